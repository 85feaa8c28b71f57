"""What a run's media cost: decodings, hits and evictions of caches, and items encoded by towers."""

from dataclasses import dataclass, fields

from sensorium.media.decoder import DecodeCounters
from sensorium.models.encoding import Encoder
from sensorium.models.prepared_media import PreparedMedia

GIB = 1 << 30


@dataclass(frozen=True)
class MediaCounts:
    """Counts since a policy was loaded, those of the copies that share its media included.

    ``decoded`` pictures, videos and sounds; ``hits`` found decoded on disk, ``damaged`` there and
    decoded anew; ``memory_hits`` answered from memory, decoded or preprocessed. ``tower_items`` went through a tower,
    ``tower_hits`` did not have to, because it is frozen.
    """

    decoded: int
    preprocessed: int
    hits: int
    memory_hits: int
    evictions: int
    memory_evictions: int
    damaged: int
    tower_items: int
    tower_hits: int
    tower_evictions: int
    cache_bytes: int
    memory_bytes: int

    def since(self, before: "MediaCounts") -> dict[str, float]:
        """What happened since, by name."""
        return {name: getattr(self, name) - getattr(before, name) for name in COUNTS}

    @property
    def sizes(self) -> dict[str, float]:
        """What is kept now: decoded on disk, and in memory."""
        return {"cache_gib": self.cache_bytes / GIB, "memory_gib": self.memory_bytes / GIB}


COUNTS = tuple(field.name for field in fields(MediaCounts) if not field.name.endswith("_bytes"))


def count_media(decoding: DecodeCounters, media: PreparedMedia, encoder: Encoder) -> MediaCounts:
    """The counts of one policy's decoder, prepared media and towers."""
    return MediaCounts(
        decoded=decoding.decoded,
        preprocessed=media.preprocessed,
        hits=decoding.disk_hits,
        memory_hits=decoding.memory_hits + decoding.shared + media.hits,
        evictions=decoding.disk_evictions,
        memory_evictions=decoding.memory_evictions + media.evictions,
        damaged=decoding.disk_damaged,
        tower_items=encoder.counters.tower_items,
        tower_hits=encoder.cache.hits,
        tower_evictions=encoder.cache.evictions,
        cache_bytes=decoding.disk_bytes,
        memory_bytes=decoding.memory_bytes + media.held,
    )
