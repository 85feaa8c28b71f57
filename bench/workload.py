"""The reference workloads: what one step does, for us and for the peers, and our side of it as a recipe."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary import Episode, Score, Task, user

NAMES = ("Ana", "Ben", "Mia", "Omar", "Ruth", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "marbles", "pencils", "shells", "stamps", "tickets")
RANGES = ((20, 90), (2, 9), (3, 12), (2, 20), (2, 9))
MODELS = "SENSORIUM_BENCH_MODELS"
QUESTION = "what colour is it? red green blue"
TINY_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vision_hidden_size": 32, "vision_intermediate_size": 64,
}  # fmt: skip
QWEN2_5_VL_3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "vision_depth": 32, "vision_hidden_size": 1280, "vision_intermediate_size": 3420, "vision_num_heads": 16,
    "vision_fullatt_block_indexes": [7, 15, 23, 31], "vision_initializer_range": 0.02,
}  # fmt: skip
QWEN2_5_OMNI_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "initializer_range": 0.02, "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "vision_depth": 32, "vision_hidden_size": 1280, "vision_intermediate_size": 3420, "vision_num_heads": 16,
    "vision_fullatt_block_indexes": [7, 15, 23, 31], "vision_initializer_range": 0.02,
    "audio_d_model": 1280, "audio_encoder_layers": 32, "audio_encoder_attention_heads": 20,
    "audio_encoder_ffn_dim": 5120, "audio_num_mel_bins": 128, "audio_initializer_range": 0.02,
    "tie_word_embeddings": False,
}  # fmt: skip

# About 4 B weights: 24 delta nets and 8 layers of attention.
QWEN3_5_4B = {
    "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "initializer_range": 0.02,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vision_depth": 24, "vision_hidden_size": 1024, "vision_intermediate_size": 4096, "vision_num_heads": 16,
    "vision_num_position_embeddings": 2304, "vision_out_hidden_size": 2560, "vision_initializer_range": 0.02,
}  # fmt: skip
QWEN3_VL_30B_A3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "initializer_range": 0.02,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
    "vision_depth": 27, "vision_hidden_size": 1152, "vision_intermediate_size": 4304, "vision_num_heads": 16,
    "vision_num_position_embeddings": 2304, "vision_deepstack_visual_indexes": [8, 16, 24],
    "vision_initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "qwen2_5_vl": QWEN2_5_VL_3B, "qwen2_5_omni": QWEN2_5_OMNI_7B, "qwen3_5": QWEN3_5_4B, "qwen3_vl_moe": QWEN3_VL_30B_A3B,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Work of one step."""

    prompts: int
    group: int
    pixels: int
    new_tokens: int
    tail: float = 1.0
    """The longest response over the mean one; ``new_tokens`` is the mean."""
    pictures: int = 1
    """Pictures of a prompt; none: arithmetic in words. Sixteen cost what a video of 32 frames costs."""
    clip: bool = False
    """A video of 8 frames and a sound of 30 seconds instead of pictures."""
    family: str = "qwen2_5_vl"
    """The model, of a published shape (``SHAPES``)."""

    def lengths(self, seed: int) -> list[list[int]]:
        """Tokens of every response: all alike, or from a heavy tail that is cut at ``tail`` times the mean."""
        if self.tail == 1:
            return [[self.new_tokens] * self.group for _ in range(self.prompts)]
        drawn = np.random.default_rng(seed).pareto(1.3, (self.prompts, self.group)) + 0.2
        for _ in range(20):  # cutting lowers the mean, so scale and cut in turn
            drawn = np.minimum(drawn / drawn.mean(), self.tail)
        return np.maximum(1, drawn * self.new_tokens).astype(int).tolist()

    @property
    def context(self) -> int:
        """A context that prompt and response fit: 28 × 28 pixels are a token, a second of sound 25, and 128 for text."""
        seen = (self.pixels // 28) ** 2 * (4 if self.clip else self.pictures)
        return seen + (750 if self.clip else 0) + (128 if seen else 256) + math.ceil(self.new_tokens * self.tail)

    @property
    def episodes(self) -> int:
        """Episodes of one step."""
        return self.prompts * self.group


TINY = Workload(prompts=8, group=8, pixels=112, new_tokens=64)
CPU = Workload(prompts=8, group=8, pixels=0, new_tokens=64, pictures=0)
W1 = Workload(prompts=16, group=8, pixels=448, new_tokens=256)
W2 = Workload(prompts=8, group=8, pixels=448, new_tokens=256, pictures=16)
W3 = Workload(prompts=64, group=8, pixels=448, new_tokens=256, tail=6.0)
OMNI = Workload(prompts=8, group=8, pixels=448, new_tokens=256, clip=True, family="qwen2_5_omni")
Q35 = Workload(prompts=16, group=8, pixels=448, new_tokens=256, family="qwen3_5")
A3B = Workload(prompts=8, group=8, pixels=448, new_tokens=256, family="qwen3_vl_moe")
WORKLOADS = {"W1": W1, "W2": W2, "W3": W3, "OMNI": OMNI, "Q35": Q35, "A3B": A3B}


class NoisePictures:
    """Tasks with noise pictures: as good as any for timing."""

    def __init__(self, *, store: MediaStore, pixels: int, pictures: int = 1, size: int = 1024) -> None:
        self.store, self.pixels, self.pictures, self.size = store, pixels, pictures, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        shown = [self.store.put(file, "picture") for file in self._files(index)]
        return Task(f"noise/{index}", (user(*shown, QUESTION),))

    def _files(self, index: int) -> list[bytes]:
        shape = (self.pictures, self.pixels, self.pixels, 3)
        pictures = np.random.default_rng(index).integers(0, 255, shape, dtype=np.uint8)
        return [encode_png(pixels) for pixels in pictures]


class NoiseClips(NoisePictures):
    """Tasks with a silent video of 8 frames at 2 a second and a sound of 30 seconds each."""

    def __getitem__(self, index: int) -> Task:
        from sensorium.data.made_media import encode_clip
        from sensorium.data.sound import encode_wav

        rng = np.random.default_rng(index)
        frames = rng.integers(0, 255, (8, self.pixels, self.pixels, 3), dtype=np.uint8)
        seen = self.store.put(encode_clip(frames, fps=2.0), "video")
        heard = self.store.put(encode_wav(rng.uniform(-0.5, 0.5, 30 * 16000)), "sound")
        return Task(f"clip/{index}", (user(seen, heard, QUESTION),))


def arithmetic(index: int) -> str:
    """A question as in grade school, with how its answer is wanted."""
    rng = np.random.default_rng(index)
    (name, other), thing = rng.choice(NAMES, 2, replace=False), rng.choice(THINGS)
    has, bags, each, gives, price = (int(rng.integers(low, high)) for low, high in RANGES)
    return (
        f"{name} has {has} {thing} and buys {bags} bags with {each} {thing} in each bag. {name} then gives {gives} of all "
        f"the {thing} to {other} and sells the rest at {price} dollars each. How many dollars does {name} get? Think step "
        "by step, and write the answer as a number after #### on the last line."
    )


class Arithmetic:
    """Tasks of text: a question each."""

    def __init__(self, *, store: MediaStore, size: int = 1024) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        return Task(f"arithmetic/{index}", (user(arithmetic(index)),))


class LengthModulo:
    """A reward that differs between members of a group, as the peer's does."""

    name = "length"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        """The length of what was written, modulo 7."""
        return (Score("length", float(len(episode.response) % 7)),)


def recipe_for(work: Workload, path: Path, run_dir: Path, **changes: Any) -> Recipe:
    """Our side of a workload: no early stop, one update a step, nothing logged but metrics."""
    shown = {"pixels": work.pixels, "pictures": work.pictures} if work.pictures else {}
    source = "Arithmetic" if not work.pictures else "NoiseClips" if work.clip else "NoisePictures"
    longest = math.ceil(work.new_tokens * work.tail)
    return Recipe.model_validate(
        {
            "name": "bench",
            "steps": 10**6,
            "run_dir": run_dir,
            "model": {"path": str(path)} | changes.pop("model", {}),
            "tasks": {"train": [{"source": f"workload:{source}", "options": shown}]},
            "batch": {"prompts_per_step": work.prompts, "group_size": work.group} | changes.pop("batch", {}),
            "rollout": {"max_new_tokens": longest, "ignore_stop_tokens": True, "max_context_tokens": work.context},
            "rewards": {"terms": [{"name": "workload:LengthModulo"}]},
            "optimizer": {"lr": 1e-6},
            "checkpoint": {"best": ""},
        }
        | changes
    )


def write_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """A checkpoint of a published model's shape with random bf16 weights, made on the GPU.

    Where ``MODELS`` names a folder it is made there once and found again by later commands.
    """
    import torch

    from sensorium.models.tiny import make_tiny

    kept = os.environ.get(MODELS)
    if kept:
        folder = Path(kept) / family
        if (folder / "config.json").exists():
            return folder
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        path = make_tiny(family, folder, **SHAPES[family])
    torch.set_default_dtype(torch.float32)
    return path
