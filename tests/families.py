"""The table of families for the tests: what each needs of them, and tiny look-alikes of its published checkpoints.

A new family gets one row of ``FAMILY_ROWS``; every test that runs over families takes them from there, or from the facts of
the families. A look-alike has the weight names and shapes, shards, dtypes, config and side files of a published checkpoint:
a tiny model as transformers 5 saves it, rewritten by hand to what releases of transformers 4 wrote.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sensorium.models.torchvision_fix  # noqa: F401
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES

SHARD_BYTES = 300_000


@dataclass(frozen=True)
class Published:
    """A layout: how the weights and the config of the family's tiny model are rewritten, and what else is in the folder."""

    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    config: Callable[[dict[str, Any]], dict[str, Any]]
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    sharded: bool = True


def same(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights


def flat_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen2.5-VL as published: ``visual.`` and ``model.`` side by side."""
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in weights.items()
    }


def nested_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen2.5-VL as some fine-tunes are: all of it below ``model.``."""
    flat = flat_prefixes(weights)
    named = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in flat.items()
    }
    return {f"model.{name}" if name.startswith("visual.") else name: tensor for name, tensor in named.items()}


def experts_turned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen3-VL-MoE: the experts' last two axes are the other way round in the file."""
    return {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in weights.items()}


