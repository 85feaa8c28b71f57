"""Model families in parts. Whoever imports from this room can import transformers' processors afterwards."""

import sensorium.models.torchvision_fix  # noqa: F401  (before anything imports transformers)
