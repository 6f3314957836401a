"""Which SGLang is installed, told from its files without importing it.

A wheel records no commit, so every file that the shim touches or relies on is hashed; a git checkout is
asked for its commit as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.runtime import contract, gate
from dsv4convert.runtime.sight import NEEDED

_INSTALL = f"install SGLang {contract.VERSION} into this environment, then dsv4convert with `--no-deps`"
_PIN = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([A-Za-z0-9_.+!]+)$")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Installation:
    """SGLang as it lies on disk.

    Attributes:
        root: Directory of the package ``sglang``.
        version: What its metadata say; None for a bare source tree.
        commit: HEAD of the checkout that holds it, None for a wheel.
    """

    root: Path
    version: str | None
    commit: str | None


def installation(modules: Mapping[str, Any]) -> Installation | None:
    """Return where SGLang is, from what `sight` says about modules; None if it is nowhere."""
    origin = modules.get("sglang")
    if not origin:
        return None
    root = Path(origin).parent
    return Installation(root, modules["versions"]["sglang"], _commit_of(root))


def findings(found: Installation | None, modules: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with SGLang and the libraries it runs on."""
    if found is None:
        problem = "SGLang is not installed where this Python looks"
        yield finding(
            "sglang.missing", "sglang", problem, expected=f"SGLang {contract.VERSION}", hint=_INSTALL
        )
        return
    # A checkout on top of the tag calls itself 0.5.16.post1.dev3 or the like.
    if found.version is not None and found.version.partition("+")[0] != contract.VERSION:
        problem = "is another version than the one the shim was written against"
        expected, shown = contract.VERSION, found.version
        yield finding("sglang.version", "sglang", problem, expected=expected, found=shown, hint=_INSTALL)
    if found.commit is not None and found.commit != contract.COMMIT:
        problem = "the checkout is at another commit"
        hint = f"run `git checkout {contract.COMMIT}` in the checkout of SGLang"
        expected, shown = contract.COMMIT, found.commit
        yield finding("sglang.commit", "sglang", problem, expected=expected, found=shown, hint=hint)
    yield from gate.changed_files(found.root)
    yield from _libraries(modules)
    absent = [name for name, path in modules["compilers"].items() if path is None]
    if absent:
        problem = (
            "kernels that are in no cache yet cannot be compiled, which ends the server at its first token"
        )
        yield finding("sglang.compiler", ", ".join(absent), problem, found="not on the path")


def _libraries(modules: Mapping[str, Any]) -> Iterator[Finding]:
    versions, pins = modules["versions"], dict(_pins(modules["requires"]))
    for name in NEEDED:
        version, pin = versions[name], pins.get(name)
        if version is None:
            problem = "SGLang cannot serve this model without it"
            yield finding(
                "sglang.library", name, problem, expected=pin or "any version", found="not installed"
            )
        elif pin is not None and version.partition("+")[0] != pin:
            problem = f"is another version than SGLang {contract.VERSION} asks for"
            yield finding("sglang.pin", name, problem, expected=pin, found=version)
        elif name == "triton" and version != contract.TRITON:
            problem = "the kernels were compiled and tested with another version"
            yield finding("sglang.pin", name, problem, expected=contract.TRITON, found=version)
    yield from _starlette(versions.get("starlette"))


def _starlette(version: str | None) -> Iterator[Finding]:
    """SGLang pins no version of it. With an old one, patch S3 is all that keeps the API key in force."""
    if version is not None and _numbers(version) < contract.STARLETTE:
        expected = ".".join(map(str, contract.STARLETTE))
        problem = "takes the path of a request from its Host header, which the check of the API key goes by"
        yield finding(
            "sglang.pin",
            "starlette",
            problem,
            expected=f"{expected} or newer",
            found=version,
            hint=f"run `pip install 'starlette>={expected}'`; until then patch S3 refuses such requests",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _pins(requirements: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the exact pins that hold on every system: ``torch==2.11.0``."""
    for requirement in requirements:
        match = _PIN.match(requirement.strip())
        if match:
            yield match[1], match[2]


def _commit_of(package: Path) -> str | None:
    """Return HEAD of the git checkout around a package, read from its files; None without one."""
    # `python/sglang` in the repository of SGLang.
    git = package.parent.parent / ".git"
    try:
        if git.is_file():  # A linked worktree.
            git = (git.parent / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head if _COMMIT.fullmatch(head) else None
        return _resolve(git, head.partition(":")[2].strip())
    except OSError:
        return None


def _resolve(git: Path, name: str) -> str | None:
    common = git / "commondir"
    store = (git / common.read_text().strip()).resolve() if common.is_file() else git
    for home in (git, store):
        if (home / name).is_file():
            commit = (home / name).read_text().strip()
            return commit if _COMMIT.fullmatch(commit) else None
    for line in (store / "packed-refs").read_text().splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return None
