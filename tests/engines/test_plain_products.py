"""oneDNN is off while any thread decodes, and afterwards as it was: the choice is the whole process's."""

import threading

import pytest
import torch

from sensorium.engines.native.writer import plain_products


@pytest.mark.parametrize("enabled", [True, False])
def test_two_threads_that_decode_at_once_leave_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """The second enters before the first leaves, and leaves last: it may not put back what it found."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    first_left = threading.Event()
    second_inside = threading.Event()
    found: list[bool] = []

    def second() -> None:
        with plain_products:
            second_inside.set()
            assert first_left.wait(60)
            found.append(torch.backends.mkldnn.enabled)

    thread = threading.Thread(target=second)
    with plain_products:
        thread.start()
        assert second_inside.wait(60)
        assert not torch.backends.mkldnn.enabled
    first_left.set()
    thread.join()
    assert found == [False]
    assert torch.backends.mkldnn.enabled is enabled
