"""Import what test workers import, so that Python compiles it once, and not each of them: ``python -m tests.compiled``."""

from importlib import import_module

from studies.fork_server import PRELOADED

TESTED = ("sensorium.cli.main", "sensorium.models.tiny", "sensorium.services", "studies.resumed_runs", "torch._dynamo",
          "torch.distributed.checkpoint", "_pytest.assertion.rewrite", "xdist.remote", "hypothesis.strategies",
          "schemathesis", "openai", "mcp", "fastapi", "uvicorn", "sympy", "safetensors.torch")  # fmt: skip

if __name__ == "__main__":
    for module in (*PRELOADED, *TESTED):
        import_module(module)
