"""How the videos and sounds of a source are decoded: what its options say, and what a row says over them."""

from collections.abc import Mapping
from typing import Any, Literal

from sensorium.vocabulary.content import USUAL
from sensorium.vocabulary.decoding import Parameters, parameters_from
from sensorium.vocabulary.errors import RecipeError

ClipKind = Literal["video", "sound"]
INSTEAD = {"frames": "fps", "fps": "frames"}
"""What a row says of one it says instead of the other."""


class ClipOptions:
    """A source's options ``video`` (frames or fps, pixel budgets, trim) and ``sound`` (sample rate, trim), checked.

    Both are in the words of VideoParameters and AudioParameters: ``video: {frames: 8, max_pixels_per_frame: 100352}``.
    """

    def __init__(
        self, video: Mapping[str, Any] | None = None, sound: Mapping[str, Any] | None = None, where: str = "source"
    ) -> None:
        self._given: dict[ClipKind, dict[str, Any]] = {"video": dict(video or {}), "sound": dict(sound or {})}
        for kind in self._given:
            try:
                self.parameters(kind, {})
            except ValueError as error:
                raise RecipeError(f"{where}: option '{kind}': {error}") from error

    @property
    def hears_in_video(self) -> bool:
        """Whether videos are shown with their sound inside; where only that is heard, options of sounds are refused."""
        return bool(self._given["video"].get("use_audio_in_video"))

    def refuse_other_sound(self, where: str) -> None:
        """Refuse options of sounds where videos bring their own."""
        if self.hears_in_video and self._given["sound"]:
            raise RecipeError(
                f"{where}: option 'sound' does nothing with video: {{use_audio_in_video: true}}, where the sound is cut as "
                "the video is. Leave one of the two out."
            )

    def parameters(self, kind: ClipKind, asked: Mapping[str, Any]) -> Parameters:
        """The parameters of one clip, of which a row asks ``asked``; a ValueError says what does not fit."""
        given = {key: value for key, value in self._given[kind].items() if INSTEAD.get(key) not in asked}
        return parameters_from(USUAL[kind], {**given, **asked})
