"""Versions of transformers and torch that were not tried are held to the stock model before anything is loaded."""

import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from torch import Tensor
from transformers import CONFIG_MAPPING

from sensorium.cli.dry_run import show_dry_run
from sensorium.data.media_store import MediaStore
from sensorium.models import tried_versions
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.encoding import Encoder
from sensorium.models.families.qwen2_5_vl import Qwen25VL
from sensorium.models.family import Family
from sensorium.models.load import load_policy
from sensorium.models.tried_versions import BOUND, FIRST_WITH, TRIED, check_versions, deviations, untried
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.load import load_recipe
from sensorium.vocabulary.content import Message, user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import ModelError

ROOT = Path(__file__).parents[2]
HERE = transformers.__version__


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This environment's transformers was never tried."""
    monkeypatch.setitem(TRIED, "transformers", ("5.98.0", "5.99.1"))
    tried_versions._compare.cache_clear()
    yield
    tried_versions._compare.cache_clear()


def plant_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a picture are one further down, as if the library counted them otherwise."""
    right = Qwen25VL.rotary

    def moved(self: Family, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        wrong_3BT = positions_3BT.clone()
        wrong_3BT[1] += (positions_3BT[1] != positions_3BT[0]).long()
        return right(self, hidden_BTH, wrong_3BT)

    monkeypatch.setattr(Qwen25VL, "rotary", moved)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_what_its_stock_model_is(family: str) -> None:
    found = deviations(family)
    assert found.keys() == {"logits", "gradients"}
    assert max(found.values()) < BOUND


def test_positions_that_are_counted_otherwise_show_in_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_other_positions(monkeypatch)
    found = deviations("qwen2_5_vl")
    assert found["logits"] > 10 * BOUND
    assert found["gradients"] > 10 * BOUND


def test_a_tower_that_does_not_learn_shows_in_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "__call__", torch.no_grad()(Encoder.__call__))
    found = deviations("qwen2_5_vl")
    assert found["logits"] < BOUND < found["gradients"]


def test_other_tokens_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChatProcessor.render

    def longer(self: ChatProcessor, messages: Sequence[Message]) -> Segment:
        return right(self, [user(*messages[0].content, "Now.")])

    monkeypatch.setattr(ChatProcessor, "render", longer)
    assert deviations("qwen2_5_vl") == {"rendered tokens": 1.0}


def test_versions_that_were_tried_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untried() == (), "this environment's versions are in the table"

    def never(family: str) -> dict[str, float]:
        raise AssertionError(family)

    monkeypatch.setattr(tried_versions, "deviations", never)
    load_policy("tiny:qwen2", store=MediaStore(), device="cpu")


def test_an_unknown_version_that_agrees_is_reported_once(unknown: None) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"transformers {HERE}")) as told:
        load_policy("tiny:qwen2", store=MediaStore(), device="cpu")
    assert "5.98.0, 5.99.1" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_policy("tiny:qwen2", store=MediaStore(), device="cpu")


def test_an_unknown_version_that_differs_is_refused(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_other_positions(monkeypatch)
    with pytest.raises(ModelError) as refused:
        load_policy("tiny:qwen2_5_vl", store=MediaStore(), device="cpu")
    for fact in (f"transformers {HERE}", "qwen2_5_vl", "logits", f"{BOUND:g}", "transformers==5.99.1"):
        assert fact in str(refused.value)
    assert "torch==" not in str(refused.value), "only what is unknown is to be replaced"
    recipe = load_recipe("shapes", [])
    with pytest.raises(ModelError, match=re.escape("transformers==5.99.1")):
        show_dry_run(recipe, Console(quiet=True))


def test_a_library_whose_parts_moved_is_refused_with_what_it_raised(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(self: Family, model: Any) -> None:
        raise AttributeError("no attribute 'visual'")

    monkeypatch.setattr(Qwen25VL, "__init__", moved)
    with pytest.raises(ModelError, match=r"AttributeError: no attribute 'visual'.*5\.99\.1"):
        check_versions("qwen2_5_vl")


def test_an_unknown_torch_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRIED, "torch", ("2.98.0",))
    tried_versions._compare.cache_clear()
    with pytest.warns(UserWarning, match=re.escape(f"torch {torch.__version__.partition('+')[0]}")):
        check_versions("qwen2")


def test_model_types_are_known_from_the_version_on_that_the_table_names() -> None:
    for first, names in FIRST_WITH.items():
        for name in names:
            assert (name in CONFIG_MAPPING) == (Version(first) <= Version(HERE)), name


def test_a_type_of_a_newer_version_is_refused_with_that_version(tmp_path: Path) -> None:
    newer = [(first, names[0]) for first, names in FIRST_WITH.items() if Version(first) > Version(HERE)]
    if not newer:
        pytest.skip("this is the newest version")
    first, name = newer[-1]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ModelError, match=f"{name}.*{re.escape(HERE)}.*{re.escape(first)}"):
        load_policy(str(tmp_path), store=MediaStore(), device="cpu")


def test_the_package_takes_what_was_tried_and_the_ends_of_it_are_tested() -> None:
    tried, needed = TRIED["transformers"], tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    major, minor, _ = Version(tried[0]).release
    assert f"transformers>={major}.{minor},<{major + 1}" in needed
    (torchs,) = (SpecifierSet(each.removeprefix("torch")) for each in needed if each.startswith("torch>"))
    assert all(version in torchs for version in TRIED["torch"])
    tested = re.findall(r"^(?:OLDEST|NEWEST) = (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tested == [tried[0], tried[-1]]
    page = (ROOT / "docs/guides/families.md").read_text()
    assert all(f"{package} {', '.join(versions)}" in page for package, versions in TRIED.items())


def test_make_versions_runs_with_the_version_that_it_names() -> None:
    before = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if ".venv_versions" in path]
    for folder in before:
        assert folder.name == HERE
        assert Path(transformers.__file__).is_relative_to(folder.resolve())
