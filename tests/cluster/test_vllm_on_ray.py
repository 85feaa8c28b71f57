"""vLLM samples and two Ray actors learn, all on this machine: they learn what one process with the native engine does."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from studies.engines import LEAST_GAIN, RESULT, learned

from ..engines.test_vllm import NEEDS_VLLM

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: pip install 'sensorium[ray]'"),
]


def test_it_learns_as_the_native_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = learned("vllm_ray")
    assert found["before"]["tasks"] >= 500
    assert found["gain"] >= LEAST_GAIN
    native = json.loads(RESULT.read_text())["native"]["after"]["interval"]
    low, high = found["after"]["interval"]
    assert low <= native[1]
    assert high >= native[0]
