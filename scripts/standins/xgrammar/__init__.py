"""Stands in for xgrammar (45 MB) where it is not carried; goes with ``--grammar-backend none``.

SGLang's protocol uses one class of it as the type of a field, whether grammars are on or not.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class StructuralTag(BaseModel):
    """Type of a field that no request without a grammar fills."""


def get_model_structural_tag(*_: Any, **__: Any) -> Any:
    """Refuse: a request asked for a grammar."""
    raise NotImplementedError("xgrammar was not carried to this machine")
