"""Lets torchvision be imported also where its compiled operators do not load.

Importing torchvision registers fake kernels for ``nms`` and ``qnms``, which its C++ library declares. Where that library
does not load (built for another torch), the import raises "operator torchvision::nms does not exist", and with it every
image processor of transformers. The processors need neither operator, so declaring their schemas is enough. Where the
library loads, or torchvision is not installed, nothing changes.

Importing this module imports neither torch nor anything of ours: it waits for the import of torchvision. So set-up
(tools/install.py) can copy it beside the installed packages and let a ``.pth`` file import it into every Python process of
an environment, and ``engines/vllm/actor_process.py`` into those of vLLM.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
LIBRARIES: list[Any] = []  # kept: schemas live as long as the object that declares them


class ImportHook(MetaPathFinder):
    """Finds a package where Python does; calls ``before`` with its folders, and ``after`` however executing it ended."""

    def __init__(
        self, package: str, before: Callable[[list[str]], None] | None = None, after: Callable[[], None] | None = None
    ) -> None:
        self.package, self._before, self._after = package, before, after

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual spec of the package, whose loader makes the calls."""
        spec = PathFinder.find_spec(name, path, target) if name == self.package else None
        if spec is None or spec.loader is None:
            return None
        execute, folders = spec.loader.exec_module, list(spec.submodule_search_locations or ())

        def execute_with_calls(module: ModuleType) -> None:
            if self._before is not None:
                self._before(folders)
            try:
                execute(module)
            finally:
                if self._after is not None:
                    self._after()

        spec.loader.exec_module = execute_with_calls  # type: ignore[method-assign]
        return spec


def _declare_missing(folders: Sequence[str]) -> None:
    import torch

    for library in (file for folder in folders for file in Path(folder).glob("_C.*")):
        try:
            torch.ops.load_library(str(library))
        except (ImportError, OSError):  # built for another torch
            continue
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
            LIBRARIES[-1].define(operator + SCHEMA)


if not any(getattr(finder, "package", None) == "torchvision" for finder in sys.meta_path):
    sys.meta_path.insert(0, ImportHook("torchvision", before=_declare_missing))
