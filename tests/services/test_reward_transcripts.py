"""What a reward service's reader was asked and answered goes with the scores of ``remote``, into the run and its report."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import JudgesSection
from sensorium.report.album import Album
from sensorium.report.cards import LoggedGroup, group_card
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.reward_term import RewardContext
from sensorium.rewards.scorer import Scorer
from sensorium.runs.episodes import TRANSCRIPTS, read_transcripts
from sensorium.runs.ledger import Ledger
from sensorium.systems.caprl.remote import MOST_REPLY, RemoteReward, ServiceAnswer, transcript_json
from sensorium.vocabulary.content import user
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.task import Task

from ..rewards import conftest as episodes
from ..rewards.judges.test_hostile_endpoints import JSON, raw_server, replying
from . import test_reward_service, text_reader
from .test_reward_service import BAD, BLOCK, GOOD, ROW, make_service, serving

episode_of = episodes.episode_of
reader = test_reward_service.reader
HOSTILE = {**ROW, "question": "<script>alert(1)</script>Which colour?"}
ENTRY = {"asked": "Which?", "answer": "A", "right": "B) red", "paid": 0.0, "model": "m", "prompt": "p/1"}


@contextmanager
def scoring(url: str, folder: Path) -> Iterator[Scorer]:
    """A scorer with ``remote`` as a run in a folder has it, on the folder's ledger."""
    client, ledger = JudgeClient(JudgesSection(), MediaStore(), folder), Ledger(folder / "ledger.sqlite")
    term = RemoteReward([url], deadline_s=60, context=RewardContext(MediaStore(), client))
    scorer = Scorer([(term, 1.0)], deadline_s=60, retries=0, judgements=ledger)
    try:
        yield scorer
    finally:
        scorer.close()
        client.close()
        ledger.close()


def group_of(name: str, episode_of: Any, *captions: str, questions: Any = (HOSTILE,)) -> Group:
    task = Task("t", (user("Describe."),), metadata={"questions": list(questions)})
    return Group(name, task, tuple(replace(episode_of(c), id=f"{name}/{i}") for i, c in enumerate(captions)))


def kept(folder: Path, episode: str) -> list[dict[str, Any]]:
    return read_transcripts(folder / TRANSCRIPTS, episode)


def test_the_service_tells_what_was_asked_and_answered_where_it_is_asked_to(reader: str, tmp_path: Path) -> None:
    service = make_service(tmp_path, reader, draws=0, format_weight=0.0)
    long = {**ROW, "question": f"Which colour? {'x' * 5000}"}
    body = {"items": [{"caption": GOOD, "questions": [ROW]}, {"caption": BAD, "questions": [ROW]}, {"caption": GOOD}]}
    with serving(service) as http:

        def asked(**body: Any) -> Any:
            return http.post("/get_reward", json=body).json()

        plain, told = asked(**body)["results"], asked(**body, transcripts=True)["results"]
        assert [list(result) for result in plain] == [["score", "parts", "reason"]] * 3
        assert [{name: result[name] for name in plain[0]} for result in told] == plain
        (right,), (wrong,), nothing = (result["transcript"] for result in told)
        lines = right["asked"].split("\n")
        assert lines[0] == ROW["question"]
        assert sorted(line[3:] for line in lines[1:]) == ["blue", "can not answer", "green", "red", "yellow"]
        assert (right["right"], right["paid"], right["answer"]) == (f"{right['answer']}) red", 1.0, right["right"][0])
        assert (wrong["paid"], f"{wrong['answer']}) blue" in wrong["asked"]) == (0.0, True)
        assert wrong["right"].endswith(") red")
        assert (right["model"], right["prompt"], nothing) == ("reader", "caption_qa/plain/1", [])
        (cut,) = asked(items=[{"caption": GOOD, "questions": [long]}], transcripts=True)["results"]
        assert len(cut["transcript"][0]["asked"]) <= 2000
        assert "more characters" in cut["transcript"][0]["asked"]
        legacy = {"prompts": [[GOOD, [[BLOCK, "B"]]]], "query": [], "labels": []}
        assert asked(**legacy, transcripts=True) == asked(**legacy) == {"rewards": [1.0], "qa_rewards": [1.0]}
        assert http.post("/get_reward", json={**body, "transcripts": "yes"}).status_code == 400


