"""The random keys of responses: a response's random numbers depend on its task and turn, not on the order of events."""

import hashlib


def response_key(seed: int, step: int, task_id: str, episode: int, turn: int) -> int:
    """The 64-bit key (as a signed integer) of one response of a run."""
    body = repr((seed, step, task_id, episode, turn)).encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)
