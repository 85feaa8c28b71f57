"""The term ``remote``: rewards from a reward service, and transcripts of what its model was asked and answered.

    {"score": 0.5, …, "transcript": [
        {"asked": "Which colour?\nA) red\nB) blue\nC) can not answer", "answer": "A", "right": "B) blue", "paid": 0.0,
         "model": "reader", "prompt": "caption_qa/plain/1"}, …], "transcript_left_out": 0}

Texts and their number are bounded on both sides, and a remark says what is cut or left out. ``remote`` stores the
transcripts of a judgement under its episodes, and once more under the content by which the judgement is cached: episodes
that later get these scores from the cache get the transcripts from there.
"""

import base64
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Literal

import httpx

from sensorium.data.media_files import mime_type
from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.judgements import JudgeAnswer
from sensorium.rewards.reward_term import RewardContext, last_response
from sensorium.rewards.scorer import Scores, judgement_keys
from sensorium.runs.episodes import TranscriptLine
from sensorium.systems.caprl.terms import CaptionJudgement, ReaderAnswer, described, judge_instructions, questions_of
from sensorium.vocabulary.episode import Episode, Score
from sensorium.vocabulary.errors import RecipeError, RecordError, RewardFailure, TaskError, nearest
from sensorium.vocabulary.secrets import holds_key, masked
from sensorium.vocabulary.task import Task

MOST_ANSWERS = 64  # questions of one caption in a transcript
MOST_TEXT, MOST_OPTION, MOST_NAME = 2000, 200, 100  # characters of a text, of the right option, of a name
MOST_REPLY_TEXT = 4_000_000  # characters of all transcripts of a reply, in equal shares for its items
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ServiceAnswer:
    """One question to a service's model. ``right``: the right option, if there is one; ``paid``: the answer's score."""

    asked: str
    answer: str
    right: str
    paid: float
    model: str
    prompt: str

    def bounded(self) -> "ServiceAnswer":
        """With texts that can be written and shown: control characters by their codes, long texts cut."""
        most = {"asked": MOST_TEXT, "answer": MOST_TEXT, "right": MOST_OPTION, "model": MOST_NAME, "prompt": MOST_NAME}
        texts: dict[str, Any] = {name: _text(getattr(self, name), length) for name, length in most.items()}
        return replace(self, **texts)

    def line(self) -> TranscriptLine:
        """The stored line. Score and right option come first, so that a long answer cannot hide them."""
        right = f"; right: {self.right}" if self.right else ""
        return TranscriptLine(self.model, self.prompt, self.asked, f"paid {self.paid:.3g}{right}; answered: {self.answer}")


def _text(text: str, most: int) -> str:
    cut = text if len(text) <= most else f"{text[: most - 40]}… ({len(text) - most + 40} more characters)"
    shown = CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", cut)
    return shown.encode("utf-8", "backslashreplace").decode()


def reading_transcript(answers: Sequence[ReaderAnswer]) -> tuple[ServiceAnswer, ...]:
    """The questions with their options and a reader's answers, without those that were not answered."""
    found = []
    for one in answers:
        if isinstance(one.answer, JudgeAnswer):
            right = f"{one.draw.letter}) {one.draw.question.choices[one.draw.question.answer]}"
            score = float(one.right)
            found.append(ServiceAnswer(one.draw.text, one.answer.text, right, score, one.answer.model, one.request.prompt))
    return tuple(found)


def judgement_transcript(found: CaptionJudgement, kind: str) -> tuple[ServiceAnswer, ...]:
    """The question to a judge that sees the medium, and its answer."""
    asked = judge_instructions(kind).replace("{caption}", "(the caption)")
    return (ServiceAnswer(asked, found.answer.text, "", found.total, found.answer.model, found.request.prompt),)


def transcript_json(transcript: Sequence[ServiceAnswer], items: int) -> dict[str, Any]:
    """A transcript as the fields of a result, of bounded length; ``items`` share the length of the reply."""
    left, entries = MOST_REPLY_TEXT // items, []
    for one in transcript[:MOST_ANSWERS]:
        fields = asdict(one.bounded())
        left -= sum(len(text) for text in fields.values() if isinstance(text, str))
        if left < 0:
            break
        entries.append(fields)
    return {"transcript": entries, "transcript_left_out": len(transcript) - len(entries)}


