"""What is sampled is what is trained: one distribution in engine, learner and reference, and a word where they part."""

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.engines.native import steps
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.episodes import read_episodes
from sensorium.runs.metrics import Notice, read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.health.facts import StepFacts
from sensorium.trainer.health.rules import ROUNDING, mismatch
from sensorium.trainer.run import train
from tests.recipes import parsed, quick

RECIPE = quick(
    "distribution",
    model={"path": "tiny:qwen2_5_vl"},
    tasks={"train": [{"source": "shapes", "options": {"size": 16, "picture_size": 56}}]},
    batch={"prompts_per_step": 2, "group_size": 3},
    rollout={"max_new_tokens": 12},
    rewards={"terms": [{"name": "tests.trainer.test_failures:ByIndex"}]},
    optimizer={"lr": 1e-3},
    checkpoint={"best": ""},
)


def recipe(folder: Path, **changes: Any) -> Recipe:
    return parsed(RECIPE, folder, **changes)


class Notes(Watcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def noted(self, text: str) -> None:
        self.texts.append(text)

    def diagnosed(self, notice: Notice) -> None:
        self.texts.append(notice.text)

    def disagreements(self) -> list[str]:
        return [text for text in self.texts if "DISAGREE" in text]


def test_ignored_stop_tokens_are_ignored_in_training_too(tmp_path: Path) -> None:
    """Current, old (a second update) and reference log-probs are all without stop tokens, which this model is sure of."""
    rollout = {"max_new_tokens": 12, "ignore_stop_tokens": True, "temperature": 0.7}
    batch = {"prompts_per_step": 2, "group_size": 3, "updates_per_epoch": 2}
    slow = {"model": {"path": "package:shapes"}, "algorithm": {"kl": {"coef": 0.1}}, "optimizer": {"lr": 1e-6}}
    notes = Notes()
    run = train(recipe(tmp_path, rollout=rollout, batch=batch, **slow), watchers=[notes])
    rows = read_metrics(run / "metrics.jsonl")
    assert all(row["mismatch/max"] < 1e-5 and row["mismatch/relative"] < ROUNDING for row in rows), rows
    assert all(row["episodes/length_mean"] == 12 for row in rows)
    assert all(row["policy/kl_ref"] < 1e-3 and row["policy/kl_old"] < 1e-3 for row in rows)
    assert not notes.disagreements()


def test_demonstrations_still_end_with_the_stop_token_that_rl_ignores(tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 4, "ignore_stop_tokens": True}
    run = train(recipe(tmp_path, rollout=rollout, steps=1, warm_start={"steps": 1, "prompts_per_step": 2}))
    warm, rl = read_metrics(run / "metrics.jsonl")
    assert warm["policy/loss"] < 100
    assert rl["mismatch/relative"] < ROUNDING


def test_fresh_adapters_recorded_by_an_evaluation_do_not_part_engine_and_learner(tmp_path: Path) -> None:
    shapes = {"source": "shapes", "options": {"size": 2, "picture_size": 56, "split": "test"}}
    given = {
        "steps": 3,
        "model": {"path": "tiny:qwen2_5_vl", "lora": {"rank": 4, "groups": ["language"]}},
        "tasks": RECIPE["tasks"] | {"evaluate": [shapes]},
        "evaluation": {"at_start": True},
        "optimizer": {"lr": 1e-2},
    }
    notes = Notes()
    rows = read_metrics(train(recipe(tmp_path, **given), watchers=[notes]) / "metrics.jsonl")
    assert all(row["mismatch/relative"] < ROUNDING for row in rows), [row["mismatch/relative"] for row in rows]
    assert not notes.disagreements()


def test_an_engine_that_samples_something_else_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.feed
    monkeypatch.setattr(steps, "feed", lambda *given: right(*given) * 1.01)
    notes = Notes()
    given = recipe(tmp_path, steps=1, rollout={"max_new_tokens": 4, "ignore_stop_tokens": True})
    (row,) = read_metrics(train(given, watchers=[notes]) / "metrics.jsonl")
    assert row["mismatch/relative"] > ROUNDING
    (told,) = notes.disagreements()
    assert f"{row['mismatch/max']:.1e}" in told


def test_only_rounding_in_float32_on_a_cpu_is_bounded(tmp_path: Path) -> None:
    apart = {"mismatch/relative": 2e-5, "mismatch/max": 2e-4}
    assert mismatch(StepFacts(recipe(tmp_path), 1, apart)) is not None
    assert mismatch(StepFacts(recipe(tmp_path), 1, apart | {"mismatch/relative": 0.9e-5})) is None
    rounded = {"mismatch/max": 0.1}
    assert mismatch(StepFacts(recipe(tmp_path), 1, rounded)) is None, "on a GPU or in bfloat16 there is no such metric"
    scripted = recipe(tmp_path, rollout={"engine": "tests.trainer.test_distribution:Other"})
    assert mismatch(StepFacts(scripted, 1, apart)) is None, "another engine may compute otherwise"
    model = {"path": "tiny:qwen2_5_vl", "dtype": "bfloat16"}
    half = recipe(tmp_path, steps=1, model=model, rollout={"max_new_tokens": 2})
    notes = Notes()
    (row,) = read_metrics(train(half, watchers=[notes]) / "metrics.jsonl")
    assert "mismatch/relative" not in row
    assert not notes.disagreements()


class Other:
    """Stands for an engine that is not ours."""


@pytest.mark.parametrize("kind", ["policy", "sampled"])
def test_the_correction_weighs_by_the_probability_that_top_p_kept(tmp_path: Path, kind: str) -> None:
    correction = {"weights": "token", "engine_logprobs": kind}
    rollout = {"max_new_tokens": 12, "top_p": 0.6, "ignore_stop_tokens": True}
    notes = Notes()
    run = train(recipe(tmp_path, rollout=rollout, steps=1, algorithm={"correction": correction}), watchers=[notes])
    (row,) = read_metrics(run / "metrics.jsonl")
    written = [turn.response for _, _, e in read_episodes(RunDirectory(run).episodes_of(1)) for turn in e.turns]
    pairs = [pair for r in written for pair in zip(r.logprobs, r.sampled_logprobs, strict=True)]
    kept = sum(exp(policy - sampled) for policy, sampled in pairs) / len(pairs)
    assert 0.55 < kept < 0.95
    assert row["correction/weight"] == pytest.approx(kept if kind == "sampled" else 1.0, abs=1e-4)
    assert row["mismatch/relative"] < ROUNDING, "the metrics compare the whole policy either way"
    assert any("truncated policy" in text for text in notes.texts) == (kind == "policy")


def test_old_over_truncated_by_hand() -> None:
    from sensorium.learner.credited_episode import SampledTokens
    from sensorium.learner.update import corrections
    from sensorium.recipe.schema import CorrectionSection

    policy_N, truncated_N = torch.tensor([0.54, 0.27]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    counts_S = torch.tensor([2])
    tokens = SampledTokens(policy_N, truncated_N, torch.zeros(2), torch.zeros(2, dtype=torch.long), counts_S)

    def found(**settings: Any) -> list[float]:
        section = CorrectionSection(**settings)
        engine_N = tokens.engine(section.engine_logprobs)
        return corrections(section, policy_N, engine_N, tokens.sequences_N, tokens.counts_S).tolist()

    assert found(weights="token") == [1.0, 1.0]
    assert found(weights="token", engine_logprobs="sampled") == pytest.approx([0.81, 0.81])
    assert found(weights="sequence", engine_logprobs="sampled") == pytest.approx([0.81**2] * 2)
