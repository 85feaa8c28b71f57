"""What all tests share: property tests are not timed by the example, because a loaded machine is not a failure."""

from importlib.util import find_spec

import sensorium.models  # noqa: F401  (mends torchvision before a test imports transformers by itself)

if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("house", deadline=None, max_examples=50)
    settings.load_profile("house")
