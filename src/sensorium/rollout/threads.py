"""How a conversation becomes threads: one append-only thread, or a new one per turn once a window is full.

Invariant: a thread is exactly what the model saw. Responses recur in later threads as the very tokens that were sampled;
observations are environment text and may be rendered anew where they follow the head.
"""

from collections.abc import Sequence

from sensorium.caches.lru import LRU
from sensorium.models.chat_processor import ChatProcessor
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.episode import Segment, Thread

Key = tuple[str, tuple[Message, ...], bool, tuple[str, ...]]
"""What a rendering depends on: its kind, the messages, whether a stop token stands before it, the media's origins."""


class ThreadBuilder:
    """Grows the threads of one episode. ``window`` turns of history, the current one included; 0 keeps them all."""

    def __init__(self, renderer: "Renderer", head: Sequence[Message], window: int) -> None:
        self.renderer = renderer
        self.head = tuple(head)
        self.window = window
        self.observations: list[tuple[Message, ...]] = []
        self.responses: list[Segment] = []
        self._segments: list[list[Segment]] = []
        self._home: list[list[bool]] = []

    def observe(self, messages: Sequence[Message]) -> tuple[Segment, ...]:
        """Add an observation and return the context of the next response."""
        self.observations.append(tuple(messages))
        turn = len(self.responses)
        first = max(0, turn - self.window + 1) if self.window else 0
        if turn == 0 or first > 0:
            self._open(first)
        else:
            self._append(self.renderer.extend(self.observations[turn], self.responses[turn - 1]), home=False)
        return tuple(self._segments[-1])

    def respond(self, response: Segment) -> tuple[int, int]:
        """Add what the model wrote; returns its home thread and its place there."""
        self.responses.append(response)
        self._append(response, home=True)
        return len(self._segments) - 1, len(self._segments[-1]) - 1

    @property
    def current(self) -> int:
        """The index of the thread being written."""
        return len(self._segments) - 1

    def threads(self) -> tuple[Thread, ...]:
        """The threads that hold a response, each up to its last one: what nothing was written after is no context."""
        threads = []
        for segments, home in zip(self._segments, self._home, strict=True):
            if any(home):
                end = len(home) - home[::-1].index(True)
                threads.append(Thread(tuple(segments[:end]), tuple(home[:end])))
        return tuple(threads)

    def _open(self, first: int) -> None:
        """Begin a thread whose oldest turn is ``first``; earlier responses in it are context."""
        self._segments.append([])
        self._home.append([])
        if self.window and self.head:
            self._append(self.renderer.head(self.head), home=False)
            self._append(self.renderer.after_head(self.observations[first]), home=False)
        else:
            self._append(self.renderer.start(self.head + self.observations[first]), home=False)
        for turn in range(first + 1, len(self.observations)):
            self._append(self.responses[turn - 1], home=False)
            self._append(self.renderer.extend(self.observations[turn], self.responses[turn - 1]), home=False)

    def _append(self, segment: Segment, *, home: bool) -> None:
        self._segments[-1].append(segment)
        self._home[-1].append(home)


class Renderer:
    """A chat processor's rendering with a bounded memory, so that the members of a group render their prompt once.

    Equal media of another origin are rendered anew: what an episode's record and its errors name must be its own, and not
    that of whoever showed the same picture first.
    """

    def __init__(self, chat: ChatProcessor, capacity: int = 4096) -> None:
        self.chat = chat
        self._known: LRU[Key, Segment] = LRU(capacity)

    def start(self, messages: tuple[Message, ...]) -> Segment:
        """The first turn of a thread."""
        return self._once("start", messages)

    def head(self, messages: tuple[Message, ...]) -> Segment:
        """The head of a windowed thread."""
        return self._once("head", messages)

    def after_head(self, messages: tuple[Message, ...]) -> Segment:
        """An observation right after the head."""
        return self._once("after_head", messages)

    def extend(self, messages: tuple[Message, ...], after: Segment) -> Segment:
        """An observation after a response."""
        stopped = bool(after.tokens) and after.tokens[-1] in self.chat.stop_ids
        key = ("extend", messages, stopped, _origins(messages))
        segment = self._known.get(key)
        if segment is None:
            segment = self.chat.extend(messages, after=after)
            self._known.put(key, segment)
        return segment

    def _once(self, kind: str, messages: tuple[Message, ...]) -> Segment:
        key = (kind, messages, False, _origins(messages))
        segment = self._known.get(key)
        if segment is None:
            if kind == "after_head":
                segment = self.chat.render_after_head(messages)
            else:
                segment = self.chat.render(messages, generate=kind == "start")
            self._known.put(key, segment)
        return segment


def _origins(messages: tuple[Message, ...]) -> tuple[str, ...]:
    return tuple(media.origin for message in messages for media in message.media)
