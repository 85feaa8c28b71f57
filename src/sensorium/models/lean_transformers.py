"""Imports two parts of transformers without scikit-learn and scipy.

Where these are installed, transformers imports them, for one option of assisted generation and for losses of object
detection, which nothing here uses: a quarter of a process' start. The two parts are imported right after transformers,
while scikit-learn and scipy look absent; everything else, and the packages themselves, stay as they are.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import sensorium.models.torchvision_fix  # noqa: F401  (the losses import image functions)


class TransformersFinder(MetaPathFinder):
    """Finds transformers where Python does, and imports the two parts after it is executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual spec of transformers, whose loader then imports the two parts."""
        spec = PathFinder.find_spec(name, path, target) if name == "transformers" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_import(module: ModuleType) -> None:
            execute(module)
            import_parts()

        spec.loader.exec_module = execute_and_import  # type: ignore[method-assign]
        return spec


def import_parts() -> None:
    """Import both while scikit-learn and scipy look absent."""
    import transformers.utils as utils

    available = utils.is_sklearn_available, utils.is_scipy_available
    utils.is_sklearn_available = utils.is_scipy_available = lambda: False
    try:
        import transformers.generation.candidate_generator
        import transformers.loss.loss_utils  # noqa: F401
    finally:
        utils.is_sklearn_available, utils.is_scipy_available = available


if "transformers" in sys.modules:
    import_parts()
else:
    sys.meta_path.insert(0, TransformersFinder())
