"""A digest of a loaded model: the same for the same weights, tokenizer and template, wherever they were stored."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import torch
from torch import Tensor

from sensorium.models.policy import Policy

NOT_THE_MODEL = ("transformers_version", "_name_or_path")


def identity(policy: Policy) -> str:
    """A digest of everything that decides the model's input and output."""
    named = sorted(policy.model.state_dict().items())
    with ThreadPoolExecutor(max_workers=cpu_count() or 1) as pool:
        weights = list(pool.map(_digest, (tensor for _, tensor in named)))
    digest = hashlib.blake2b(digest_size=16)
    for (name, tensor), content in zip(named, weights, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}\n".encode())
    config = {key: value for key, value in policy.model.config.to_dict().items() if key not in NOT_THE_MODEL}
    chat = policy.chat
    processing = chat.processor.to_json_string() if chat.processor is not None else ""
    tokens = chat.tokenizer.backend_tokenizer.to_str()
    said = json.dumps(config, sort_keys=True, default=str)
    for part in (said, chat.owner.chat_template, processing, tokens, chat.stop_ids):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
