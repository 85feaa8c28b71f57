"""Media through a whole run: decoded once, counted, refused or skipped by policy, never cut, and replayed."""

import asyncio
import hashlib
import itertools
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.models.policy import Policy
from sensorium.runs.episodes import read_episodes, read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.checkpoint import replay
from sensorium.trainer.run import open_trainer, train
from sensorium.vocabulary import Episode, Media, Status
from sensorium.vocabulary.errors import MediaError, ModelError, NonFiniteUpdate, NothingTrained, PromptTooLong

from .cinema import RECIPE, cinema, recipe_of, rows_of, sound_bytes, video_bytes

HERE = "tests.trainer.test_media"


def run(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    with suppress(NothingTrained):  # that nothing could be learned is another test's business
        train(recipe_of(folder, **changes))
    return read_metrics(folder / "metrics.jsonl")


def episodes_of(folder: Path, step: int = 1) -> list[Episode]:
    return [episode for _, _, episode in read_episodes(folder / f"episodes/step_{step:06d}.jsonl")]


def counted(rows: list[dict[str, Any]], name: str) -> int:
    """A count over a whole run, evaluations included."""
    return round(sum(row[f"media/{name}"] + row.get(f"media/eval/{name}", 0) for row in rows))


def shown(folder: Path) -> set[Media]:
    """Every medium that any episode of a run showed."""
    files = [*folder.glob("episodes/*.jsonl"), *folder.glob("eval/*.jsonl")]
    seen = [episode for path in files for _, _, episode in read_episodes(path)]
    return {span.media for e in seen for thread in e.threads for s in thread.segments for span in s.media}


EPOCHS: dict[str, Any] = {
    "steps": 3,
    "tasks": RECIPE["tasks"] | {"evaluate": [{"source": "sight_and_sound", "options": {"size": 3, "split": "test"}}]},
    "batch": {"prompts_per_step": 3, "group_size": 2, "epochs_per_step": 2},
    "evaluation": {"every": 2, "at_start": True, "samples": 2},
    "algorithm": {"kl": {"coef": 0.01}, "advantage": {"name": "masked_gae"}},
    "health": {"sight_tasks": 0},
}


def test_each_clip_is_decoded_once_by_policy_reference_critic_and_evaluation(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", **EPOCHS)
    media = shown(tmp_path / "run")
    assert {item.kind for item in media} == {"video", "sound"}
    assert counted(rows, "decoded") == counted(rows, "preprocessed") == len(media) == 18
    assert counted(rows, "evictions") == counted(rows, "memory_evictions") == counted(rows, "hits") == 0
    assert counted(rows, "memory_hits") > 5 * len(media)
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("<video controls") > 2
    assert page.count("data:audio/wav;base64,") > 2
    assert "4 frames of 56 × 56 from 1.00 s" in page
    assert rows[-1]["media/cache_gib"] == pytest.approx(
        sum(path.stat().st_size for path in (tmp_path / "run/decoded").iterdir()) / 2**30
    )


def test_each_clip_of_a_world_is_decoded_once_however_many_turns_and_episodes_show_it(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", **cinema())
    assert all(len(e.turns) == 3 and e.status == Status.FINISHED for e in episodes_of(tmp_path / "run"))
    media = shown(tmp_path / "run")
    assert counted(rows, "decoded") == len(media) <= 4 + 2


def test_a_group_is_shown_one_augmented_prompt_that_is_trained_and_evaluation_none(tmp_path: Path) -> None:
    augment = {"sound": {"gain": [-6, -1], "noise": 20}, "video": {"jitter": 0.9}}
    run(tmp_path / "run", **EPOCHS | {"tasks": EPOCHS["tasks"] | {"augment": augment}})
    groups: dict[str, set[tuple[Media, ...]]] = {}
    for step in (1, 2, 3):
        for group in read_groups(tmp_path / f"run/episodes/step_{step:06d}.jsonl"):
            spans = [
                [s.media for thread in e.threads for part in thread.segments for s in part.media] for e in group.episodes
            ]
            groups[group.id] = {tuple(seen) for seen in spans}
            for seen in spans:
                assert [item.augmentation for item in seen] == [item.augmentation for item in group.task.messages[0].media]
    assert len(groups) == 9
    assert all(len(seen) == 1 for seen in groups.values())
    media = [item for seen in groups.values() for prompt in seen for item in prompt]
    assert all(item.augmentation is not None for item in media)
    assert len({item.key for item in media}) == len(media), "each draw has changes of its own"
    held_out = [e for path in (tmp_path / "run").glob("eval/*.jsonl") for _, _, e in read_episodes(path)]
    spans = [s for e in held_out for thread in e.threads for segment in thread.segments for s in segment.media]
    assert spans
    assert all(span.media.augmentation is None for span in spans)


def test_a_later_run_finds_the_decoded_clips_of_a_shared_folder(tmp_path: Path) -> None:
    media = {"cache": str(tmp_path / "shared")}
    first = run(tmp_path / "one", media=media)
    second = run(tmp_path / "two", media=media)
    assert not (tmp_path / "one/decoded").exists()
    assert counted(first, "decoded") == counted(second, "hits") == len(shown(tmp_path / "two"))
    assert counted(second, "decoded") == 0
    assert [row["policy/loss"] for row in first] == [row["policy/loss"] for row in second]


def test_without_room_clips_are_let_go_counted_and_decoded_again_and_nothing_else_changes(tmp_path: Path) -> None:
    short = EPOCHS | {"steps": 2, "evaluation": {"every": 2}, "algorithm": {"kl": {"coef": 0.01}}}
    whole = run(tmp_path / "whole", **short)
    tight = run(tmp_path / "tight", media={"cache_gib": 1e-4, "memory_gib": 1e-4}, **short)
    assert counted(tight, "decoded") > counted(whole, "decoded")
    assert counted(tight, "evictions") > 0
    assert counted(tight, "memory_evictions") > 0
    assert all(row["media/cache_gib"] <= 1e-4 and row["media/memory_gib"] <= 1e-4 for row in tight)
    none = run(tmp_path / "none", media={"cache_gib": 0, "memory_gib": 0}, **short)
    assert not (tmp_path / "none/decoded").exists()
    for name in ("policy/loss", "policy/grad_norm", "policy/kl_ref"):
        assert [row[name] for row in tight] == [row[name] for row in whole] == [row[name] for row in none]


FROZEN = {"path": "tiny:qwen2_5_omni", "freeze": ["vision", "audio", "projector"]}


def test_frozen_towers_look_at_each_clip_once_and_say_so(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", model=FROZEN, steps=4)
    assert counted(rows, "tower_items") == len(shown(tmp_path / "run"))
    assert counted(rows, "tower_hits") > 0
    assert counted(rows, "tower_evictions") == 0


def test_the_next_step_is_decoded_while_this_one_is_trained_on(tmp_path: Path) -> None:
    source = {"source": "sight_and_sound", "options": {"size": 64}}
    trainer = open_trainer(recipe_of(tmp_path, tasks={"train": [source]}), RunDirectory(tmp_path).create())

    async def first_step() -> None:
        await trainer.advance()
        assert trainer.loader._ahead is not None
        assert trainer.loader._ahead.count == 3
        ahead = trainer.loader._ahead.reading.result()
        before = trainer.session.policy.media_counts
        drawn = await trainer.loader.draw(3)
        assert drawn.tasks == ahead.tasks
        assert trainer.loader._ahead is None
        since = trainer.session.policy.media_counts.since(before)
        assert since["preprocessed"] == len({item for task in drawn.tasks for item in task.messages[0].media})

    try:
        asyncio.run(first_step())
    finally:
        trainer.close()


def clips(folder: Path) -> list[list[dict[str, Any]]]:
    """Rows of a video and a sound each, in files."""
    rows: list[list[dict[str, Any]]] = []
    for i in range(4):
        (folder / f"{i}.mp4").write_bytes(video_bytes(i))
        (folder / f"{i}.wav").write_bytes(sound_bytes(i))
        rows.append([{"type": "video", "path": f"{i}.mp4", "frames": 2}, {"type": "audio", "path": f"{i}.wav"}])
    return rows


@pytest.mark.parametrize("kind", ["video", "sound"])
def test_media_too_long_for_the_context_are_refused_by_task_or_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    rows = clips(tmp_path)
    if kind == "video":
        (tmp_path / "2.mp4").write_bytes(video_bytes(2, frames=64, size=56))
        rows[2][0]["frames"] = 64
    else:
        (tmp_path / "2.wav").write_bytes(sound_bytes(2, seconds=8.0))
    tasks, rollout = rows_of(tmp_path, rows), RECIPE["rollout"] | {"max_context_tokens": 128}
    with pytest.raises(PromptTooLong, match=r"task row-2: the prompt takes \d+ tokens and .* is 128.* never cut"):
        run(tmp_path / "refused", tasks=tasks, rollout=rollout, steps=3)
    metrics = run(tmp_path / "skipped", tasks=tasks | {"on_long_prompt": "skip"}, rollout=rollout, steps=3)
    assert sum(row["tasks/skipped_long"] for row in metrics) >= 1
    assert sum(row["tasks/skipped_bad"] for row in metrics) == 0
    assert all(row["groups/trained"] == 3 for row in metrics)
    assert {e.task_id for step in (1, 2, 3) for e in episodes_of(tmp_path / "skipped", step)} == {"row-0", "row-1", "row-3"}


@pytest.mark.parametrize("damage", ["truncated", "not a clip", "too long to hear"])
def test_a_damaged_clip_is_refused_by_file_and_row_or_skipped_and_counted(damage: str, tmp_path: Path) -> None:
    rows = clips(tmp_path)
    if damage == "truncated":
        (tmp_path / "1.mp4").write_bytes(video_bytes(1)[:-200])
    elif damage == "not a clip":
        (tmp_path / "1.wav").write_bytes(b"nothing of the kind")
    else:
        (tmp_path / "1.wav").write_bytes(sound_bytes(1, seconds=31.0))
    tasks = rows_of(tmp_path, rows)
    with pytest.raises(MediaError, match=r"tasks\.jsonl:2, message 0, block [01] '1[.](mp4|wav)': "):
        run(tmp_path / "refused", tasks=tasks, steps=3)
    metrics = run(tmp_path / "skipped", tasks=tasks | {"on_bad_row": "skip"}, steps=3)
    assert sum(row["tasks/skipped_bad"] for row in metrics) >= 1
    assert all(row["groups/trained"] == 3 and row["episodes/failed"] == 0 for row in metrics)


def test_held_out_clips_obey_the_same_rules(tmp_path: Path) -> None:
    rows = clips(tmp_path)
    (tmp_path / "1.wav").write_bytes(b"nothing of the kind")
    (tmp_path / "2.wav").write_bytes(sound_bytes(2, seconds=8.0))
    held_out = {"evaluate": rows_of(tmp_path, rows)["train"]}
    changes = {"evaluation": {"every": 1}, "steps": 1, "rollout": RECIPE["rollout"] | {"max_context_tokens": 128}}
    with pytest.raises(MediaError, match=r"tasks\.jsonl:2"):
        run(tmp_path / "refused", tasks=RECIPE["tasks"] | held_out, **changes)
    skip = {"on_bad_row": "skip", "on_long_prompt": "skip"}
    run(tmp_path / "skipped", tasks=RECIPE["tasks"] | held_out | skip, **changes)
    [summary] = RunDirectory(tmp_path / "skipped").summaries()
    assert (summary["tasks"], summary["failed"]) == (2, 0)


def test_what_a_world_shows_later_and_does_not_fit_ends_the_episode_with_a_reason(tmp_path: Path) -> None:
    changes = cinema(long_s=8.0)
    changes["rollout"] |= {"max_context_tokens": 160}
    rows = run(tmp_path / "run", **changes)
    episodes = episodes_of(tmp_path / "run")
    assert all((e.status, len(e.turns)) == (Status.TRUNCATED, 2) for e in episodes)
    assert all(
        e.task_id in e.failure and "turn 2" in e.failure and "max_context_tokens is 160" in e.failure for e in episodes
    )
    assert [row["episodes/out_of_context"] for row in rows] == [6, 6]
    assert [row["episodes/truncated"] for row in rows] == [6, 6]
    seconds = [span.media for e in episodes for s in e.threads[0].segments for span in s.media]
    assert not any(media.origin.endswith("turn 2") for media in seconds), "it is left out whole, not cut"


def test_a_broken_clip_of_a_world_costs_its_episode_and_is_named(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", **cinema(broken=True))
    episodes = episodes_of(tmp_path / "run")
    assert all(e.status == Status.FAILED and "turn 2" in e.failure and "record " in e.failure for e in episodes)
    assert rows[0]["episodes/failed"] == 6


class Deaf(NativeEngine):
    """An engine that takes no sounds."""

    def __init__(self, policy: Policy, *, lockstep: bool = True) -> None:
        super().__init__(policy, lockstep=lockstep)
        self.capabilities = replace(self.capabilities, modalities=policy.chat.modalities - {"sound"})


PICTURES = {"source": "shapes", "options": {"size": 8}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"path": "tiny:qwen2_5_vl"}}, r"task sight_and_sound/\S+: family qwen2_5_vl takes .* and not sound"),
        ({"model": {"path": "tiny:qwen2"}}, r"family qwen2 takes text and not video, which sight_and_sound, square"),
        ({"rollout": {"engine": f"{HERE}:Deaf"}}, r"the engine takes picture, text, video and not sound"),
        ({"model": {"path": "tiny:qwen2"}} | cinema(), r"-train-\d+: family qwen2 takes text and not video, which reel"),
        (
            {"model": {"path": "tiny:qwen2_5_vl"}, "tasks": {"train": [PICTURES], "evaluate": RECIPE["tasks"]["train"]}},
            r"task sight_and_sound/\S+: family qwen2_5_vl .* not sound",
        ),
        (
            {
                "model": {"path": "tiny:qwen2_5_vl"},
                "tasks": {"train": [PICTURES | {"weight": 99}, RECIPE["tasks"]["train"][0] | {"weight": 0.01}]},
            },
            r"not sound, which sight_and_sound, tone .* is. Use one that does \(model\.path, rollout\.engine\)",
        ),
    ],
)
def test_a_modality_that_family_or_engine_lacks_is_refused_at_start(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        open_trainer(recipe_of(tmp_path, **changes), RunDirectory(tmp_path).create())
    assert not list((tmp_path / "episodes").iterdir())


def test_a_batch_with_video_and_sound_is_kept_without_loading_it_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sensorium.algorithms.losses as clip

    right = clip.clip

    def wrong(tokens: Any, clip_low: float, clip_high: float, dual_clip: float | None) -> Any:
        found = right(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        return type(found)(found.loss_N * float("nan"), found.clipped_N)

    loaded: list[str] = []
    whole = MediaStore.bytes_of
    monkeypatch.setattr(MediaStore, "bytes_of", lambda store, media: loaded.append(media.kind) or whole(store, media))
    monkeypatch.setattr(clip, "clip", wrong)
    tasks = rows_of(tmp_path, clips(tmp_path))
    with pytest.raises(NonFiniteUpdate, match="sensorium replay"):
        run(tmp_path / "run", tasks=tasks)
    assert loaded == []
    kept = tmp_path / "run/kept/step_000001"
    files = {path.name for path in (kept / "media").iterdir()}
    assert len(files) == 6
    monkeypatch.setattr(clip, "clip", right)
    again = replay(kept)
    straight = run(tmp_path / "straight", tasks=tasks)
    assert again["policy/grad_norm"] == straight[0]["policy/grad_norm"] > 0
    assert not (kept / "decoded").exists()


def test_media_that_are_replaced_during_a_run_are_never_mixed(tmp_path: Path) -> None:
    """Whatever a row's file holds when it is read, the run's copy has the hash that its episodes show."""
    rows = clips(tmp_path)
    over = threading.Event()
    contents = {f"{i}.mp4": [video_bytes(i), video_bytes(i + 50)] for i in range(4)}
    contents |= {f"{i}.wav": [sound_bytes(i), sound_bytes(i + 50)] for i in range(4)}
    allowed = {hashlib.sha256(data).hexdigest() for several in contents.values() for data in several}

    def attack() -> None:
        for turn in itertools.count():
            for name, several in contents.items():
                path, new = tmp_path / name, tmp_path / f".{name}"
                if turn % 7 == 5 and name.startswith("0"):
                    path.unlink()
                elif name.startswith("2"):
                    if turn < 2:
                        (tmp_path / f"{turn}-{name}").write_bytes(several[turn])
                    new.symlink_to(f"{turn % 2}-{name}")
                    new.rename(path)
                else:
                    cut = 60 if turn % 7 == 6 and name.startswith("1") else None
                    new.write_bytes(several[turn % 2][:cut])
                    os.utime(new, (1, 1))
                    new.rename(path)
            if over.wait(0.002):
                return

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        run(tmp_path / "run", tasks=rows_of(tmp_path, rows) | {"on_bad_row": "skip"}, steps=4)
    finally:
        over.set()
        attacker.join()
    media = shown(tmp_path / "run")
    assert media
    assert {item.hash for item in media} <= allowed
    for item in media:
        assert hashlib.sha256((tmp_path / "run/media" / item.hash).read_bytes()).hexdigest() == item.hash
