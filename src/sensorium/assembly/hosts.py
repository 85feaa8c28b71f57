"""Where the processes of a run are started, by its recipe's cluster section."""

from pathlib import Path

from sensorium.recipe.cluster_checks import ray_needs
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import SensoriumError
from sensorium.workers.hosts import ProcessHost, ThisMachine


def open_host(
    recipe: Recipe,
    what: str,
    lost: type[SensoriumError],
    folder: Path | None = None,
    *,
    gpus: float = 0.0,
    on_gpus: bool = False,
) -> ProcessHost:
    """This machine, or Ray. ``gpus`` are those of each process, ``on_gpus``: the run's models are on GPUs."""
    section = recipe.cluster
    if section.placement != "ray":
        return ThisMachine()
    from sensorium.workers.ray_host import RayHost

    seen = Path(folder or ".").absolute() if section.address else None
    needs = ray_needs(recipe, gpus=on_gpus)
    return RayHost(section.address, needs, seen, what, lost, gpus=gpus, start_s=section.start_s)


def driver_address(recipe: Recipe) -> str:
    """How other machines reach this one; empty where all processes are on it."""
    section = recipe.cluster
    if section.placement != "ray" or not section.address:
        return ""
    import ray

    return str(ray.util.get_node_ip_address())
