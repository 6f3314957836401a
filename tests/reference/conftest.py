"""Tiny models, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsv4convert.convert import convert
from tests.reference import tiny
from tests.reference.judge import Judge


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny.Tiny]:
    """Return ``model(kind, layout="official")``: a tiny checkpoint or its conversion; not to be changed.

    The kind ``pictures`` is ``plain`` of the release with a vision tower.
    """
    root = tmp_path_factory.mktemp("tiny")
    read: dict[Path, tiny.Tiny] = {}

    def get(kind: str, layout: str = "official") -> tiny.Tiny:
        source = root / kind
        if not source.exists():
            release = tiny.VISION_RELEASE if kind == "pictures" else tiny.RELEASE
            tiny.make(root, kind, release)
        path = source if layout == "official" else root / f"{kind}-{layout}"
        if not path.exists():
            convert(source, path, experts=layout)
        if path not in read:
            read[path] = tiny.Tiny.read(path)
        return read[path]

    return get


@pytest.fixture(scope="session")
def judge(model: Callable[..., tiny.Tiny]) -> Callable[[str], Judge]:
    """Return ``judge(kind)``: what transformers makes of an official tiny checkpoint."""
    pytest.importorskip("transformers", minversion="5.12")
    known: dict[str, Judge] = {}
    return lambda kind: known.setdefault(kind, Judge(model(kind).root))
