"""dsv4convert: validate, convert and prove DeepSeek-V4 checkpoints for SM80 GPUs.

The public names are loaded on first use, so that importing the package costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "open": ("dsv4convert.checkpoint", "open_checkpoint"),
    "plan": ("dsv4convert.plan", "plan"),
    "convert": ("dsv4convert.convert", "convert"),
    "verify": ("dsv4convert.validate", "verify"),
    "Checkpoint": ("dsv4convert.checkpoint", "Checkpoint"),
    "Finding": ("dsv4convert.errors", "Finding"),
    "Dsv4Error": ("dsv4convert.errors", "Dsv4Error"),
    "Refused": ("dsv4convert.errors", "Refused"),
    "EnvironmentFault": ("dsv4convert.errors", "EnvironmentFault"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
