"""Stands in for datasets, which SGLang's benchmark client imports for prompts that are not random."""

from __future__ import annotations

from typing import Any


def load_dataset(*_: Any, **__: Any) -> Any:
    """Refuse: a benchmark asked for a public dataset."""
    raise NotImplementedError("datasets was not carried to this machine")
