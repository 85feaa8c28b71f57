"""Imports torchvision, also where its compiled operators do not load.

Importing torchvision registers fake kernels for ``nms`` and ``qnms``, which its C++ library declares. Where that library
does not load (built for another torch), the import raises "operator torchvision::nms does not exist", and with it every
image processor of transformers. The processors need neither operator, so declaring their schemas is enough. Where
torchvision loads, or is not installed, importing this module changes nothing.
"""

import torch

LIBRARY: torch.library.Library | None = None  # kept: the schemas live as long as this object
try:
    import torchvision
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
except ImportError:
    pass
