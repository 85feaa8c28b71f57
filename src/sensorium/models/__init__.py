"""Model families in parts. After an import from this package, transformers' processors can be imported."""

import sensorium.models.torchvision_fix  # noqa: F401  (before anything imports transformers)
