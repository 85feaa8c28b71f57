"""Sessions act once for each step, whatever is asked again, and hold no more places than there are."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.services import sessions
from sensorium.services.application import sweep
from sensorium.services.sessions import Offer, Offers, Refusal, SessionTable, environment_offer, usual_offers
from sensorium.vocabulary.errors import RecipeError

from .running import ACTS, make_table


def played(test: Any, **options: Any) -> None:
    async def run() -> None:
        table = make_table(**options)
        try:
            await test(table)
        finally:
            await table.shut()

    ACTS.clear()
    asyncio.run(run())


async def refused(asked: Any) -> int:
    with pytest.raises(Refusal) as refusal:
        await asked
    return refusal.value.status


@pytest.mark.parametrize("environment", ["counting", "slow"])
def test_a_step_that_is_asked_again_replies_again_and_acts_once(environment: str) -> None:
    async def test(table: SessionTable) -> None:
        first = await table.open("a", environment, {}, 7)
        assert first["observation"][0]["content"] == [{"text": "seed 7"}]
        assert await table.open("a", environment, {}, 7) == first
        replies = await asyncio.gather(*(table.step("a", 1, "go") for _ in range(5)))
        assert all(reply == replies[0] for reply in replies)
        assert await table.step("a", 1, "something else") == replies[0]
        await table.step("a", 2, "go")
        assert dict(ACTS) == {(7, 1): 1, (7, 2): 1}
        assert [await refused(table.step("a", number, "go")) for number in (1, 4)] == [409, 409]
        assert await refused(table.open("a", environment, {}, 8)) == 409
        assert table.counts() | {"capacity": 0} == {
            "sessions": 1, "capacity": 0, "opened": 1, "steps": 2, "reaped": 0, "failed": 0,
        }  # fmt: skip

    played(test)


def test_who_stops_waiting_does_not_stop_the_act() -> None:
    async def test(table: SessionTable) -> None:
        await table.open("a", "slow", {}, 1)
        for _ in range(3):
            impatient = asyncio.create_task(table.step("a", 1, "go"))
            await asyncio.sleep(0)
            impatient.cancel()
        assert (await table.step("a", 1, "go"))["reward"] == {"act": 1.0}
        assert dict(ACTS) == {(1, 1): 1}

    played(test)


def test_an_ended_episode_takes_no_step_and_a_failed_one_gives_its_place_back() -> None:
    async def test(table: SessionTable) -> None:
        await table.open("a", "counting", {"turns": 1}, 1)
        last = await table.step("a", 1, "go")
        assert (last["done"], last["observation"]) == (True, None)
        assert await table.step("a", 1, "go") == last
        assert await refused(table.step("a", 2, "go")) == 410
        await table.close("a")
        await table.open("b", "counting", {}, 2)
        assert await refused(table.step("b", 1, "raise")) == 410
        assert await refused(table.step("b", 2, "go")) == 404
        assert (len(table.sessions), table.failed) == (0, 1)

    played(test, capacity=1)


def test_no_more_sessions_than_there_are_places() -> None:
    async def test(table: SessionTable) -> None:
        found = await asyncio.gather(*(table.open(f"{i}", "slow", {}, i) for i in range(20)), return_exceptions=True)
        full = [error for error in found if isinstance(error, Refusal)]
        assert (len(full), {error.status for error in full}) == (17, {503})
        assert all(error.retry_after_s > 0 for error in full)
        assert len(table.sessions) == 3
        await table.close("0")
        await table.close("0")
        await table.open("more", "slow", {}, 1)

    played(test, capacity=3)


def test_idle_sessions_are_closed_and_renewed_ones_are_not() -> None:
    async def test(table: SessionTable) -> None:
        await table.open("idle", "counting", {}, 1)
        await table.open("kept", "counting", {}, 2)
        table.sessions["idle"].used -= 100
        table.sessions["kept"].used -= 100
        table.renew("kept")
        assert (table.reap(), set(table.sessions)) == (1, {"kept"})
        assert await refused(table.step("idle", 1, "go")) == 404

    played(test, lease_s=50)


def test_a_client_chooses_among_what_is_offered_and_nothing_else() -> None:
    async def test(table: SessionTable) -> None:
        wishes: list[tuple[str, dict[str, Any], int]] = [
            ("countin", {}, 404),
            ("os:system", {}, 404),
            ("counting", {"turn": 1}, 422),
            ("closed", {"secret": 2}, 422),
            ("sokoban", {"size": "a"}, 422),
        ]
        for environment, options, status in wishes:
            assert await refused(table.open("x", environment, options, 1)) == status
        assert await refused(table.open("", "counting", {}, 1)) == 422
        await table.open("x", "closed", {"turns": 2}, 1)

    played(test)
    offered = set(usual_offers())
    assert {"frozen_lake", "sokoban", "countdown", "svg", "navigation"} <= offered
    assert (
        not {"gymnasium", "slime", "vagen", "openenv", "tools", "geo3k", "rows", "remote", "isolated", "ai2thor"} & offered
    )
    with pytest.raises(RecipeError, match="cannot be served"):
        Offers({"tools": Offer("tools")})
    with pytest.raises(RecipeError, match="offers no environment"):
        Offers({})


def test_an_environment_that_needs_what_clients_may_not_say_is_offered_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"needs 'id', which a client may not set.*taxi=FILE\.yaml"):
        Offers(dict([environment_offer("taxi=gymnasium")]))
    (tmp_path / "taxi.yaml").write_text("environment: gymnasium\noptions: {id: Taxi-v4, view: text}\n")
    offers = Offers(dict([environment_offer(f"taxi={tmp_path}/taxi.yaml"), environment_offer("sokoban")]))
    assert offers.chosen("taxi", {"max_turns": 3}) == ("gymnasium", {"id": "Taxi-v4", "view": "text", "max_turns": 3})
    with pytest.raises(RecipeError, match="is the server's own"):
        offers.chosen("taxi", {"id": "CliffWalking-v1"})
    for wrong in (f"taxi={tmp_path}/none.yaml", f"={tmp_path}/taxi.yaml"):
        with pytest.raises(RecipeError, match=r"cannot be read|NAME=FILE"):
            environment_offer(wrong)


def test_an_isolated_environment_that_crashes_fails_its_own_session_only() -> None:
    async def run() -> None:
        offers, store = Offers({"wild": Offer("tests.envs.test_isolated:Wild")}), MediaStore()
        table = SessionTable(offers, store, make=lambda name, options: offers.isolated(name, options, store, 4096, 60.0))
        await asyncio.gather(*(table.open(id, "wild", {}, 0) for id in "ab"))
        assert await refused(table.step("a", 1, "crash")) == 410
        assert (await table.step("b", 1, "fine"))["reward"] == 1.0
        assert (len(table.sessions), table.failed) == (1, 1)
        await table.shut()

    asyncio.run(run())


def test_old_pictures_are_swept(tmp_path: Path) -> None:
    for name, age in (("old", 1000), ("new", 0)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert sweep(tmp_path, 200) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["new"]
    assert sweep(None, 100) == 0


def test_who_was_killed_gives_its_places_up_to_who_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ABANDONED_S", 30.0)
    killed, other = object(), object()

    async def test(table: SessionTable) -> None:
        for id, asker in (("a", killed), ("b", killed), ("c", other)):
            await table.open(id, "counting", {}, 1)
            table.asked_by(asker, id, False)
        table.abandon(killed)
        assert await refused(table.open("d", "counting", {}, 2)) == 503  # it may come back
        for id in "ab":
            since = table.sessions[id].abandoned
            assert since is not None
            table.sessions[id].abandoned = since - 60
        await table.step("a", 1, "go")  # it came back
        await table.open("d", "counting", {}, 2)
        assert set(table.sessions) == {"a", "c", "d"}
        assert await refused(table.open("e", "counting", {}, 3)) == 503
        assert table.counts()["reaped"] == 1

    played(test, capacity=3)
