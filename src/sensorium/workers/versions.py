"""The versions that all processes of a run must share."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import sensorium
from sensorium.vocabulary.errors import SensoriumError


def versions() -> dict[str, str]:
    """What must be the same in all processes of a run."""
    try:
        torch = installed("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"sensorium": sensorium.__version__, "torch": torch, "python": platform.python_version()}


def refuse_other_versions(found: Mapping[str, str], what: str, lost: type[SensoriumError]) -> None:
    """Refuse a process that runs another version of Python, torch or of this package than this one."""
    own_versions = versions()
    for name, version in found.items():
        if version != (own := own_versions[name]):
            raise lost(
                f"{what} runs {name} {version}, and the driver {own}. Their numbers and messages may differ; install "
                "the same versions on all machines of the cluster."
            )
