"""Which media of an update are encoded with their micro-batch, so that the tower's activations can be kept for a while.

A tower's pass and its backward enclose the whole update where several micro-batches show a medium: then all but the inputs
of its blocks is computed again. A medium that one micro-batch alone shows can be done with there. Example, with room for
600 patches kept and none recomputed, a medium of 200 patches each:

    micro-batch 0 shows a b c, micro-batch 1 shows d e f     all are apart: 600 patches are kept at a time
    micro-batch 0 shows a b c d, micro-batch 1 shows d e     a b c and e are apart, d is shown twice

Where there is room for all 1,200, nothing is apart and everything is kept: one pass is better than two smaller ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sensorium.learner.packing import MicroBatch, media_of
from sensorium.models.policy import Policy
from sensorium.recipe.activations import WHOLE_BYTES, TowerRoom
from sensorium.vocabulary.content import Media


@dataclass(frozen=True)
class TowerPasses:
    """``whole``: one pass whose activations are kept. ``apart``: media that are encoded with their micro-batch."""

    whole: bool = False
    apart: frozenset[Media] = frozenset()


def tower_passes(
    policy: Policy, learning: Sequence[MicroBatch], idle: Sequence[MicroBatch], room: TowerRoom
) -> TowerPasses:
    """How the media of an update are encoded, so that as little is recomputed as the room allows."""
    shown = [media_of([microbatch]) for microbatch in (*learning, *idle)]
    patches = {media: prod(policy.chat.prepared.extent(media).grid) for several in shown for media in several}
    kept = room.kept * sum(patches[media] for media in media_of(learning))
    if kept <= min(room.bytes, WHOLE_BYTES):
        return TowerPasses(whole=True)
    return TowerPasses(apart=choose_apart(shown, len(learning), patches, room))


def choose_apart(
    shown: Sequence[Sequence[Media]], learning: int, patches: dict[Media, int], room: TowerRoom
) -> frozenset[Media]:
    """Of what the first ``learning`` micro-batches show, what one alone shows and there is room for."""
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
