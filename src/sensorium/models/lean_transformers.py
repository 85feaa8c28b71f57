"""Imports two parts of transformers without scikit-learn and scipy.

Where these are installed, transformers imports them, for one option of assisted generation and for the losses of object
detection, which nothing here uses: a fourth of the CPU time that a process takes to start. Importing those two parts
while they look absent leaves everything else of transformers, and the packages themselves, as they are.
"""

import transformers.utils as utils

import sensorium.models.torchvision_fix  # noqa: F401  (the losses import image functions)

_available = utils.is_sklearn_available, utils.is_scipy_available
utils.is_sklearn_available = utils.is_scipy_available = lambda: False
try:
    import transformers.generation.candidate_generator
    import transformers.loss.loss_utils  # noqa: F401
finally:
    utils.is_sklearn_available, utils.is_scipy_available = _available
