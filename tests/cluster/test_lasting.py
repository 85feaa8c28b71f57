"""What a process has loaded is left out of garbage collections while it works."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from sensorium.cluster import event_loop
from sensorium.cluster.event_loop import USUAL, collect_rarely, lasting_objects, set_aside, set_aside_more


@pytest.fixture(autouse=True)
def nothing_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Later tests of this process find aside what was aside before: each run would collect and freeze all of it again."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setattr(event_loop, "_excluded_by", "nobody")
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    if before:
        gc.collect()
        gc.freeze()


class Cycle:
    """An object that only a collection removes."""

    def __init__(self) -> None:
        self.own = self


def test_what_exists_is_left_out_until_the_end() -> None:
    kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    with lasting_objects():
        assert gc.get_freeze_count() > len(kept)
        with lasting_objects():  # who is inside leaves it as it is
            pass
        assert gc.get_freeze_count() > len(kept)
    assert gc.get_freeze_count() == 0


def test_garbage_is_removed_first_and_later_garbage_is_collected() -> None:
    before = weakref.ref(Cycle())
    assert set_aside()
    assert before() is None
    assert not set_aside()
    after = weakref.ref(Cycle())
    gc.collect()
    assert after() is None
    aside = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    set_aside_more()
    assert gc.get_freeze_count() >= aside + len(kept)


def test_garbage_is_collected_rarely_only_until_the_work_begins() -> None:
    collect_rarely()
    assert gc.get_threshold() > USUAL
    assert set_aside()
    assert gc.get_threshold() == USUAL
