"""Answers of exported checkpoints by plain transformers (4.57 or 5), or by vLLM: run alone, it knows nothing of Sensorium.

    python export_reader.py transformers JOB.json ANSWERS.json

A job is a list of {"folder", "kind": the model class, "suppress": token ids, "prompts": [{"picture": path or "", "text"}]}.
"""

import json
import sys
from typing import Any

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
NEW_TOKENS = 8


def import_torchvision() -> Any:
    """torchvision, also where its compiled operators do not load, which the processors do not need."""
    library = None
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + SCHEMA)
    return library  # the schemas live as long as it does


def messages(prompt: dict[str, str], *, plain: bool) -> list[dict[str, Any]]:
    """A prompt as one message of a user."""
    from PIL import Image

    if plain:
        return [{"role": "user", "content": prompt["text"]}]
    shown = [{"type": "image", "image": Image.open(prompt["picture"]).convert("RGB")}] if prompt["picture"] else []
    return [{"role": "user", "content": [*shown, {"type": "text", "text": prompt["text"]}]}]


def by_transformers(item: dict[str, Any]) -> list[list[int]]:
    """Greedy answers; what the checkpoint's generation config says of sampling is set aside."""
    import transformers

    model = getattr(transformers, item["kind"]).from_pretrained(item["folder"], dtype=torch.float32).eval()
    plain = item["kind"].endswith("ForCausalLM")
    if model.config.model_type == "smolvlm" and transformers.__version__.startswith("4.57"):
        number_patches(model.model.vision_model.embeddings)
    # 4.57 would resize pictures by Pillow where 5 does it by torchvision.
    auto: Any = transformers.AutoTokenizer if plain else transformers.AutoProcessor
    owner = auto.from_pretrained(item["folder"], use_fast=True)
    answers = []
    for prompt in item["prompts"]:
        inputs = owner.apply_chat_template(
            messages(prompt, plain=plain), tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        written = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0, suppress_tokens=item["suppress"]
        )
        answers.append(written[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def number_patches(embeddings: Any) -> None:
    """Give the patches of SmolVLM2's tiles the positions of 4.50 and 5: 4.57 puts rows and columns one too early."""

    def forward(pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> torch.Tensor:
        assert bool(patch_attention_mask.all())
        patches = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return patches + embeddings.position_embedding(torch.arange(patches.shape[1]))

    embeddings.forward = forward


def by_vllm(item: dict[str, Any]) -> list[list[int]]:
    """Greedy answers by vLLM."""
    from PIL import Image
    from transformers import AutoProcessor
    from vllm import LLM, SamplingParams

    model = LLM(
        item["folder"],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        seed=0,
        max_num_seqs=4,
        gpu_memory_utilization=0.2,
    )
    processor = AutoProcessor.from_pretrained(item["folder"])
    vocabulary = model.llm_engine.model_config.get_vocab_size()
    allowed = sorted(set(range(vocabulary)) - set(item["suppress"]))
    settings = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, allowed_token_ids=allowed, repetition_penalty=1.0)
    requests = []
    for prompt in item["prompts"]:
        text = processor.apply_chat_template(messages(prompt, plain=False), tokenize=False, add_generation_prompt=True)
        shown = {"image": Image.open(prompt["picture"]).convert("RGB")} if prompt["picture"] else None
        requests.append({"prompt": text} | ({"multi_modal_data": shown} if shown else {}))
    return [list(made.outputs[0].token_ids) for made in model.generate(requests, settings)]


if __name__ == "__main__":
    kept = import_torchvision()
    reader, job, answers = sys.argv[1:]
    read = {"transformers": by_transformers, "vllm": by_vllm}[reader]
    with open(job) as file:
        found = [read(item) for item in json.load(file)]
    assert "sensorium" not in sys.modules
    with open(answers, "w") as file:
        json.dump(found, file)
