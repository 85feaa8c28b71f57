"""The one bounded cache: what it holds, drops and counts is what a plain list of pairs would."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.lru import LRU

keys = st.sampled_from("abcdefg")
calls = st.one_of(
    st.tuples(st.sampled_from(["get", "peek", "pop"]), keys),
    st.tuples(st.sampled_from(["put", "add"]), keys, st.integers(0, 7)),
    st.just(("clear",)),
)


@given(st.lists(calls, max_size=60), st.none() | st.integers(0, 20), st.integers(0, 2))
def test_it_does_what_a_plain_list_of_pairs_does(made: list[tuple], bound: int | None, at_least: int) -> None:  # type: ignore[type-arg]
    cache: LRU[str, int] = LRU(bound, lambda value: value, at_least=at_least)
    pairs: list[tuple[str, int]] = []
    hits = evictions = 0
    for name, *arguments in made:
        key = arguments[0] if arguments else ""
        known = dict(pairs).get(key)
        expected = None
        if name == "clear":
            pairs = []
        elif name in ("put", "add") and (name == "put" or known is None):
            pairs = [pair for pair in pairs if pair[0] != key] + [(key, arguments[1])]
            while bound is not None and sum(value for _, value in pairs) > bound and len(pairs) > at_least:
                pairs, evictions = pairs[1:], evictions + 1
        elif name in ("get", "peek", "pop"):
            expected = known
            if known is not None and name != "peek":
                pairs = [pair for pair in pairs if pair[0] != key] + ([(key, known)] if name == "get" else [])
                hits += name == "get"
        assert getattr(cache, name)(*arguments) == expected
        assert cache.items() == pairs
        assert (cache.held, cache.hits, cache.evictions) == (sum(value for _, value in pairs), hits, evictions)
        assert len(cache) == len(pairs)
        assert all((key in cache) == (key in dict(pairs)) for key in "abcdefg")


def test_without_a_size_values_are_counted() -> None:
    cache: LRU[str, str] = LRU(3)
    for key in "abc":
        cache.put(key, key)
    cache.get("a")
    cache.put("d", "d")
    assert [key for key, _ in cache.items()] == ["c", "a", "d"]


@pytest.mark.parametrize("at_least", [0, 1])
def test_a_value_beyond_the_bound_is_held_only_if_some_must_stay(at_least: int) -> None:
    cache: LRU[int, bytes] = LRU(10, len, at_least=at_least)
    cache.put(1, bytes(99))
    assert len(cache) == at_least


def test_several_threads_may_use_it_at_once() -> None:
    cache: LRU[int, bytes] = LRU(50, len)

    def work(seed: int) -> None:
        for i in range(2000):
            key = (seed * 7919 + i * 31) % 40
            if cache.get(key) is None:
                cache.add(key, bytes(key % 9))
            if i % 5 == 0:
                cache.pop((key + 1) % 40)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.held == sum(len(value) for _, value in cache.items()) <= 50