def head_written_out(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tied head that stands in the file all the same."""
    embeddings = next(t for name, t in weights.items() if name.endswith("embed_tokens.weight"))
    return weights | {"lm_head.weight": embeddings.clone()}


def whole_omni(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen2.5-Omni: the thinker beside what speaks."""
    generator = torch.Generator().manual_seed(1)
    speaking = {
        "talker.codec_head.weight": torch.randn(8, 4, generator=generator),
        "talker.model.layers.0.mlp.up_proj.weight": torch.randn(8, 4, generator=generator),
        "token2wav.code2wav_bigvgan_model.conv_pre.bias": torch.randn(5, generator=generator),
    }
    return {f"thinker.{name}": tensor for name, tensor in weights.items()} | speaking


def siglip_nested(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """LLaVA-OneVision: the tower's weights below ``vision_model``."""
    return {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in weights.items()}


def whole_omni3(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen3-Omni: the thinker, its experts one by one, beside what speaks."""
    speaking = {"talker.codec_head.weight": torch.ones(8, 4), "code2wav.decoder.0.bias": torch.ones(5)}
    return {f"thinker.{name}": tensor for name, tensor in weights.items()} | speaking


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of transformers 4, in a config and those inside it."""
    config = {key: text_config(value) if isinstance(value, dict) else value for key, value in config.items()}
    rope = config.pop("rope_parameters", None)
    if rope and "rope_theta" in rope and rope["rope_type"] == "default":
        config["rope_theta"] = rope.pop("rope_theta")
        if "mrope_section" in rope:
            config["rope_scaling"] = rope | {"type": "default"}
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
        config["norm_topk_prob"] = True
    if "transformers_version" in config:
        config["transformers_version"] = "4.57.1"
    if "tie_word_embeddings" in config and "text_config" in config:  # which transformers 4 reads there
        config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]
    return config


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen2.5-VL's: the text model's keys at the top."""
    config = text_config(config)
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text["rope_scaling"]["mrope_section"]}
    return {key: value for key, value in text.items() if key != "model_type"} | config


def omni_config(config: dict[str, Any]) -> dict[str, Any]:
    thinker = text_config(config)
    return {
        "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker,
        "talker_config": {"model_type": "qwen2_5_omni_talker"},
        "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
        "enable_audio_output": True, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    }  # fmt: skip


def omni3_config(config: dict[str, Any]) -> dict[str, Any]:
    thinker = text_config(config)
    vision = thinker["vision_config"]  # whose size vLLM asks for; transformers has it by its position embeddings
    side = round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    thinker["vision_config"] = vision | {"image_size": side, "apply_vit_abs_pos_embed": True}
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe",
        "thinker_config": thinker, "enable_audio_output": True, "transformers_version": "4.57.0.dev0",
    }  # fmt: skip


def numbered_by_turn(text: str) -> str:
    """Qwen2-Audio's template counts the sounds of a conversation; those of a message that is rendered alone begin at 1."""
    turns = []
    for turn in text.split("<|im_start|>"):
        numbers = itertools.count(1)
        turns.append(re.sub(r"Audio \d+: (?=<\|audio_bos)", lambda _, of=numbers: f"Audio {next(of)}: ", turn))
    return "<|im_start|>".join(turns)


def thinking_by_turn(text: str) -> str:
    """Qwen3.5's template begins an answer that is asked for with ``<think>``, and no answer of a finished turn."""
    return re.sub(r"(<\|im_start\|>assistant\n)(?!<think>)", r"\1<think>\n", text)


UNTIED = {"tie_word_embeddings": False}
OBLONG = {"moe_intermediate_size": 48}  # experts that are not square show their orientation
QWEN_BOXES = ("<|object_ref_start|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>")


@dataclass(frozen=True)
class FamilyRow:
    """What tests know of a family beside its facts. Most is about the stock classes, which tests hold the family to.

    ``layouts``: its published checkpoints. ``class_4``: of transformers 4, which reads its exports. ``boxes``: marks that
    its models write. ``picture_tokens``: of a picture of 84 x 84; ``sound_tokens``: of sounds of 0.03, 2, 2.01 and 5.1 s.
    ``gap``: the text that its processor expects before a video. ``one_length``: whether its stock processor or model takes
    videos of one length only. ``shortest_s``: sounds that are shorter depend on the batch in the stock model; ``heard_s``:
    videos with sound of another length have positions with fractions there. ``unused``: parameters that the stock model
    computes nothing with; ``fixed``: those that it would train though its class freezes them. ``tied``: whether the
    learner's gradients are compared with a tied head. ``rounding``: how far logits may be from the stock model's, relative
    to the largest. ``window_s``: to so many seconds ``make_short`` lets the stock encoder pad sounds. ``by_turn`` rewrites
    a conversation that the stock template has rendered as a whole to what it renders turn by turn.
    """

    layouts: Mapping[str, Published]
    class_4: str = "AutoModelForImageTextToText"
    boxes: tuple[str, ...] = ()
    picture_tokens: int = 9
    sound_tokens: tuple[int, ...] = ()
    gap: str = "\n"
    one_length: Literal["", "processor", "model"] = ""
    shortest_s: float = 0.0
    heard_s: float | None = None
    unused: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    tied: bool = False
    rounding: float = 1e-5
    window_s: int = 0
    by_turn: Callable[[str], str] = str


FAMILY_ROWS = {
    "glm4v": FamilyRow(
        {"GLM-4.1V-9B": Published(same, text_config, UNTIED)},
        boxes=("<|begin_of_box|>", "<|end_of_box|>"),
        rounding=2e-5,  # 1e-9 in float64
        tied=True,
    ),
    "internvl": FamilyRow(
        {"InternVL3-8B-hf": Published(same, text_config, UNTIED)},
        boxes=("<ref>", "</ref>", "<box>", "</box>", "<quad>"),
        picture_tokens=20,
        one_length="processor",
        tied=True,
    ),
    "llava_onevision": FamilyRow(
        {"LLaVA-OneVision-7B": Published(siglip_nested, text_config, UNTIED)},
        picture_tokens=88,
        one_length="model",
        unused=("vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.bias"),
    ),
    "qwen2_audio": FamilyRow(
        {"Qwen2-Audio-7B": Published(same, text_config, UNTIED)},
        "Qwen2AudioForConditionalGeneration",
        sound_tokens=(1, 50, 50, 127),
        fixed=("model.audio_tower.embed_positions.weight",),
        by_turn=numbered_by_turn,
        window_s=4,
    ),
    "qwen2_5_omni": FamilyRow(
        {"Qwen2.5-Omni-7B": Published(whole_omni, omni_config, UNTIED)},
        "Qwen2_5OmniThinkerForConditionalGeneration",
        sound_tokens=(1, 50, 50, 127),
        unused=("audio_bos_eos_token.weight",),
    ),
    "qwen2_5_vl": FamilyRow(
        {
            "Qwen2.5-VL-3B": Published(flat_prefixes, flat_config),
            "Qwen2.5-VL-7B": Published(flat_prefixes, flat_config, UNTIED),
            "Qwen2.5-VL nested": Published(nested_prefixes, text_config, UNTIED, torch.float32, sharded=False),
        },
        boxes=QWEN_BOXES,
        tied=True,
    ),
    "qwen3_5": FamilyRow(
        {"Qwen3.5-2B": Published(same, text_config), "Qwen3.5-9B": Published(same, text_config, UNTIED)},
        boxes=QWEN_BOXES,
        by_turn=thinking_by_turn,
        rounding=5e-5,
        tied=True,
    ),
    "qwen3_5_moe": FamilyRow(
        {"Qwen3.5-35B-A3B": Published(same, text_config, UNTIED | OBLONG)},
        boxes=QWEN_BOXES,
        by_turn=thinking_by_turn,
        rounding=5e-5,
    ),
    "qwen3_omni_moe": FamilyRow(
        {"Qwen3-Omni-30B-A3B": Published(whole_omni3, omni3_config, UNTIED | OBLONG)},
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        boxes=QWEN_BOXES,
        sound_tokens=(1, 26, 27, 67),
        shortest_s=1.0,
        heard_s=3.0,
    ),
    "qwen3_vl": FamilyRow(
        {
            "Qwen3-VL-2B": Published(same, text_config),
            "Qwen3-VL-8B": Published(same, text_config, UNTIED, sharded=False),
        },
        boxes=QWEN_BOXES,
    ),
    "qwen3_vl_moe": FamilyRow(
        {"Qwen3-VL-30B-A3B": Published(experts_turned, text_config, UNTIED | OBLONG)}, boxes=QWEN_BOXES, tied=True
    ),
    "smolvlm": FamilyRow({"SmolVLM2-2.2B": Published(same, text_config, UNTIED)}, picture_tokens=20, gap=" ", tied=True),
    "llama": FamilyRow({"SmolLM2-135M": Published(same, text_config, sharded=False)}, "LlamaForCausalLM"),
    "qwen2": FamilyRow({"Qwen2.5-0.5B": Published(head_written_out, text_config, sharded=False)}, "Qwen2ForCausalLM"),
    "qwen3": FamilyRow({"Qwen3-0.6B": Published(same, text_config)}, "Qwen3ForCausalLM"),
}
LAYOUTS = {name: (family, layout) for family, row in FAMILY_ROWS.items() for name, layout in row.layouts.items()}
UNUSED = tuple(ending for row in FAMILY_ROWS.values() for ending in row.unused)
SEEING = [family for family, facts in FAMILIES.items() if facts.vision]
HEARING = [family for family, facts in FAMILIES.items() if facts.audio]
ONLY_HEARING = [family for family in HEARING if family not in SEEING]
SENSING = [family for family, facts in FAMILIES.items() if facts.has_towers]


def stock_class(family: str) -> Any:
    """transformers' own class of a family's models; GLM-4V's so that it takes a picture beside a video."""
    return SeesBoth if family == "glm4v" else getattr(transformers, FAMILIES[family].model_class)


class SeesBoth(transformers.Glm4vForConditionalGeneration):
    """The stock class compares the features of one kind of media with the tokens of pictures and videos together."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.get_placeholder_mask = self._masks

    def _masks(self, input_ids: Tensor, embeds: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
        starts, ends = (input_ids == self.config.video_start_token_id, input_ids == self.config.video_end_token_id)
        filmed, seen = (starts.cumsum(-1) > ends.cumsum(-1)), input_ids == self.config.image_token_id
        return (seen & ~filmed)[..., None], (seen & filmed)[..., None]


def wide_weights(family: str, scale: float, *parts: str) -> dict[str, float]:
    """Overrides of a tiny model that give its parts ("", "vision", "audio") first weights of this scale, where they can."""
    facts = FAMILIES[family]
    sizes = {"": facts.text, "vision": facts.vision, "audio": facts.audio}
    return {f"{part}_initializer_range".lstrip("_"): scale for part in parts if "initializer_range" in sizes[part]}


def make_short(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A tiny model whose stock encoder pads sounds to ``window_s`` seconds: to 30, that is most of what it computes."""
    seconds = FAMILY_ROWS[family].window_s
    if not seconds:
        return make_tiny(family, folder, seed, **overrides)
    make_tiny(family, folder, seed, audio_max_source_positions=50 * seconds, **overrides)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    stock = processor.feature_extractor
    processor.feature_extractor = type(stock)(feature_size=stock.feature_size, chunk_length=seconds)
    processor.save_pretrained(folder)
    return folder


def make_published(name: str, folder: Path) -> Path:
    """Write the look-alike of a published checkpoint."""
    family, layout = LAYOUTS[name]
    return publish(name, make_tiny(family, folder / "v5", **layout.overrides), folder / "published")


def publish(name: str, made: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint that transformers 5 saved in the layout of a published one."""
    family, layout = LAYOUTS[name]
    target.mkdir()
    weights = {
        key: tensor.to(layout.dtype) for key, tensor in layout.weights(load_file(made / "model.safetensors")).items()
    }
    _save(weights, target, shard_bytes if layout.sharded else None)
    config = layout.config(json.loads((made / "config.json").read_text()))
    _write(target / "config.json", config | {"torch_dtype": str(layout.dtype).removeprefix("torch.")})
    generation = json.loads((made / "generation_config.json").read_text())
    _write(target / "generation_config.json", generation | {"transformers_version": "4.57.1", "repetition_penalty": 1.05})
    _side_files(made, target)
    if family == "qwen2_5_omni":
        torch.save({"Chelsie": torch.zeros(3)}, target / "spk_dict.pt")
    (target / "LICENSE").write_text("a licence\n")
    (target / "README.md").write_text("a card of another model\n")
    return target


def _save(weights: dict[str, Tensor], target: Path, shard_bytes: int | None) -> None:
    if shard_bytes is None:
        save_file(weights, target / "model.safetensors", {"format": "pt"})
        return
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    places = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    assert len(shards) > 1
    total = sum(tensor.nbytes for tensor in weights.values())
    _write(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _side_files(made: Path, target: Path) -> None:
    """Tokenizer, template and processors in the files of transformers 4."""
    tokens = json.loads((made / "tokenizer.json").read_text())
    _write(target / "tokenizer.json", tokens)
    _write(target / "vocab.json", tokens["model"]["vocab"])
    (target / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in tokens["model"]["merges"]))
    said = json.loads((made / "tokenizer_config.json").read_text())
    special = said.pop("extra_special_tokens", [])
    # Those that a processor asks for by name.
    named = {key: token for key, token in said.items() if key.endswith("_token") and token in special}
    if named:
        said["extra_special_tokens"] = named
    del said["backend"]
    added = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in tokens["added_tokens"]}
    keys = {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": [t for t in special if t not in named.values()],
    }
    _write(target / "tokenizer_config.json", said | keys | named | {"added_tokens_decoder": added, "bos_token": None})
    template = (made / "chat_template.jinja").read_text()
    if not (made / "processor_config.json").exists():
        (target / "chat_template.jinja").write_text(template)
        return
    _write(target / "chat_template.json", {"chat_template": template})
    parts = json.loads((made / "processor_config.json").read_text())
    seen = parts.get("image_processor", {}) | parts.get("feature_extractor", {})
    _write(target / "preprocessor_config.json", seen | {"processor_class": parts["processor_class"]})
    if "video_processor" in parts:
        _write(target / "video_preprocessor_config.json", parts["video_processor"])
    own = {key: value for key, value in parts.items() if not isinstance(value, dict)}
    if len(own) > 1:  # more than the class
        _write(target / "processor_config.json", own)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