def test_every_episode_has_its_transcript_also_from_the_cache_and_the_report_shows_it(
    reader: str, tmp_path: Path, episode_of: Any
) -> None:
    service = make_service(tmp_path, reader, draws=1)
    found = []
    with serving(service) as http:
        for names in (("a", "b"), ("c",)):  # the second scorer is a resumed run's
            with scoring(str(http.base_url), tmp_path) as scorer:

                async def scored(scorer: Scorer = scorer, names: tuple[str, ...] = names) -> list[Group]:
                    groups = [group_of(name, episode_of, GOOD, BAD, GOOD) for name in names]
                    together = await asyncio.gather(*map(scorer.score_group, groups))
                    return [*together, await scorer.score_group(replace(groups[0], id="late"))]

                found += asyncio.run(scored())
        assert service.counters["requests"] == 1
    assert [[episode.reward for episode in group.episodes] for group in found] == [[1.0, 0.0, 1.0]] * 5
    for name in ("a", "b", "c"):
        right, wrong, again = (kept(tmp_path, f"{name}/{i}") for i in range(3))
        assert right == again == kept(tmp_path, "a/0")
        assert right[0]["answer"].startswith("paid 1; right: ")
        assert ") red; answered: " in wrong[0]["answer"]
        assert wrong[0]["messages"][0]["content"][0]["text"].startswith("<script>alert(1)</script>Which colour?\nA) ")
    store = MediaStore(tmp_path / "media")
    with closing(Decoder(store)) as decoder:
        card = group_card(LoggedGroup(1, found[-1]), Album(store, 1 << 20, decoder))
    assert "<script" not in card
    assert "&lt;script&gt;alert(1)&lt;/script&gt;Which colour?" in card
    assert "paid 0; right: " in card


class Forgetful(text_reader.Reader):
    """Refuses questions about when."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        if "When" in asked:
            return self.reply(400, {"error": {"message": "no time"}})
        choice = {"index": 0, "message": {"role": "assistant", "content": text_reader.read(asked)}, "finish_reason": "stop"}
        self.reply(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def test_a_caption_of_which_a_question_is_unanswered_keeps_what_was_answered(tmp_path: Path, episode_of: Any) -> None:
    server = text_reader.Server(("127.0.0.1", 0), Forgetful)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service = make_service(tmp_path, f"http://127.0.0.1:{server.server_address[1]}/v1", draws=0, format_weight=0.0)
    group = group_of("g", episode_of, GOOD, questions=(ROW, {**ROW, "question": "When?"}))
    with serving(service) as http, scoring(str(http.base_url), tmp_path) as scorer:
        (episode,) = asyncio.run(scorer.score_group(group)).episodes
    server.shutdown()
    assert episode.reward is None
    assert "1 of 2 questions were not answered" in episode.scores[0].reason
    (answered,) = kept(tmp_path, "g/0")
    assert answered["answer"].startswith("paid 1; right: ")
    assert (service.counters["missing"], service.counters["judged"]) == (1, 0)


def test_the_transcripts_of_a_large_request_stay_below_what_a_client_reads() -> None:
    answers = [ServiceAnswer("q" * 2000, "a" * 2000, "B) red", 0.0, "m", "p/1")] * 8
    many = transcript_json(answers * 9, 1)
    assert (len(many["transcript"]), many["transcript_left_out"]) == (64, 8)
    told = transcript_json(answers, 400)
    assert (len(told["transcript"]), told["transcript_left_out"]) == (2, 6)
    assert len(json.dumps(told)) * 400 < MOST_REPLY


def test_a_server_that_sends_no_transcript_or_no_good_one_is_paid_by_as_before(tmp_path: Path, episode_of: Any) -> None:
    strange: list[Any] = [
        None,
        "x",
        {"asked": 1},
        [1],
        [{**ENTRY, "paid": "much"}],
        [{**ENTRY, "answer": None}],
        [{**ENTRY, "answer": "\0\ud800", "right": "r" * 10**4}] * 99,
    ]
    cases = [{}, *({"transcript": one, "transcript_left_out": 10**20} for one in strange)]
    for place, told in enumerate(cases):
        folder = tmp_path / str(place)
        folder.mkdir()
        body = json.dumps({"results": [{"score": 0.5, "parts": {}, "reason": "", **told}]}).encode()
        with raw_server(replying(body, JSON)) as (url, _), scoring(url, folder) as scorer:
            scored = asyncio.run(scorer.score_group(group_of("g", episode_of, GOOD)))
        assert scored.episodes[0].reward == 0.5
        assert (folder / TRANSCRIPTS).exists() == bool(told)
        if told:
            assert sum(len(row["answer"]) for row in kept(folder, "g/0")) < 64 * 2500
            assert ("cannot be read" in kept(folder, "g/0")[0]["answer"]) == (place < len(strange))
    assert kept(folder, "g/0")[0]["answer"].endswith("; answered: \\x00\\ud800")
    assert "1000000035 more questions" in kept(folder, "g/0")[-1]["answer"]
