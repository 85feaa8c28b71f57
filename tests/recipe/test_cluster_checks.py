"""What a recipe's cluster section cannot combine is refused in one paragraph each."""

import re
from typing import Any

import pytest

from sensorium.recipe.checks import cluster_notes, cluster_problems
from sensorium.recipe.schema import ClusterSection

from .test_computing_checks import recipe


@pytest.mark.parametrize(
    ("cluster", "precision", "told"),
    [
        ({"learners": 4, "sequence_parallel": 2}, "fast", ""),
        ({"learners": 1, "sequence_parallel": 2}, "fast", "there is one learner, which is not a multiple"),
        ({"learners": 4, "sequence_parallel": 3}, "fast", "4 learners are not a multiple .* cluster.learners to 3, 6"),
        ({"learners": 2, "sequence_parallel": 2}, "matched", "not built for tokens on several learners.*precision: fast"),
    ],
)
def test_learners_that_cannot_share_tokens_are_refused(cluster: dict[str, Any], precision: str, told: str) -> None:
    found = list(cluster_problems(recipe("qwen3_vl", precision=precision, cluster=cluster)))
    assert [place for place, _ in found] == ["cluster.sequence_parallel"] * bool(told)
    for _, text in found:
        assert "\n" not in text
        assert re.search(told, text)


@pytest.mark.parametrize(
    ("cluster", "place"),
    [
        ({"address": "10.0.0.1:6379"}, "cluster.address"),
        ({"address": "local", "placement": "ray"}, "cluster.address"),
        *(
            ({"address": one, "placement": "ray"}, "cluster.address")
            for one in ("head", ":6379", "head:port", "ray://", "a:0")
        ),
        ({"offload": True}, "cluster.offload"),
        ({"backend": "gloo"}, "cluster.backend"),
        ({"address": "10.0.0.1:6379", "placement": "ray", "offload": True}, ""),
        *(({"address": one, "placement": "ray"}, "") for one in ("auto", "ray://head-1.x:10001", "[::1]:6379")),
        ({"learners": 2, "offload": True, "backend": "gloo"}, ""),
    ],
)
def test_what_would_do_nothing_is_refused(cluster: dict[str, Any], place: str) -> None:
    found = list(cluster_problems(recipe("qwen3_vl", cluster=cluster)))
    assert [where for where, _ in found] == ([place] if place else [])


@pytest.mark.parametrize("key", ["hang_s", "start_s", "reply_s"])
def test_seconds_that_overflow_a_clock_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ClusterSection.model_validate({key: 1e12})


def test_nccl_without_gpus_is_refused() -> None:
    cluster = {"learners": 2, "backend": "nccl"}
    assert [place for place, _ in cluster_problems(recipe("qwen3_vl", "cpu", cluster=cluster))] == ["cluster.backend"]
    assert not list(cluster_problems(recipe("qwen3_vl", "cuda", cluster=cluster)))


@pytest.mark.parametrize(
    ("device", "cluster", "more", "told"),
    [
        ("cpu", {"learners": 8}, {}, "9 processes (8 learner ranks, 1 engine (process)) share 2 CPUs"),
        ("auto", {"learners": 8, "placement": "ray"}, {}, "9 processes (8 learner ranks, 1 engine (process)) share 2 CPUs"),
        ("cpu", {"learners": 2}, {"schedule": {"name": "asynchronous"}}, "3 processes"),
        ("cpu", {"learners": 2, "rewards": 4}, {}, ""),
        ("cpu", {"learners": 8, "placement": "ray", "address": "10.0.0.1:6379"}, {}, ""),
        ("cuda", {"learners": 8}, {}, ""),
    ],
)
def test_more_processes_than_cpus_are_told(device: str, cluster: dict[str, Any], more: dict[str, Any], told: str) -> None:
    found = recipe("qwen3_vl", device, cluster=cluster, rollout={"engine": {"name": "process"}}, **more)
    notes = list(cluster_notes(found, gpus=False, cpus=2))
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)
