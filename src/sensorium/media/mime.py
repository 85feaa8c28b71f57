"""The MIME type and the kind of a medium by how its bytes begin: files of the store have no extensions."""

import mimetypes

from sensorium.vocabulary.content import MediaKind

HEAD_BYTES = 64
"""How much of a file the type is told from."""

UNKNOWN = "application/octet-stream"
STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"#!AMR", "audio/amr"),
    (b"caff", "audio/x-caf"),
    (b".snd", "audio/basic"),
    (b"FLV", "video/x-flv"),
    (b"\x00\x00\x01\xba", "video/mpeg"),
    (b"\x30\x26\xb2\x75", "video/x-ms-asf"),
)
RIFF = {b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo", b"WEBP": "image/webp", b"AIFF": "audio/aiff"}
BRANDS = {b"qt  ": "video/quicktime", b"M4A ": "audio/mp4", b"avif": "image/avif"}


def mime_type(head: bytes, kind: MediaKind) -> str:
    """The type of a medium of ``kind`` whose bytes begin so. Of a file that may hold both, a sound is the sound alone."""
    found = _found(head)
    return found.replace("video/", "audio/") if kind == "sound" else found


def kind_of(head: bytes, name: str = "") -> MediaKind | None:
    """Whether bytes that begin so are a picture, a video or a sound; None if neither they nor the file's name say it.

    A container that may hold both is a sound where the name says so (``.m4a``, ``.oga``).
    """
    by_bytes, by_name = _found(head), mimetypes.guess_type(name, strict=False)[0] or ""
    found = by_name if by_bytes == UNKNOWN or (by_bytes.startswith("video/") and by_name.startswith("audio/")) else by_bytes
    kinds: dict[str, MediaKind] = {"image": "picture", "video": "video", "audio": "sound"}
    return kinds.get(found.partition("/")[0])


def _found(head: bytes) -> str:
    for start, name in STARTS:
        if head.startswith(start):
            return name
    if head[:4] in (b"RIFF", b"FORM"):
        return RIFF.get(head[8:12], UNKNOWN)
    if head[4:8] == b"ftyp":
        return BRANDS.get(head[8:12], "video/mp4")
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "video/webm" if b"webm" in head else "video/x-matroska"
    if head.startswith(b"OggS"):
        return "audio/ogg" if any(codec in head for codec in (b"vorbis", b"Opus", b"FLAC")) else "video/ogg"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "audio/aac"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "audio/mpeg"
    return UNKNOWN
