"""Import and collect what test workers do, so that Python and pytest compile it once: ``python -m tests.compiled``.

Each worker would do it by itself, all at the same time: eight CPU seconds each for the tests alone.
"""

from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO

import pytest

from studies.fork_server import PRELOADED

TESTED = ("sensorium.cli.main", "sensorium.models.tiny", "sensorium.services", "studies.resumed_runs", "torch._dynamo",
          "torch.distributed.checkpoint", "_pytest.assertion.rewrite", "xdist.remote", "hypothesis.strategies",
          "schemathesis", "openai", "mcp", "fastapi", "uvicorn", "sympy", "safetensors.torch")  # fmt: skip

if __name__ == "__main__":
    for module in (*PRELOADED, *TESTED):
        import_module(module)
    with redirect_stdout(StringIO()):  # what is wrong with a test is told when it is run
        pytest.main(["--collect-only", "-p", "no:xdist"])
