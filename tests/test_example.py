"""The one-file example does what the library does: the same samples, rewards and updates, step for step."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.recipe.load import load_recipe
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer
from sensorium.vocabulary import Group

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import grpo_in_one_file as flat

STEPS = 2


@pytest.fixture(scope="module")
def library(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[list[Group]], list[dict[str, float]], dict[str, torch.Tensor]]:
    """What the library sampled, measured and learned in the recipe's first steps."""
    directory = RunDirectory(tmp_path_factory.mktemp("library")).create()
    changes = [f"steps={STEPS}", f"run_dir={directory.path}", "evaluation.at_start=false", "evaluation.every=0"]
    trainer = open_trainer(load_recipe("shapes", [*changes, "logging.episodes=0"]), directory)

    async def advance() -> None:
        for _ in range(STEPS):
            await trainer.advance()

    asyncio.run(advance())
    from sensorium.runs.episodes import read_groups

    groups = [read_groups(directory.episodes_of(step)) for step in range(1, STEPS + 1)]
    trainer.close()
    return groups, read_metrics(directory.metrics), trainer.session.policy.model.state_dict()


def test_its_first_steps_are_the_librarys(library: tuple) -> None:
    groups_by_step, rows, learned = library
    store = MediaStore()
    source = flat.Shapes(store=store, size=flat.TRAIN_SIZE, picture_size=flat.PICTURE_SIZE)
    stream = flat.TaskStream([source], [1.0], seed=0)
    model = flat.Model(flat.CHECKPOINT)
    rate = flat.LEARNING_RATE
    optimizer = torch.optim.AdamW(model.whole.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    for step, (groups, row) in enumerate(zip(groups_by_step, rows, strict=True), start=1):
        count = len(groups)
        tasks = list(stream.draw((step - 1) * count, count).tasks)
        done = flat.train_step(model, optimizer, tasks, store, 0, step)
        assert [group.task.id for group in groups] == [task.id for task in tasks]
        written_PGR = flat.written(model, done.tokens_PGR)
        for p, group in enumerate(groups):
            for episode in group.episodes:
                mine = done.tokens_PGR[p, episode.index][written_PGR[p, episode.index]]
                assert tuple(mine.tolist()) == episode.turns[0].response.tokens, (step, episode.id)
                assert episode.reward == pytest.approx(done.rewards_PG[p, episode.index].item())
        assert done.grad_norm == pytest.approx(row["policy/grad_norm"], rel=1e-4)
        assert done.loss == pytest.approx(row["policy/loss"], abs=1e-6)
    mine = model.whole.state_dict()
    for name in mine.keys() & learned.keys():
        torch.testing.assert_close(mine[name].flatten(), learned[name].flatten(), rtol=0, atol=2e-5)


def test_it_fits_in_the_head() -> None:
    lines = Path(flat.__file__).read_text().splitlines()
    assert len(lines) <= 350


def test_the_lmms_eval_task_has_what_its_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.lmms_eval import shapes_colour

    monkeypatch.chdir(tmp_path)
    shapes_colour.main(size=3)
    rows = [json.loads(line) for line in Path("shapes_colour.jsonl").read_text().splitlines()]
    assert [shapes_colour.pictures(row)[0].size for row in rows] == [(64, 64)] * 3
    assert all("colour" in shapes_colour.question(row, None) for row in rows)
    right = f"<answer>{rows[0]['answer']}</answer>"
    assert [shapes_colour.judged(rows[0], [said])["accuracy"] for said in (right, "<answer>grey</answer>")] == [1.0, 0.0]
    task = Path(shapes_colour.__file__).with_suffix(".yaml").read_text()
    named = re.findall(r"!function shapes_colour\.(\w+)", task)
    assert len(named) == 3
    assert all(callable(getattr(shapes_colour, name)) for name in named)
