"""A recording computes with the weights of the moment, whichever changes and however alike they were when it was made."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.key_values import RowStates
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.prefix_cache import RouteRecorder
from sensorium.engines.native.steps import Steps, feed
from sensorium.engines.protocol import Sampling
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import user

from .conftest import RECORD_AFTER, ask, generate

pytestmark = pytest.mark.usefixtures("early_recordings")
LORA = LoraSection(rank=2, alpha=4, groups=("language",))
WITH_QWEN2 = ("internvl", "llava_onevision", "qwen2_audio")
"""Families whose language model is that of qwen2: what is recorded is that and the head."""
ADAPTED = ("qwen2", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Where adapters lie on layers of other kinds: with biases, with norms of heads, in delta nets, beside experts."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Policy]:
    """Models as they start: every norm is all ones, every bias and every adapter's B all zeros."""
    folders: dict[str, Path] = {}

    def load(family: str, **options: Any) -> Policy:
        if family not in folders:
            folders[family] = make_tiny(family, tmp_path_factory.mktemp(family), num_hidden_layers=2)
        return load_policy(str(folders[family]), store=MediaStore(), device="cpu", **options)

    return load


def few_rows(policy: Policy, rows: int = 3, reach: int = 6) -> SimpleNamespace:
    """A batch of rows in the middle of their responses, as far as ``Steps.feed`` looks at it."""
    config = policy.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(3)
    heads = config.num_key_value_heads
    block = torch.randn(config.num_hidden_layers, 2, rows, heads, reach, size, generator=generator)
    states = RowStates.of(policy.adapter.language_model, policy.dtype, policy.device)
    states.reserve(rows)
    for tensor in states.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    write_N = torch.arange(rows * heads) * reach + reach - 1
    routes = RouteRecorder(policy).buffer(rows) if policy.routers else torch.empty(rows, 0, 0)
    fed = (torch.arange(rows) + 40, torch.arange(rows) + reach, block, write_N, torch.zeros(rows, 1, 1, reach), routes)
    given = {"block": block, "states": states, "routes_BLK": routes}
    return SimpleNamespace(**given, fed=lambda: (*fed, *(tensor.clone() for tensor in states.tensors)))


def recorded_steps(policy: Policy, batch: Any) -> Steps:
    steps = Steps(policy, record=True)
    for _ in range(RECORD_AFTER + 1):
        steps.feed(batch)
    return steps


