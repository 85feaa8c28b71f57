"""How large a medium may be, checked before it is decoded: media come from others, and a small file can hold a huge one."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class MediaLimits:
    """The bounds of one medium, as the recipe's section ``media`` sets them."""

    pixels: int = 64_000_000
    file_mib: float = 2048
    clip_s: float = 7200
    clip_mib: float = 1024

    def refuse_pixels(self, width: int, height: int, what: str) -> str:
        """Why a picture or frame of this size is not decoded; empty if it is."""
        if width * height <= self.pixels:
            return ""
        return (
            f"{what} of {width} × {height} = {width * height:,} pixels is beyond media.max_pixels {self.pixels:,}. Shrink "
            "it, or raise that setting."
        )

    def refuse_file(self, size: int) -> str:
        """Why a file of so many bytes is not read; empty if it is."""
        if size <= self.file_mib * MIB:
            return ""
        return f"a file of {size / MIB:,.0f} MiB is beyond media.max_file_mib {self.file_mib:g}. Shrink it, or raise that."

    def refuse_length(self, seconds: float) -> str:
        """Why a clip of so many seconds is not decoded; empty if it is."""
        if seconds <= self.clip_s:
            return ""
        return f"{seconds:,.0f} s are beyond media.max_clip_s {self.clip_s:g}. Trim it with start and end, or raise that."

    def refuse_decoded(self, size: int) -> str:
        """Why a clip that takes so many bytes when decoded is not decoded; empty if it is."""
        if size <= self.clip_mib * MIB:
            return ""
        return (
            f"decoded it would take {size / MIB:,.0f} MiB, and media.max_clip_mib is {self.clip_mib:g}. Ask for fewer or "
            "smaller frames or a shorter part, or raise that."
        )
