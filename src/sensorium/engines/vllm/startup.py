"""What every process that vLLM starts must find: our weight backend as a plugin, and a torchvision that can be imported.

vLLM starts an engine core and workers of its own, and inspects models in further processes. They share nothing with this
one but environment variables. So a folder at the head of PYTHONPATH carries both: ``sitecustomize``, which Python imports
at its start, and the metadata of an entry point, which vLLM looks up. An installed sensorium has the entry point as well;
a checkout that is only on the path has not.
"""

import os
from pathlib import Path

from sensorium.models import torchvision_fix

SITE = """\
import os
import runpy
import sys

import sensorium_torchvision

for folder in sys.path:  # the one that this file stands before
    other = os.path.join(folder, "sitecustomize.py")
    if os.path.isfile(other) and not os.path.samefile(other, __file__):
        runpy.run_path(other)
        break
"""
PLUGIN = "sensorium_weights"
ENTRY_POINTS = f"""\
[vllm.general_plugins]
{PLUGIN} = sensorium.engines.vllm.weight_backend:register
"""
METADATA = "Metadata-Version: 2.1\nName: sensorium-vllm\nVersion: 0\n"


def write_startup(folder: Path) -> Path:
    """Write the folder that goes to the head of PYTHONPATH."""
    info = folder / "sensorium_vllm-0.dist-info"
    info.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "sensorium_torchvision.py").write_bytes(Path(torchvision_fix.__file__).read_bytes())
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(startup: Path, *, on_cpu: bool, cache_gib: int) -> dict[str, str]:
    """The variables of vLLM's processes."""
    given = {
        "PYTHONPATH": str(startup),  # before what else the process finds its modules on
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if os.environ.get("VLLM_PLUGINS"):
        given["VLLM_PLUGINS"] = f"{os.environ['VLLM_PLUGINS']},{PLUGIN}"
    if on_cpu:
        # Without the first, the first request compiles C++ for 12 s, also where the model runs eagerly.
        given |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
    return given
