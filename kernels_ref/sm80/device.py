"""What the launchers ask of a card, once per card."""

from __future__ import annotations

from functools import lru_cache

import torch

# Interpreted kernels run on CPU tensors: launch as for an A100.
_A100_PROCESSORS = 108


def blocks_at_once(device: torch.device, per_processor: int) -> int:
    """Return how many blocks the card runs at a time when `per_processor` of them fit one multiprocessor."""
    return processors(device) * per_processor


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; the answer does not change, so it may be asked during capture."""
    if device.type != "cuda":
        return _A100_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
