"""The device that does the arithmetic of a conversion: whether it can, its decoder, and its faults.

The kernels, and torch with them, are loaded only when a GPU is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from dsv4convert.decoder import CpuDecoder, Decoder
from dsv4convert.errors import EnvironmentFault, finding

#: What `convert` can be told to use.
DEVICES = ("cpu", "cuda")
_CAPABILITY = (8, 0)
# How the messages of torch and of Triton begin when the driver refused something.
_CUDA_SAYS = ("CUDA error", "CUDA driver error", "CUDA out of memory", "Triton Error [CUDA]")


def require_device(device: str) -> None:
    """Refuse a device that cannot convert.

    Raises:
        ValueError: there is no such device.
        EnvironmentFault: ``device.unavailable``: no torch with CUDA, no card, an old card, or no Triton.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device == "cuda":
        _require_cuda()


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}, " + ("without CUDA" if torch.version.cuda is None else "no GPU")
        raise _unavailable("no CUDA GPU can be used", "an NVIDIA GPU and a CUDA build of torch", built)
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        found = f"{torch.cuda.get_device_name()}, {capability[0]}.{capability[1]}"
        raise _unavailable("the GPU is too old", "compute capability 8.0 or newer", found)
    try:
        import triton
    except ImportError as error:
        found = f"`import triton` fails: {error}"
        raise _unavailable("Triton is not installed", "`dsv4convert[triton]`", found) from error
    del triton


def _unavailable(problem: str, expected: str, found: str) -> EnvironmentFault:
    return EnvironmentFault(finding("device.unavailable", "cuda", problem, expected=expected, found=found))


def decoder_of(device: str) -> Decoder:
    """Return a decoder on a device that `require_device` has accepted; a process has one on its GPU."""
    return CpuDecoder() if device == "cpu" else _gpu_decoder()


@lru_cache(maxsize=1)
def _gpu_decoder() -> Decoder:
    from kernels_ref.sm80.strips import StripDecoder

    return StripDecoder("cuda")


@contextmanager
def device_faults(where: str) -> Iterator[None]:
    """Turn what a GPU can run into, while shard `where` is converted, into a finding.

    Raises:
        EnvironmentFault: ``device.failed``; the shard can be converted again, on this device or on another.
    """
    try:
        yield
    except Exception as error:
        if problem := _problem(error):
            found = str(error).strip().splitlines()[0]
            raise EnvironmentFault(finding("device.failed", where, problem, found=found)) from error
        raise


def _problem(error: Exception) -> str | None:
    """Return what is wrong with the GPU, None when the error is about something else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "the GPU has too little free memory"
    if isinstance(error, RuntimeError) and str(error).startswith(_CUDA_SAYS):
        return "the GPU reported an error"
    return None
