"""Two ranks that share tokens, on one GPU or on the CPU: attention, a whole update, and the sharded learner.

    python studies/shared_tokens.py [cuda | cpu] [attention | update | learner …]

Writes studies/results/shared_tokens.json (on a GPU). NCCL takes one rank a GPU, so the ranks talk over gloo, by way of the
CPU: what attention takes is timed without the talk. Each rank holds what the other sends, so the peaks are of one rank.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from sensorium.learner.forward import LogprobScorer, UpdateFeatures, hidden_states
from sensorium.learner.packing import pack
from sensorium.learner.sequence_parallel import SharedAttention, TokenGroup, share_tokens
from sensorium.learner.sharding import RankTeam, RankTokenGroup
from sensorium.learner.tree_attention import LevelAttention, TokenRun, TreeAttention, arrange, arrange_levels
from sensorium.models.tiny import make_tiny
from tests.learner.played import Player, open_policy
from tests.learner.sharded.scenarios import SCENARIOS, compute
from tests.models.clips import clip

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "studies" / "results" / "shared_tokens.json"
RANKS = 2
HEADS = {"cuda": (16, 2, 128), "cpu": (4, 2, 16)}
TREE = {"cuda": (32768, 8, 512), "cpu": (96, 3, 8)}  # tokens of the prompt, responses, tokens of each
LARGER = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
FRAMES = {"cuda": (256, 336), "cpu": (8, 56)}  # of the video, and their side


class Answered:
    """A token group whose other ranks have answered already: what attention takes without them."""

    def __init__(self, group: TokenGroup, whole: Tensor) -> None:
        self.rank, self.size, self._whole = group.rank, group.size, whole

    def gather(self, own: Tensor, width: int) -> Tensor:
        """What was gathered before."""
        return self._whole

    def sum_own(self, rows: Tensor) -> Tensor:
        """This rank's part."""
        return rows.unflatten(0, (self.size, -1))[self.rank]


def attention(device: torch.device, group: RankTokenGroup, folder: Path) -> dict[str, Any]:
    """A long prompt with responses: results and gradients against one process' attention, seconds, and peaks."""
    heads, kv_heads, size = HEADS[device.type]
    length, responses, each = TREE[device.type]
    prompt = TokenRun(length, None)
    runs = [prompt, *(TokenRun(each, prompt) for _ in range(responses))]
    cuda = device.type == "cuda"
    batches = arrange_levels(runs) if cuda else arrange(runs)
    whole = LevelAttention(batches, device) if cuda else TreeAttention(batches, device)
    shares = share_tokens(runs, RANKS)
    count, dtype = sum(run.length for run in runs), torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, n, count, size, generator=generator).to(device, dtype) for n in (heads, kv_heads, kv_heads)]
    gradient = torch.randn(1, count, heads, size, generator=generator).to(device, dtype)
    own_T = torch.from_numpy(shares.places[group.rank]).to(device)
    taken = [x[:, :, own_T].contiguous() for x in drawn]

    def run(attend: Any, given: list[Tensor], slope: Tensor) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in given]
        out = attend(0, *inputs, size**-0.5)
        return [out.detach(), *torch.autograd.grad(out, inputs, slope)]

    expected = run(whole, drawn, gradient)
    shared = SharedAttention(shares, group, device)
    found = run(shared, taken, gradient[:, own_T].contiguous())
    axes = (1, 2, 2, 2)
    off = [
        float((one.float() - right.index_select(axis, own_T).float()).abs().max() / right.float().abs().max())
        for one, right, axis in zip(found, expected, axes, strict=True)
    ]
    gathered = shared.group.gather(torch.stack([x[0].transpose(0, 1) for x in taken[1:]], 1), shares.width)
    still = SharedAttention(shares, Answered(group, gathered), device)
    return {
        "tokens": count,
        "by flash": cuda,
        "off, relative to the largest: result, queries, keys, values": [round(one, 6) for one in off],
        "seconds alone": _seconds(device, lambda: run(whole, drawn, gradient)),
        "seconds of a rank": _seconds(device, lambda: run(still, taken, gradient[:, own_T].contiguous())),
    }


