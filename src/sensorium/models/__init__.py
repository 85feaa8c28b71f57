"""Model families in parts. Importing this package lets transformers be imported without trouble, and faster.

torchvision may be broken (``torchvision_fix``). And a third of a process' start went into what nothing here uses.
Where scikit-learn and scipy are installed, transformers imports them for one option of assisted generation and for losses
of object detection. torchvision and transformers import torch._dynamo, for a question about one operator, for masks of
other models and to mark kernels of quantized models. transformers looks for its models twice. So while the few modules
that do this are executed, scikit-learn and scipy look absent and torch._dynamo is replaced; what was asked of it happens
when it is imported. All else stays as it is.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from sensorium.models.torchvision_fix import ImportHook

MARKS: list[tuple[str, Any]] = []
"""Decorators of torch._dynamo, by name, and the functions that they mark once it is imported."""


def _looks_absent(module: str, check: str) -> ImportHook:
    """While a module of transformers is executed, its check for a package says no."""
    checks: list[Any] = []

    def before(folders: object) -> None:
        utils = import_module("transformers.utils")
        checks.append(getattr(utils, check))
        setattr(utils, check, lambda: False)

    def after() -> None:
        setattr(import_module("transformers.utils"), check, checks.pop())

    return ImportHook(module, before, after)


def _called_later(module: str, source: str, name: str) -> ImportHook:
    """While a module is executed, ``name`` of ``source`` is a function that imports the real one when it is called."""
    stand_in = ModuleType(source)

    def called(*given: Any, **named: Any) -> Any:
        return getattr(import_module(source), name)(*given, **named)

    setattr(stand_in, name, called)

    def before(folders: object) -> None:
        sys.modules.setdefault(source, stand_in)

    def after() -> None:
        if sys.modules[source] is stand_in:
            del sys.modules[source]

    return ImportHook(module, before, after)


class _Marking(ModuleType):
    """Stands for torch._dynamo where functions are decorated that it shall know; the decorators return what they get."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def mark(function: Any) -> Any:
            MARKS.append((name, function))
            return function

        return mark


def _marked_later(module: str) -> ImportHook:
    """While a module is executed, decorators of torch._dynamo wait until it is imported; if it is, they act at once."""
    stand_in = _Marking("torch._dynamo")
    real: dict[str, Any] = {}

    def before(folders: object) -> None:
        if "torch._dynamo" not in sys.modules:
            torch = import_module("torch")
            vars(torch).setdefault("_dynamo", stand_in)
            real.update({name: getattr(torch.compiler, name) for name in ("allow_in_graph", "disable")})
            torch.compiler.allow_in_graph = stand_in.allow_in_graph
            torch.compiler.disable = torch._disable_dynamo  # imports it where the function is called

    def after() -> None:
        if real:
            torch = import_module("torch")
            vars(torch.compiler).update(real)
            real.clear()
            if torch._dynamo is stand_in:
                del torch._dynamo

    return ImportHook(module, before, after)


def _mark() -> None:
    dynamo = sys.modules["torch._dynamo"]
    while MARKS and hasattr(dynamo, "disable"):  # not where its import failed, which is what the user is to read
        name, function = MARKS.pop()
        getattr(dynamo, name)(function)


def _scan_once() -> None:
    """List the models of transformers once: it asks by their folder and by a file in it, and caches these as two."""
    utils: Any = sys.modules["transformers.utils.import_utils"]
    scan = utils.create_import_structure_from_path
    utils.create_import_structure_from_path = lambda path: scan(
        os.path.dirname(path) if os.path.isfile(path) else str(path)
    )


sys.meta_path[:0] = [
    _looks_absent("transformers.generation.candidate_generator", "is_sklearn_available"),
    _looks_absent("transformers.loss.loss_utils", "is_scipy_available"),
    _called_later("torchvision.ops.roi_align", "torch._dynamo.utils", "is_compile_supported"),
    _called_later("transformers.masking_utils", "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"),
    _marked_later("torchvision.tv_tensors"),
    _marked_later("transformers.modeling_utils"),
    ImportHook("torch._dynamo", after=_mark),
    ImportHook("transformers.utils.import_utils", after=_scan_once),
]
