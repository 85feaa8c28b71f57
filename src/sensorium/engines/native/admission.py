"""Admission to the batch of a GPU where it has less room than the waiting need, and whose prompts are computed ahead.

The waiting come in the order of ``engines/scheduler.py``. Members of a group that join together share the pages of
their prompt, which a step then reads once for all of them. So a group waits until there is room for the whole of it. With
room for 11 rows:

    waiting  a a a a a a a a  b b b b b b b b  c …      the eight of a join, the rest of the room stays free for now

Prompts of those who still wait are computed in the same passes as the prompts of those who join, up to a bound, and set
aside. Later groups then join without a pass of their own: a few short prompts take a GPU nearly as long as many.
"""

from collections.abc import Hashable, Sequence

from sensorium.engines.native.prefix_cache import context_key
from sensorium.engines.scheduler import Job

AHEAD_TOKENS = 16384  # of prompts that are computed before their groups have room
LARGEST_SHARE = 4  # a group of more than a fourth of all rows is not waited for


def joining(waiting: Sequence[Job], room: int, max_rows: int, idle: bool) -> int:
    """How many of the waiting join now, in order: whole groups, unless the first is large or nobody else is at work."""
    if room <= 0 or room >= len(waiting):
        return max(0, min(room, len(waiting)))
    next_key = context_key(waiting[room].request.context)
    whole = room
    while whole and context_key(waiting[whole - 1].request.context) == next_key:
        whole -= 1
    if whole:
        return whole
    group = sum(1 for job in waiting[: max_rows // LARGEST_SHARE + 1] if context_key(job.request.context) == next_key)
    return room if idle or group > max_rows // LARGEST_SHARE else 0


def prompts_ahead(waiting: Sequence[Job]) -> dict[Hashable, Job]:
    """The first job of each distinct prompt among the waiting that other threads may have too: no words of the model."""
    firsts: dict[Hashable, Job] = {}
    for job in waiting:
        if all(segment.author == "environment" for segment in job.request.context):
            firsts.setdefault(context_key(job.request.context), job)
    return firsts
