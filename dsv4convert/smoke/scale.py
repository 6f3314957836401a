"""Long prompts, and many requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import Answer, Turn
from dsv4convert.smoke.checks import FULL, QUICK, Check, Result, Scene
from dsv4convert.smoke.native import Generated, generate
from dsv4convert.smoke.server import Trouble
from dsv4convert.smoke.ties import agree

_NEEDLE: Final = "58213"
#: Lines whose tokens are counted to know how long a line is, and tokens of the answer.
_SAMPLE, _SAID = 32, 64
#: Notes are numbered from here on, so that the numbers of most prompts have equally many digits.
_FIRST: Final = 1000
#: A prompt may miss the length that was asked for by this share: lines have no equal lengths.
_OFF: Final = 0.1
_WORDS: Final = (
    "oak",
    "harbour",
    "violin",
    "granite",
    "lantern",
    "meadow",
    "copper",
    "sail",
    "thistle",
    "bridge",
)

#: Tokens of an answer that is repeated under load.
_REPEATED: Final = 32
_PROMPTS: Final = tuple(
    f"{subject} in one sentence:"
    for subject in (
        "What a lighthouse is for",
        "How bread is made",
        "Why leaves turn red",
        "What a violin is",
        "How a lock works",
        "Why the sea is salt",
        "What a fraction is",
        "How rain begins",
    )
)


def checks(scene: Scene) -> Iterator[Check]:
    """Yield the checks of size."""
    for length in scene.terms.lengths:
        asserts = f"a prompt of {length:,} tokens is counted right, and a number that stands in it is found"
        yield Check(f"long.{length}", asserts, partial(_long, scene, length), suites=FULL)
    load = _Load(scene)
    for number in scene.terms.concurrency:
        at_once = (
            f"{number} requests at once" if number > 1 else "the same requests again, one after the other,"
        )
        asserts = f"{at_once} all succeed and answer as alone, but for ties within {scene.terms.tie:g} nats"
        yield Check(
            f"concurrency.{number}",
            asserts,
            partial(load.check, number),
            suites=QUICK if number <= 4 else FULL,
        )


def _line(number: int) -> str:
    words = " ".join(_WORDS[(number * step + step) % len(_WORDS)] for step in (1, 3, 7))
    return f"Note {_FIRST + number}: {words}."


def _document(lines: int) -> str:
    notes = [_line(number) for number in range(lines)]
    notes[lines // 3] = f"Note {_FIRST + lines // 3}: the number of the locker is {_NEEDLE}."
    return "\n".join(notes)


def _question(lines: int) -> tuple[Turn]:
    end = "What is the number of the locker? Answer with the number only."
    return (Turn("user", f"These are notes.\n{_document(lines)}\n{end}"),)


def _lines_of(scene: Scene, length: int) -> int:
    """Return how many lines make a prompt of so many tokens, from the counts of two short ones."""
    short, double = (scene.chat.ask(_question(n * _SAMPLE), 1).prompt_tokens or 0 for n in (1, 2))
    if double <= short:
        found = f"{short:,} and {double:,}"
        raise Trouble(
            "protocol", f"prompts of {_SAMPLE} and {2 * _SAMPLE} lines are counted as {found} tokens"
        )
    return max(_SAMPLE, _SAMPLE + (length - short) * _SAMPLE // (double - short))


def _long(scene: Scene, length: int) -> Result:
    context = scene.server.context
    if context is not None and length + _SAID > context:
        return Result(skipped=f"the server takes {context:,} tokens")
    lines = _lines_of(scene, length)
    turns = _question(lines)
    answer, counted = scene.chat.ask(turns, _SAID), scene.messages.count(turns)
    facts = {
        "prompt_tokens": answer.prompt_tokens,
        "counted": counted,
        "judged": not scene.terms.random_weights,
    }
    return Result(tuple(_long_faults(scene, length, answer, counted)), facts)


def _long_faults(scene: Scene, length: int, answer: Answer, counted: int | None) -> Iterator[Finding]:
    where, prompt = f"long.{length}", answer.prompt_tokens or 0
    if counted is not None and prompt != counted:
        problem = "the tokens of a long prompt are counted wrong"
        yield finding("smoke.usage", where, problem, expected=f"{counted:,}", found=f"{prompt:,}")
    elif not length * (1 - _OFF) <= prompt <= length * (1 + _OFF):
        problem = "the prompt is far from as long as the tokens of its lines make it"
        yield finding("smoke.usage", where, problem, expected=f"about {length:,}", found=f"{prompt:,}")
    if not scene.terms.random_weights and _NEEDLE not in answer.text.replace(",", ""):
        problem, found = "a number that stands in the prompt was not found", repr(answer.text[:60])
        yield finding("smoke.needle", where, problem, expected=_NEEDLE, found=found)


@dataclass(slots=True)
class _Load:
    """The same prompts, alone and at once; alone only once."""

    scene: Scene
    _alone: list[Generated] = field(default_factory=list)

    def check(self, number: int) -> Result:
        """Send all prompts, `number` at a time, and compare."""
        server = self.scene.server
        if not self._alone:
            # SGLang refuses probabilities under DSpark.
            gaps = not server.speculates
            self._alone = [generate(server, prompt, _REPEATED, gaps=gaps) for prompt in _PROMPTS]
        with ThreadPoolExecutor(number) as pool:
            answers = list(pool.map(self._ask, _PROMPTS))
        troubles = [answer for answer in answers if isinstance(answer, Trouble)]
        if len(troubles) == len(answers) and troubles[0].kind in ("connection", "timeout"):
            raise troubles[0]
        findings = []
        if troubles:
            problem, found = f"{len(troubles)} of {len(answers)} requests failed", f"{troubles[0]}"
            findings.append(finding("smoke.load", f"concurrency.{number}", problem, found=found))
        seen: dict[str, int] = {}
        for prompt, alone, answer in zip(_PROMPTS, self._alone, answers, strict=True):
            if isinstance(answer, Generated):
                verdict, at = _compare(alone, answer, self.scene.terms.tie)
                seen[verdict] = seen.get(verdict, 0) + 1
                findings += _verdict(f"concurrency.{number}", prompt, verdict, at, alone, answer)
        return Result(tuple(findings), {"requests": len(answers), "failed": len(troubles), **seen})

    def _ask(self, prompt: str) -> Generated | Trouble:
        try:
            return generate(self.scene.server, prompt, _REPEATED)
        except Trouble as trouble:
            return trouble


def _compare(alone: Generated, answer: Generated, bound: float) -> tuple[str, int]:
    """Return ``equal``, ``tie``, ``fault`` or ``unknown``, and the position of the first difference."""
    at = agree(alone.ids, answer.ids)
    if at == len(alone.ids):
        return "equal", at
    if not alone.gaps:
        return "unknown", at
    gaps: Mapping[int, Any] = alone.gaps[at] if at < len(alone.gaps) else {}
    return ("tie" if gaps.get(answer.ids[at], bound + 1) <= bound else "fault"), at


def _verdict(
    where: str, prompt: str, verdict: str, at: int, alone: Generated, answer: Generated
) -> Iterator[Finding]:
    if verdict in ("equal", "tie"):
        return
    code, problem = "smoke.load", f"`{prompt}` is answered otherwise than alone from token {at} on"
    if verdict == "unknown":
        code, problem = (
            "smoke.unjudged",
            f"{problem}; the server gives no probabilities that could show a tie",
        )
    yield finding(code, where, problem, expected=f"{alone.ids[at]}", found=f"{answer.ids[at]}")
