"""A worker that says what it is asked, and dies of "poison". ``python -m tests.cluster.parroting_worker FD``"""

import os

from sensorium.workers.placed_main import serve


def parrot(question: str) -> str:
    """What is asked."""
    if question == "poison":
        os._exit(9)
    return question


if __name__ == "__main__":
    serve(lambda settings, folder: ("parrot", parrot))
