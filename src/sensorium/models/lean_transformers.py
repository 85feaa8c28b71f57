"""Imports the part of transformers that generates text without scikit-learn.

Where scikit-learn is installed, transformers imports it, and with it scipy, for one option of assisted generation, which
nothing here uses: a fifth of the CPU time that a process takes to start. Importing that one module while scikit-learn looks
absent leaves everything else of transformers, and scikit-learn itself, as it is.
"""

import transformers.utils as utils

_available = utils.is_sklearn_available
utils.is_sklearn_available = lambda: False
try:
    import transformers.generation.candidate_generator  # noqa: F401
finally:
    utils.is_sklearn_available = _available
