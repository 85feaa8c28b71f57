"""Sensorium trains models that see, hear and act, by reinforcement learning.

``import sensorium as sn`` gives the Python API: ``sn.train``, ``sn.resume``, ``sn.sweep``, ``sn.evaluate``, ``sn.rescore``.
Importing it is cheap: what a name stands for is imported when it is first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sensorium.moved_modules import install

# MKL reads this at its first product. Without it, on some CPUs (Zen 5) the last bits of a product depend on where in memory
# its inputs happen to be, so a run would not repeat.
os.environ.setdefault("MKL_CBWR", "AUTO")

if TYPE_CHECKING:
    from sensorium.api.chat import Model, Reply, load
    from sensorium.api.run import Run, Table, view
    from sensorium.api.sweep import Sweep, sweep
    from sensorium.api.train import Demonstrations, Evaluation, Rescoring, evaluate, fork, record, rescore, resume, train
    from sensorium.recipe import Recipe, load_recipe, register
    from sensorium.vocabulary import Episode, Score, Task, reward
    from sensorium.vocabulary.errors import SensoriumError

__version__ = "0.2.0"
__all__ = [
    "Demonstrations", "Episode", "Evaluation", "Model", "Recipe", "Reply", "Rescoring", "Run", "Score", "SensoriumError",
    "Sweep", "Table", "Task", "__version__", "evaluate", "fork", "load", "load_recipe", "record", "register", "rescore",
    "resume", "reward", "sweep", "train", "view",
]  # fmt: skip

_PLACES = {
    "Demonstrations": "sensorium.api.train",
    "Episode": "sensorium.vocabulary",
    "Evaluation": "sensorium.api.train",
    "Model": "sensorium.api.chat",
    "Recipe": "sensorium.recipe",
    "Reply": "sensorium.api.chat",
    "Rescoring": "sensorium.api.train",
    "Run": "sensorium.api.run",
    "Score": "sensorium.vocabulary",
    "SensoriumError": "sensorium.vocabulary.errors",
    "Sweep": "sensorium.api.sweep",
    "Table": "sensorium.api.run",
    "Task": "sensorium.vocabulary",
    "evaluate": "sensorium.api.train",
    "fork": "sensorium.api.train",
    "load": "sensorium.api.chat",
    "load_recipe": "sensorium.recipe",
    "record": "sensorium.api.train",
    "register": "sensorium.recipe",
    "rescore": "sensorium.api.train",
    "resume": "sensorium.api.train",
    "reward": "sensorium.vocabulary",
    "sweep": "sensorium.api.sweep",
    "train": "sensorium.api.train",
    "view": "sensorium.api.run",
}

install()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'sensorium' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
