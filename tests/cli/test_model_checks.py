"""A dry run refuses a checkpoint that a run would refuse, by its small files and the headers of its weights alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, PaliGemmaConfig

from sensorium.cli.main import main
from sensorium.models import load as model_loading
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.models.load import check_checkpoint
from sensorium.models.tiny import make_tiny
from sensorium.models.weight_files import INDEX
from sensorium.recipe.model_shape import IncompleteConfig, read_shape
from sensorium.recipe.schema import LoraSection, ModelSection
from sensorium.report.tables import count_text
from sensorium.vocabulary.errors import ModelError, RecipeError
from tests.families import LAYOUTS, publish

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Qwen2.5-VL in the published layout, and an InternVL in one file."""
    folder = tmp_path_factory.mktemp("made")
    make_tiny("internvl", folder / "internvl")
    make_tiny("qwen2_5_vl", folder / "v5", tie_word_embeddings=False)
    publish("Qwen2.5-VL-7B", folder / "v5", folder / "sharded")
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "internvl", tmp_path / "model"))


@pytest.fixture
def sharded(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "sharded", tmp_path / "sharded"))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def reconfigure(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def dry_run(folder: Path, capsys: pytest.CaptureFixture[str], *changes: str) -> tuple[int, str, str]:
    rows = json.dumps({"messages": [{"role": "user", "content": "1?"}], "answer": "1"})
    (folder.parent / "rows.jsonl").write_text(f"{rows}\n")
    recipe = folder.parent / "trial.yaml"
    recipe.write_text(
        f"name: trial\nsteps: 1\nmodel: {{path: '{folder}'}}\nrewards: {{terms: [{{name: exact}}]}}\n"
        f"tasks: {{train: [{{source: jsonl, options: {{path: '{folder.parent}/rows.jsonl'}}}}]}}\n"
    )
    code = main(["train", str(recipe), *changes, "--dry-run"])
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


def truncated(folder: Path) -> None:
    weights = folder / SINGLE
    weights.write_bytes(weights.read_bytes()[:-2])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def wrong_header(folder: Path) -> None:
    weights = folder / SINGLE
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F64"', 1))


def foreign(folder: Path) -> None:
    reconfigure(folder, config_of(folder) | {"model_type": "foo_vl"})


def one_layer_less(folder: Path) -> None:
    config = config_of(folder)
    config["text_config"]["num_hidden_layers"] = 1
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:1]
    reconfigure(folder, config)


def one_layer_more(folder: Path) -> None:
    config = config_of(folder)
    config["vision_config"]["num_hidden_layers"] += 1
    reconfigure(folder, config)


def wider(folder: Path) -> None:
    config = config_of(folder)
    config["text_config"]["intermediate_size"] *= 2
    reconfigure(folder, config)


