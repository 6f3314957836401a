"""Findings and the exceptions that carry them.

Everything this package has to say about a bad input is a `Finding`: one problem, with a stable code,
the place, what was expected, what was found, and one next action. A code exists only if it has a row
in the catalogue. Nothing here knows about files, tensors or the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from dsv4convert.catalog import CATALOG, Severity


class Exit(IntEnum):
    """Exit statuses of every command."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    REFUSED = 3
    ENVIRONMENT = 4
    INTERNAL = 5
    SIGHUP = 129
    SIGINT = 130
    SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem.

    Attributes:
        code: Stable ``noun.fault`` code, a key of `CATALOG`.
        where: Tensor name, shard or file name, or config key; without path.
        problem: What is wrong, lower case, no final stop.
        expected: What would be right; may be empty when `problem` says it.
        found: What is there; may be empty.
        hint: One next action.
        severity: ``error`` or ``warning``.
    """

    code: str
    where: str
    problem: str
    expected: str
    found: str
    hint: str
    severity: Severity

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    def __str__(self) -> str:
        facts = []
        if self.expected:
            facts.append(f"expected {self.expected}")
        if self.found:
            facts.append(f"found {self.found}")
        tail = f": {', '.join(facts)}" if facts else ""
        return f"{self.severity}: `{self.where}`: {self.problem}{tail}   [{self.code}]"


def finding(
    code: str, where: str, problem: str, *, expected: str = "", found: str = "", hint: str = ""
) -> Finding:
    """Build a finding; severity and default hint come from `CATALOG`.

    Raises:
        KeyError: `code` has no row in `CATALOG` (a bug of the caller).
    """
    kind = CATALOG[code]
    where, problem, expected, found = map(encodable, (where, problem, expected, found))
    return Finding(code, where, problem, expected, found, hint or kind.hint, kind.severity)


def encodable(text: str) -> str:
    """Return `text` with what no encoding can hold escaped: bytes of file names that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


class Dsv4Error(Exception):
    """Base of the errors a user can cause or meet; carries findings and an exit status."""

    exit_code: Exit = Exit.FINDINGS

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = (findings,) if isinstance(findings, Finding) else tuple(findings)
        super().__init__("\n".join(str(f) for f in self.findings))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders (worker to parent); the default form would lose `findings`.
        return type(self), (self.findings,)


class Refused(Dsv4Error):
    """Source or destination is not acceptable; no index was written, DST is not a checkpoint."""

    exit_code = Exit.REFUSED


class EnvironmentFault(Dsv4Error):
    """Disk, permission, memory or library trouble; running the same command again is safe."""

    exit_code = Exit.ENVIRONMENT


def errors_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return only the findings of severity ``error``."""
    return tuple(f for f in findings if f.severity == "error")
