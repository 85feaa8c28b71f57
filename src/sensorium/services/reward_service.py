"""The reward service: captions are judged by how well questions are answered from them, or by a model that sees.

    POST /get_reward   CapRL's and OpenRLHF's protocols and our own, by shape (``reward_protocols``)
    GET  /health, /metrics

Judgements are made through the client of judges: endpoints in rotation, cached by content, each made once. Statuses: 400 a
body of no known form, or an item that cannot be judged as it was sent; 401 no key, 413 too large, 500 a reader did not
answer (``error``), 503 busy (with Retry-After).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from sensorium import __version__
from sensorium.judges.client import JudgeClient
from sensorium.media.store import MediaStore
from sensorium.rewards.caption_judge import as_judged, judge_caption
from sensorium.rewards.caption_qa import Reading, read_caption, share_right
from sensorium.rewards.service_transcripts import judgement_transcript, reading_transcript
from sensorium.services.application import BodyLimit, Counters, Json, Refusal, make_application, until_gone
from sensorium.services.kept_media import sweeping
from sensorium.services.reward_protocols import CaptionItem, CaptionScore, Mode, RewardRequest, reply_of, request_of
from sensorium.tasks.message_parsing import Place
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import JudgeFailure, MediaError, SensoriumError, TaskError

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
class RewardSettings:
    """How captions are judged, and what replies hold. ``missing``: the number that stands for "not judged", if any does.

    ``capacity`` items are under way at most; media files may lie in ``roots`` alone.
    """

    reading: Reading
    mode: Mode = "qa"
    format_weight: float = 0.2
    missing: float | None = None
    capacity: int = 4096
    roots: tuple[Path, ...] = ()


class RewardService:
    """Judges items, each by itself: one that cannot be judged costs no other its score."""

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
        self.counters.measure("worker_restarts", "times that a worker was started again", self._restarts)

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
        """One item's score, or why it has none."""
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

    def _restarts(self) -> float:
        return sum(worker["restarts"] for worker in self.workers())


def make_reward_app(
    service: RewardService,
    key: str = "",
    most_body: int = 64 << 20,
    around: Callable[[], Any] | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """The service. ``key`` must come with every request but /health. ``around`` runs as long as the service does.

    ``hosts`` are further names by which clients ask.
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
        alive = all(worker["ready"] for worker in workers)
        mode = service.settings.mode
        return {
            "status": "ok" if alive else "degraded",
            "version": __version__,
            "mode": mode,
            "open": service.open,
            "workers": workers,
        }

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
        asked.cancel()  # what is being judged is judged to its end, into the cache
        service.counters.add("withdrawn")
        raise Refusal(503, "the client is gone")

    return app
