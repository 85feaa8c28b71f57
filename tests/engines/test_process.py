"""The engine in another process writes what the native one writes, bit for bit, and its end is told."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.cluster.python_process import Channel
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.process_child import serve
from sensorium.engines.process_engine import ProcessEngine
from sensorium.engines.protocol import LiveEpisodes, Request, Sampling
from sensorium.models.load import load_policy
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, EngineLost, MediaError
from studies.fork_server import ForkServer

from ..forked import forked_python
from ..general_checkpoints import make_checkpoint
from ..models.clips import noise
from .conftest import Bench, ask, generate
from .test_in_flight import check_spans, spanning

SAMPLING = Sampling(max_new_tokens=8, temperature=1.1)


@pytest.fixture(scope="module")
def engine(benches: Any, fork_server: ForkServer) -> Iterator[ProcessEngine]:
    """One child of the family that sees and hears; tests leave it as they found it."""
    engine = ProcessEngine(benches("qwen2_5_omni").policy)
    with forked_python(fork_server):
        engine.start()
    child = engine._process
    yield engine
    engine.close()
    assert child is not None
    assert not child.alive


def talk(bench: Bench, engine: Any, turns: int = 2) -> list[Segment]:
    """Three episodes of some turns: two of one prompt with a picture, a video and a sound, one of text that stops early."""
    chat, live = bench.policy.chat, LiveEpisodes()
    question = user(bench.picture(1), bench.clip(2), bench.tone(3), "what?")

    async def episode(index: int) -> list[Segment]:
        segments: list[Segment] = []
        live.enter()
        try:
            for turn in range(turns):
                messages = [question if index < 2 else user("which?")]
                segments.append(chat.extend(messages, after=segments[-1]) if turn else chat.render(messages))
                sampling = SAMPLING if index < 2 else Sampling(max_new_tokens=20, top_k=50, stop=("e", "a"))
                name = f"e{index}/{turn}"
                request = Request(f"e{index}", tuple(segments), sampling, (0, index, turn), 100 * index + turn, name)
                segments.append((await engine.generate(request, live)).segment)
            return segments
        finally:
            engine.release(f"e{index}")
            live.leave()

    async def everyone() -> list[Segment]:
        return [segment for found in await asyncio.gather(*(episode(i) for i in range(3))) for segment in found]

    return asyncio.run(everyone())


def test_tokens_and_logprobs_are_those_of_the_native_engine(omni: Bench, engine: ProcessEngine) -> None:
    native = NativeEngine(omni.policy)
    assert talk(omni, engine) == talk(omni, native)
    assert engine.counters == native.counters, "the same was computed, and no more"
    assert replace(engine.capabilities, own_weights=False) == native.capabilities


@pytest.mark.parametrize("name", ["gemma3", "minicpmv4_6"])
def test_of_the_general_path_too(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """The second is computed with pictures of one size alone."""
    policy = load_policy(str(make_checkpoint(name, tmp_path / name)), store=MediaStore())
    prompts = [policy.chat.render([user(noise(policy.chat.store, seed, 56, 56), "what?")]) for seed in (1, 2)]
    requests = [ask(str(i), [prompts[i % 2]], SAMPLING, order=(i, 0, 0), key=i) for i in range(4)]
    engine = ProcessEngine(policy, max_rows=3)
    with forked_python(fork_server):
        engine.start()
    try:
        found = [response.segment for response in generate(engine, *requests)]
        assert found == [response.segment for response in generate(NativeEngine(policy, max_rows=3), *requests)]
        with torch.no_grad():
            policy.adapter.head.weight.mul_(1.5)
        policy.version = 1
        engine.update_weights(policy, 1)
        moved = [response.segment for response in generate(engine, *requests)]
        assert moved == [response.segment for response in generate(NativeEngine(policy, max_rows=3), *requests)]
        assert moved != found
    finally:
        engine.close()
    with pytest.raises(EngineError, match="keep_bytes"):
        ProcessEngine(policy, keep_bytes=1)


def test_open_responses_go_on_with_new_weights(omni: Bench, engine: ProcessEngine) -> None:
    check_spans(spanning(omni, engine, 0.05), omni.policy.version)


def test_it_follows_an_update_and_stamps_the_version(omni: Bench, engine: ProcessEngine) -> None:
    policy, native = omni.policy, NativeEngine(omni.policy)
    before = talk(omni, engine, 1)
    moved = policy.adapter.language_model.layers[0].mlp.down_proj.weight
    kept = moved.detach().clone()
    try:
        with torch.no_grad():
            moved.mul_(1.5)
        policy.version += 1
        for one in (engine, native):
            one.update_weights(policy, policy.version)
        after = talk(omni, engine, 1)
        assert after == talk(omni, native, 1)
        assert after != before
        assert {segment.policy_version for segment in after if segment.author == "model"} == {policy.version}
    finally:
        with torch.no_grad():
            moved.copy_(kept)
        policy.version -= 1
        engine.update_weights(policy, policy.version)
    assert talk(omni, engine, 1) == before


def test_requests_fail_alone_and_cancelled_ones_leave(omni: Bench, engine: ProcessEngine) -> None:
    chat = omni.policy.chat
    context = [chat.render([user("what?")])]
    broken = [chat.render([user(chat.store.put(b"no picture", "picture", "bad.png"), "what?")])]
    long = Sampling(max_new_tokens=300, stop_tokens=False)

    async def run() -> None:
        alone = (await engine.generate(ask("a", context, SAMPLING))).segment
        engine.release("a")
        wrong = asyncio.create_task(engine.generate(ask("b", broken, SAMPLING, order=(1,))))
        endless = asyncio.create_task(engine.generate(ask("c", context, long, order=(2,))))
        fine = asyncio.create_task(engine.generate(ask("a", context, SAMPLING)))
        with pytest.raises(MediaError, match=r"bad\.png"):
            await wrong
        assert (await fine).segment.tokens == alone.tokens
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert (await engine.generate(ask("c", context, SAMPLING, name="again"))).segment.tokens == alone.tokens
        twice = [engine.generate(ask("d", context, SAMPLING)) for _ in range(2)]
        first, second = await asyncio.gather(*twice, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, EngineError), "a thread has one response at a time"

    asyncio.run(run())
    engine.reset_cache()


def test_a_loop_that_ends_in_the_middle_leaves_an_engine_that_works(omni: Bench, engine: ProcessEngine) -> None:
    many = Sampling(max_new_tokens=200, stop_tokens=False)
    request = ask("a", [omni.policy.chat.render([user("what?")])], many)
    steps = engine.counters.decode_steps

    async def interrupted() -> None:
        task = asyncio.create_task(engine.generate(request))
        while engine.counters.decode_steps <= steps:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(interrupted())
    assert asyncio.run(engine.generate(request)).segment.tokens


def test_its_death_is_told_in_one_paragraph_and_close_ends_it(text: Bench) -> None:
    engine = ProcessEngine(text.policy)
    with pytest.raises(EngineLost, match=r"not started.*start\(\)"):
        asyncio.run(engine.generate(ask("a", [text.policy.chat.render([user("what?")])], SAMPLING)))
    engine.start()
    pid, folder = engine.pid, engine._folder
    assert pid is not None
    assert folder is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"engine process \(pid \d+\) was killed by SIGKILL.* Resume the run") as told:
        asyncio.run(engine.generate(ask("a", [text.policy.chat.render([user("what?")])], SAMPLING)))
    assert "\n" not in str(told.value)
    engine.close()
    engine.close()
    assert not folder.exists()


def test_a_start_that_takes_too_long_is_told(text: Bench) -> None:
    engine = ProcessEngine(text.policy, start_s=0.01)
    with pytest.raises(EngineLost, match=r"did not answer 'start' within 0\.01 s.*start_s"):
        engine.start()
    assert engine.pid is None


def test_a_child_whose_parent_died_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its side of the connection, in a thread: the folder goes when the parent hangs up, as at its death."""
    folder = tmp_path / "sensorium-engine-x"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    ended: list[BaseException] = []

    def child() -> None:
        try:
            serve(Channel(theirs))
        except EOFError as error:
            ended.append(error)

    thread = threading.Thread(target=child)
    thread.start()
    parent = Channel(ours)
    parent.send({"do": "start", "temporary": str(folder)})
    assert "error" in parent.receive(), "no model is described, so none is built"
    assert folder.exists()
    parent.close()
    thread.join()
    assert ended
    assert not folder.exists()
