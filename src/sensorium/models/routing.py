"""Where a mixture of experts sends its tokens: the router logits of a pass, read off the stock routers as they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def routers_of(language_model: Any) -> list[nn.Module]:
    """The router of each layer that has experts, in order."""
    blocks = [layer.mlp for layer in language_model.layers]
    return [block.gate for block in blocks if hasattr(block, "gate") and hasattr(block, "experts")]


@contextmanager
def watched(routers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collects the logits [T, E] of routers in the order they run: of one forward inside, a tensor per layer with experts.

    The stock block computes them and keeps them to itself, so they are read by hooks, which are there only inside. A layer
    that is recomputed in a backward pass outside is not read twice.
    """
    seen: list[Tensor] = []

    def note(router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        seen.append(output[0])

    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
