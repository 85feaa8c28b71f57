"""The scripted engine: given answers, replayed as if sampled. For tests of everything else, and for demonstrations."""

from collections.abc import Callable

from sensorium.engines.protocol import Request, Response
from sensorium.models.chat_processor import ChatProcessor


class ScriptedEngine:
    """Answers each request with what ``answers`` says; log-probs are zero."""

    def __init__(self, chat: ChatProcessor, answers: Callable[[Request], str]) -> None:
        self.modalities = chat.modalities
        self.deterministic = True
        self.between_ticks: Callable[[], bool] | None = None
        self._chat = chat
        self.version = 0
        self._answers = answers

    def enter(self) -> None:
        """Nothing to count: every answer is at hand."""

    def leave(self) -> None:
        """There are no ticks: between them is whenever an episode is over."""
        if self.between_ticks is not None:
            self.between_ticks()

    async def generate(self, request: Request) -> Response:
        """The scripted answer as a model segment that stops by itself."""
        return Response(self._chat.respond(self._answers(request), request.name, self.version), "stop")

    def release(self, thread: str) -> None:
        """Nothing is kept."""

    def refresh(self, policy_version: int) -> None:
        """Nothing is kept."""
        self.version = policy_version