def lines_of(result: Mapping[str, Any]) -> list[TranscriptLine]:
    """The lines of a result's transcript, which a server may have sent in any form; a line reports what is unreadable."""
    if "transcript" not in result:
        return []
    raw, left_out = result["transcript"], result.get("transcript_left_out", 0)
    lines = []
    try:
        for entry in raw[:MOST_ANSWERS]:
            score = float(entry["paid"])
            texts = {name: entry[name] for name in ("asked", "answer", "right", "model", "prompt")}
            if not isfinite(score) or not all(isinstance(text, str) for text in texts.values()):
                raise ValueError("an entry has texts and the finite number 'paid'")
            lines.append(ServiceAnswer(paid=score, **texts).bounded().line())
        left_out = min(int(left_out), 10**9) + len(raw) - len(lines)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        return [TranscriptLine("the server", "transcript", "", _text(f"(it cannot be read: {error!r})", MOST_OPTION))]
    if left_out > 0:
        lines.append(TranscriptLine("the server", "transcript", "", f"({left_out} more questions are not shown)"))
    return lines


KEY_VARIABLE = "SENSORIUM_SERVICE_KEY"
PROTOCOLS = ("sensorium", "caprl_qa", "caprl_vl_judge", "openrlhf")
MODES = ("qa", "vl_judge")
MOST_REST_S = 30.0  # before a server that was busy or away is asked again
WARN_EVERY_S = 60.0
MOST_REPLY = 64 << 20
MOST_PROBLEM = 1 << 20


