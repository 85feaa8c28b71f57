"""The policy as it was when RL began, to be scored beside it: another copy in memory, or under LoRA the same model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sensorium.models.policy import Counters, Policy


class Reference(Protocol):
    """``with reference.active() as policy:`` gives the policy to score with; outside it must not be used."""

    def active(self) -> AbstractContextManager[Policy]: ...


@dataclass(frozen=True)
class FrozenCopy:
    """A separate policy that is never trained, copied or loaded. Its towers are frozen, so their features are cached."""

    policy: Policy

    def __post_init__(self) -> None:
        self.policy.model.requires_grad_(False)

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """As it always is."""
        yield self.policy


@dataclass(frozen=True)
class FormerSelf:
    """The trained policy with the adapters it had when RL began; None: it had fresh ones, and is its base model then.

    While it is active nothing may be sampled or updated. Towers, language model and head all are those of the reference.
    """

    policy: Policy
    adapters: Mapping[str, Tensor] | None

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """The former self; afterwards, whatever happened, the policy is bit for bit what it was."""
        policy, own = self.policy, self.policy.adapters
        assert own is not None, "a policy without adapters cannot be its former self"
        version, counters = policy.version, policy.counters
        with own.off() if self.adapters is None else own.holding(self.adapters):
            try:
                # Caches by version must not mistake it for the policy; media it encodes do not count as the policy's work.
                policy.version, policy.counters = -1, Counters()
                yield policy
            finally:
                policy.version, policy.counters = version, counters