def tensors_of(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Everything that a decode step computes with."""
    for part in (policy.adapter.language_model, policy.adapter.head):
        yield from part.named_parameters()
        yield from part.named_buffers()


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, False) for family in FAMILIES if family not in WITH_QWEN2), *((family, True) for family in ADAPTED)],
)
@torch.no_grad()
def test_every_parameter_and_buffer_may_change_in_place(family: str, lora: bool, fresh: Callable[..., Policy]) -> None:
    policy = fresh(family, lora=LORA) if lora else fresh(family)
    batch = few_rows(policy)
    steps = recorded_steps(policy, batch)
    assert steps.refusal is None
    before = steps.feed(batch).clone()
    ignored = []
    for name, tensor in tensors_of(policy):
        kept = tensor.clone()
        tensor.add_(torch.linspace(0.1, 0.3, tensor.numel()).view_as(tensor))
        found = steps.feed(batch)
        assert torch.equal(found, feed(policy, *batch.fed())), name
        if torch.equal(found, before):
            ignored.append(name)
        tensor.copy_(kept)
    assert torch.equal(steps.feed(batch), before)
    assert all("proj" not in name or "lora_A" in name for name in ignored), ignored  # a zero B hides its A


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl"])
@torch.no_grad()
def test_every_parameter_may_be_replaced(family: str, fresh: Callable[..., Policy]) -> None:
    policy = fresh(family)
    batch = few_rows(policy)
    steps = recorded_steps(policy, batch)
    for part in (policy.adapter.language_model, policy.adapter.head):
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter + 0.1 * torch.ones_like(parameter)))
                assert torch.equal(steps.feed(batch), feed(policy, *batch.fed())), name
                getattr(module, name).data = getattr(module, name).data * 0.5
                assert torch.equal(steps.feed(batch), feed(policy, *batch.fed())), name


@torch.no_grad()
def test_a_model_that_gets_adapters_later_is_recorded_anew(fresh: Callable[..., Policy]) -> None:
    from sensorium.models.lora import add_adapters

    policy = fresh("qwen2")
    batch = few_rows(policy)
    steps = recorded_steps(policy, batch)
    adapters = add_adapters(policy.model, policy.adapter.groups, LORA, 0, "base")
    for parameter in adapters.parameters.values():
        parameter.add_(0.1)
    steps.refresh()
    for _ in range(RECORD_AFTER + 1):
        assert torch.equal(steps.feed(batch), feed(policy, *batch.fed()))
    assert steps.refusal is None


def test_fresh_adapters_are_followed_through_updates(fresh: Callable[..., Policy]) -> None:
    """An evaluation records while every B is zero; then training moves each of them."""
    policy = fresh("qwen2", lora=LORA)
    assert policy.adapters is not None
    engine = NativeEngine(policy)
    prompt = policy.chat.render([user("what colour is it?")])
    sampling = Sampling(max_new_tokens=RECORD_AFTER + 8, stop_tokens=False)
    requests = [ask(f"{i}", [prompt], sampling, order=(i,), key=i) for i in range(3)]
    generate(engine, *requests)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.adapters.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        policy.version += 1
        engine.update_weights(policy, policy.version)
        plain = generate(NativeEngine(policy, record=False), *requests)
        assert [r.segment for r in generate(engine, *requests)] == [r.segment for r in plain]


def test_a_step_that_reads_a_tensors_value_is_not_recorded_and_says_why(
    fresh: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fresh("qwen2")
    original = policy.logits

    def reading(hidden_NH: Tensor) -> Tensor:
        return original(hidden_NH) * (2.0 if float(hidden_NH[0, 0]) > 1e9 else 1.0)

    monkeypatch.setattr(policy, "logits", reading)
    with torch.no_grad(), pytest.warns(UserWarning, match="without a recording"):
        steps = recorded_steps(policy, few_rows(policy))
    assert steps.refusal is not None
    assert "value" in steps.refusal


def test_experts_that_run_or_not_by_the_tokens_are_not_recorded(fresh: Callable[..., Policy]) -> None:
    policy = fresh("qwen3_vl_moe")
    policy.model.set_experts_implementation("eager")
    with pytest.warns(UserWarning, match="without a recording"):
        steps = recorded_steps(policy, few_rows(policy))
    assert steps.refusal is not None


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_not_recorded(
    fresh: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fresh("qwen2")
    original, hidden_away = policy.logits, torch.ones(policy.vocab_size)
    monkeypatch.setattr(policy, "logits", lambda hidden_NH: original(hidden_NH) * hidden_away)
    batch = few_rows(policy)
    with pytest.warns(UserWarning, match="without a recording"):
        steps = recorded_steps(policy, batch)
    hidden_away.mul_(3.0)
    with torch.no_grad():
        assert torch.equal(steps.feed(batch), feed(policy, *batch.fed()))


def test_what_cannot_be_recorded_is_said_where_the_engine_is_told_to(
    fresh: Callable[..., Policy], recwarn: pytest.WarningsRecorder
) -> None:
    policy = fresh("qwen3_vl_moe")
    policy.model.set_experts_implementation("eager")
    steps, told = Steps(policy, record=True), list[str]()
    steps.noted = told.append
    batch = few_rows(policy)
    with torch.no_grad():
        for _ in range(RECORD_AFTER):
            steps.feed(batch)
    assert steps.refusal is not None
    assert len(told) == 1
    assert "without a recording" in told[0]
    assert not [warning for warning in recwarn if "without a recording" in str(warning.message)]
