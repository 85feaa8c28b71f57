"""Modules that are imported at their first use, so that the dry run can import the families without torch."""

from importlib import import_module
from typing import Any


class DeferredModule:
    """Imports a module when an attribute is first read. Files name the module itself under TYPE_CHECKING."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)  # the next access costs nothing
        return found
