"""What must hold before SGLang is patched: pinned files are those of the contract, each target is there."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.runtime import contract, settings
from dsv4convert.runtime.contract import Patch
from dsv4convert.runtime.refusal import refusal, refuse_all


def require_known_files(root: str) -> None:
    """Refuse unless every pinned file is the one the patches were written against, or was allowed by hash.

    Args:
        root: Directory of the package ``sglang``.

    Raises:
        Refused: files differ; all of them are named.
    """
    faults = tuple(changed_files(Path(root)))
    if faults:
        raise refuse_all(faults)


def changed_files(root: Path) -> Iterator[Finding]:
    """Yield a finding for every pinned file below `root` that is neither the pinned one nor allowed."""
    allowed = settings.allowed_hashes()
    for name, pinned in contract.HASHES.items():
        try:
            digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        except OSError as error:
            digest = f"nothing ({error.strerror})"
        if digest != pinned and digest not in allowed:
            problem = f"is not the file of SGLang {contract.VERSION}{_other_version(root)}"
            yield finding("shim.file", f"sglang/{name}", problem, expected=f"SHA-256 {pinned}", found=digest)


def _other_version(root: Path) -> str:
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^__version__ = (?:version = )?'([^']+)'", text, re.MULTILINE)
    return f", the installed one is {match[1]}" if match and match[1] != contract.VERSION else ""


def apply(patch: Patch, module: ModuleType) -> None:
    """Replace the target of a patch.

    Raises:
        Refused: the target is gone or takes other parameters.
    """
    *path, name = patch.attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    stock = _ABSENT if owner is None else getattr(owner, name, _ABSENT)
    target = f"{patch.module}.{patch.attribute}"
    if stock is _ABSENT:
        problem = f"patch {patch.id} has nothing to replace"
        raise refusal("shim.target", target, problem, found="no such attribute")
    if patch.parameters is not None:
        found = tuple(inspect.signature(stock).parameters)
        if found != patch.parameters:
            problem = f"patch {patch.id} replaces a function of other parameters"
            raise refusal(
                "shim.target", target, problem, expected=", ".join(patch.parameters), found=", ".join(found)
            )
    maker_module, maker = patch.maker.split(":")
    make = getattr(import_module(f"dsv4convert.runtime.patches.{maker_module}"), maker)
    replacement = make(stock, module)
    if inspect.isfunction(replacement):
        # For whoever looks: signatures are read through it, and it is the way back to the stock function.
        replacement.__wrapped__ = stock  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


_ABSENT: Any = object()


def require_patches() -> tuple[str, ...]:
    """Import every patched module and return the ids in force.

    Raises:
        Refused: a module was imported before the hook was there, so that its patches are missing.
    """
    wanted = contract.wanted()
    for module in dict.fromkeys(patch.module for patch in wanted):
        import_module(module)
    applied = contract.status()["applied"]
    missing = [patch for patch in wanted if patch.id not in applied]
    if missing:
        problem = "was imported before the shim could patch it"
        raise refuse_all(
            finding("shim.late", patch.module, problem, expected=f"patch {patch.id}") for patch in missing
        )
    return tuple(applied)
