"""Lets a process of vLLM import torchvision where its compiled operators do not load, and costs nothing where none does.

``sensorium.models.torchvision_fix`` is imported in place of the first import of torchvision, and not before: a process that
never needs it does not load torch for it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Imported(Loader):
    """Gives a module that was imported meanwhile."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was executed already."""


class TorchvisionFinder(MetaPathFinder):
    """Finds torchvision once, by importing it with the schemas of its operators declared where they are missing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A module that is there already, for torchvision alone."""
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        if find_spec(name) is None:
            return None
        import_module("sensorium.models.torchvision_fix")
        return ModuleSpec(name, _Imported())


sys.meta_path.insert(0, TorchvisionFinder())
