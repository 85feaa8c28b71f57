"""A packed micro-batch through the policy: towers once per update, language model, log-probs of the sampled tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sensorium.kernels.first_use import fall_back, given_up
from sensorium.kernels.matched_ops import with_gradient_of
from sensorium.learner.packing import MicroBatch, Packing, media_of
from sensorium.learner.sequence_parallel import SlotShare
from sensorium.models.general_path import StockRows
from sensorium.models.matched import matched_logprobs
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features, Placement
from sensorium.recipe.memory_estimate import WHOLE_BYTES, TowerRoom
from sensorium.vocabulary.content import Media

# The policy is softmax(logits / temperature + bias); forbidden ids have the bias ``FORBIDDEN``. Axes: M tokens, V
# vocabulary.


# Stands for minus infinity, but makes 0 when multiplied by a probability of 0.
FORBIDDEN = -1e30


class TokenLogprobs(torch.autograd.Function):
    """(logits, targets) → log-probs of the targets and entropies, keeping nothing but the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled_MV = torch.add(bias_V, logits_MV, alpha=1 / temperature)
        scaled_MV -= scaled_MV.amax(1, keepdim=True)
        chosen_M = scaled_MV.gather(1, targets_M[:, None])[:, 0]
        probs_MV = scaled_MV.exp()
        sums_M = probs_MV.sum(1)
        logs_M = sums_M.log()
        probs_MV /= sums_M[:, None]
        entropies_M = logs_M - scaled_MV.mul_(probs_MV).sum(1)
        ctx.temperature = temperature
        ctx.save_for_backward(probs_MV, targets_M, entropies_M)
        ctx.set_materialize_grads(False)
        return chosen_M - logs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        probs_MV, targets_M, entropies_M = ctx.saved_tensors
        logprobs_M, entropy_M = gradients
        result_MV = None
        if logprobs_M is not None:
            result_MV = probs_MV * (-logprobs_M / ctx.temperature)[:, None]
            result_MV.scatter_add_(1, targets_M[:, None], (logprobs_M / ctx.temperature)[:, None])
        if entropy_M is not None:
            slope_MV = _entropy_gradient(probs_MV, entropies_M, entropy_M / ctx.temperature)
            result_MV = slope_MV if result_MV is None else result_MV.add_(slope_MV)
        return result_MV, None, None, None


def _entropy_gradient(probs_MV: Tensor, entropies_M: Tensor, pull_M: Tensor) -> Tensor:
    """dH/dz = -p·(log p + H), pulled."""
    slope_MV = torch.xlogy(probs_MV, probs_MV).addcmul_(probs_MV, entropies_M[:, None])
    return slope_MV.mul_(-pull_M[:, None])


# On a CPU logits are computed in tiles that stay in its cache, and neither kept nor written to memory::
#
#     tile     logits of 1,024 tokens over 1,024 ids: 4 MiB
#     forward  each tile adds to the largest logit of a token, its sum of exponentials, and its sum weighted by them
#     backward each tile again: probabilities by the known log-sum-exp, then both gradients
#
# A chunk of 256 MiB takes the memory's time instead, and more: glibc maps such a tensor anew each time, page by page.


TILE = 1024


