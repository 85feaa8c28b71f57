"""What a group costs to compute, by which groups are divided among ranks: tokens of its tree, and patches of its media.

The driver knows both without work, since it has just played the groups. A rank would have to decode media that others
compute with.
"""

from collections.abc import Sequence
from math import prod

from sensorium.models.policy import Policy
from sensorium.vocabulary.episode import Episode


class GroupCosts:
    """Costs in tokens of the language model. A patch costs as much of one as its tower is large beside the model."""

    def __init__(self, policy: Policy) -> None:
        self._chat = policy.chat
        towers = {id(p) for tower in policy.adapter.towers.values() for p in tower.module.parameters()}
        sizes = {id(p): p.numel() for p in policy.model.parameters()}
        in_towers = sum(size for key, size in sizes.items() if key in towers)
        self._patch = in_towers / max(1, sum(sizes.values()) - in_towers)

    def of(self, episodes: Sequence[Episode]) -> float:
        """The cost of a group: what its episodes share is computed once."""
        tokens, seen, media = 0, set(), set()
        for episode in episodes:
            for thread in episode.threads:
                path: tuple[str, ...] = ()
                for segment in thread.segments:
                    path = (*path, segment.key)
                    if path not in seen:
                        seen.add(path)
                        written = segment.author == "model"
                        tokens += len(segment.tokens) if written else len(self._chat.layout(segment))
                        media |= {slot.media for slot in (() if written else self._chat.layout(segment).slots)}
        patches = sum(prod(self._chat.prepared.extent(item).grid) for item in media)
        return tokens + self._patch * patches
