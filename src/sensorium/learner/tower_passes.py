"""Which media of an update are encoded with their micro-batch, so that the tower holds little at a time.

A tower's pass and its backward enclose the whole update where several micro-batches show a medium. It then holds the
inputs of its blocks for all of them, and computes the rest again. A medium that one micro-batch alone shows can be done
with there. That is worth it in two cases:

- there is room to keep all that the backward pass needs of one micro-batch, so that nothing is computed again;
- the inputs of blocks alone, of all media, are too many to be held.

Example, with room for 600 patches kept and none recomputed, a medium of 200 patches each:

    micro-batch 0 shows a b c, micro-batch 1 shows d e f     all are apart: 600 patches are kept at a time
    micro-batch 0 shows a b c d, micro-batch 1 shows d e     a b c and e are apart, d is shown twice

Where there is room for all 1,200, nothing is apart and everything is kept: one pass is better than two smaller ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sensorium.learner.packing import MicroBatch, media_of
from sensorium.models.fast_paths import fall_back, given_up
from sensorium.models.policy import Policy
from sensorium.recipe.activations import WHOLE_BYTES, TowerRoom
from sensorium.vocabulary.content import Media

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
