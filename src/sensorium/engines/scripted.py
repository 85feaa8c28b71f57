"""The scripted engine: given answers, replayed as if sampled. For validation, tests and demonstrations."""

from collections.abc import Callable

from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.models.chat_processor import ChatProcessor


class ScriptedEngine:
    """Answers each request with the text that ``answers`` returns; log-probs are zero."""

    def __init__(self, chat: ChatProcessor, answers: Callable[[Request], str]) -> None:
        self.capabilities = Capabilities(chat.modalities, deterministic=True)
        self.version = 0
        self._chat = chat
        self._answers = answers

    def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """The scripted answer as a model segment that stops by itself."""
        return Response(self._chat.respond(self._answers(request), request.name, self.version), "stop")

    def release(self, thread: str) -> None:
        """Nothing is kept."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Only the version changes."""
        self.version = version

    def reset_cache(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""
