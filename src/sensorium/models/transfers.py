"""Small tables from the host to a device, without waiting for what the device is doing."""

import torch
from torch import Tensor


def sent_to(device: torch.device, table: Tensor) -> Tensor:
    """A table of the CPU on a device. From pinned memory: a copy from elsewhere waits until all work before it is done."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
