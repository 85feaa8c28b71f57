"""Model families in parts. After an import from this package, transformers' processors can be imported."""

# isort: off  (before anything else imports transformers, in this order)
import sensorium.models.lean_transformers
import sensorium.models.torchvision_fix  # noqa: F401
