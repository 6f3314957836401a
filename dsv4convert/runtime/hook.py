"""The import hook: patches a module of SGLang right after it was executed, before anyone can use it.

Nothing happens until a process imports SGLang. Then, once: settings are read, environment defaults are set,
and the files that the patches rest on are compared with the hashes of the contract. A file that differs
refuses the import; no patch is ever applied to code that was not read.

A target that is not there refuses the process. SGLang's registry of models ignores every error of an import
and serves a substitute for the model; therefore whoever goes on to its next module ends the process.

Loaded at the start of every Python process, so only `os` and `sys` are imported here.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from dsv4convert.runtime.contract import Patch

#: Ids of patches in force, in the order in which they were applied.
APPLIED: list[str] = []


def install() -> None:
    """Arm this process if the environment asks for it; calling it again changes nothing."""
    if is_enabled() and not is_installed():
        sys.meta_path.insert(0, _FINDER)


def is_enabled() -> bool:
    """Say whether the environment asks for the shim; our own variable outranks the older name."""
    return os.environ.get("ENABLE_DSV4_SM80", os.environ.get("ENABLE_SGLANG_DSV4_A100_PATCH")) == "1"


def is_installed() -> bool:
    """Say whether this process is armed."""
    return _FINDER in sys.meta_path


class _Finder:
    """Finds nothing itself: lets the other finders look, and wraps the loader of a module to be patched."""

    def __init__(self) -> None:
        self._patches: dict[str, list[Patch]] | None = None
        self._checked = False
        #: Why this process must not serve.
        self.refusal: Exception | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "sglang" and not name.startswith("sglang."):
            return None
        if self.refusal is not None:
            # No error of an import: those are what was ignored.
            raise SystemExit(str(self.refusal))
        if self._patches is None:
            self._patches = _begin()
        if name not in self._patches:
            return None
        if not self._checked:
            from dsv4convert.runtime import gate

            gate.require_known_files(sys.modules["sglang"].__path__[0])
            self._checked = True
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                wrapped: Any = _PatchingLoader(spec.loader, self._patches[name])
                spec.loader = wrapped
                return spec
        return None


class _PatchingLoader:
    """Runs the stock loader, applies the patches, and leaves the module as if it had not been here."""

    def __init__(self, stock: Any, patches: list[Patch]) -> None:
        self._stock = stock
        self._patches = patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._stock.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._stock
        module.__loader__ = self._stock
        self._stock.exec_module(module)
        from dsv4convert.runtime import gate

        for patch in self._patches:
            try:
                gate.apply(patch, module)
            except Exception as error:
                _FINDER.refusal = error
                raise
            APPLIED.append(patch.id)


_FINDER: Any = _Finder()


def _begin() -> dict[str, list[Patch]]:
    """Read the settings, set the environment defaults, and return module -> patches."""
    from dsv4convert.runtime import contract, settings

    for name, value in contract.environment(settings.moe_backend()).items():
        os.environ.setdefault(name, value)
    by_module: dict[str, list[Patch]] = {}
    for patch in contract.wanted():
        by_module.setdefault(patch.module, []).append(patch)
    return by_module
