"""How the shim says no: a sentence that stands alone in a server's log, with what to do next."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4convert.errors import Finding, Refused, finding


class ShimRefused(Refused):
    """The shim will not let this process serve. The message carries the hints: nobody else prints them."""

    def __str__(self) -> str:
        hints = dict.fromkeys(f.hint for f in self.findings)
        return "\n".join([*map(str, self.findings), *(f"hint: {hint}" for hint in hints)])


def refusal(code: str, where: str, problem: str, *, expected: str = "", found: str = "") -> ShimRefused:
    """Return the exception for one finding; its hint is that of the catalogue."""
    return refuse_all([finding(code, where, problem, expected=expected, found=found)])


def refuse_all(findings: Iterable[Finding]) -> ShimRefused:
    """Return the exception for several findings."""
    return ShimRefused(findings)
