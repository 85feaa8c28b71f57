"""Weights that a checkpoint may hold and the trained model has no place for; a run leaves them out, an export keeps them.

The parts of an Omni model that speak, heads that predict several tokens ahead (MTP), the pooling head of a SigLIP tower,
and tables that older versions of transformers saved though they are computed. A recipe adds others by
``model.unused_weights``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

SPEAKING = ("talker.", "token2wav.", "code2wav.")
OTHERS = re.compile(r"(^|\.)(mtp\.|rotary_emb\.inv_freq$|embeddings\.position_ids$|vision_model\.head\.)")


def is_unloaded(name: str, also: Sequence[str] = ()) -> bool:
    """Whether a weight is left out on purpose; ``also`` are prefixes that a recipe names."""
    return name.startswith((*SPEAKING, *also)) or OTHERS.search(name) is not None


def told_by_part(names: Iterable[str], most: int = 4) -> str:
    """Names of weights in few words, by the part they belong to: ``model.layers.2 (12 weights), model.layers.3 (12 …)``."""
    names = list(names)
    if len(names) <= most:
        return ", ".join(sorted(names))
    parts = Counter(part_of(name) for name in sorted(names))
    told = [f"{part} ({count} {'weight' if count == 1 else 'weights'})" for part, count in parts.items()]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more parts" if len(told) > most else "")


def part_of(name: str) -> str:
    """``a.layers.2.mlp.up.weight`` → ``a.layers.2``; without a number all but the last word."""
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words)
