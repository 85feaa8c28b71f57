"""Files made to do harm, or damaged beyond what a cut leaves: one paragraph each, at once, in little memory."""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium.data.media_store import MediaStore
from sensorium.models import rendering
from sensorium.models.load import check_checkpoint, load_policy
from sensorium.models.tiny import make_tiny
from sensorium.models.weight_files import INDEX, SINGLE, read_weight_file
from sensorium.recipe.model_shape import read_shape
from sensorium.recipe.schema import ModelSection
from sensorium.vocabulary.errors import ModelError, RecipeError

from ..file_limit import small_files_only

DEEP = b'{"a":' * 50_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def refused(model: Path) -> str:
    with pytest.raises(ModelError) as error:
        check_checkpoint(ModelSection(path=str(model)))
    assert str(error.value).startswith(f"model.path '{model}': ")
    return str(error.value)


def write_header(file: Path, header: bytes) -> None:
    data = file.read_bytes()
    old = int.from_bytes(data[:8], "little")
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + old :])


@pytest.mark.parametrize(
    "lie",
    [
        lambda entry: entry | {"shape": [-size for size in entry["shape"]]},
        lambda entry: entry | {"shape": [float(size) for size in entry["shape"]]},
        lambda entry: entry | {"shape": "ab"},
        lambda entry: entry | {"shape": [None]},
        lambda entry: entry | {"dtype": ["F32"]},
        lambda entry: entry | {"data_offsets": [float(place) for place in entry["data_offsets"]]},
        lambda entry: DEEP,
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(lie: Callable[[Any], Any], model: Path) -> None:
    data = (model / SINGLE).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = "model.embed_tokens.weight"
    said = lie(header[name])
    write_header(model / SINGLE, said if isinstance(said, bytes) else json.dumps(header | {name: said}).encode())
    assert "cut short or damaged: its header cannot be read" in refused(model)


def test_a_header_longer_than_any_is_not_read(model: Path) -> None:
    with (model / SINGLE).open("wb") as file:
        file.write((50 << 30).to_bytes(8, "little"))
        file.truncate(60 << 30)  # takes no room on the disk
    assert "53687091200 bytes" in refused(model)
    with pytest.raises(RecipeError, match="longer than the file, or than any header"):
        read_shape(str(model))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "processor_config.json", SINGLE])
def test_a_pipe_is_refused_and_not_waited_for(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f"its {name} is a pipe or a device" in refused(model)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers: 1000000000, which no model has"),
        ("vocab_size", 10**12, "vocab_size: 1000000000000, which no model has"),
        ("num_key_value_heads", 0, "num_key_value_heads: 0, which no model has"),
        ("hidden_size", -128, "hidden_size: -128, which no model has"),
        ("num_attention_heads", "4", "expected int, got str (value: '4'). Use the config.json that belongs"),
        ("vocab_size", None, "expected int, got NoneType"),
        ("vocab_size", 300, "the tokenizer has tokens up to 4"),
        ("hidden_act", "nope", "its files name 'nope', which transformers does not know"),
    ],
)
def test_a_config_of_no_model_is_refused_before_one_is_built(key: str, value: object, said: str, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    assert said in refused(model)


@pytest.mark.parametrize("content", [DEEP, b"[1]"])
def test_a_config_that_is_no_object_is_refused(content: bytes, model: Path) -> None:
    (model / "config.json").write_bytes(content)
    assert "its config.json is damaged" in refused(model)


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"added_tokens": [{"id": 4_000_000_000, "content": "x"}]}, "4000000000"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
            "cannot load",
        ),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}}, "1e+06"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 30}}, "1.07e+09"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLED | {"pattern": {"Regex": ""}}] * 30}}, "2.06e+14"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(change: dict[str, Any], said: str, model: Path) -> None:
    """An id of four billion took 16 GiB and ended the process; the library's errors have no class of their own."""
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert said in refused(model)


@pytest.mark.parametrize("base", ["other", "../../../../etc", "somebody/model"])
def test_adapters_beside_weights_are_refused_and_not_added_unseen(base: str, model: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 10**9, "target_modules": ["q_proj"]}
    (model / "adapter_config.json").write_text(json.dumps(config))
    assert "merge_and_unload" in refused(model)


def test_guards_of_files_hold_without_assertions(model: Path) -> None:
    """``python -O`` leaves assertions out: what users' files are checked by is none."""
    (model / SINGLE).unlink()
    (model / INDEX).write_text('{"weight_map": {"a": 5}}')
    code = "import sys, pathlib, sensorium.models.weight_files as read; read.weight_files(pathlib.Path(sys.argv[1]))"
    ended = subprocess.run([sys.executable, "-O", "-c", code, model], capture_output=True, text=True, timeout=60)
    assert "ModelError" in ended.stderr.splitlines()[-1]


