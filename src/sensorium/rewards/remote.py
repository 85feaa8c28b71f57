"""A reward from a service over HTTP: ``sensorium serve reward``, or whoever speaks CapRL's or OpenRLHF's protocol.

The episodes of a group go in one request to the server with the fewest requests open. A server that is busy (503, 429) is
asked again when it says; one that cannot be reached or fails is passed over for another. What a server did not judge is
missing, never 0.
"""

import base64
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from sensorium.media.mime import mime_type
from sensorium.media.store import MediaStore
from sensorium.rewards.answer import last_response
from sensorium.rewards.caption_judge import described
from sensorium.rewards.caption_qa import questions_of
from sensorium.rewards.context import RewardContext
from sensorium.rewards.judgements import Scores
from sensorium.rewards.service_transcripts import KeptTranscripts
from sensorium.vocabulary.caption_questions import CaptionQuestion
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError, nearest
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.secrets import holds_key, masked
from sensorium.vocabulary.task import Task

KEY_VARIABLE = "SENSORIUM_SERVICE_KEY"
PROTOCOLS = ("sensorium", "caprl_qa", "caprl_vl_judge", "openrlhf")
MODES = ("qa", "vl_judge")
MOST_REST_S = 30.0
TELL_S = 60.0
MOST_REPLY = 64 << 20


class RemoteReward:
    """The term ``remote``. ``servers`` are addresses, with or without ``/get_reward``; the key comes from ``key_env``.

    ``reads`` names the list of a legacy reply that is taken: ``qa_rewards`` has no format reward in it, ``rewards`` has.
    """

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
        usual = {"caprl_qa": "qa_rewards", "caprl_vl_judge": "judge_rewards"}
        self.name, self.protocol, self.mode, self.deadline_s = name, protocol, mode, deadline_s
        self.reads = reads or usual.get(protocol, "rewards")
        self._store, self._key_env = context.store if context is not None else MediaStore(), key_env
        self._servers = [server.rstrip("/").removesuffix("/get_reward") + "/get_reward" for server in given]
        self._open = dict.fromkeys(self._servers, 0)
        self._rests = dict.fromkeys(self._servers, 0.0)
        self._told: dict[str, float] = {}
        judges = context.judges if context is not None and protocol == "sensorium" else None
        identity = json.dumps([name, mode, self._servers])
        self._transcripts = KeptTranscripts(name, identity, judges.transcripts if judges is not None else None)
        self._lock = threading.Lock()

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Any]:
        """A score for each episode of a group; a server that judged none of them is no judge."""
        reply = self._asked(self._body(task, [last_response(episode) for episode in episodes]))
        scores = self._read(reply, len(episodes))
        if self.protocol == "sensorium":
            self._transcripts.keep(task, episodes, reply["results"])
        if all(score.missing for score in scores):
            raise RewardFailure(f"reward term '{self.name}': {scores[0].reason}")
        return scores

    def recall_judgement(self, task: Task, episodes: Sequence[Episode], scores: Sequence[Scores]) -> None:
        """Give episodes whose scores came from the cache the transcripts of these."""
        self._transcripts.recall(task, episodes, scores)

    def _body(self, task: Task, captions: list[str]) -> dict[str, Any]:
        """What is sent, in the protocol."""
        if self.protocol == "caprl_qa":
            asked = [[question.block(), _letter(question)] for question in questions_of(task)]
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
            held = {media.kind: self._data_url(media)}
        told = {"transcripts": True} if self._transcripts.wanted else {}
        return {"mode": self.mode, "items": [{"caption": caption, **held} for caption in captions], **told}

    def _data_url(self, media: Media) -> str:
        data = self._store.bytes_of(media)
        return f"data:{mime_type(data[:64], media.kind)};base64,{base64.b64encode(data).decode()}"

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
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return (
            Score(self.name, float(value))
            if good
            else Score(self.name, None, reason=reason or f"the server said {value!r:.40}")
        )

    def _asked(self, body: Mapping[str, Any]) -> Any:
        """The reply of some server, before the deadline; what a server refuses (4xx) is not asked of another."""
        data, until, problem = json.dumps(body).encode(), time.monotonic() + self.deadline_s, "it was never asked"
        while time.monotonic() < until:
            server = self._next()
            if server is None:
                time.sleep(0.05)
                continue
            try:
                return self._call(server, data, until - time.monotonic())
            except HTTPError as error:
                problem = self._masked(f"{server} answered {error.code}: {_said(error)}")
                if error.code < 500 and error.code not in (408, 429):
                    raise (TaskError if error.code in (400, 413, 422) else RewardFailure)(
                        f"reward term '{self.name}': {problem}"
                    ) from error
                self._rest(server, error.headers.get("Retry-After"))
                if error.code == 500:
                    raise RewardFailure(f"reward term '{self.name}': {problem}") from error
            except (URLError, OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                problem = self._masked(f"{server} gave no reply: {getattr(error, 'reason', None) or error}")
                self._rest(server, None)
                self._tell(server, problem, until - time.monotonic())
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

    def _tell(self, server: str, problem: str, left_s: float) -> None:
        """Say that a server is away, once a minute: a run that waits for it must not do so in silence."""
        now = time.monotonic()
        with self._lock:
            if now < self._told.get(server, -TELL_S) + TELL_S:
                return
            self._told[server] = now
        print(
            f"reward term '{self.name}': {problem}; asked again for up to {max(0, left_s):.0f} s. Is it running? "
            "(sensorium serve reward CHECKPOINT)",
            file=sys.stderr,
            flush=True,
        )

    def _call(self, server: str, data: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._key_env, ""):
            headers["Authorization"] = f"Bearer {key}"
        until = time.monotonic() + seconds
        with OPENER.open(Request(server, data, headers), timeout=max(0.1, seconds)) as reply:
            return self._masked(json.loads(_body(reply, until)))

    def _masked(self, value: Any) -> Any:
        """What a server sent, without the key: it reaches no score, transcript or error."""
        return masked(value, [os.environ.get(self._key_env, "")])


class NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: the key and the captions are for the servers that the recipe names."""

    def redirect_request(self, *_: Any) -> None:
        """None: the redirect is an answer, and no good one."""


OPENER = build_opener(NoRedirect)


def _body(reply: Any, until: float) -> bytes:
    """All of a reply, if it comes before a moment and is not too large: the socket's timeout bounds each read alone."""
    body = bytearray()
    while part := reply.read1(1 << 16):
        body += part
        if len(body) > MOST_REPLY:
            raise ValueError(f"its reply has more than {MOST_REPLY >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("its reply did not end in time")
    if reply.length:
        raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body)


def _letter(question: CaptionQuestion) -> str:
    return str(question.to_json()["answer"])


def _said(error: HTTPError) -> str:
    try:
        body = json.loads(error.read(4096))
        return str(body.get("error") or body.get("detail") or body)[:200]
    except (ValueError, OSError, AttributeError):
        return str(error.reason)
