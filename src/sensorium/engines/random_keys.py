"""The random keys of responses: what a response draws depends on what it is for, not on the order things happen in."""

import hashlib


def response_key(seed: int, step: int, task_id: str, episode: int, turn: int) -> int:
    """The 64-bit key (as a signed integer) of one response of a run."""
    body = repr((seed, step, task_id, episode, turn)).encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)
