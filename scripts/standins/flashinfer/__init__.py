"""Stands in for flashinfer where it is not carried: SGLang imports it whether it uses it or not.

Goes with ``SGLANG_IS_FLASHINFER_AVAILABLE=0`` and ``--sampling-backend pytorch``. Whatever is called says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.6.14"


def absent(name: str) -> Callable[..., Any]:
    """Return a function that can be imported and not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"flashinfer.{name}: flashinfer was not carried to this machine")

    return refuse
