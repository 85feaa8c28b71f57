"""The reward service (POST /get_reward, GET /health, /metrics). A request's protocol is recognised by its shape:

    CapRL qa         {"prompts": [[caption, [[question_block, "B"], …]], …], "query": [], "labels": []}
    CapRL vl_judge   {"score_mode": "vl_judge", "samples": [{"caption", "video_path"}]}
    OpenRLHF         {"query": [prompt + response], "prompts": [prompt], "labels": [questions, or {"video_path"}]}
    Sensorium        {"items": [{"caption", "questions" or "picture" or "video"}], "mode": "qa"}

The first three are answered with lists of numbers, which cannot express that an item was not judged: such a request fails
as a whole (``error``, with 400 if only the request is at fault, else 500). What was judged is cached, so that a second try
asks for the rest only. With the setting ``missing`` that number is sent instead, and counted. Our own protocol has null and
a reason for each item, and with ``"transcripts": true`` the questions and answers about it (``remote.py``).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from sensorium import __version__
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import Place
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.terms import timestamp_format
from sensorium.services.application import BodyLimit, Counters, Json, Refusal, make_application, sweeping, until_gone
from sensorium.systems.caprl.caption_rows import CaptionQuestion, question_of, question_of_block
from sensorium.systems.caprl.remote import ServiceAnswer, judgement_transcript, reading_transcript, transcript_json
from sensorium.systems.caprl.terms import Reading, as_judged, judge_caption, read_caption, share_right
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import JudgeFailure, MediaError, SensoriumError, TaskError

Mode = Literal["qa", "vl_judge"]
Protocol = Literal["sensorium", "caprl_qa", "caprl_vl_judge", "openrlhf"]
ASSISTANT = "<|im_start|>assistant\n"
ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
MOST_ITEMS = 4096
MOST_QUESTIONS = 1024  # of one caption: each may be a call of a reader, and more would keep other clients waiting
STATUSES = {
    400: "the body has no known form, or an item cannot be judged as it was sent; the reason is in 'error'",
    401: "the key is missing or wrong",
    413: "the body is too large",
    500: "a reader or judge did not answer; the reason is in 'error'",
    503: "the server is busy, try again after Retry-After seconds; or the client is gone",
}
RETRY_AFTER_S = 1.0
KEPT_S = 3600.0
FILE = "file://"


@dataclass(frozen=True)
class CaptionItem:
    """A caption to judge by questions, or beside its picture or video. ``problem``: why it cannot be judged."""

    caption: str
    questions: tuple[CaptionQuestion, ...] = ()
    picture: str = ""
    video: str = ""
    problem: str = ""


@dataclass(frozen=True)
class CaptionScore:
    """An item's value with its parts, or None and the reason; ``refused``: the request is at fault."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    transcript: tuple[ServiceAnswer, ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class RewardRequest:
    """A request as the service works on it, and the protocol in which it is answered."""

    protocol: Protocol
    mode: Mode
    items: tuple[CaptionItem, ...]
    transcripts: bool = False


