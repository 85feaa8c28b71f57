"""A stream of tasks is a function of its position: shares, permutations, skipping."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.mixture import TaskStream, each_once, permuted
from sensorium.vocabulary.errors import MediaError, TaskError
from sensorium.vocabulary.task import Task


class Numbers:
    """A source whose listed rows are bad."""

    def __init__(self, name: str, length: int, bad: tuple[int, ...] = ()) -> None:
        self.name, self.length, self.bad = name, length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Task:
        if index in self.bad:
            raise MediaError(f"{self.name}:{index} is bad")
        return Task(f"{self.name}{index}")


def taken(stream: TaskStream, position: int, count: int) -> list[tuple[int, int]]:
    return [stream.at(p) for p in range(position, position + count)]


@given(st.integers(1, 300), st.text(max_size=5))
def test_keyed_permutation_hits_every_index_once(length: int, key: str) -> None:
    assert sorted(permuted(i, length, key) for i in range(length)) == list(range(length))


def test_permutation_is_fixed_for_good() -> None:
    assert [permuted(i, 8, "0/0/0") for i in range(8)] == [4, 0, 2, 5, 6, 7, 1, 3]


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=5), st.integers(1, 400))
def test_shares_follow_weights(weights: list[float], positions: int) -> None:
    stream = TaskStream([Numbers(str(i), 7) for i in range(len(weights))], weights, seed=0)
    counts = Counter(source for source, _ in taken(stream, 0, positions))
    for i, weight in enumerate(weights):
        assert abs(counts[i] - positions * weight / sum(weights)) <= len(weights)


@given(st.integers(0, 500), st.integers(0, 60), st.integers(0, 3))
def test_any_slice_equals_the_slice_of_the_whole(position: int, count: int, seed: int) -> None:
    stream = TaskStream([Numbers("a", 7), Numbers("b", 11), Numbers("c", 3)], [1, 2.5, 0.3], seed=seed)
    assert taken(stream, position, count) == taken(stream, 0, position + count)[position:]


def test_every_epoch_of_a_source_passes_each_row_once_in_a_new_order() -> None:
    stream = TaskStream([Numbers("a", 10), Numbers("b", 4)], [1, 1], seed=3)
    rows = [row for source, row in taken(stream, 0, 80) if source == 0]
    epochs = [tuple(rows[i : i + 10]) for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 4


def test_seed_changes_the_order_and_unshuffled_keeps_it() -> None:
    orders = [taken(TaskStream([Numbers("a", 50)], [1], seed=seed), 0, 50) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert taken(TaskStream([Numbers("a", 5)], [1], seed=0, shuffle=False), 3, 4) == [(0, 3), (0, 4), (0, 0), (0, 1)]


def test_bad_rows_are_skipped_and_counted_and_the_position_moves_past_them() -> None:
    stream = TaskStream([Numbers("a", 6, bad=(1, 4))], [1], seed=0, shuffle=False, on_bad_row="skip")
    first = stream.draw(0, 2)
    assert ([t.id for t in first.tasks], first.position) == (["a0", "a2"], 3)
    assert [(s.source, s.row) for s in first.skipped] == [(0, 1)]
    second = stream.draw(first.position, 3)
    assert [t.id for t in second.tasks] == ["a3", "a5", "a0"]
    assert "a:4 is bad" in second.skipped[0].reason


def test_bad_rows_are_refused_by_default() -> None:
    with pytest.raises(MediaError, match="a:1"):
        TaskStream([Numbers("a", 3, bad=(1,))], [1], seed=0, shuffle=False).draw(0, 2)


@pytest.mark.parametrize("weights", [(1, 1), (1, 50), (50, 1)])
def test_a_stream_of_bad_rows_alone_ends_with_an_error(weights: tuple[float, float]) -> None:
    bad, good = Numbers("a", 4, bad=(0, 1, 2, 3)), Numbers("b", 3, bad=(0, 1))
    with pytest.raises(TaskError, match="every task"):
        TaskStream([bad, bad], list(weights), seed=0, on_bad_row="skip").draw(0, 1)
    rare = TaskStream([bad, good], list(weights), seed=0, on_bad_row="skip").draw(0, 1)
    assert rare.tasks[0].id == "b2"
    assert len(rare.skipped) <= ceil(6 * (sum(weights) / weights[1]))


@pytest.mark.parametrize("shuffle", [True, False])
@given(st.integers(0, 40), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 50))
def test_every_row_comes_up_within_a_whole_pass_from_any_position(
    shuffle: bool, position: int, lengths: list[int], seed: int
) -> None:
    sources = [Numbers(str(i), length) for i, length in enumerate(lengths)]
    stream = TaskStream(sources, [1, 2.5, 0.3][: len(lengths)], seed=seed, shuffle=shuffle)
    seen = set(taken(stream, position, stream.whole_pass()))
    assert seen == {(i, row) for i, length in enumerate(lengths) for row in range(length)}


def test_empty_sources_and_wrong_weights_are_refused() -> None:
    with pytest.raises(TaskError, match="no tasks"):
        TaskStream([Numbers("a", 0)], [1], seed=0)
    with pytest.raises(TaskError, match="above 0"):
        TaskStream([Numbers("a", 1)], [0], seed=0)
    with pytest.raises(TaskError, match="one weight per source"):
        TaskStream([Numbers("a", 1)], [1, 2], seed=0)


def test_each_once_reads_everything_or_takes_turns_under_a_limit() -> None:
    sources = [Numbers("a", 3, bad=(1,)), Numbers("b", 2)]
    tasks, skipped = each_once(sources, on_bad_row="skip")
    assert [t.id for t in tasks] == ["a0", "a2", "b0", "b1"]
    assert [s.row for s in skipped] == [1]
    few = [t.id for t in each_once(sources, limit=3, on_bad_row="skip")[0]]
    assert len(few) == 3
    assert {id[0] for id in few} == {"a", "b"}, "the sources take turns"
    with pytest.raises(MediaError):
        each_once(sources)


def test_a_limit_draws_from_the_whole_of_a_sorted_file_and_the_same_rows_each_time() -> None:
    drawn = [[int(t.id[1:]) for t in each_once([Numbers("a", 1000)], limit=100)[0]] for _ in range(2)]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert all(sum(low <= row < low + 250 for row in drawn[0]) >= 10 for low in range(0, 1000, 250))


def test_a_refused_row_names_the_way_out() -> None:
    class Broken:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Task:
            raise MediaError("rows.jsonl:1: cannot read the picture 'no.png': No such file or directory.")

    with pytest.raises(MediaError, match=r"no\.png.*tasks\.on_bad_row: skip"):
        TaskStream([Broken()], [1.0], seed=0).draw(0, 1)
    with pytest.raises(MediaError, match=r"tasks\.on_bad_row: skip"):
        each_once([Broken()])