def test_bytes_that_do_not_fill_a_weights_place_are_not_written(model: Path) -> None:
    file, before = read_weight_file(model / SINGLE), (model / SINGLE).read_bytes()
    with pytest.raises(ModelError):
        file.overwrite(file.tensors[0], bytes(file.tensors[0].size + 1))
    with pytest.raises(ModelError):
        file.write_like(model / "other.safetensors", lambda tensor: file.bytes_of(tensor)[:-1])
    assert (model / SINGLE).read_bytes() == before


@pytest.mark.parametrize("content", [DEEP, b'{"weight_map": {}}', b'{"weight_map": {"a": 5}}'])
def test_an_index_that_names_nothing_is_refused(content: bytes, model: Path) -> None:
    (model / SINGLE).unlink()
    (model / INDEX).write_bytes(content)
    assert "is damaged" in refused(model)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_where_they_are_read(value: float, model: Path) -> None:
    weights = load_file(model / SINGLE)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.tensor(value)
    save_file(weights, model / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights of the checkpoint hold numbers that are not finite: .*layers\.0"):
        load_policy(str(model), store=MediaStore(), device="cpu")


def test_weights_may_be_read_by_whoever_may_read_the_config(whole: Path, tmp_path: Path) -> None:
    load_policy(str(whole), store=MediaStore(), device="cpu").save(tmp_path / "saved")
    for folder in (whole, tmp_path / "saved"):
        assert (folder / SINGLE).stat().st_mode == (folder / "config.json").stat().st_mode


def test_weights_that_find_no_room_are_the_systems_error(whole: Path, tmp_path: Path) -> None:
    policy = load_policy(str(whole), store=MediaStore(), device="cpu")
    with small_files_only(), pytest.raises(OSError, match="File too large") as error:
        policy.save(tmp_path / "saved")
    assert error.value.errno == errno.EFBIG


HOSTILE_TEMPLATES = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a huge text": "{{ 'a' * 10000000000 }}",
    "a huge list": "{{ [0] * 10000000000 }}",
    "a huge number": "{{ (9 ** 999999999) % 7 }}",
    "a text that doubles": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "a sum that doubles": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a wide text": "{{ 'a'.ljust(10000000000) }}",
    "a wide filter": "{{ 'a'|center(10000000000) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide formatter": "{{ '{:>10000000000}'.format(1) }}",
    "replacements that grow": "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
    "a join that grows": "{{ range(99999)|join('b' * 9999999) }}",
    "a method that joins": "{{ ('b' * 9999999).join(['c'] * 99999) }}",
    "a long output": "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("what", HOSTILE_TEMPLATES)
def test_a_template_without_bounds_is_refused_in_little_time_and_memory(
    what: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MOST_S", 2.0)
    template = model / "chat_template.jinja"
    template.write_text(HOSTILE_TEMPLATES[what] + template.read_text())
    before = rendering.resident_bytes()
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_policy(str(model), store=MediaStore())
    assert rendering.resident_bytes() - before < 1 << 30


def test_an_ended_rendering_leaves_nothing_behind_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MOST_S", 0.2)

    def endless() -> str:
        while True:
            pass

    for _ in range(3):
        with pytest.raises(rendering.TemplateBeyondBounds):
            rendering.bounded_rendering(endless, 0)
        assert rendering.bounded_rendering(lambda: "fine", 4) == "fine"
    assert sum(range(10**6)) > 0, "no late exception arrives"


def test_a_rendering_inside_of_another_leaves_the_outer_bound_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MOST_S", 0.3)
    deadline = time.monotonic() + 10

    def nested() -> str:
        while time.monotonic() < deadline:
            rendering.bounded_rendering(lambda: "inner", 5)
        return "ended by itself"

    with pytest.raises(rendering.TemplateBeyondBounds):
        rendering.bounded_rendering(nested, 100)
    assert rendering.bounded_rendering(lambda: "fine", 4) == "fine"


def test_a_rendering_that_is_ended_at_its_end_does_not_keep_the_lock() -> None:
    watch, finish, ended = rendering._WATCH, threading.Event(), threading.Event()

    def render() -> None:
        with suppress(rendering.TemplateBeyondBounds):
            rendering.bounded_rendering(lambda: str(finish.wait(20)), 0)
        ended.set()

    other = threading.Thread(target=render, daemon=True)
    other.start()
    deadline = time.monotonic() + 20
    while other.ident not in watch._running and time.monotonic() < deadline:
        time.sleep(0.01)
    with watch._changed:
        finish.set()
        while sys._current_frames()[other.ident or 0].f_code.co_name not in ("watching", "__enter__"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        del watch._running[other.ident or 0]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(other.ident or 0), ctypes.py_object(rendering.TemplateBeyondBounds)
        )
    assert ended.wait(20)
    assert watch._lock.acquire(timeout=20)
    watch._lock.release()


def test_a_child_forked_during_a_rendering_renders() -> None:
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(rendering.bounded_rendering(lambda: "fine", 4) != "fine")
        children.append(child)

    with rendering._WATCH._changed:  # as at the beginning and end of every rendering
        other = threading.Thread(target=fork)
        other.start()
        other.join()
    deadline = time.monotonic() + 20
    while (found := os.waitpid(children[0], os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if found == (0, 0):
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    assert found == (children[0], 0)
