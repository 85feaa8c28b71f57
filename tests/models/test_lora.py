"""Adapters: where they sit, how they start, that the model with them is what peft and their sum say, and who is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.models.families.qwen3_vl import Qwen3VL
from sensorium.models.load import load_policy
from sensorium.models.lora import Adapters, choose_layers
from sensorium.models.policy import FormerSelf, FrozenCopy, Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.content import Message, user
from sensorium.vocabulary.errors import CheckpointError, RecipeError
from tests.families import ONLY_HEARING, stock_class, wide_weights

from .published import meta_model
from .stock_pair import Pair, close

ADAPTED = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", *ONLY_HEARING, "qwen2", "qwen3"]
TOWERS = LoraSection(rank=4, alpha=8, groups=("vision", "projector", "language"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[Any, Path] = {}

    def folder(family: str, **given: Any) -> Path:
        key = (family, *sorted(given))
        if key not in made:
            wide = wide_weights(family, 0.15, "", "vision", "audio")
            made[key] = make_tiny(family, tmp_path_factory.mktemp(family), **wide, **given)
        return made[key]

    return folder


def load(folder: Path, lora: LoraSection | None = None, dtype: str = "float32", seed: int = 3) -> Policy:
    if lora is None:
        parts = dict.fromkeys(group for _, group in FAMILIES[family_in(folder)].parts)
        lora = LoraSection(rank=4, alpha=8, groups=(*parts, "language"))
    return load_policy(str(folder), store=MediaStore(), dtype=dtype, device="cpu", lora=lora, seed=seed)


def family_in(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def adapters(policy: Policy) -> Adapters:
    assert policy.adapters is not None
    return policy.adapters


def stir(policy: Policy, seed: int = 0) -> None:
    """Adapters that matter, as training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters(policy).parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def stock(folder: Path) -> Any:
    return stock_class(family_in(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def question(policy: Policy) -> list[Message]:
    shown = [Pair(policy, None, Path()).medium(1, 84, 56)] if policy.chat.modalities != {"text"} else []
    return [user(*shown, "What colour is it?")]


def logits(policy: Policy) -> Tensor:
    with torch.no_grad():
        return Pair(policy, None, Path()).got([policy.chat.render(question(policy))])


@pytest.mark.parametrize("family", ADAPTED)
def test_fresh_adapters_change_nothing_and_sit_on_every_linear_layer_of_their_groups(
    family: str, folders: Callable[..., Path]
) -> None:
    plain, adapted = load(folders(family), LoraSection()), load(folders(family))
    assert plain.adapters is None
    assert torch.equal(logits(plain), logits(adapted))
    linear = {name for name, part in plain.model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert set(adapters(adapted).layers) == linear - {"lm_head"}
    learning = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert learning == set(adapters(adapted).parameters)
    for group, named in adapted.groups().items():
        own = {name.replace(".base_layer.", ".") for name in named if name not in learning}
        assert own == set(plain.groups()[group])
        assert {name.partition(".lora_")[0] for name in named if name in learning} <= linear
        assert set(adapted.trainable()[group]) == learning & set(named)


def test_adapters_are_a_function_of_seed_and_layer_alone(folders: Callable[..., Path]) -> None:
    folder = folders("qwen2")
    torch.manual_seed(1)
    first = load(folder)
    state = torch.get_rng_state()
    again, other = load(folder), load(folder, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    narrow = load(folder, LoraSection(rank=4, modules=("mlp.up_proj",)))
    half = load(folder, dtype="bfloat16")
    for part in (again, narrow, half):
        for name, parameter in adapters(part).parameters.items():
            assert torch.equal(parameter, adapters(first).parameters[name].to(parameter.dtype))
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    drawn, different = (adapters(policy).parameters[name] for policy in (first, other))
    assert not torch.equal(drawn, different)
    bound = drawn.shape[1] ** -0.5
    assert float(drawn.detach().abs().max()) == pytest.approx(bound, rel=0.05)
    assert abs(float(drawn.detach().mean())) < bound / 10


@pytest.mark.parametrize("family", ADAPTED)
def test_the_adapted_model_is_what_peft_makes_of_it_and_its_checkpoint_is_their_sum(
    family: str, folders: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    policy = load(folders(family))
    stir(policy)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    policy.save(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    inputs = Pair(policy, None, tmp_path).inputs(question(policy))
    summed = stock(tmp_path)
    with_peft = PeftModel.from_pretrained(stock(folders(family)), tmp_path / "adapter")
    plain = stock(folders(family))
    with torch.no_grad():
        base, merged, unmerged = (m(**inputs, use_cache=False).logits[0] for m in (plain, summed, with_peft))
    got = logits(policy)
    close(got, merged)
    close(got, unmerged)
    assert float((got - base).abs().max()) > 0.1
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == load_file(folders(family) / "model.safetensors").keys()
    assert with_peft.peft_config["default"].base_model_name_or_path == str(folders(family))


@pytest.mark.parametrize(("rank", "alpha"), [(4, 6.0), (2, 2.0), (8, 32.0)])
def test_adapters_are_scaled_by_alpha_over_rank(
    rank: int, alpha: float, folders: Callable[..., Path], tmp_path: Path
) -> None:
    policy = load(folders("qwen2"), LoraSection(rank=rank, alpha=alpha))
    stir(policy)
    policy.save(tmp_path)
    base, summed = (load_file(folder / "model.safetensors") for folder in (folders("qwen2"), tmp_path))
    input_NI = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for name, layer in adapters(policy).layers.items():
        a_RI, b_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        added_OI = (alpha / rank) * (b_OR @ a_RI).detach()
        torch.testing.assert_close(summed[f"{name}.weight"], base[f"{name}.weight"] + added_OI)
        if layer.in_features == 64:
            computed_NO = layer(input_NI) - layer.base_layer(input_NI)
            torch.testing.assert_close(computed_NO, input_NI @ added_OI.T, rtol=1e-3, atol=1e-4)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (rank, alpha)


def test_an_untied_head_is_adapted_when_it_is_named(folders: Callable[..., Path], tmp_path: Path) -> None:
    policy = load(folders("qwen3_vl", tie_word_embeddings=False), LoraSection(rank=2, groups=("head", "language")))
    assert "lm_head" in adapters(policy).layers
    fresh = logits(policy)
    with torch.no_grad():
        adapters(policy).layers["lm_head"].lora_B["default"].weight.fill_(0.1)
    assert not torch.equal(logits(policy), fresh)
    policy.save(tmp_path)
    inputs = Pair(policy, None, tmp_path).inputs(question(policy))
    close(logits(policy), stock(tmp_path)(**inputs, use_cache=False).logits[0])


def test_experts_and_routers_of_a_mixture_have_no_adapters() -> None:
    layers = choose_layers(meta_model("Qwen3-VL-30B-A3B"), Qwen3VL.groups, LoraSection(rank=1))
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(layers) == 4 * 48


@pytest.mark.parametrize(
    ("family", "lora", "says"),
    [
        ("qwen2", {"groups": ("vision",)}, r"no parameter group 'vision'"),
        ("qwen2_5_vl", {"groups": ("langauge",)}, r"'langauge'; did you mean 'language'"),
        (
            "qwen2_5_vl",
            {"groups": ("head",)},
            r"'head' has no linear layers .*shares the weights.*vision, projector, language",
        ),
        ("qwen2_5_vl", {"groups": ()}, r"names no group"),
        ("qwen2_5_vl", {"modules": ("c_attn",)}, r"no layer of 'language' ends in c_attn.*q_proj"),
        ("qwen2_5_vl", {"groups": ("projector",), "modules": ("q_proj",)}, r"its layers end in: mlp\.0, mlp\.2"),
        ("qwen2_5_vl", {"modules": ("q_proj", "k_porj")}, r"no layer ends in 'k_porj'; the adapted end in: q_proj"),
        ("qwen2_5_vl", {"modules": ("proj",)}, r"no layer of 'language' ends in proj"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    family: str, lora: dict[str, Any], says: str, folders: Callable[..., Path]
) -> None:
    with pytest.raises(RecipeError, match=says):
        load(folders(family), LoraSection(rank=2, **lora))


def test_modules_choose_layers_by_the_end_of_their_name(folders: Callable[..., Path]) -> None:
    section = LoraSection(
        rank=2, groups=("vision", "language"), modules=("qkv", "self_attn.q_proj", "layers.1.mlp.up_proj")
    )
    policy = load(folders("qwen3_vl"), section)
    assert sorted(adapters(policy).layers) == [
        "model.language_model.layers.0.self_attn.q_proj",
        "model.language_model.layers.1.mlp.up_proj",
        "model.language_model.layers.1.self_attn.q_proj",
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.1.attn.qkv",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_adapters_come_back_bit_for_bit_and_others_are_refused(
    dtype: str, folders: Callable[..., Path], tmp_path: Path
) -> None:
    policy, again = load(folders("qwen2"), dtype=dtype), load(folders("qwen2"), dtype=dtype, seed=9)
    stir(policy)
    policy.save(tmp_path)
    adapters(again).load(tmp_path / "adapter")
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name
    with pytest.raises(CheckpointError, match="another rank"):
        adapters(load(folders("qwen2"), LoraSection(rank=2))).load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="down_proj"):
        adapters(load(folders("qwen2"), LoraSection(rank=4, modules=("q_proj",)))).load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="holds no adapters"):
        adapters(again).load(tmp_path)
    saved = tmp_path / "adapter" / "adapter_model.safetensors"
    saved.write_bytes(saved.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=saved.name):
        adapters(again).load(tmp_path / "adapter")


def fail_inside(reference: FormerSelf) -> None:
    with reference.active() as policy:
        logits(policy)
        raise ZeroDivisionError


@pytest.mark.parametrize("warm", [False, True], ids=["fresh adapters", "after a warm start"])
def test_the_former_self_is_exactly_what_the_policy_was_and_leaves_no_trace(
    warm: bool, folders: Callable[..., Path]
) -> None:
    policy = load(folders("qwen3_vl"))
    if warm:
        stir(policy, 1)
    former, copy = logits(policy), FrozenCopy(policy.frozen_copy())
    reference = FormerSelf(policy, adapters(policy).snapshot() if warm else None)
    stir(policy, 2)
    next(iter(adapters(policy).parameters.values())).requires_grad_(False)
    now, version, items = logits(policy), policy.version, policy.counters.tower_items
    held = {name: (p.data_ptr(), p.requires_grad, p._version) for name, p in policy.model.named_parameters()}
    with reference.active() as active:
        assert torch.equal(logits(active), former)
        assert policy.version != version
    with pytest.raises(ZeroDivisionError):
        fail_inside(reference)
    assert held == {name: (p.data_ptr(), p.requires_grad, p._version) for name, p in policy.model.named_parameters()}
    assert (policy.version, policy.counters.tower_items) == (version, items)
    assert torch.equal(logits(policy), now)
    with copy.active() as other:
        assert torch.equal(logits(other), former)
        assert adapters(other).parameters.keys() == adapters(policy).parameters.keys()


def test_a_model_made_on_the_spot_is_the_same_every_time() -> None:
    """Adapters are resumed on a base that is loaded anew."""
    first, again = (load_policy("tiny:qwen3_vl", store=MediaStore(), device="cpu", lora=TOWERS) for _ in range(2))
    assert all(torch.equal(p, again.model.get_parameter(name)) for name, p in first.model.named_parameters())
