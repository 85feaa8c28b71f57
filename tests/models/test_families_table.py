"""The table of docs/guides/families.md says what loading finds out: what is fast, what is general, what is refused and why.

``python -m tests.models.test_families_table`` prints it.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from sensorium.data.media_store import MediaStore
from sensorium.models.general_path import refuse_general
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.recipe.family_facts import FAMILIES
from sensorium.vocabulary.errors import ModelError
from tests.general_checkpoints import GENERAL, make_checkpoint

PAGE = Path(__file__).parents[2] / "docs/guides/families.md"
COMPANY = {"any": "padded together", "alike": "together with rows whose media have the same size", "alone": "one by one"}


def table(folder: Path) -> list[str]:
    """The lines of the table, by model type."""
    lines = fast_rows() | dict(general_rows(folder)) | dict(refused_rows())
    return [
        "| `model_type` | path | takes besides text | turns in a thread | |",
        "|---|---|---|---|---|",
        *map(lines.get, sorted(lines)),
    ]


def fast_rows() -> dict[str, str]:
    """The families that have an adapter."""
    return {name: f"| `{name}` | fast | {_kinds(facts.vision, facts.audio)} | any | |" for name, facts in FAMILIES.items()}


def general_rows(folder: Path) -> Iterator[tuple[str, str]]:
    """What loading a tiny checkpoint of each row of ``GENERAL`` found out."""
    for name in GENERAL.keys() - FAMILIES.keys():
        path = make_checkpoint(name, folder / name)
        try:
            policy = load_policy(str(path), store=MediaStore(), dtype="float32", device="cpu")
        except ModelError as error:
            yield name, f"| {_label(name, path)} | refused | | | {_reason(error, path)} |"
        else:
            yield name, general_row(name, path, policy)


def general_row(name: str, path: Path, policy: Policy) -> str:
    """The line of a checkpoint of ``GENERAL`` that was loaded."""
    assert policy.general is not None
    chat: Any = policy.chat
    kinds = chat.media_format.placeholders
    turns = "one" if chat.one_turn else "any"
    remarks = [COMPANY[chat.media_format.company]] * (chat.media_format.company != "any")
    remarks += ["eager attention"] * (policy.model.config._attn_implementation == "eager")
    takes = _kinds("picture" in kinds, "sound" in kinds)
    return f"| {_label(name, path)} | general | {takes} | {turns} | {'; '.join(remarks)} |"


def _label(name: str, path: Path) -> str:
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    return f"`{model_type}`" if model_type == name else f"`{model_type}` ({name})"


def refused_rows() -> Iterator[tuple[str, str]]:
    """Types that transformers has and whose config rules them out."""
    for name in sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        if name in FAMILIES or name in GENERAL:
            continue
        try:
            refuse_general(CONFIG_MAPPING[name]())
        except ModelError as error:
            yield name, f"| `{name}` | refused | | | {str(error).partition(': ')[2].rstrip('.')} |"
        except ValueError:
            continue  # a config that cannot be made without its parts


def _kinds(sees: Any, hears: Any) -> str:
    return " and ".join(kind for kind, can in (("pictures", sees), ("sounds", hears)) if can)


def _reason(error: ModelError, path: Path) -> str:
    said = str(error).replace(f"model.path '{path}': ", "").replace("cannot load the checkpoint: ", "").rstrip(".")
    return said.partition("cannot be trained: ")[2] or said


@pytest.mark.parametrize("name", sorted(name for name, row in GENERAL.items() if row.refused))
def test_the_table_of_the_page_says_why_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """Of those that train: test_a_run_computes_what_transformers_computes, which loads them."""
    path = make_checkpoint(name, tmp_path / name)
    with pytest.raises(ModelError) as refused:
        load_policy(str(path), store=MediaStore(), dtype="float32", device="cpu")
    assert f"| {_label(name, path)} | refused | | | {_reason(refused.value, path)} |" in PAGE.read_text().splitlines()


def test_the_table_of_the_page_is_what_configs_say() -> None:
    page = PAGE.read_text().splitlines()
    assert [line for line in (fast_rows() | dict(refused_rows())).values() if line not in page] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(Path(folder))))
