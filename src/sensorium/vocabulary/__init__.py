"""The data types that every other package uses. Imports nothing of ours and no torch."""

from sensorium.vocabulary.content import Block, Media, MediaKind, Message, Role, Text, assistant, system, user
from sensorium.vocabulary.decoding import AudioParameters, VideoParameters
from sensorium.vocabulary.episode import (
    Episode,
    Group,
    MediaSpan,
    Score,
    Segment,
    Status,
    Thread,
    Turn,
    correctness,
    reward,
    total,
)
from sensorium.vocabulary.task import EnvironmentSpec, Task

__all__ = [
    "AudioParameters", "Block", "EnvironmentSpec", "Episode", "Group", "Media", "MediaKind", "MediaSpan", "Message",
    "Role", "Score", "Segment", "Status", "Task", "Text", "Thread", "Turn", "VideoParameters", "assistant",
    "correctness", "reward", "system", "total", "user",
]  # fmt: skip