def request_of(body: Any, default: Mode) -> RewardRequest:
    """A request by its shape; Refusal if it has none of the four. ``default`` is the mode where it names none."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is an object; docs/guides/services.md has the four forms.")
    mode = body.get("score_mode", body.get("mode")) or default
    if mode not in ("qa", "vl_judge"):
        raise Refusal(400, f"there is no score_mode {mode!r:.40}; there are qa and vl_judge.")
    if "items" in body:
        transcripts = body.get("transcripts", False)
        if not isinstance(transcripts, bool):
            raise Refusal(400, f"'transcripts' is true or false, not {transcripts!r:.40}.")
        items = tuple(_own(raw, mode) for raw in _listed(body["items"], "items"))
        return RewardRequest("sensorium", mode, items, transcripts)
    if "samples" in body:
        samples = tuple(_own(raw, "vl_judge") for raw in _listed(body["samples"], "samples"))
        return RewardRequest("caprl_vl_judge", "vl_judge", samples)
    if not any(name in body for name in ("prompts", "query", "labels")):
        held = ", ".join(map(str, body))[:80] or "nothing"
        raise Refusal(400, f"the body has none of items, samples, prompts and query; it has {held}.")
    prompts = _listed(body.get("prompts", []), "prompts")
    if any(isinstance(prompt, Sequence) and not isinstance(prompt, str) for prompt in prompts):
        return RewardRequest("caprl_qa", "qa", tuple(map(_pair, prompts)))
    query, labels = _listed(body.get("query", []), "query"), _listed(body.get("labels", []), "labels")
    if not (len(query) == len(prompts) == len(labels)):
        counts = f"{len(query)} query, {len(prompts)} prompts and {len(labels)} labels"
        raise Refusal(400, f"OpenRLHF's form has as many of each: these are {counts}.")
    rows = zip(query, prompts, labels, strict=True)
    return RewardRequest("openrlhf", mode, tuple(_openrlhf(*row, mode) for row in rows))


def reply_of(request: RewardRequest, scores: Sequence[CaptionScore], format_weight: float, missing: float | None) -> Json:
    """The scores in the request's protocol. Refusal (400 or 500) where it cannot report a missing one."""
    if request.protocol == "sensorium":
        results = []
        for score in scores:
            transcript = transcript_json(score.transcript, len(scores)) if request.transcripts else {}
            results.append({"score": score.value, "parts": dict(score.parts), "reason": score.reason, **transcript})
        return {"results": results}
    if not scores:
        return {"rewards": []}
    lost = [(place, score) for place, score in enumerate(scores) if score.value is None]
    if lost and missing is None:
        reasons = "; ".join(f"item {place}: {score.reason}" for place, score in lost[:3])
        status = 400 if all(score.refused for _, score in lost) else 500
        raise Refusal(status, f"{len(lost)} of {len(scores)} items were not judged, which is no score of 0: {reasons}")
    values = [missing if score.value is None else score.value for score in scores]
    if request.protocol == "caprl_vl_judge":
        return {"rewards": values, "judge_rewards": values}
    rewards, formats = values, {}
    if format_weight:
        format_rewards = [timestamp_format(item.caption) for item in request.items]
        pairs = zip(values, format_rewards, strict=True)
        rewards = [None if value is None else value + format_weight * reward for value, reward in pairs]
        formats = {"format_rewards": format_rewards}
    if request.protocol == "caprl_qa":
        return {"rewards": rewards, "qa_rewards": values, **formats}
    judged = [set(score.parts) for score in scores if score.value is not None]
    names = sorted(set.intersection(*judged)) if judged else []  # a part that an item does not have is no 0
    logs = {name: [missing if score.value is None else float(score.parts[name]) for score in scores] for name in names}
    return {"rewards": rewards, "scores": values, "extra_logs": {**logs, f"{request.mode}_rewards": values, **formats}}


def _listed(raw: Any, name: str) -> list[Any]:
    if not isinstance(raw, list):
        raise Refusal(400, f"'{name}' is a list.")
    if len(raw) > MOST_ITEMS:
        raise Refusal(413, f"'{name}' has {len(raw)} entries; send at most {MOST_ITEMS} at once.")
    return raw


def _pair(raw: Any) -> CaptionItem:
    """``[caption, [[question_block, letter], …]]``."""
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str) or not isinstance(raw[1], list):
        return CaptionItem("", problem=f"an entry of prompts is [caption, [[question, letter], …]], not {raw!r:.80}")
    return _asked(raw[0], raw[1], blocks=True)


def _own(raw: Any, mode: Mode) -> CaptionItem:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("caption"), str):
        return CaptionItem("", problem=f"an item is an object with a 'caption', not {raw!r:.80}")
    return _labelled(raw["caption"], raw, mode)


def _openrlhf(query: Any, prompt: Any, label: Any, mode: Mode) -> CaptionItem:
    if not isinstance(query, str) or not isinstance(prompt, str):
        return CaptionItem("", problem="query and prompts are lists of texts")
    caption = response_in(query, prompt)
    if caption is None:
        return CaptionItem("", problem="the query does not begin with its prompt, and has no assistant's turn to cut at")
    return _labelled(caption, label, mode)