class RemoteReward:
    """The term ``remote``. ``servers`` are addresses, with or without ``/get_reward``; the key comes from ``key_env``.

    The episodes of a group go in one request to the server with the fewest open requests. A busy server (503, 429) is
    asked again when it says; instead of one that fails another is asked. What was not judged is missing, never 0.
    ``reads`` names the list of a legacy reply to use: ``qa_rewards`` has no format reward in it, ``rewards`` has.
    """

    asks_service = True

    def __init__(
        self,
        servers: Sequence[str],
        protocol: Literal["sensorium", "caprl_qa", "caprl_vl_judge", "openrlhf"] = "sensorium",
        mode: Literal["qa", "vl_judge"] = "qa",
        reads: str = "",
        deadline_s: float = 600.0,
        key_env: str = KEY_VARIABLE,
        name: str = "remote",
        *,
        context: RewardContext | None = None,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise RecipeError(f"reward '{name}': there is no protocol '{protocol}'{nearest(protocol, list(PROTOCOLS))}")
        if mode not in MODES:
            raise RecipeError(f"reward '{name}': there is no mode '{mode}'{nearest(mode, list(MODES))}")
        given = [servers] if isinstance(servers, str) else list(servers) if isinstance(servers, list | tuple) else []
        if not given or not all(str(server).startswith(("http://", "https://")) for server in given):
            raise RecipeError(
                f"reward '{name}': servers are addresses such as http://127.0.0.1:18889, not {servers!r:.80}."
            )
        if any(map(holds_key, given)):
            raise RecipeError(
                f"reward '{name}': an address of servers has a user, a password or a query (?…). A key does not belong "
                f"into a recipe: leave it out and set the environment variable {key_env}."
            )
        lists = {"caprl_qa": "qa_rewards", "caprl_vl_judge": "judge_rewards"}
        self.name, self.protocol, self.mode, self.deadline_s = name, protocol, mode, deadline_s
        self.reads = reads or lists.get(protocol, "rewards")
        self._store, self._key_env = context.store if context is not None else MediaStore(), key_env
        self._servers = [server.rstrip("/").removesuffix("/get_reward") + "/get_reward" for server in given]
        self._open = dict.fromkeys(self._servers, 0)
        self._rests = dict.fromkeys(self._servers, 0.0)
        self._warned: dict[str, float] = {}
        judges = context.judges if context is not None and protocol == "sensorium" else None
        self._transcripts = judges.transcripts if judges is not None and judges.transcripts.path is not None else None
        self._identity = json.dumps([name, mode, self._servers])
        self._lock = threading.Lock()
        # No redirects: the key and the captions are for the servers that the recipe names.
        self._client = httpx.Client(follow_redirects=False, limits=httpx.Limits(max_keepalive_connections=0))

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Any]:
        """A score for each episode of a group; RewardFailure where none was judged."""
        reply = self._asked(self._body(task, [last_response(episode) for episode in episodes]))
        scores = self._read(reply, len(episodes))
        if self.protocol == "sensorium":
            self._store_transcripts(task, episodes, reply["results"])
        if all(score.missing for score in scores):
            raise RewardFailure(f"reward term '{self.name}': {scores[0].reason}")
        return scores

    def recall_judgement(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Scores]) -> None:
        """Copy the transcripts of cached scores to the episodes that have got these scores."""
        if self._transcripts is None:
            return
        for episode, judgement, given in zip(episodes, self._judgements(task, episodes), scores, strict=True):
            if not any(score.missing for score in given):
                self._transcripts.copy(judgement, episode.id, self.name)

    def _store_transcripts(self, task: Task, episodes: Sequence[Episode], results: Sequence[Mapping[str, Any]]) -> None:
        """Store the transcripts of a reply. If they cannot be written, scores count all the same; one line reports it."""
        if self._transcripts is None or not any("transcript" in result for result in results):
            return
        try:
            for episode, judgement, result in zip(episodes, self._judgements(task, episodes), results, strict=True):
                judged = result.get("score") is not None  # else a later judgement of the same content is the one to recall
                places = (episode.id, judgement) if judged else (episode.id,)
                self._transcripts.replace(places, self.name, lines_of(result))
        except RecordError as error:
            if "transcripts" not in self._warned:
                self._warned["transcripts"] = time.monotonic()
                print(f"reward term '{self.name}': transcripts are not kept: {error}", file=sys.stderr, flush=True)

    def _judgements(self, task: Task, episodes: Sequence[Episode]) -> list[str]:
        return [f"judgement {key}" for key in judgement_keys(self._identity, task, episodes).content]

    def _body(self, task: Task, captions: list[str]) -> dict[str, Any]:
        """The request, in the protocol."""
        if self.protocol == "caprl_qa":
            asked = [[question.block(), question.to_json()["answer"]] for question in questions_of(task)]
            return {"prompts": [[caption, asked] for caption in captions], "query": [], "labels": []}
        if self.protocol == "caprl_vl_judge":
            path = described(task).origin
            samples = [{"caption": caption, "video_path": path} for caption in captions]
            return {"score_mode": "vl_judge", "samples": samples}
        if self.protocol == "openrlhf":
            prompt = "\n".join(message.text for message in task.messages)
            label = task.metadata.get("questions", task.answer)
            return {
                "query": [prompt + caption for caption in captions],
                "prompts": [prompt] * len(captions),
                "labels": [label] * len(captions),
            }
        if self.mode == "qa":
            held: dict[str, Any] = {"questions": [question.to_json() for question in questions_of(task)]}
        else:
            media = described(task)
            data = self._store.shown_bytes(media)
            held = {media.kind: f"data:{mime_type(data[:64], media.kind)};base64,{base64.b64encode(data).decode()}"}
        wanted = {"transcripts": True} if self._transcripts is not None else {}
        return {"mode": self.mode, "items": [{"caption": caption, **held} for caption in captions], **wanted}

    def _read(self, reply: Any, count: int) -> list[Score]:
        if not isinstance(reply, Mapping):
            raise RewardFailure(f"reward term '{self.name}': the reply is no object: {reply!r:.80}")
        if self.protocol == "sensorium":
            found = reply.get("results")
            if not isinstance(found, list) or len(found) != count or not all(isinstance(one, Mapping) for one in found):
                raise RewardFailure(f"reward term '{self.name}': the reply has no {count} results: {reply!r:.120}")
            return [self._score(one.get("score"), str(one.get("reason") or "")) for one in found]
        values = reply.get(self.reads, reply.get("rewards"))
        if not isinstance(values, list) or len(values) != count:
            raise RewardFailure(f"reward term '{self.name}': the reply has no {count} {self.reads}: {reply!r:.120}")
        return [self._score(value, "") for value in values]

    def _score(self, value: Any, reason: str) -> Score:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return Score(self.name, float(value))
        return Score(self.name, None, reason=reason or f"the server sent {value!r:.40}")

    def _asked(self, body: Mapping[str, Any]) -> Any:
        """The reply of any server before the deadline; a request that one refuses (4xx) is not sent to another."""
        data, until, problem = json.dumps(body).encode(), time.monotonic() + self.deadline_s, "it was never asked"
        while time.monotonic() < until:
            server = self._next()
            if server is None:
                time.sleep(0.05)
                continue
            try:
                return self._call(server, data, until - time.monotonic())
            except httpx.HTTPStatusError as error:
                code, problem = error.response.status_code, self._masked(f"{server} answered {error}")
                if code < 500 and code not in (408, 429):
                    raise (TaskError if code in (400, 413, 422) else RewardFailure)(
                        f"reward term '{self.name}': {problem}"
                    ) from error
                self._rest(server, error.response.headers.get("Retry-After"))
                if code == 500:
                    raise RewardFailure(f"reward term '{self.name}': {problem}") from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RecursionError) as error:
                problem = self._masked(f"{server} gave no reply: {str(error) or type(error).__name__}")
                self._rest(server, None)
                now = time.monotonic()
                with self._lock:
                    warn = now >= self._warned.get(server, -WARN_EVERY_S) + WARN_EVERY_S
                    self._warned[server] = now if warn else self._warned[server]
                if warn:
                    print(
                        f"reward term '{self.name}': {problem}; asked again for up to "
                        f"{max(0, until - now):.0f} s. Is it running? (sensorium serve reward CHECKPOINT)",
                        file=sys.stderr,
                        flush=True,
                    )
            finally:
                with self._lock:
                    self._open[server] -= 1
        raise RewardFailure(
            f"reward term '{self.name}': no server answered within {self.deadline_s:g} s; the last: {problem}"
        )

    def _next(self) -> str | None:
        """The server with the fewest requests open among those that do not rest."""
        now = time.monotonic()
        with self._lock:
            ready = [server for server in self._servers if self._rests[server] <= now]
            if not ready:
                return None
            chosen = min(ready, key=lambda server: self._open[server])
            self._open[chosen] += 1
            return chosen

    def _rest(self, server: str, asked: Any) -> None:
        try:
            seconds = float(asked)
        except (TypeError, ValueError):
            seconds = 1.0
        with self._lock:
            self._rests[server] = time.monotonic() + min(MOST_REST_S, max(0.1, seconds))

    def _call(self, server: str, data: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := os.environ.get(self._key_env, ""):
            headers["Authorization"] = f"Bearer {key}"
        until = time.monotonic() + seconds
        with self._client.stream("POST", server, content=data, headers=headers, timeout=max(0.1, seconds)) as reply:
            if reply.is_success:
                return self._masked(json.loads(_body(reply, until, MOST_REPLY)))
            try:
                body = json.loads(_body(reply, until, MOST_PROBLEM))
                problem = str(body.get("error") or body.get("detail") or body)[:200]
            except (httpx.HTTPError, OSError, ValueError, AttributeError, RecursionError):
                problem = reply.reason_phrase
            raise httpx.HTTPStatusError(f"{reply.status_code}: {problem}", request=reply.request, response=reply)

    def _masked(self, value: Any) -> Any:
        """What a server sent, without the key, which must reach no score, transcript or error."""
        return masked(value, [os.environ.get(self._key_env, "")])


def _body(reply: httpx.Response, until: float, most: int) -> bytes:
    """A whole reply of bounded size and time: the client's timeout bounds each read alone."""
    body = bytearray()
    for part in reply.iter_raw():  # as it arrives: with a chunk size it would wait for whole chunks
        body += part
        if len(body) > most:
            raise ValueError(f"its reply has more than {most >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("its reply did not end in time")
    return bytes(body)
