"""Modules that are imported when they are first used, for files that the dry run reads without torch (the families')."""

from importlib import import_module
from typing import Any


class DeferredModule:
    """Stands for a module and imports it when an attribute is read. Files name the module itself under TYPE_CHECKING."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)  # the next access costs nothing
        return found
