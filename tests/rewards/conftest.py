"""Episodes as a rollout would leave them, without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Episode, Segment, Status, Thread, Turn

MakeEpisode = Callable[..., Episode]


@pytest.fixture
def episode_of() -> MakeEpisode:
    """Builds an episode in which the model wrote these texts, one a turn."""

    def build(
        *texts: str,
        rewards: Sequence[float | None] = (),
        infos: Sequence[dict[str, Any]] = (),
        observation: str = "?",
        status: Status = Status.FINISHED,
        failure: str = "",
        info: dict[str, Any] | None = None,
    ) -> Episode:
        turns, segments = [], []
        for i, text in enumerate(texts):
            response = Segment("model", (1,), text=text, logprobs=(0.0,), name=f"e/{i}")
            segments += [Segment("environment", (0,), text=observation), response]
            reward = rewards[i] if rewards else None
            turns.append(Turn(i, (user(observation),), response, 0, 2 * i + 1, reward, infos[i] if infos else {}))
        threads = (Thread(tuple(segments), tuple(s.author == "model" for s in segments)),) if segments else ()
        return Episode("e", "t", "g", 0, threads, tuple(turns), status, failure, info=info or {})

    return build