def response_in(query: str, prompt: str) -> str | None:
    """The response in a query, which is prompt and response decoded with special tokens; None if it is not found.

    Where the prompt's placeholders were expanded, the query does not begin with the prompt. Then the response follows as
    many assistant turns as the prompt has; it cannot add to these.
    """
    if query.startswith(prompt):
        found = query[len(prompt) :]
    else:
        turns = prompt.count(ASSISTANT)
        parts = query.split(ASSISTANT, turns)
        if not turns or len(parts) <= turns:
            return None
        found = parts[-1]
    changed = True
    while changed:
        found, before = found.rstrip(), found
        for end in ENDS:
            found = found.removesuffix(end)
        changed = found != before
    return found


def _labelled(caption: str, label: Any, mode: Mode) -> CaptionItem:
    """A caption with its label: a list of questions, or an object with them or with a picture or video."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            label = {"video_path": label} if mode == "vl_judge" else None
    held = {"questions": label} if isinstance(label, list) else label
    if not isinstance(held, Mapping):
        return CaptionItem(caption, problem=f"its label says nothing to judge it by: {label!r:.80}")
    if mode == "vl_judge":
        video, picture = held.get("video_path", held.get("video")), held.get("image_path", held.get("picture"))
        if isinstance(video, str) and video:
            return CaptionItem(caption, video=video)
        if isinstance(picture, str) and picture:
            return CaptionItem(caption, picture=picture)
        return CaptionItem(caption, problem="it has neither a video nor a picture, and is not judged without")
    questions = held.get("questions", held.get("ground_truth"))
    if not isinstance(questions, list):
        return CaptionItem(caption, problem="it has no questions")
    return _asked(caption, questions)


def _asked(caption: str, questions: Sequence[Any], blocks: bool = False) -> CaptionItem:
    """An item with questions. ``blocks``: each is [text with its options, letter]; else it may also be an object."""
    if len(questions) > MOST_QUESTIONS:
        return CaptionItem(caption, problem=f"it has {len(questions)} questions; a caption has at most {MOST_QUESTIONS}")
    found = []
    for raw in questions:
        try:
            if not blocks and not isinstance(raw, list):
                found.append(question_of(raw))
            elif isinstance(raw, list) and len(raw) == 2:
                found.append(question_of_block(*raw))
            else:
                raise ValueError(f"a question is [text with its options, letter], not {raw!r:.80}")
        except ValueError as error:
            return CaptionItem(caption, problem=str(error))
    return CaptionItem(caption, tuple(found)) if found else CaptionItem(caption, problem="it has no questions")


@dataclass(frozen=True)
class RewardSettings:
    """How captions are judged. ``missing``: the number sent for "not judged"; None: the request fails.

    At most ``capacity`` items are judged at once; media files are read from ``roots`` alone.
    """

    reading: Reading
    mode: Mode = "qa"
    format_weight: float = 0.2
    missing: float | None = None
    capacity: int = 4096
    roots: tuple[Path, ...] = ()


class RewardService:
    """Judges items independently: one that cannot be judged costs no other its score."""

    def __init__(self, settings: RewardSettings, client: JudgeClient, store: MediaStore) -> None:
        self.settings, self.client, self.store = settings, client, store
        self.open = 0
        self.workers: Callable[[], list[Json]] = list
        self.counters = Counters("sensorium_reward")
        self.counters.declare(
            requests="requests taken",
            refused="requests refused because the server was busy",
            items="captions that were asked about",
            judged="captions that were judged",
            missing="captions that could not be judged",
            missing_replaced="missing judgements for which a number was sent (--missing-as)",
            withdrawn="requests whose client went away",
        )
        self.counters.measure("open", "captions under way", lambda: self.open)
        self.counters.measure("capacity", "captions that may be under way", lambda: self.settings.capacity)
        self.counters.measure("workers_alive", "worker processes that run", lambda: sum(w["alive"] for w in self.workers()))
        self.counters.measure(
            "worker_restarts", "times that a worker was started again", lambda: sum(w["restarts"] for w in self.workers())
        )

    async def answer(self, body: Any) -> Json:
        """The reply to a request."""
        request = request_of(body, self.settings.mode)
        count = len(request.items)
        if self.open and self.open + count > self.settings.capacity:
            self.counters.add("refused")
            raise Refusal(503, f"{self.open} of {self.settings.capacity} captions are being judged.", RETRY_AFTER_S)
        self.counters.add("requests")
        self.open += count
        try:
            scores = list(await asyncio.gather(*(self.score(request, item) for item in request.items)))
        finally:
            self.open -= count
        if request.protocol != "sensorium" and self.settings.missing is not None:
            self.counters.add("missing_replaced", sum(score.value is None for score in scores))
        return reply_of(request, scores, self.settings.format_weight, self.settings.missing)

    async def score(self, request: RewardRequest, item: CaptionItem) -> CaptionScore:
        """One item's score, or the reason why it has none."""
        self.counters.add("items")
        try:
            if item.problem:
                raise TaskError(item.problem)
            found = await (self._judge(item) if request.mode == "vl_judge" else self._read(item))
        except SensoriumError as error:
            self.counters.add("missing")
            return CaptionScore(None, reason=str(error), refused=isinstance(error, TaskError | MediaError))
        self.counters.add("missing" if found.value is None else "judged")
        return found

    async def _read(self, item: CaptionItem) -> CaptionScore:
        answers = await read_caption(self.client, self.settings.reading, item.caption, item.questions)
        transcript = reading_transcript(answers)
        try:
            share = share_right(answers)
        except JudgeFailure as failure:
            return CaptionScore(None, reason=str(failure), transcript=transcript)
        return CaptionScore(share, {"qa": share}, transcript=transcript)

    async def _judge(self, item: CaptionItem) -> CaptionScore:
        media = await asyncio.to_thread(self._media, item)
        model = self.settings.reading.model
        found = await judge_caption(self.client, model, item.caption, media, {"temperature": 0.0, "max_tokens": 512})
        return CaptionScore(found.total, found.scores, transcript=judgement_transcript(found, media.kind))

    def _media(self, item: CaptionItem) -> Media:
        place = Place("item", Path("/"), self.store, roots=self.settings.roots, service=True)
        if item.video:
            return as_judged(place.clip("video", item.video.removeprefix(FILE), "video"))
        return place.picture(item.picture.removeprefix(FILE), "picture")