class TiledLogprobs(torch.autograd.Function):
    """(hidden [M, H], weight [V, H], targets) → log-probs and entropies, and the largest size of a scaled logit."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        top_M = hidden_MH.new_full((len(hidden_MH),), FORBIDDEN)
        sums_M, weighted_M, chosen_M = torch.zeros(3, len(hidden_MH)).unbind()
        scale = torch.zeros(())
        for tile in _tiles(hidden_MH, weight_VH, targets_M, bias_V, temperature):
            rows, logits = tile.rows, tile.logits
            scale = torch.maximum(scale, tile.scale)
            chosen_M[rows][tile.hit] = logits[tile.hit, tile.place]
            top = torch.maximum(top_M[rows], logits.amax(1))
            moved = top_M[rows] - top
            logits -= top[:, None]
            exps = logits.exp()
            weighted_M[rows] = moved.exp() * (weighted_M[rows] + moved * sums_M[rows]) + logits.mul_(exps).sum(1)
            sums_M[rows] = moved.exp() * sums_M[rows] + exps.sum(1)
            top_M[rows] = top
        logs_M = sums_M.log()
        entropies_M, total_M = logs_M - weighted_M / sums_M, top_M + logs_M
        ctx.temperature = temperature
        ctx.save_for_backward(hidden_MH, weight_VH, targets_M, bias_V, total_M, entropies_M)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scale)
        return chosen_M - top_M - logs_M, entropies_M, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, targets_M, bias_V, total_M, entropies_M = ctx.saved_tensors
        logprobs_M, entropy_M = (None if given is None else given / ctx.temperature for given in gradients[:2])
        if logprobs_M is None and entropy_M is None:
            return (None,) * 5
        of_hidden, of_weight = (
            torch.zeros_like(x) if ctx.needs_input_grad[i] else None for i, x in enumerate((hidden_MH, weight_VH))
        )
        for tile in _tiles(hidden_MH, weight_VH, targets_M, bias_V, ctx.temperature):
            rows, probs = tile.rows, tile.logits.sub_(total_M[tile.rows, None]).exp_()
            slope = None if entropy_M is None else _entropy_gradient(probs, entropies_M[rows], entropy_M[rows])
            if logprobs_M is not None:
                probs *= -logprobs_M[rows, None]
                probs[tile.hit, tile.place] += logprobs_M[rows][tile.hit]
                slope = probs if slope is None else slope.add_(probs)
            assert slope is not None
            if of_hidden is not None:
                of_hidden[rows].addmm_(slope, weight_VH[tile.ids])
            if of_weight is not None:
                of_weight[tile.ids].addmm_(slope.T, hidden_MH[rows])
        return of_hidden, of_weight, None, None, None


class _Tile(NamedTuple):
    """Scaled logits of tokens ``rows`` over ``ids``; ``hit`` are the rows whose target is at ``place`` among the ids."""

    rows: slice
    ids: slice
    logits: Tensor
    hit: Tensor
    place: Tensor
    scale: Tensor


def _tiles(hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, bias_V: Tensor, temperature: float) -> Iterator[_Tile]:
    """All tiles in the same memory, one after the other; those over the same ids together."""
    memory = hidden_MH.new_empty(TILE * TILE)
    for first in range(0, len(weight_VH), TILE):
        ids = slice(first, min(first + TILE, len(weight_VH)))
        masked = bias_V[ids].nonzero()[:, 0]
        for start in range(0, len(hidden_MH), TILE):
            rows = slice(start, min(start + TILE, len(hidden_MH)))
            shape = rows.stop - rows.start, ids.stop - ids.start
            logits = torch.mm(hidden_MH[rows], weight_VH[ids].T, out=memory[: shape[0] * shape[1]].view(shape))
            if temperature != 1:
                logits /= temperature
            scale = torch.stack(logits.aminmax()).abs().amax()
            logits.index_fill_(1, masked, FORBIDDEN)
            place_R = targets_M[rows] - first
            hit = ((place_R >= 0) & (place_R < shape[1])).nonzero()[:, 0]
            yield _Tile(rows, ids, logits, hit, place_R[hit], scale)


# A tower's pass and its backward enclose the whole update where several micro-batches show a medium. It then holds the
# inputs of its blocks for all of them, and computes the rest again. A medium that one micro-batch alone shows can be done
# with there. That is worth it in two cases:
#
# - there is room to keep all that the backward pass needs of one micro-batch, so that nothing is computed again;
# - the inputs of blocks alone, of all media, are too many to be held.
#
# Example, with room for 600 patches kept and none recomputed, a medium of 200 patches each:
#
#     micro-batch 0 shows a b c, micro-batch 1 shows d e f     all are apart: 600 patches are kept at a time
#     micro-batch 0 shows a b c d, micro-batch 1 shows d e     a b c and e are apart, d is shown twice
#
# Where there is room for all 1,200, nothing is apart and everything is kept: one pass is better than two smaller ones.


REPEATED = (
    "pictures and videos that several micro-batches of an update show are encoded anew by each of them, because the GPU "
    "has no room for what the vision tower would hold of all: updates are slower. Micro-batches that hold a whole group "
    "(batch.tokens_per_microbatch), fewer prompts a step, more updates (batch.updates_per_epoch) or a frozen tower "
    "(model.freeze) avoid it."
)


@dataclass(frozen=True)
class TowerPasses:
    """``apart``: media that are encoded with their micro-batch. ``keeps``: no block is recomputed of those media, or of
    all if none is apart.
    """

    keeps: bool = False
    apart: frozenset[Media] = frozenset()


def tower_passes(
    policy: Policy, learning: Sequence[MicroBatch], idle: Sequence[MicroBatch], room: TowerRoom
) -> TowerPasses:
    """How the media of an update are encoded, so that as little is recomputed as the room allows."""
    shown = [media_of([microbatch]) for microbatch in (*learning, *idle)]
    patches = {media: policy.chat.patches(media) for several in shown for media in several}
    passes = choose_passes(shown, len(learning), patches, room)
    if _repeats(shown[: len(learning)], passes) and REPEATED not in given_up():
        fall_back(REPEATED)
    return passes


def choose_passes(
    shown: Sequence[Sequence[Media]], learning: int, patches: Mapping[Media, int], room: TowerRoom
) -> TowerPasses:
    """The passes over what micro-batches show, of which the first ``learning`` teach the policy.

    In order of preference: all is kept; what is apart is kept; all is recomputed in one backward pass; what one
    micro-batch alone shows is apart; everything is, also what several show.
    """
    everything = {media for several in shown[:learning] for media in several}
    total, whole = sum(patches[media] for media in everything), min(room.bytes, WHOLE_BYTES)
    if room.kept:
        if total * room.kept <= whole:
            return TowerPasses(keeps=True)
        if apart := choose_apart(shown, learning, patches, room):
            return TowerPasses(keeps=True, apart=apart)
    if total * room.recomputed <= whole:
        return TowerPasses()
    times = Counter(media for several in shown for media in several)
    own = frozenset(media for media in everything if times[media] == 1)
    others = sum(patches[media] for media in everything - own)
    return TowerPasses(apart=own if others * room.recomputed <= whole else frozenset(everything))


def choose_apart(
    shown: Sequence[Sequence[Media]], learning: int, patches: Mapping[Media, int], room: TowerRoom
) -> frozenset[Media]:
    """Of what the first ``learning`` micro-batches show, what one alone shows and there is room to keep."""
    times = Counter(media for several in shown for media in several)
    own = [[media for media in several if times[media] == 1] for several in shown[:learning]]
    everything = {media for several in shown[:learning] for media in several}
    for most in range(max(map(len, own), default=0), 0, -1):  # media that a micro-batch keeps at most
        apart = frozenset(media for several in own for media in several[:most])
        at_once = max(sum(patches[media] for media in several[:most]) for several in own)
        recomputed = sum(patches[media] for media in everything - apart)
        if at_once * room.kept + recomputed * room.recomputed <= room.bytes:
            return apart
    return frozenset()


def _repeats(shown: Sequence[Sequence[Media]], passes: TowerPasses) -> bool:
    """Whether a medium is encoded more than once for the micro-batches that teach."""
    return any(count > 1 for count in Counter(m for several in shown for m in several if m in passes.apart).values())


# The policy is softmax(logits / temperature) over the ids that are not forbidden; where stop tokens are ignored, they
# are forbidden too. The head runs only where a token was predicted, in chunks, so that full logits never exist.


# Logits held at once: 256 MiB of float32.
CHUNK_ELEMENTS = 1 << 26
# How far log-probs of the head's kernels may be from plain ones, in nats, on this many rows.
HEAD_BOUND, TRIAL_ROWS = 0.02, 64


class GraphCut:
    """Where tower graphs are cut: leaves stand for their results, and take the gradients that ``backward`` carries on."""

    def __init__(self, sharded: bool) -> None:
        self._roots: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._sharded = sharded

    def cut_off(self, features: Features) -> Features:
        """The features as leaves."""
        return Features(self._leaf(features.embeds_NH), tuple(self._leaf(level) for level in features.deepstack_NH))

    def backward(self) -> None:
        """Carry the gathered gradients through the towers, once."""
        if self._sharded:  # the others are waiting in the towers' backward, also for a rank that shows nothing
            for leaf in self._leaves:
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        pairs = [(root, leaf.grad) for root, leaf in zip(self._roots, self._leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad.to(root.dtype) for root, grad in pairs])

    def _leaf(self, root: Tensor) -> Tensor:
        if not root.requires_grad:
            return root
        # In float32: the gradients of all micro-batches are summed here.
        leaf = root.detach().float().requires_grad_()
        self._roots.append(root)
        self._leaves.append(leaf)
        return leaf


class UpdateFeatures:
    """Features of an update's media: one tower pass, leaves for the micro-batches to pour gradients into, one backward.

    Media that only ``idle`` ones show get a pass of their own, without a graph. ``passes`` says which media are apart:
    these are encoded inside ``shown_by``, for a micro-batch that shows them, and their backward runs at its end. Of media
    whose tokens several ranks share, what this rank's tokens take is held.
    """

    def __init__(
        self,
        policy: Policy,
        microbatches: Sequence[MicroBatch],
        idle: Sequence[MicroBatch] = (),
        passes: TowerPasses = TowerPasses(),
    ) -> None:
        self._policy = policy
        self._cut = GraphCut(policy.sharding is not None)
        self._passes = passes
        self._idle = {id(microbatch) for microbatch in idle}
        self._taken = rows_taken((*microbatches, *idle))
        with policy.keeping_towers() if passes.keeps and not passes.apart else nullcontext():
            learning = policy.encode(media for media in media_of(microbatches) if media not in passes.apart)
        self._features = {item: self._cut.cut_off(self._held(item, features)) for item, features in learning.items()}
        with torch.no_grad():
            others = policy.encode(item for item in media_of(idle) if item not in learning and item not in passes.apart)
            self._features |= {item: self._held(item, features) for item, features in others.items()}

    def placements(self, microbatch: MicroBatch) -> list[Placement]:
        return [
            slot.place(self._features[slot.media], self._taken[slot.media])
            if isinstance(slot, SlotShare)
            else slot.place(self._features[slot.media])
            for slot in microbatch.slots
            if slot.runs
        ]

    def _held(self, media: Media, features: Features) -> Features:
        return features.rows(self._taken[media]) if media in self._taken else features

    @contextmanager
    def shown_by(self, microbatch: MicroBatch) -> Iterator[None]:
        """Inside, there are features of the media apart that this micro-batch shows; of an idle one without a graph."""
        own = [media for media in media_of([microbatch]) if media in self._passes.apart]
        if not own:
            yield
            return
        cut = GraphCut(sharded=False)
        keeping = self._policy.keeping_towers() if self._passes.keeps else nullcontext()
        with keeping, torch.set_grad_enabled(id(microbatch) not in self._idle):
            found = self._policy.encode(own)
        self._features |= {item: cut.cut_off(features) for item, features in found.items()}
        del found
        yield
        for media in own:
            del self._features[media]
        cut.backward()

    def backward(self) -> None:
        """Carry the gathered gradients through the towers, once; those of ``shown_by`` have been."""
        self._cut.backward()


def rows_taken(microbatches: Sequence[MicroBatch]) -> dict[Media, Tensor]:
    """Of media whose tokens several ranks share, which features tokens of this rank take, in order."""
    shares = [slot for microbatch in microbatches for slot in microbatch.slots if isinstance(slot, SlotShare)]
    media = dict.fromkeys(slot.media for slot in shares)
    return {item: torch.cat([slot.rows_N for slot in shares if slot.media == item]).unique() for item in media}


def hidden_states(policy: Policy, microbatch: MicroBatch, features: UpdateFeatures) -> Tensor:
    """The language model over a micro-batch: hidden states [T, H]; on the general path what ``General.read`` gives.

    Callers replay its routes, backward included.
    """
    if isinstance(microbatch.attention, StockRows):
        assert policy.general is not None, "only it has rows"
        policy.counters.tower_items += sum(len(row.media) for row in microbatch.attention.rows)
        return policy.general.read(policy.chat, microbatch.attention)
    placements, attention = features.placements(microbatch), microbatch.attention
    return policy.language(microbatch.ids_T[None], microbatch.positions_3T[:, None], attention, placements)[0]


class LogprobScorer:
    """Log-probs and entropies of a policy at a temperature, with or without its stop tokens.

    ``scale`` is the largest size of a scaled logit seen so far where float32 is computed on the CPU, and 0 elsewhere: by it
    the rounding of a log-prob is judged.
    """

    def __init__(self, policy: Policy, temperature: float, *, stop_tokens: bool = True) -> None:
        self.policy = policy
        self.temperature = temperature
        self.forbidden = frozenset(
            policy.chat.forbidden_ids if stop_tokens else (*policy.chat.forbidden_ids, *policy.chat.stop_ids)
        )
        self.scale = 0.0
        self._exact = policy.device.type == "cpu" and policy.dtype == torch.float32
        self._fused: bool | None = None
        self._bias_V = torch.zeros(policy.vocab_size, device=policy.device)
        self._bias_V[sorted(self.forbidden)] = FORBIDDEN

    def score(self, hidden_TH: Tensor, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M] of a micro-batch's predicted tokens, in float32, from its hidden states."""
        hidden_MH, targets_M = hidden_TH.index_select(0, microbatch.states_M), microbatch.targets_M
        logprobs_M, entropies_M = self.policy.inside(self._head, hidden_MH, targets_M)
        if self.policy.matched is not None:
            logprobs_M = with_gradient_of(self._as_sampled(hidden_MH, targets_M), logprobs_M)
        return logprobs_M, entropies_M

    @torch.no_grad()
    def logprobs(self, packing: Packing) -> Tensor:
        """Log-probs [N] of all sampled tokens of a packing, in canonical order, without gradient."""
        return self.scores(packing)[0]

    @torch.no_grad()
    def scores(self, packing: Packing) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of all sampled tokens of a packing, in canonical order, without gradient."""
        features = UpdateFeatures(self.policy, packing.microbatches)
        logprobs_N, entropies_N = torch.zeros(2, packing.trained, device=self.policy.device).unbind()
        for microbatch in packing.microbatches:
            with self.policy.replay_routes(microbatch.routes_TLK):
                hidden_TH = hidden_states(self.policy, microbatch, features)
            logprobs_N[microbatch.places_M], entropies_N[microbatch.places_M] = self.score(hidden_TH, microbatch)
        return logprobs_N, entropies_N

    @torch.no_grad()
    def _as_sampled(self, hidden_MH: Tensor, targets_M: Tensor) -> Tensor:
        """Log-probs bit for bit as the sampler computes them."""
        rows = max(1, CHUNK_ELEMENTS // self.policy.vocab_size)
        forbidden_F = torch.tensor(sorted(self.forbidden), dtype=torch.int64, device=hidden_MH.device)
        parts = [
            matched_logprobs(self.policy.logits(hidden), targets, forbidden_F, self.temperature)
            for hidden, targets in _chunks(hidden_MH, targets_M, rows)
        ]
        return torch.cat(parts)

    def _head(self, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        if self._fused is None and len(hidden_MH):  # a rank may predict nothing in its first micro-batch
            self._fused = self._fuses(hidden_MH.detach(), targets_M)
        if self._fused:
            from sensorium.kernels.learner_triton import HeadLogprobs

            weight_VH = self.policy.adapter.head.weight
            found: tuple[Tensor, Tensor] = HeadLogprobs.apply(
                hidden_MH, weight_VH, targets_M, self._bias_V, self.temperature
            )
            return found
        rows = max(1, CHUNK_ELEMENTS // self.policy.vocab_size)
        if len(targets_M) <= rows:
            return self._chunk(hidden_MH, targets_M)
        head = self.policy.adapter.head
        if self._exact and type(head) is nn.Linear and head.bias is None and self.policy.matched is None:
            given = hidden_MH, head.weight, targets_M, self._bias_V, self.temperature
            logprobs_M, entropies_M, scale = TiledLogprobs.apply(*given)
            self.scale = max(self.scale, float(scale))
            return logprobs_M, entropies_M
        parts = [self._recomputed(*chunk) for chunk in _chunks(hidden_MH, targets_M, rows)]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])

    def _fuses(self, hidden_MH: Tensor, targets_M: Tensor) -> bool:
        """Whether the head runs through its kernels: on CUDA, a plain one, and where they give what the plain way gives."""
        head = self.policy.adapter.head
        if not hidden_MH.is_cuda or type(head) is not nn.Linear or head.bias is not None:
            return False
        try:
            from sensorium.kernels.learner_triton import HeadLogprobs

            given = hidden_MH[:TRIAL_ROWS], targets_M[:TRIAL_ROWS]
            with torch.no_grad():
                expected = self._chunk(*given)
                found = HeadLogprobs.apply(given[0], head.weight, given[1], self._bias_V, self.temperature)
            gap = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
            wrong = "" if gap <= HEAD_BOUND else f"they are {gap:.2g} off the plain ones (bound {HEAD_BOUND:g})"
        except Exception as error:  # a kernel that this GPU or Triton cannot build is a reason to be slow, not to stop
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if wrong:
            fall_back(f"log-probs are computed without the head's kernels, which is slower: {wrong}")
        return not wrong

    def _chunk(self, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = self.policy.logits(hidden_MH)
        if self._exact and logits_MV.numel():
            least, largest = torch.stack(logits_MV.detach().aminmax()).tolist()
            self.scale = max(self.scale, -least / self.temperature, largest / self.temperature)
        logprobs_M, entropies_M = TokenLogprobs.apply(logits_MV, targets_M, self._bias_V, self.temperature)
        return logprobs_M, entropies_M

    def _recomputed(self, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return self._chunk(hidden_MH, targets_M)
        return checkpoint(self._chunk, hidden_MH, targets_M, use_reentrant=False, preserve_rng_state=False)


def _chunks(hidden_MH: Tensor, targets_M: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(hidden_MH.split(rows), targets_M.split(rows), strict=True)
