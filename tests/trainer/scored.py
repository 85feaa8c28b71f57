"""Scored episodes and groups without a model."""

from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn


def episode(index: int, *values: float | None, status: Status = Status.FINISHED, weight: float = 0.5) -> Episode:
    """An episode of three tokens, judged by as many terms as there are values."""
    response = Segment("model", (5, 6, 7), logprobs=(0.0,) * 3, name=f"e{index}")
    prompt = Segment("environment", (1, 2))
    scores = tuple(
        Score(f"term{i}", v, weight=weight, reason="" if v is not None else "timed out") for i, v in enumerate(values)
    )
    thread = Thread((prompt, response), (False, True))
    return Episode(f"e{index}", "t", "g", index, (thread,), (Turn(0, (), response, 0, 1),), status, scores=scores)


def group(*episodes: Episode, id: str = "g") -> Group:
    """A group of these."""
    return Group(id, Task("t"), episodes)


def paid(id: str, *rewards: float) -> Group:
    """A group whose members were paid so."""
    return group(*(with_id(episode(i, reward, weight=1.0), f"{id}/{i}") for i, reward in enumerate(rewards)), id=id)


def with_id(one: Episode, id: str) -> Episode:
    """The same episode under another id."""
    return Episode(id, one.task_id, one.group_id, one.index, one.threads, one.turns, one.status, scores=one.scores)
