"""Task: what is asked, and what is known of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sensorium.vocabulary.content import Message

RECORDED = "recorded"  # the environment that plays a row again
OBSERVED = "observed"  # option of that environment: an environment showed what was recorded, not a question


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a task, its options, and the seed that determines its start."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """One thing to attempt. Single-turn tasks have messages; tasks played in an environment have its spec.

    ``demonstration`` is a worked response (or one per turn) for supervised stages. ``metadata`` is free; the key
    ``category`` groups evaluation tables.
    """

    id: str
    messages: tuple[Message, ...] = ()
    answer: Any = None
    environment: EnvironmentSpec | None = None
    demonstration: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
