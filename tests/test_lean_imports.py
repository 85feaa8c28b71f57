"""What is imported without scikit-learn and scipy leaves both as they are for everything else.

Here and not in tests/models, whose conftest imports transformers before the package when that folder is run alone.
"""

from importlib.util import find_spec

import transformers.utils
from transformers.generation import candidate_generator
from transformers.loss import loss_for_object_detection

import sensorium.models  # noqa: F401


def test_two_modules_do_without_and_the_rest_of_transformers_sees_what_is_installed() -> None:
    assert not hasattr(candidate_generator, "roc_curve")
    assert not hasattr(loss_for_object_detection, "linear_sum_assignment")
    assert transformers.utils.is_sklearn_available() == (find_spec("sklearn") is not None)
    assert transformers.utils.is_scipy_available() == (find_spec("scipy") is not None)
