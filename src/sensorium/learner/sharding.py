"""A policy sharded over ranks (FSDP2), and the ranks that share the tokens of a micro-batch, over torch.distributed.

The media of such a token group are divided among its ranks: each encodes a part, and the features are gathered.
A tower of Qwen's kind attends within one step of time, so a video is cut between steps; other media stay whole. Example: a
video of 8 steps of 100 patches and a picture of 300, two ranks:

    pieces      video 0–4 (400)   video 4–8 (400)   picture (300)
    rank              0                 1                 0
"""

import io
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard, empty
from torch.utils._pytree import register_pytree_node
from transformers.modeling_layers import GradientCheckpointingLayer

from sensorium.data.sound import encode_wav
from sensorium.learner.packing import MicroBatch, Packing, blank
from sensorium.learner.saved_state import local_of, part_for, whole_of
from sensorium.learner.team import Team, divide, sum_of_squares
from sensorium.models.encoding import Encoder
from sensorium.models.family import Tower
from sensorium.models.lora import Adapters
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Features
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import Media, MediaKind

# torch 2.13 has new names for both, and warns of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankTokenGroup:
    """This process among ``size`` neighbours of the default process group: ranks 0 to size - 1, the next ``size``, …

    Gloo moves tensors of the CPU, so those of a GPU go by way of it (for checks; GPUs have NCCL).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.rank = size, dist.get_rank() % size
        self._group: Any = dist.new_subgroups(size)[0]
        self._by_cpu = dist.get_backend(self._group) == "gloo"
        self._device = torch.device("cpu") if self._by_cpu else device

    def gather(self, own: Tensor, width: int) -> Tensor:
        """[size · width, …] of every rank's rows, padded to ``width`` each."""
        padded = own.contiguous()
        if len(own) < width:
            padded = torch.cat([padded, own.new_zeros(width - len(own), *own.shape[1:])])
        source = padded.cpu() if self._by_cpu else padded
        found = source.new_empty(self.size * width, *own.shape[1:])
        _ALL_GATHER(found, source, self._group)
        return found.to(own.device)

    def sum_own(self, rows: Tensor) -> Tensor:
        """[width, …]: the sum over all ranks of the rows [size · width, …] that are this rank's."""
        source = rows.contiguous().cpu() if self._by_cpu else rows.contiguous()
        found = source.new_empty(len(rows) // self.size, *rows.shape[1:])
        _REDUCE_SCATTER(found, source, group=self._group)
        return found.to(rows.device)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags any rank has set."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return [bool(flag) for flag in found.tolist()]

    def gather_with_gradient(self, own: Tensor, width: int) -> Tensor:
        """Like ``gather``; the gradient of a row is summed over all ranks and goes back to the one that gave it."""
        found: Tensor = _Gathered.apply(own, self, width)
        return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: RankTokenGroup, width: int) -> Tensor:
        ctx.group, ctx.length, ctx.dtype = group, len(own), own.dtype
        return group.gather(own, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.sum_own(gradients[0].float())[: ctx.length].to(ctx.dtype), None, None


class RankTeam(Team):
    """This process among those of the default process group, which compute on ``device``.

    ``sequence_parallel`` neighbours share the tokens of a micro-batch.
    """

    tokens: RankTokenGroup | None

    def __init__(self, device: torch.device, sequence_parallel: int = 1) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tokens = RankTokenGroup(sequence_parallel, device) if sequence_parallel > 1 else None
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))

    def owned(self, costs: Sequence[float]) -> list[bool]:
        """Which groups are computed here: those that the division of their costs gives this rank and its token group."""
        sharing = 1 if self.tokens is None else self.tokens.size
        return [chosen == self.rank // sharing for chosen in divide(costs, self.size // sharing)]

    def level(self, packing: Packing) -> Packing:
        """A packing with blank micro-batches added, so that every rank has as many of each kind.

        Silent micro-batches may go without a backward pass, so the two kinds are counted apart.
        """
        kinds = [[one for one in packing.microbatches if one.silent is silent] for silent in (False, True)]
        most = self.largest(*(len(kind) for kind in kinds))
        filled: list[MicroBatch] = []
        for kind, count, silent in zip(kinds, most, (False, True), strict=True):
            filled += [*kind, *(blank(self.device, silent) for _ in range(int(count) - len(kind)))]
        return replace(packing, microbatches=tuple(filled), blanks=packing.blanks + len(filled) - len(packing.microbatches))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; of truth values, whether any is true."""
        if tensor.dtype == torch.bool:
            counts = tensor.to(torch.uint8)
            dist.all_reduce(counts, dist.ReduceOp.MAX)
            return tensor.copy_(counts)
        dist.all_reduce(tensor)
        return tensor

    def largest(self, *numbers: float) -> tuple[float, ...]:
        """The largest of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """The sum of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor whose rows are spread over the ranks as those of parameters are."""
        spread: Tensor = empty(shape, dtype=dtype, device_mesh=self.mesh, placements=[Shard(0)])
        return spread

    def norm(self, shards: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together; those that each rank has whole count once."""
        squares = self.sum(sum_of_squares(shards, self.device)) + sum_of_squares(whole, self.device)
        return squares.sqrt().float()

    def _reduced(self, numbers: Sequence[float], how: dist.ReduceOp.RedOpType) -> tuple[float, ...]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, how)
        return tuple(found.tolist())


@dataclass(frozen=True)
class MediaPiece:
    """The steps of time ``first`` to ``end`` of a medium, which ``rank`` encodes; ``count`` features come of them."""

    media: Media
    extent: Extent
    first: int
    end: int
    count: int
    rank: int = 0

    @property
    def patches(self) -> int:
        """How much there is to encode."""
        return (self.end - self.first) * prod(self.extent.grid[1:])

    def cut(self, prepared: TowerInput) -> TowerInput:
        """What the tower is given of the prepared medium."""
        steps, height, width = self.extent.grid
        if self.end - self.first == steps:
            return prepared
        size = height * width
        patches_PC = prepared.patches_PC[self.first * size : self.end * size]
        return TowerInput(patches_PC, replace(self.extent, grid=(self.end - self.first, height, width)))


def divide_media(
    tower: Tower, media: Sequence[Media], extents: Sequence[Extent], counts: Sequence[int], ranks: int
) -> list[MediaPiece]:
    """The pieces of media, in order, each with the rank that encodes it; ``counts`` are their features."""
    pieces: list[MediaPiece] = []
    for item, extent, count in zip(media, extents, counts, strict=True):
        steps = extent.grid[0]
        parts = min(ranks, steps) if isinstance(tower, VisionTower) and extent.kind == "video" else 1
        ends = [steps * i // parts for i in range(parts + 1)]
        pieces += [MediaPiece(item, extent, first, end, count * (end - first) // steps) for first, end in pairwise(ends)]
    owners = divide([piece.patches for piece in pieces], ranks)
    return [replace(piece, rank=rank) for piece, rank in zip(pieces, owners, strict=True)]


def encode_shared(
    tower: Tower,
    pieces: Sequence[MediaPiece],
    prepare: Callable[[Sequence[Media]], list[TowerInput]],
    group: RankTokenGroup,
    spare: MediaPiece,
    *,
    apart: bool = False,
) -> dict[Media, Features]:
    """Features of all media, of which each rank encodes its pieces, or the spare one where it has none.

    ``apart``: each piece in a pass of its own.
    """
    by_rank = [[piece for piece in pieces if piece.rank == rank] or [spare] for rank in range(group.size)]
    own = by_rank[group.rank]
    inputs = [piece.cut(prepared) for piece, prepared in zip(own, prepare([piece.media for piece in own]), strict=True)]
    made = [one for single in inputs for one in tower([single])] if apart else tower(inputs)
    sizes = [part.shape[1] for part in (made[0].embeds_NH, *made[0].deepstack_NH)]
    rows = torch.cat([torch.cat([one.embeds_NH, *one.deepstack_NH], 1) for one in made])
    assert len(rows) == sum(piece.count for piece in own), (
        f"{len(rows)} features, {[piece.count for piece in own]} expected"
    )
    width = max(sum(piece.count for piece in several) for several in by_rank)
    whole = group.gather_with_gradient(rows, width)
    found: dict[MediaPiece, Tensor] = {}
    for rank, several in enumerate(by_rank):
        start = rank * width
        for piece in several:
            found[piece], start = whole[start : start + piece.count], start + piece.count
    features: dict[Media, Features] = {}
    for item in dict.fromkeys(piece.media for piece in pieces):
        joined = torch.cat([found[piece] for piece in pieces if piece.media == item])
        embeds_NH, *levels = joined.split(sizes, 1)
        features[item] = Features(embeds_NH, tuple(levels))
    return features


# The policy calls parts of its model, not the model. So the root's forward is a method of ours, through which every
# part is called (``Policy.inside``): there embeddings, norms and head are whole, a tied head included. What a tensor
# needs gradients for is handed over inside a function, not as an argument: FSDP would take the gradient of an argument
# for the end of the backward pass. A frozen tower stays whole on every rank: it has no gradients or moments, and its
# features are cached, so ranks run it at different times. Towers that learn are run by all ranks at once; a rank that
# shows nothing then encodes a spare medium, whose gradient is zero.


SOUND_RATE, SOUND_S = 16000, 1.0

# FSDP gathers the root's weights again when a gradient reaches what the root returned; it looks for tensors in trees only.
register_pytree_node(
    Features,
    lambda features: ([features.embeds_NH, *features.deepstack_NH], None),
    lambda parts, _: Features(next(found := iter(parts)), tuple(found)),
)


class ShardedModel:
    """How a model is spread: what ``Policy`` asks of it."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self._model = model
        self._parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
        self._within = False

    def call(self, part: Callable[..., Any], *given: Any) -> Any:
        """Call a part inside the root's forward; from within, directly."""
        if self._within:
            return part(*given)
        self._within = True
        try:
            return self._model.run_part(lambda: part(*given))
        finally:
            self._within = False

    def rest(self) -> None:
        """Free gathered weights: an optimizer writes to this rank's own rows, and they would be out of date."""
        for part in self._parts:
            part.reshard()


def shard_policy(policy: Policy, team: RankTeam, freeze: Iterable[str], *, offload: bool = False) -> None:
    """Spread a policy's weights over a team, in place; groups of ``freeze`` will not learn. Not to be copied any more."""
    model, frozen = policy.model, set(freeze)
    learning = {
        id(parameter) for group, named in policy.trainable().items() if group not in frozen for parameter in named.values()
    }
    towers = list(dict.fromkeys(policy.adapter.towers.values()))
    still = [tower for tower in towers if not any(id(p) in learning for p in tower.module.parameters())]
    whole = {parameter for tower in still for parameter in tower.module.parameters()}
    settings: dict[str, Any] = {
        "mesh": team.mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=team.device.type == "cuda") if offload else OffloadPolicy(),
    }
    for layer in policy.adapter.language_model.layers:
        fully_shard(layer, **settings)
    for tower in towers:
        if tower in still:
            tower.module.to(team.device)
        else:
            for block in tower.module.modules():
                if isinstance(block, GradientCheckpointingLayer):
                    fully_shard(block, **settings)
    fully_shard(model, **settings, ignored_params=whole, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are weighted over the whole update: gradients are sums,
            part.set_force_sum_reduction_for_comms(True)  # and gloo has no other kind of reduction
    model.run_part = types.MethodType(lambda _, part: part(), model)
    register_fsdp_forward_method(model, "run_part")
    policy.sharding = ShardedModel(model, team.device)
    policy._encoder = ShardedEncoder(policy, team, [tower for tower in towers if tower not in still])
    if policy.adapters is not None:
        policy.adapters = ShardedAdapters(model, policy.adapters.section, policy.adapters.base)


class ShardedEncoder(Encoder):
    """The towers of a sharded policy; ``spread`` ones are run by all ranks together, or by none."""

    def __init__(self, policy: Policy, team: RankTeam, spread: list[Tower]) -> None:
        super().__init__(policy.adapter, policy.chat, team.device)
        self._team, self._spread = team, spread

    def __call__(self, media: Iterable[Media]) -> dict[Media, Features]:
        """Features of the distinct media, and of a spare one for each tower that other ranks run and this one need not."""
        distinct = list(dict.fromkeys(media))
        shown = [any(self._adapter.towers[item.kind] is tower for item in distinct) for tower in self._spread]
        if not self._spread:
            return super().__call__(distinct)
        anywhere = self._team.largest(*shown)
        spare = [
            self._spare_of(tower)
            for tower, here, somewhere in zip(self._spread, shown, anywhere, strict=True)
            if somewhere and not here
        ]
        found = super().__call__([*distinct, *spare])
        group = self._team.tokens
        self.counters.tower_items -= len(spare) if group is None or group.rank == 0 else 0
        return found

    def _passes(self, tower: Tower, media: Sequence[Media]) -> Sequence[Sequence[Media]]:
        """The media of each pass of a tower; of one that is spread there is one pass, since ranks run it equally often."""
        return [media] if tower in self._spread else super()._passes(tower, media)

    def _look(self, tower: Tower, media: Sequence[Media]) -> dict[Media, Features]:
        """One pass of a tower; ranks of a token group divide the media."""
        group = self._team.tokens
        if group is None or not media:
            return super()._look(tower, media)
        return self._look_together(group, tower, media, apart=False)

    def _recall(self, tower: Tower, version: object, media: Sequence[Media]) -> dict[Media, Features]:
        """Features from a frozen tower; ranks of a token group divide those that one of them has not cached."""
        group = self._team.tokens
        if group is None:
            return super()._recall(tower, version, media)
        cached = [self.cache.get((version, item)) for item in media]
        missing = group.any([found is None for found in cached])
        features = {item: found for item, found, gone in zip(media, cached, missing, strict=True) if found and not gone}
        self.counters.tower_hits += len(features)
        if new := [item for item, gone in zip(media, missing, strict=True) if gone]:
            with torch.inference_mode(False), torch.no_grad():
                # On a CPU one at a time, as in one process: what is cached must not depend on its company.
                features |= self._look_together(group, tower, new, apart=self._device.type == "cpu")
        for item in new:
            self.cache.put((version, item), features[item])
        return features

    def _look_together(
        self, group: RankTokenGroup, tower: Tower, media: Sequence[Media], *, apart: bool
    ) -> dict[Media, Features]:
        """Features of media, of which each rank of a token group encodes a part. An item counts where it begins."""
        extents, counts = self._extents(media)
        pieces = divide_media(tower, media, extents, counts, group.size)
        spare = self._spare_of(tower)
        (extent,), (count,) = self._extents([spare])
        nothing = MediaPiece(spare, extent, 0, extent.grid[0], count)
        self.counters.tower_passes += 1
        own = [piece for piece in pieces if piece.rank == group.rank]
        self.counters.tower_items += sum(piece.first == 0 for piece in own)
        self.counters.patches += sum(piece.patches for piece in own)
        return encode_shared(tower, pieces, self._chat.prepared.get, group, nothing, apart=apart)

    def _extents(self, media: Sequence[Media]) -> tuple[list[Extent], list[int]]:
        """How large media are, and how many features they give."""
        extents = [self._chat.prepared.extent(item) for item in media]
        return extents, [self._chat.media_format.expand(extent).count for extent in extents]

    def _frozen_version(self, tower: Tower) -> object | None:
        """A tower that is spread is never asked for single media, whatever learns at the moment."""
        return None if tower in self._spread else super()._frozen_version(tower)

    def _spare_of(self, tower: Tower) -> Media:
        kinds: list[MediaKind] = [kind for kind, owner in self._adapter.towers.items() if owner is tower]
        return self._sound if kinds == ["sound"] else self._picture

    @cached_property
    def _picture(self) -> Media:
        from PIL import Image

        data = io.BytesIO()
        Image.new("RGB", (56, 56)).save(data, "PNG")
        return self._chat.shown(self._chat.store.put(data.getvalue(), "picture", "spare picture"))

    @cached_property
    def _sound(self) -> Media:
        times_s = np.arange(round(SOUND_RATE * SOUND_S)) / SOUND_RATE
        wave = 0.1 * np.sin(2 * np.pi * 440 * times_s)
        return self._chat.shown(self._chat.store.put(encode_wav(wave.astype(np.float32)), "sound", "spare sound"))


class ShardedAdapters(Adapters):
    """Low-rank adapters whose rows are spread over ranks."""

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with the adapters of a snapshot, which are copied in and out: FSDP gathers from fixed places."""
        assert tensors.keys() == self.parameters.keys(), "a snapshot of other adapters"
        own = self.snapshot()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            local_of(parameter).copy_(part_for(tensors[name], parameter))


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a model the weights of another of the same kind, each of them spread or whole. All ranks at the same time."""
    given = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        local_of(parameter).copy_(part_for(whole_of(given[name]), parameter))