def make_reward_app(
    service: RewardService,
    key: str = "",
    most_body: int = 64 << 20,
    around: Callable[[], Any] | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """The service. Every request but /health needs ``key``. ``around`` runs as long as the service.

    ``hosts`` are further host names that clients may use.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with sweeping(service.store, KEPT_S):
            if around is None:
                yield
            else:
                async with around():
                    yield
        await asyncio.to_thread(service.client.close)

    app, declared = make_application(
        "Sensorium reward service", key, lifespan, STATUSES, lambda status, why: {"error": why}, hosts
    )
    app.add_middleware(BodyLimit, most=most_body)

    @app.get("/health")
    async def health() -> Json:
        workers = service.workers()
        status = "ok" if all(worker["ready"] for worker in workers) else "degraded"
        mode = service.settings.mode
        return {"status": status, "version": __version__, "mode": mode, "open": service.open, "workers": workers}

    @app.get("/metrics", response_class=PlainTextResponse, **declared)
    async def metrics() -> PlainTextResponse:
        return service.counters.page()

    @app.post("/get_reward", response_model=dict[str, Any], **declared)
    async def get_reward(request: Request, body: Annotated[dict[str, Any], Body()]) -> Any:
        asked, gone = asyncio.ensure_future(service.answer(body)), asyncio.ensure_future(until_gone(request))
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if asked.done():
            return JSONResponse(asked.result())
        asked.cancel()  # judgements under way go on and are cached
        service.counters.add("withdrawn")
        raise Refusal(503, "the client is gone")

    return app
