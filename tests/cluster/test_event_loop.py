"""A run's event loop: what an interrupted run leaves behind does not disturb the next one in the same thread."""

import asyncio
import gc
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from inspect import CORO_CLOSED, getcoroutinestate
from pathlib import Path
from typing import Any

import pytest

from sensorium.cli.main import stopping_in_order
from sensorium.cluster.event_loop import LoopThread, run_async
from sensorium.envs.remote.client import EnvironmentClient
from sensorium.recipe.schema import JudgesSection
from sensorium.rewards.judges.client import JudgeClient


@contextmanager
def _ctrl_c(handler: Any) -> Iterator[None]:
    """Inside, SIGINT has this handler. Where tests run in a shell's background it is ignored."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_after_one_whose_end_was_interrupted_too() -> None:
    left: list[Coroutine[Any, Any, None]] = []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def interrupted_at_its_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyboardInterrupt

    async def cut_off() -> None:
        await asyncio.gather(interrupted_at_its_end(), interrupted())

    async def whole() -> int:
        left.clear()
        gc.collect()
        await asyncio.sleep(0)
        return 7

    left.append(cut_off())
    with pytest.raises(KeyboardInterrupt):
        run_async(left[0])
    assert run_async(whole()) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_took_ends_a_run_that_waits_for_nothing_else(number: int) -> None:
    """Python runs its handler in the main thread alone, which sleeps in the loop."""

    async def hang() -> None:
        def signal_yourself() -> None:
            while not asleep():
                time.sleep(0.001)
            signal.pthread_kill(threading.get_ident(), number)

        threading.Thread(target=signal_yourself, daemon=True).start()
        await asyncio.Event().wait()

    def asleep() -> bool:
        state = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "S"

    with _ctrl_c(signal.default_int_handler), stopping_in_order(), pytest.raises(KeyboardInterrupt):
        run_async(hang())
    assert signal.set_wakeup_fd(-1) == -1


def test_a_hosts_own_wakeup_is_told_too_and_may_be_closed_meanwhile() -> None:
    hears, tells = socket.socketpair()
    hears.setblocking(False)
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno())

    async def signalled() -> bytes:
        signal.raise_signal(signal.SIGUSR1)
        while True:
            await asyncio.sleep(0)
            with suppress(BlockingIOError):
                return hears.recv(1)

    async def closes() -> int:
        tells.close()
        return 7

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert run_async(signalled()) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(tells.fileno()) == tells.fileno()
        assert run_async(closes()) == 7
    finally:
        signal.signal(signal.SIGUSR1, before)
        assert signal.set_wakeup_fd(-1) == -1
        hears.close()


class MadeWithASignal(asyncio.SelectorEventLoop):
    """Sends a signal to its process while it is made."""

    made: list["MadeWithASignal"]
    number = signal.SIGINT

    def __init__(self) -> None:
        signal.raise_signal(self.number)
        super().__init__()
        self.made.append(self)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_loop_is_made_ends_the_run_and_leaves_nothing_open(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeWithASignal, "made", [], raising=False)
    monkeypatch.setattr(MadeWithASignal, "number", number)
    monkeypatch.setattr("asyncio.events.new_event_loop", MadeWithASignal)
    work = asyncio.sleep(0)
    with _ctrl_c(signal.default_int_handler), stopping_in_order():
        with pytest.raises(KeyboardInterrupt):
            run_async(work)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [loop.is_closed() for loop in MadeWithASignal.made] == [True]
    assert getcoroutinestate(work) == CORO_CLOSED, "else Python warns that it was never awaited"


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_a_signal_in_the_last_step_of_a_run_ends_it_and_not_the_next(ctrl_c: Any) -> None:
    """A web server that has stopped in order raises the signal that stopped it again, and ends."""

    async def ends() -> None:
        signal.raise_signal(signal.SIGTERM)

    with _ctrl_c(ctrl_c), stopping_in_order() as stop:
        with pytest.raises(KeyboardInterrupt):
            run_async(ends())
        assert stop.code == 128 + signal.SIGTERM
        assert run_async(asyncio.sleep(0, 7)) == 7


def test_the_loop_of_a_thread_is_closed_with_what_runs_in_it() -> None:
    ended: list[str] = []
    begun = threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    thread = LoopThread("test")
    hanging = thread.submit(hang())
    assert begun.wait(60)
    thread.close()
    assert thread.loop.is_closed()
    assert ended == ["cancelled"]
    assert hanging.cancelled()
    thread.close()
    assert not [one for one in threading.enumerate() if one.name == "test"]


def test_clients_that_are_closed_leave_no_open_loop(tmp_path: Path) -> None:
    servers = EnvironmentClient([])
    servers.close()
    assert servers._thread.loop.is_closed()
    judges = JudgeClient(JudgesSection(), folder=tmp_path)
    judges._submit(asyncio.sleep(0)).result(60)
    thread = judges._thread
    judges.close()
    assert thread is not None
    assert thread.loop.is_closed()
