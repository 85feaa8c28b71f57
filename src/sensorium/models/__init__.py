"""Model families in parts. Whoever imports from this package can import transformers' processors afterwards."""

import sensorium.models.torchvision_fix  # noqa: F401  (before anything imports transformers)
