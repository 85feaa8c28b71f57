"""What a tool is: a name, a JSON schema of its arguments, and a call that gives content blocks back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Block, Media, Text
from sensorium.vocabulary.task import Task


@dataclass(frozen=True)
class ToolSpec:
    """How a tool is offered. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def offered(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: text and media in order. An error is told to the model like anything else."""

    content: tuple[Block, ...]
    is_error: bool = False

    @classmethod
    def error(cls, text: str) -> "ToolResult":
        """An error, in words."""
        return cls((Text(f"Error: {text}"),), True)

    @property
    def text(self) -> str:
        """The text blocks joined."""
        return "".join(block.text for block in self.content if isinstance(block, Text))


@dataclass
class ToolContext:
    """What a tool may look at: the store of media, the task, and the pictures shown so far, those of tools included."""

    store: MediaStore
    task: Task
    pictures: list[Media] = field(default_factory=list)


class Tool(Protocol):
    """A tool. ``call`` returns a ToolResult, a text or blocks; what it raises is told to the model as an error.

    An ``instant`` one is plain computation and runs in place. Any other runs in a thread under a deadline and may be a
    coroutine, unless it says ``own_deadline = True``: then it keeps its own.
    """

    spec: ToolSpec
    instant: bool

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Do it; the arguments fit the schema."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
