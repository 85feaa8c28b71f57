"""What an OpenAI-compatible client may ask of a served model, and how it becomes messages and sampling."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sensorium.engines.protocol import Sampling
from sensorium.media.store import MediaStore
from sensorium.services.application import Refusal, Whole
from sensorium.tasks.message_parsing import Place, messages_of
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import SensoriumError

MOST_SEED = 2**63 - 1
MOST_CHOICES = 128
LEAST_TEMPERATURE = 1e-6
FILE = "file://"


def divisible(temperature: float) -> float:
    """Refuse temperatures by which logits cannot be divided; 0 is greedy and divides nothing."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"Input should be 0, which is greedy, or at least {LEAST_TEMPERATURE}")
    return temperature


class Part(BaseModel):
    """A content part: text, or a medium as ``image_url``, ``video_url``, ``audio_url`` or ``input_audio``.

    What else a video or sound part has says how it is decoded (``fps``, ``frames``, …; see docs/media.md).
    """

    model_config = ConfigDict(extra="allow")
    type: str


class ChatMessage(BaseModel):
    """One message."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class ResponseFormat(BaseModel):
    """Only plain text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"] = "text"


class ChatRequest(BaseModel):
    """A chat completion. What the engine cannot do (tools, penalties, other log-probs) is refused, never ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(divisible)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = 0
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = 1
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[Whole, Field(ge=-MOST_SEED, le=MOST_SEED)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=0)] | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = self.stop if isinstance(self.stop, list) else [self.stop]
        return tuple(text for text in given if text)

    def sampling(self, most: int) -> Sampling:
        """How to draw; ``most`` tokens where the client sets no bound."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            max_new_tokens=min(most, self.max_completion_tokens or self.max_tokens or most),
            stop=self.stops,
        )


def conversation(request: ChatRequest, store: MediaStore, roots: tuple[Path, ...]) -> tuple[Message, ...]:
    """The messages of a request; its media go to the store. Files are read only where they lie in one of ``roots``."""
    if request.messages[-1].role == "assistant":
        raise Refusal(400, "the last message is by the assistant, so nothing is asked of it.")
    raw = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content if isinstance(message.content, str) else [_block(part) for part in message.content],
        }
        for message in request.messages
    ]
    try:
        return messages_of(raw, Place("messages", Path("/"), store, roots=roots, service=True))
    except SensoriumError as error:
        raise Refusal(400, str(error)) from error


def _block(part: Part) -> dict[str, Any]:
    """A content part as rows have it."""
    raw = part.model_dump()
    if part.type == "input_audio":
        held = raw.get("input_audio")
        data = held.get("data") if isinstance(held, dict) else None
        if not isinstance(data, str):
            raise Refusal(400, "input_audio holds {data: base64, format: wav}.")
        return {"type": "audio", "data": data}
    held = raw.get(part.type)
    if part.type.endswith("_url"):
        url = held.get("url") if isinstance(held, dict) else held
        if not isinstance(url, str) or not url:
            raise Refusal(400, f"{part.type} holds {{url: …}}.")
        if not url.startswith(("data:", FILE)):
            raise Refusal(
                400, f"'{url:.80}' is not fetched: send the medium as a data URL, or as {FILE} in a folder that is served."
            )
        return raw | {part.type: url.removeprefix(FILE)}
    return raw