def _seconds(device: torch.device, work: Callable[[], Any], times: int = 5) -> float:
    """Mean seconds, one rank after the other: they are on one device."""
    work()
    found = 0.0
    for turn in range(RANKS):
        if turn == dist.get_rank():
            _settled(device)
            started = time.perf_counter()
            for _ in range(times):
                work()
            _settled(device)
            found = (time.perf_counter() - started) / times
        dist.barrier()
    return round(found, 5)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def update(device: torch.device, group: RankTokenGroup, folder: Path) -> dict[str, Any]:
    """Log-probs and gradients over a long video with responses, whole weights on every rank: gaps and peaks of memory."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    policy = open_policy(folder / "larger", dtype, device=device.type)
    policy.model.requires_grad_(False)
    policy.adapter.language_model.requires_grad_(True)
    scorer = LogprobScorer(policy, 1.0)
    frames, side = FRAMES[device.type]
    player = Player(policy)
    film = clip(policy.chat.store, 3, frames, side, side, frames / 2)
    groups = [player.single_turn(size=4, pictures=0, longest=64, more=[film])]
    found: dict[str, Any] = {}
    gradients, logprobs = [], []
    for name, tokens in (("alone", None), ("shared", group)):
        packing = pack(groups, policy.chat.layout, 1 << 20, device, tokens=tokens)
        (microbatch,) = packing.microbatches
        policy.model.zero_grad()
        features = UpdateFeatures(policy, packing.microbatches)
        held = _memory(device, reset=True)
        dist.barrier()
        started = time.perf_counter()
        seen_M, _ = scorer.score(hidden_states(policy, microbatch, features), microbatch)
        seen_M.sum().backward()
        whole_N = torch.zeros(packing.trained, device=device)
        whole_N[microbatch.places_M] = seen_M.detach()
        peak = _memory(device) - held
        named = {n: p.grad.float().cpu() for n, p in policy.model.named_parameters() if p.grad is not None}
        found[name] = {"tokens": len(microbatch), "seconds": round(time.perf_counter() - started, 3)}
        if device.type == "cuda":
            found[name]["peak above weights and features, GiB"] = round(peak / (1 << 30), 3)
        if tokens is not None:
            for one in named.values():
                dist.all_reduce(one)
            told = whole_N.cpu()
            dist.all_reduce(told)
            whole_N = told
        gradients.append(named)
        logprobs.append(whole_N.cpu())
    one, other = gradients
    gap = sum(float((one[n] - other[n]).double().square().sum()) for n in one)
    found["gradients, relative"] = (gap / sum(float(g.double().square().sum()) for g in one.values())) ** 0.5
    found["log-probs, largest gap"] = float((logprobs[0] - logprobs[1]).abs().max())
    return found


def _memory(device: torch.device, *, reset: bool = False) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()


@contextmanager
def by_cpu() -> Iterator[None]:
    """Inside, what ranks on one GPU send each other goes by way of the CPU: there gloo ends by a segmentation fault."""

    def staged(call: Any) -> Any:
        def moved(target: Tensor, *given: Any, **named: Any) -> None:
            there = target.cpu()
            parts = [one.cpu() if isinstance(one, Tensor) else one for one in given]
            call(there, *parts, **{key: one.cpu() if isinstance(one, Tensor) else one for key, one in named.items()})
            target.copy_(there)

        return moved

    later = ("all_gather_single", "reduce_scatter_single") if hasattr(dist, "all_gather_single") else ()
    with ExitStack() as stack:
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", *later):
            stack.enter_context(patch.object(dist, name, staged(getattr(dist, name))))
        yield


def learner(device: torch.device, group: RankTokenGroup, folder: Path) -> dict[str, Any]:
    """The sharded learner (FSDP2 over gloo) against one process on the CPU, in float32."""
    scenario = SCENARIOS["long video"]
    alone = compute(scenario, folder)
    with by_cpu():
        shared = compute(scenario, folder, RankTeam(device, RANKS))
    one, other = ({n: g.cpu() for n, g in found.gradients[0].items()} for found in (alone, shared))
    gap = sum(float((one[n] - other[n]).double().square().sum()) for n in one)
    return {
        "gradients, relative to one process on the CPU": (gap / sum(float(g.double().square().sum()) for g in one.values()))
        ** 0.5,
        "loss": [alone.metrics["policy/loss"], shared.metrics["policy/loss"]],
        "activations kept by a rank": round(shared.kept / alone.kept, 3),
    }


PARTS: dict[str, Callable[[torch.device, RankTokenGroup, Path], dict[str, Any]]] = {
    "attention": attention,
    "update": update,
    "learner": learner,
}


def rank_main(rank: int, kind: str, folder: Path, parts: list[str]) -> None:
    """One rank: all parts, one after the other; one that fails is told and the next is tried."""
    device = torch.device("cuda:0" if kind == "cuda" else "cpu")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(minutes=3))
    group = RankTokenGroup(RANKS, device)
    told: dict[str, Any] = {"on": torch.cuda.get_device_name() if kind == "cuda" else "cpu", "torch": torch.__version__}
    for part in parts:
        try:
            told[part] = PARTS[part](device, group, folder)
        except Exception as error:  # a part that this backend cannot do must not hide the others
            traceback.print_exc()
            told[part] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(f"rank {rank}, {part}: {json.dumps(told[part])}", flush=True)
        (folder / f"told-{rank}.json").write_text(json.dumps(told, indent=1))
    os._exit(0)  # after a failure the other rank may be waiting


def main() -> None:
    """Start the ranks and write down what rank 0 and 1 found."""
    arguments = sys.argv[1:]
    kind = next((one for one in arguments if one in ("cuda", "cpu")), "cuda" if torch.cuda.is_available() else "cpu")
    parts = [one for one in arguments if one in PARTS] or list(PARTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny("qwen2_5_vl", folder / "larger", **(LARGER if kind == "cuda" else {}))
        make_tiny("qwen3_vl", folder / "qwen3_vl", initializer_range=0.15, vision_initializer_range=0.15)
        command = [sys.executable, __file__, "rank"]
        ranks = [subprocess.Popen([*command, str(rank), kind, name, *parts]) for rank in range(RANKS)]
        for process in ranks:
            process.wait()
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("told-*.json"))]
    print(json.dumps(told, indent=1))
    if kind == "cuda":
        RESULT.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
