"""The HTTP client of judges: follows no redirect, and reads a reply only up to a size, compressed or not.

A redirect would carry the question, and Azure's key, to a place that nobody named. A reply without an end, or one that is
small and grows without bounds when it is unpacked, would take all memory.
"""

import zlib
from typing import Any

MOST_BYTES = 16 << 20
"""Of a reply; an answer has some thousand."""

REWRITTEN = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that say how the reply came, which is whole and unpacked here."""


class StrangeReply(ValueError):
    """A reply that is not read; the message says why."""


def bounded_client(most: int = MOST_BYTES) -> Any:
    """A client for the openai package."""
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        """The package's own client, with the bounds of this module."""

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Ask, and read the whole reply within the bound."""
            reply = await super().send(request, stream=True, **options)
            try:
                raw = bytearray()
                async for part in reply.aiter_raw():
                    raw += part
                    if len(raw) > most:
                        raise StrangeReply(f"its reply has more than {most >> 20} MiB")
            finally:
                await reply.aclose()
            headers = {name: value for name, value in reply.headers.items() if name not in REWRITTEN}
            content = unpacked(bytes(raw), reply.headers.get("content-encoding", ""), most)
            return type(reply)(reply.status_code, headers=headers, content=content, request=request)

    return BoundedClient(follow_redirects=False, headers={"Accept-Encoding": "gzip, deflate"})


def unpacked(data: bytes, encoding: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a reply that came in this encoding, at most so many."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return data
    if kind not in ("gzip", "x-gzip", "deflate"):
        raise StrangeReply(f"its reply is packed as {kind[:40]!r}, which was not asked for")
    try:
        found = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, most + 1)
    except zlib.error as error:
        raise StrangeReply(f"its reply cannot be unpacked: {error}") from error
    if len(found) > most:
        raise StrangeReply(f"its reply unpacks to more than {most >> 20} MiB")
    return found
