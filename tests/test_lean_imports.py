"""What is imported without scikit-learn, scipy and torch._dynamo leaves them as they are for everything else.

Here and not in tests/models, whose conftest imports transformers before the package when that folder is run alone.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import transformers.modeling_utils  # which loads the two, as every model does
from transformers.generation import candidate_generator
from transformers.loss import loss_for_object_detection

import sensorium.models  # noqa: F401

OF_A_PICTURE_MODEL = """
import sys
from pathlib import Path
from sensorium.data.media_store import MediaStore
from sensorium.models.load_chat import load_chat_processor
load_chat_processor("package:shapes", store=MediaStore(Path(sys.argv[1])))
import sensorium.models, torch
print("torch._dynamo" in sys.modules, len(sensorium.models.MARKS) > 2)

import torch._dynamo
from torch._dynamo.trace_rules import is_callable_allowed
from transformers.integrations.deepgemm import _load_deepgemm_kernel
from transformers.masking_utils import TransformGetItemToIndex
print(sensorium.models.MARKS, is_callable_allowed(_load_deepgemm_kernel), torch.compiler.disable.__module__)
with TransformGetItemToIndex() as mode:
    print(type(mode).__module__)
print(sys.modules["torchvision.ops.roi_align"].is_compile_supported("meta"))
"""


def test_two_modules_do_without_and_the_rest_of_transformers_sees_what_is_installed() -> None:
    assert not hasattr(candidate_generator, "roc_curve")
    assert not hasattr(loss_for_object_detection, "linear_sum_assignment")
    assert transformers.utils.is_sklearn_available() == (find_spec("sklearn") is not None)
    assert transformers.utils.is_scipy_available() == (find_spec("scipy") is not None)


def test_a_chat_processor_imports_no_torch_dynamo_and_what_was_asked_of_it_is_done_later(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", OF_A_PICTURE_MODEL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    mode = "torch._dynamo._trace_wrapped_higher_order_op"
    assert done.stdout.splitlines() == ["False True", "[] True torch.compiler", mode, "False"]


def test_the_process_of_an_environment_imports_no_recipe_schema() -> None:
    code = "import sys, sensorium.envs.remote.isolated, sensorium.envs.frozen_lake; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
