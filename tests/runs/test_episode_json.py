"""Episodes survive their way to disk and back, whatever they hold."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.runs.episodes import (
    episode_from_json,
    episode_to_json,
    read_episodes,
    read_groups,
    task_from_json,
    task_to_json,
    write_episodes,
)
from sensorium.vocabulary import (
    AudioParameters,
    Episode,
    Group,
    Media,
    MediaSpan,
    Message,
    Score,
    Segment,
    Status,
    Task,
    Text,
    Thread,
    Turn,
    VideoParameters,
    system,
    user,
)
from sensorium.vocabulary.episode import Routes
from sensorium.vocabulary.task import EnvironmentSpec

texts = st.text(max_size=12)
floats = st.floats(allow_nan=False)
hashes = st.text("0123456789abcdef", min_size=8, max_size=8)
rates = st.builds(VideoParameters, fps=st.none() | st.floats(0.1, 30), start=st.floats(0, 9), min_frames=st.integers(1, 9))
counts = st.builds(VideoParameters, frames=st.integers(1, 64), max_pixels_per_clip=st.integers(1, 10**7))
sounds = st.builds(AudioParameters, st.integers(8000, 48000), end=st.none() | st.floats(0.5, 9))
media = st.one_of(
    st.builds(Media, st.just("picture"), hashes, texts),
    st.builds(Media, st.just("video"), hashes, texts, st.none() | rates | counts),
    st.builds(Media, st.just("sound"), hashes, texts, st.none() | sounds),
)
blocks = st.one_of(st.builds(Text, texts), media)
messages = st.builds(Message, st.sampled_from(["system", "user", "tool"]), st.lists(blocks, max_size=3).map(tuple))
info = st.dictionaries(texts, st.one_of(st.none(), st.integers(), floats, texts, st.booleans()), max_size=2)
scores = st.builds(
    Score,
    texts,
    st.none() | floats,
    floats,
    st.sampled_from(["episode", "turn", "span"]),
    st.none() | st.integers(0, 5),
    st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.none() | st.booleans(),
    texts,
)
tasks = st.builds(
    Task,
    id=texts,
    messages=st.lists(messages, max_size=2).map(tuple),
    answer=st.one_of(st.none(), texts, floats, st.lists(st.integers(), max_size=2)),
    environment=st.none() | st.builds(EnvironmentSpec, texts, info, st.integers()),
    demonstration=st.lists(texts, max_size=2).map(tuple),
    metadata=info,
)


recorded = st.builds(Routes, st.integers(0, 9), st.binary(max_size=4), st.binary(max_size=4), *[st.just(1)] * 3)


@st.composite
def segments(draw: st.DrawFn, author: str) -> Segment:
    """A segment of either author, log-probs included where the model wrote."""
    tokens = tuple(draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=4)))
    logprobs = tuple(draw(st.lists(floats, min_size=len(tokens), max_size=len(tokens)))) if author == "model" else ()
    spans = () if author == "model" else tuple(MediaSpan(0, m) for m in draw(st.lists(media, max_size=1)))
    ends = tuple(range(len(tokens))) if author == "model" else ()
    given = (author, tokens, spans, draw(texts), logprobs, logprobs, ends, draw(st.integers(0, 9)), draw(texts))
    routes = draw(st.none() | recorded) if author == "model" else None
    return Segment(*given, routes=routes)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """An episode of up to three turns, each in a thread of its own that repeats the earlier ones as context."""
    history: list[Segment] = []
    threads, turns = [], []
    for index in range(draw(st.integers(0, 3))):
        history = [*history[-2:], draw(segments("environment")), draw(segments("model"))]
        home = tuple(place == len(history) - 1 for place in range(len(history)))
        threads.append(Thread(tuple(history), home))
        observation = tuple(draw(st.lists(messages, max_size=2)))
        paid, parts = draw(st.none() | floats), draw(st.dictionaries(texts, floats, max_size=2))
        turns.append(Turn(index, observation, history[-1], index, len(history) - 1, paid, draw(info), parts))
    return Episode(
        draw(texts),
        draw(texts),
        "group",
        draw(st.integers(0, 9)),
        tuple(threads),
        tuple(turns),
        draw(st.sampled_from(Status)),
        draw(texts),
        tuple(draw(st.lists(scores, max_size=3))),
        draw(info),
        tuple(draw(st.lists(messages, max_size=2))),
    )


def through_text(data: dict) -> dict:
    return json.loads(json.dumps(data))


@given(episodes(), tasks)
@settings(max_examples=60, deadline=None)
def test_an_episode_comes_back_as_it_was(episode: Episode, task: Task) -> None:
    assert episode_from_json(through_text(episode_to_json(episode, routes=True))) == episode
    logged = episode_from_json(through_text(episode_to_json(episode)))
    assert not any(turn.response.routes for turn in logged.turns)
    assert task_from_json(through_text(task_to_json(task))) == task


def windowed() -> Episode:
    """Two turns, each seen by a thread of its own; the first response is context of the second thread."""
    head = Segment("environment", (1, 2), text="rules")
    one = Segment("environment", (3, 4), (MediaSpan(1, Media("picture", "aa")),), text="look")
    said = Segment("model", (5,), text="left", logprobs=(-0.5,), sampled_logprobs=(-0.4,), byte_ends=(4,), name="m0")
    two = Segment("environment", (6,), text="and now?")
    last = Segment("model", (7,), text="up", logprobs=(-0.25,), sampled_logprobs=(-0.25,), byte_ends=(2,), name="m1")
    threads = (
        Thread((head, one, said), (False, False, True)),
        Thread((head, one, said, two, last), (False, False, False, False, True)),
    )
    turns = (Turn(0, (system("rules"), user("look")), said, 0, 2), Turn(1, (user("and now?"),), last, 1, 4, 1.0, {"at": 3}))
    return Episode("e", "t", "g", 0, threads, turns, Status.FINISHED, scores=(Score("environment", 1.0, correct=True),))


def test_shared_history_is_written_once_and_comes_back_shared() -> None:
    data = episode_to_json(windowed())
    assert len(data["segments"]) == 5
    back = episode_from_json(through_text(data))
    assert back.threads[0].segments[2] is back.threads[1].segments[2]
    assert back.turns[1].response is back.threads[1].segments[4]


def test_logprobs_that_are_not_finite_survive_in_plain_json() -> None:
    segment = Segment("model", (1, 2, 3), logprobs=(-math.inf, math.nan, -1.5), name="m")
    episode = Episode("e", "t", "g", 0, (Thread((segment,), (True,)),), (Turn(0, (), segment, 0, 0),), Status.FAILED)
    text = json.dumps(episode_to_json(episode), allow_nan=False)
    back = episode_from_json(json.loads(text)).turns[0].response.logprobs
    assert back[0] == -math.inf
    assert math.isnan(back[1])
    assert back[2] == -1.5


def test_a_log_gives_back_groups_and_keeps_to_its_limit(tmp_path) -> None:
    def member(group: str, index: int) -> Episode:
        return Episode(f"{group}/{index}", group, group, index, (), (), Status.FINISHED, scores=(Score("exact", 1.0),))

    groups = [Group(id, Task(id), tuple(member(id, i) for i in range(3))) for id in ("a", "b")]
    path = tmp_path / "episodes" / "step_000001.jsonl"
    write_episodes(path, 1, groups)
    assert read_groups(path) == groups
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0] * 6
    write_episodes(path, 1, groups, limit=4)
    assert [episode.id for _, _, episode in read_episodes(path)] == ["a/0", "a/1", "a/2", "b/0"]


def test_what_user_code_put_into_info_never_stops_a_run(tmp_path) -> None:
    import numpy

    episode = Episode("e", "t", "g", 0, (), (), Status.FINISHED, info={"at": numpy.int64(3), "where": numpy.arange(2)})
    write_episodes(tmp_path / "log.jsonl", 1, [Group("g", Task("t"), (episode,))])
    [(_, _, back)] = read_episodes(tmp_path / "log.jsonl")
    assert back.info == {"at": 3, "where": [0, 1]}


def test_offered_tools_are_kept() -> None:
    messages = (Message("system", (Text("Look."),), '[{"name": "look"}]'), Message("user", (Text("Go"),)))
    written = json.loads(json.dumps(task_to_json(Task("t", messages))))
    assert task_from_json(written).messages == messages
    assert "tools" not in written["messages"][1]
