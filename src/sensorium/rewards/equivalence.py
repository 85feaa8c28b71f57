"""A process that decides mathematical equivalence, one JSON line a question; run as a script, imports nothing of ours.

Computer algebra can run for ever on what a model writes, and a thread cannot be stopped. So this process sets itself an
alarm for each question and dies by it: in CPU seconds, so that verdicts do not depend on how busy the machine is.
"""

import json
import logging
import os
import resource
import signal
import sys

MEMORY_BYTES = 4 * 1024**3


def as_latex(text: str) -> str:
    """Mathematics as the parser expects it: between dollars, unless it is marked already."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def main(deadline_s: float) -> None:
    """Answer questions from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, bool | str]
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        try:
            known = parse(as_latex(question["expected"]), parsing_timeout=None)
            given = parse(as_latex(question["given"]), parsing_timeout=None)
            reply = {"equal": bool(verify(known, given, timeout_seconds=None))} if known else {"unfit": True}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main(float(sys.argv[1]))