def with_dropout(folder: Path) -> None:
    config = config_of(folder)
    config["text_config"]["attention_dropout"] = 0.1
    reconfigure(folder, config)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def half_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id"')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "is cut short or damaged"),
        (no_config, "has no config.json"),
        (wrong_header, "its header gives "),
        (foreign, "names the model type 'foo_vl', which transformers"),
        (one_layer_less, "12 weights of the checkpoint have no place in the model that its config.json describes, which "
                         "has fewer layers or experts of the same kind: language_model.model.layers.1 (12 weights)"),
        (one_layer_more, "weights that its config.json asks for: model.vision_tower.encoder.layer.2 ("),
        (wider, "weights and config.json disagree on 6 shapes"),
        (with_dropout, "has dropout 0.1"),
        (without_template, "no chat template"),
        (without_tokenizer, "the folder has no tokenizer"),
        (half_generation, "its generation_config.json is damaged"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_refused_in_one_paragraph_before_anything_is_shown(
    damage: Callable[[Path], None], says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model)
    code, out, err = dry_run(model, capsys)
    assert code == 2, out
    assert says in err
    assert str(model) in err
    assert out == ""


@pytest.mark.parametrize(
    ("name", "says"), [(INDEX, INDEX), ("model-00002-of-", "lacks 1 of 5 weight files: model-00002-of-")]
)
def test_a_missing_shard_and_a_missing_index_are_named(
    name: str, says: str, sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(sharded.glob(f"{name}*")).unlink()
    code, _, err = dry_run(sharded, capsys)
    assert code == 2
    assert says in err


def test_no_weight_is_read_and_a_good_checkpoint_passes(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safetensors.safe_open", None)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", None)
    for name in ("internvl", "sharded"):
        code, out, err = dry_run(made / name, capsys)
        shape = read_shape(str(made / name))
        assert code == 0, err
        assert shape is not None
        assert f"parameters {count_text(shape.total)} (" in " ".join(out.split())


def test_the_dry_run_of_an_evaluation_checks_and_counts_the_model_that_is_named(
    made: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "shapes", "--model", str(made / "internvl"), "--dry-run"]) == 0
    assert "parameters 509.0 k (" in " ".join(capsys.readouterr().out.split())
    truncated(model)
    assert main(["eval", "shapes", "--model", str(model), "--dry-run"]) == 2
    assert "is cut short or damaged" in capsys.readouterr().err


def test_what_this_machine_would_refuse_is_told_but_another_may_run_it(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sensorium.models.load.free_memory", lambda: 1000)
    code, out, _ = dry_run(made / "internvl", capsys)
    assert code == 0
    assert "on this machine the run would be refused: model.path" in " ".join(out.split())


def test_adapters_for_layers_that_are_not_there_are_refused(made: Path) -> None:
    section = ModelSection(path=str(made / "internvl"), lora=LoraSection(rank=2, modules=("no_proj",)))
    with pytest.raises(RecipeError, match=r"no layer of 'language' ends in no_proj"):
        check_checkpoint(section)


def test_a_hub_id_that_is_not_here_is_said_to_be_unchecked_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "find_checkpoint", None)
    (said,) = check_checkpoint(ModelSection(path="Nobody/NoSuchModel"))
    assert "Nobody/NoSuchModel" in said
    assert "not checked" in said


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_published_passes_and_is_counted_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    family, layout = LAYOUTS[name]
    folder = publish(name, make_tiny(family, tmp_path / "v5", **layout.overrides), tmp_path / "published")
    assert check_checkpoint(ModelSection(path=str(folder))) == []
    counted, alone = read_shape(str(folder)), read_shape(str(tmp_path / "v5"))
    assert counted is not None
    assert alone is not None
    assert counted.parameters == alone.parameters


def test_layers_are_no_unused_weights_and_are_named_as_in_the_files(sharded: Path) -> None:
    reconfigure(sharded, config_of(sharded) | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    section = ModelSection(path=str(sharded), unused_weights=("model.layers.1.",))
    with pytest.raises(ModelError, match=r"fewer layers .*: model\.layers\.1 \(12 weights\)"):
        check_checkpoint(section)


def test_weights_without_a_place_are_left_out_only_if_they_are_named(model: Path) -> None:
    weights = load_file(model / SINGLE)
    more = {"value_head.weight": torch.zeros(1, 128), "mtp.layers.0.norm.weight": torch.zeros(128)}
    save_file(weights | more, model / SINGLE, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights .* have no place .*: value_head\.weight\..*model\.unused_weights"):
        check_checkpoint(ModelSection(path=str(model)))
    section = ModelSection(path=str(model), unused_weights=("value_head.",))
    assert check_checkpoint(section) == []
    plain, named = read_shape("tiny:internvl"), read_shape(str(model), unused=section.unused_weights)
    assert plain is not None
    assert named is not None
    assert named.parameters == plain.parameters


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gemma3"}, "features of a picture"),
        ({"model_type": "paligemma"}, "features of a picture"),
        ({"model_type": "foo_vl"}, "names the model type 'foo_vl'"),
        (Gemma3Config().to_dict(), "features of a picture"),
        (PaliGemmaConfig().to_dict() | {"model_type": "internvl"}, "and the tokenizer's files belong together?"),
        (PaliGemmaConfig().to_dict() | {"model_type": "smolvlm"}, "the family 'smolvlm'"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_belong_to_its_processor_is_refused(
    config: dict, says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reconfigure(model, config)
    for family in ("auto", "internvl"):
        code, _, err = dry_run(model, capsys, f"model.family={family}")
        assert code == 2
        assert "damaged" not in err
        if family == "auto":
            assert says in err


def test_a_config_that_leaves_sizes_to_defaults_is_planned_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("qwen2", tmp_path / "model", num_attention_heads=32, num_key_value_heads=32)
    told = dry_run(folder, capsys)[1]
    config = config_of(folder)
    reconfigure(folder, {key: value for key, value in config.items() if key != "num_attention_heads"})
    with pytest.raises(IncompleteConfig, match=r"does not say 'num_attention_heads'"):
        read_shape(str(folder))
    code, out, err = dry_run(folder, capsys)
    assert code == 0, err
    assert out == told


def test_a_run_in_place_of_its_checkpoint_is_told_where_that_lies(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000002" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="checkpoints in: checkpoints/step_000002; name one of them"):
        find_checkpoint(str(tmp_path))
