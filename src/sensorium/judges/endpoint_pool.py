"""The endpoints of one model: the least loaded healthy one is asked next.

An endpoint that fails rests: 1 s, 2 s, 4 s … up to a minute, or as long as it asked for (Retry-After). One that refuses the
key is not asked again. Example of two endpoints: a has 2 calls open, b 1, so b is next; b answers 503 and rests 1 s, so the
next calls go to a, also if it is busier; when both rest, whoever asks waits for the first to be back.
"""

import sys
import time
from dataclasses import dataclass

from sensorium.judges.endpoints import Endpoint

LONGEST_REST_S = 60.0
NOTED_FAILURES = 3
"""Failures in a row after which one of several endpoints is named: the others would hide it."""
DOUBLINGS = 10  # more would rest longer than LONGEST_REST_S anyway, and overflow after a thousand failures


@dataclass
class EndpointHealth:
    """How an endpoint is doing: calls open now, failures in a row, when it may be asked again, calls it was given."""

    endpoint: Endpoint
    open: int = 0
    failures: int = 0
    rests_until: float = 0.0
    calls: int = 0
    refused_key: str = ""


class EndpointPool:
    """Chooses among the endpoints of a model. Used from one event loop only."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.members = [EndpointHealth(endpoint) for endpoint in endpoints]

    def next(self) -> tuple[EndpointHealth | None, float]:
        """The endpoint to ask now; or None, and the seconds until one may be asked (infinite: none will be)."""
        now = time.monotonic()
        usable = [member for member in self.members if not member.refused_key]
        ready = [member for member in usable if member.rests_until <= now]
        if ready:
            return min(ready, key=lambda member: (member.open, member.calls)), 0.0
        return None, min((member.rests_until - now for member in usable), default=float("inf"))

    def begin(self, member: EndpointHealth) -> None:
        """A call is made."""
        member.open += 1
        member.calls += 1

    def answered(self, member: EndpointHealth) -> None:
        """A call was answered: the endpoint is healthy."""
        member.open -= 1
        member.failures = 0

    def failed(self, member: EndpointHealth, rest_s: float | None) -> None:
        """A call failed; the endpoint rests as long as it asked for, or longer with every failure."""
        member.open -= 1
        member.failures += 1
        if member.failures == NOTED_FAILURES and len(self.members) > 1:
            print(
                f"judge '{member.endpoint.model}': {member.endpoint.place} failed {member.failures} times in a row and "
                f"is asked less often; {len(self.members) - 1} other endpoints take its questions. Is it running?",
                file=sys.stderr,
                flush=True,
            )
        usual = min(LONGEST_REST_S, 2.0 ** min(member.failures - 1, DOUBLINGS))
        if len(self.members) == 1 and rest_s is None:
            usual = 0.0  # there is no other to go to; who asked waits by itself
        member.rests_until = time.monotonic() + (usual if rest_s is None else rest_s)

    def refused(self, member: EndpointHealth, reason: str = "") -> None:
        """A call was refused: for what was asked, or, with a reason, for the key."""
        member.open -= 1
        member.refused_key = reason
