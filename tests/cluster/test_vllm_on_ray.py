"""vLLM samples and two Ray actors learn, all on this machine: they learn what one process with the native engine does.

The native run goes on beside the start of Ray and vLLM, in a process of its own. ``ENGINES_SEED`` is another seed.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import pytest

from studies.engines import BRIEF, LEAST_GAIN, RESULT, learned

from ..engines.test_vllm import NEEDS_VLLM

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: pip install 'sensorium[ray]'"),
]
SEED = int(os.environ.get("ENGINES_SEED", "0"))
RECIPE = [*BRIEF, f"seed={SEED}"]
NATIVE = f"""
import json, sys
from studies.engines import learned
print(json.dumps(learned("native", *{RECIPE}, quiet=True)))
"""


def test_it_learns_as_the_native_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *filter(None, sys.path)])
    log = (tmp_path / "native.txt").open("w+")
    alone = subprocess.Popen(
        [sys.executable, "-c", NATIVE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE,
        stderr=log, text=True,
    )  # fmt: skip
    try:
        monkeypatch.chdir(tmp_path)
        found = learned("vllm_ray", *RECIPE)
        said, _ = alone.communicate()
    finally:
        alone.kill()
        alone.wait()
    assert alone.returncode == 0, (tmp_path / "native.txt").read_text()
    native = json.loads(said.splitlines()[-1])
    for name, run in (("vllm_ray", found), ("native", native)):
        print(f"{name}: {run['before']['accuracy']:.3f} -> {run['after']['accuracy']:.3f} {run['after']['interval']}")
        print({key: value for key, value in run["medians"].items() if value is not None})
        assert run["before"]["tasks"] >= 500
        assert run["gain"] >= LEAST_GAIN, name
    committed = {run["seed"]: run["after"]["accuracy"] for run in json.loads(RESULT.read_text())["native, brief"]["runs"]}
    seeds = list((committed | {SEED: native["after"]["accuracy"]}).values())
    # What one more seed gives lies so far from the mean of these: an interval of three standard deviations.
    bound = 3 * stdev(seeds) * sqrt(1 + 1 / len(seeds))
    assert abs(found["after"]["accuracy"] - mean(seeds)) <= bound, (found["after"]["accuracy"], seeds)
