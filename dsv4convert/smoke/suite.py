"""All checks of a suite, in order, and their report."""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsv4convert.errors import Finding, errors_of, finding
from dsv4convert.files import printable
from dsv4convert.smoke import access, scale, talk, tokens, vision
from dsv4convert.smoke.checks import Check, Outcome, Result, Scene
from dsv4convert.smoke.server import Server, Trouble

_TROUBLES: Final = {"timeout": "smoke.timeout", "pictures": "smoke.picture-count"}
_OTHER_SUITES: Final = {
    "text": "pictures: `--suite vision`",
    "vision": "access, and what needs no picture: `--suite full`",
}
#: What no check here can see.
NOT_CHECKED: Final = (
    "quality of answers beyond these questions",
    "sampling at other temperatures",
    "stored Responses, and functions in streams",
    "speed: `dsv4convert bench-serve` measures it",
)


@dataclass(frozen=True, slots=True)
class Smoke:
    """What a suite found.

    Attributes:
        server: Who was asked.
        suite: ``quick``, ``full`` or ``vision``.
        outcomes: Every check that was chosen, in order.
        only: Patterns of the names that were chosen; none for all.
        left: How many checks of the suite were not chosen.
        lost: Why no more was asked, if the server stopped answering.
    """

    server: Server
    suite: str
    outcomes: tuple[Outcome, ...]
    only: tuple[str, ...] = ()
    left: int = 0
    lost: Finding | None = None

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What no suite looks at, what this one leaves to another, and what was not chosen of it."""
        rest = (f"{self.left} other checks of this suite: without `--only`",) if self.left else ()
        return (*rest, _OTHER_SUITES["vision" if self.suite == "vision" else "text"], *NOT_CHECKED)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, of all checks; one if no check could ask anything."""
        found = [f for outcome in self.outcomes for f in outcome.findings]
        if all(outcome.state == "skipped" for outcome in self.outcomes):
            problem, shown = "every check that was chosen was skipped", " ".join(self.only)
            found.append(finding("smoke.nothing", "--only", problem, found=printable(shown, 200)))
        return (*found, self.lost) if self.lost else tuple(found)

    def ok(self, *, strict: bool = False) -> bool:
        """Tell whether there are no errors or, under `strict`, no findings at all."""
        return not (self.findings if strict else errors_of(self.findings))

    def counts(self) -> Counter[str]:
        """Return how many checks ended in each state."""
        return Counter(outcome.state for outcome in self.outcomes)

    def as_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the JSON form; its ``ok`` is the verdict of the exit status."""
        errors = len(errors_of(self.findings))
        info = self.server.info
        return {
            "ok": self.ok(strict=strict),
            "url": self.server.url,
            "suite": self.suite,
            "only": list(self.only),
            "left": self.left,
            "server": {
                "model": self.server.model,
                "context": self.server.context,
                "sglang": info.get("version"),
                "speculative_algorithm": info.get("speculative_algorithm"),
            },
            "lost": self.lost is not None,
            "errors": errors,
            "warnings": len(self.findings) - errors,
            "checks": [outcome.as_dict() for outcome in self.outcomes],
            "not_checked": list(self.not_checked),
            "findings": [f.as_dict() for f in self.findings],
        }


def run_suite(scene: Scene, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> Smoke:
    """Ask everything that is chosen; a check that fails stops no other, a server that has gone stops all.

    Args:
        scene: Who is asked, and what.
        on_outcome: Called after every check.

    Raises:
        NoSuchCheckError: no check of the suite has the name that was chosen.
    """
    outcomes: list[Outcome] = []
    lost = None
    checks = list(_checks(scene))
    only = scene.terms.only
    chosen = _chosen(checks, only, scene.terms.suite) if only else checks
    for check in chosen:
        if lost:
            outcome = Outcome(check.name, check.asserts, "not run", "the server had stopped answering")
        else:
            outcome, lost = _run(scene.server, check)
        outcomes.append(outcome)
        on_outcome(outcome)
    return Smoke(scene.server, scene.terms.suite, tuple(outcomes), only, len(checks) - len(chosen), lost)


class NoSuchCheckError(ValueError):
    """A pattern that no check is called by: a run that would prove nothing."""


def _chosen(checks: Sequence[Check], only: Sequence[str], suite: str) -> list[Check]:
    """Return the checks that a pattern names, in order; every pattern must name one."""
    chosen: set[str] = set()
    for pattern in only:
        named = {check.name for check in checks if fnmatch.fnmatchcase(check.name, pattern)}
        if not named:
            expected = f"expected some of the suite {suite}: {', '.join(check.name for check in checks)}"
            raise NoSuchCheckError(f"{expected}; got {printable(pattern)!r}")
        chosen |= named
    return [check for check in checks if check.name in chosen]


def _checks(scene: Scene) -> Iterator[Check]:
    for part in (access, talk, vision, tokens, scale):
        yield from (check for check in part.checks(scene) if scene.terms.suite in check.suites)


def _run(server: Server, check: Check) -> tuple[Outcome, Finding | None]:
    """Run a check; also return why nothing more can be asked, if the server has gone."""
    started = time.monotonic()
    try:
        result, trouble = check.run(), None
    except Trouble as caught:
        code = _TROUBLES.get(caught.kind, "smoke.answer")
        result, trouble = Result((finding(code, check.name, f"{caught}"),)), caught
    outcome = Outcome.of(check, result, time.monotonic() - started)
    lost = None
    if trouble and trouble.kind in ("timeout", "connection") and not server.is_alive():
        problem = f"the server stopped answering during `{check.name}`"
        lost = finding("smoke.unreachable", server.url, problem, found=f"{trouble}")
    return outcome, lost
