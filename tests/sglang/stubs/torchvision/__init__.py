"""A stand-in for torchvision, for machines whose torch is a CPU build.

PyPI's torchvision registers its operators against a CUDA torch and cannot be imported beside a CPU one.
SGLang and transformers import names of it that these tests never call; any name is there, calling it fails.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _Submodule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the attribute that makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"a stand-in for {self.__name__}.{name}")

        return absent


def _put(name: str) -> ModuleType:
    module = sys.modules[f"{__name__}.{name}"] = _Submodule(f"{__name__}.{name}")
    parent, _, leaf = module.__name__.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


# transformers reads members of both when it is imported.
_put("io").ImageReadMode = Enum("ImageReadMode", "UNCHANGED GRAY RGB")  # type: ignore[attr-defined]
_put("transforms").InterpolationMode = Enum(  # type: ignore[attr-defined]
    "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
)
for _name in ("transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _put(_name)
