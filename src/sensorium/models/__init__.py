"""Model families in parts. Importing this package lets transformers be imported without trouble, and faster.

torchvision may be broken (``torchvision_fix``). And where scikit-learn and scipy are installed, transformers imports them,
for one option of assisted generation and for losses of object detection, which nothing here uses: a quarter of a process'
start. These two parts of transformers are imported right after it while both packages look absent; all else stays as it is.
"""

import sys

from sensorium.models.torchvision_fix import ImportHook


def _import_parts() -> None:
    import transformers.utils as utils

    available = utils.is_sklearn_available, utils.is_scipy_available
    utils.is_sklearn_available = utils.is_scipy_available = lambda: False
    try:
        import transformers.generation.candidate_generator
        import transformers.loss.loss_utils  # noqa: F401
    finally:
        utils.is_sklearn_available, utils.is_scipy_available = available


if "transformers" in sys.modules:
    _import_parts()
else:
    sys.meta_path.insert(0, ImportHook("transformers", after=_import_parts))
