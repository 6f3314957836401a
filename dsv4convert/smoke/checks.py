"""What a check is, and what it has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dsv4convert.errors import Finding, errors_of
from dsv4convert.smoke.answers import Picture
from dsv4convert.smoke.protocols import Chat, Messages, Responses, Speaker, speakers
from dsv4convert.smoke.server import Server

#: Distance in nats up to which two tokens may change places. Greedy answers of a correct server with other
#: kernels lost at most 0.17 at a token that differed; a wrong layer loses whole nats.
TIE: Final = 0.25
#: What a working draft of five tokens stays above: one guess in ten right makes 1.5 tokens a step.
ACCEPT_LENGTH: Final = 1.5
ACCEPT_RATE: Final = 0.1

State = Literal["passed", "failed", "skipped", "not run"]
Suite = Literal["quick", "full", "vision"]
#: Suites that hold a check: what takes seconds, what takes longer, and what needs pictures.
QUICK: Final[tuple[Suite, ...]] = ("quick", "full")
FULL: Final[tuple[Suite, ...]] = ("full",)
VISION: Final[tuple[Suite, ...]] = ("vision",)
EVERY: Final[tuple[Suite, ...]] = (*QUICK, *VISION)


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked, and what is still right.

    Attributes:
        suite: Which checks: ``quick``, ``full``, or ``vision``.
        only: Patterns of names, as of a shell; checks of the suite with other names are left out. None: all.
        choice: ``tool_choice`` of the tool loop: ``auto`` or ``required``.
        lengths: Lengths of long prompts in tokens.
        concurrency: Numbers of requests at once.
        tie: Distance in nats up to which two tokens may change places.
        random_weights: The checkpoint has no trained weights: answers are counted, not judged.
        accept_length: Tokens per step that a draft must bring; None for the default where it can be judged.
        accept_rate: Share of guesses that must be right; None as above.
        golden: Content of a golden file.
        shown: The pictures of its prompt, in order; none if they were not given.
        pictures: Numbers of pictures in one request.
        number: Changes from run to run, so that no cache holds what stands for "new" in a check.
    """

    suite: Suite = "quick"
    only: tuple[str, ...] = ()
    choice: str = "auto"
    lengths: tuple[int, ...] = (8192, 32768)
    concurrency: tuple[int, ...] = (1, 4, 8)
    tie: float = TIE
    random_weights: bool = False
    accept_length: float | None = None
    accept_rate: float | None = None
    golden: Mapping[str, Any] | None = None
    shown: tuple[Picture, ...] = ()
    pictures: tuple[int, ...] = (1, 2, 8, 48, 96)
    number: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check: what is wrong, what was measured, or why it was left out."""

    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question.

    Attributes:
        name: Stable name, such as ``chat.stream``.
        asserts: What holds when it passes, as a sentence.
        run: Asks it; may raise `Trouble`.
        suites: Suites that hold it.
    """

    name: str
    asserts: str
    run: Callable[[], Result]
    suites: tuple[Suite, ...] = QUICK


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check and what came of it.

    Attributes:
        name: Of the check.
        asserts: Of the check.
        state: ``skipped`` has a reason; ``not run`` means that the server had gone.
        reason: Why it was skipped.
        findings: What is wrong.
        facts: What was measured.
        seconds: How long it took.
    """

    name: str
    asserts: str
    state: State
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(cls, check: Check, result: Result, seconds: float) -> Outcome:
        """Return the outcome of a check that ran."""
        state: State = "skipped" if result.skipped else "failed" if errors_of(result.findings) else "passed"
        return cls(check.name, check.asserts, state, result.skipped, result.findings, result.facts, seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "asserts": self.asserts,
            "state": self.state,
            "reason": self.reason,
            "facts": dict(self.facts),
            "seconds": round(self.seconds, 3),
            "findings": [f.as_dict() for f in self.findings],
        }


@dataclass(frozen=True, slots=True)
class Scene:
    """A server, its three protocols, and what is asked of it."""

    server: Server
    terms: Terms
    chat: Chat
    responses: Responses
    messages: Messages

    @classmethod
    def of(cls, server: Server, terms: Terms) -> Scene:
        """Return a scene with clients of its own."""
        return cls(server, terms, *speakers(server))

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        for speaker in self.speakers:
            speaker.close()

    @property
    def speakers(self) -> tuple[Speaker, ...]:
        """All three protocols."""
        return self.chat, self.responses, self.messages
