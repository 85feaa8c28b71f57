"""The engine's options as arguments of vLLM."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensorium.engines.options import LORA_RANKS
from sensorium.engines.vllm.recipe_checks import TOWER_GROUPS, VllmVersion
from sensorium.engines.vllm.weight_backend import BROADCAST, FILE, SHARED
from sensorium.models.policy import Policy


@dataclass(frozen=True)
class EngineSettings:
    """Options that go to vLLM.

    ``max_rows`` responses are written at once. ``max_context`` is the longest thread, response included (default: what the
    model allows). ``cache_gib`` is for keys and values on a CPU, ``gpu_share`` the part of a GPU's memory that vLLM may
    take, the weights included. ``eager`` runs without compiled graphs (default: on a CPU). ``push`` is how weights get
    there: ``file``, ``broadcast``, or ``ipc`` where engine and learner share a GPU; ``own_device`` says that they do not.
    ``engine_args`` go to vLLM as they are.
    """

    max_rows: int
    max_context: int | None
    cache_gib: int
    gpu_share: float
    eager: bool | None
    tensor_parallel: int
    push: str
    engine_args: dict[str, Any]
    own_device: bool = False

    def backend(self, device: str) -> str:
        """How weights get there, by vLLM's name of it, from a policy on a device of this type."""
        named = {"file": FILE, "broadcast": BROADCAST, "ipc": SHARED}
        if self.push != "auto":
            return named[self.push]
        if device == "cpu":
            return FILE
        if self.own_device:
            return BROADCAST
        return SHARED if self.tensor_parallel == 1 else FILE  # of several GPUs one is the learner's too


@dataclass(frozen=True)
class EngineArguments:
    """What vLLM is started with, and the backend that weights are pushed by."""

    engine_args: dict[str, Any]
    backend: str
    on_cpu: bool


def describe(policy: Policy, folder: Path) -> None:
    """All of a checkpoint but its weights, as vLLM reads it."""
    policy.save_description(folder)
    if policy.experts_per_token:  # transformers leaves out what it always does, and vLLM asks for it
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config.get("text_config", config).setdefault("norm_topk_prob", True)
        path.write_text(json.dumps(config, indent=2))


def engine_arguments(settings: EngineSettings, policy: Policy, version: VllmVersion, folder: Path) -> EngineArguments:
    """vLLM's arguments for a policy whose description is in ``folder``; its weights are pushed later."""
    on_cpu = version.on_cpu or policy.device.type == "cpu"
    context = settings.max_context or policy.model.config.get_text_config().max_position_embeddings
    given: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "seed": secrets.randbits(31),  # engines with one seed would write the same responses to one prompt
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "skip_tokenizer_init": False,
        "generation_config": "vllm",
        "max_model_len": context,
        # A medium must fit one batch of its encoder, or its request would never be scheduled: a context's worth does.
        "max_num_batched_tokens": max(context, 2048 if on_cpu else 8192),
        "max_num_seqs": settings.max_rows,
        "enforce_eager": on_cpu if settings.eager is None else settings.eager,
        "tensor_parallel_size": settings.tensor_parallel,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **dict(version.switches),
    }
    if on_cpu:
        given |= {"block_size": 32}  # the least that vLLM takes: prompts shorter than a block are computed for each sample
    else:
        given |= {"gpu_memory_utilization": settings.gpu_share}
    if policy.adapters is not None:
        section = policy.adapters.section
        given |= {
            "enable_lora": True,
            "max_loras": 2,  # responses that span a push go on with the adapter they began with
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= section.rank),
        }
        if TOWER_GROUPS & {*section.groups}:
            given |= {"enable_tower_connector_lora": True}
    return EngineArguments({**given, **settings.engine_args}, settings.backend(policy.device.type), on_cpu)
