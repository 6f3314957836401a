"""Whether an answer is about the picture that was shown, wherever it stands and whatever caches hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import Answer, Picture, Turn, count_at
from dsv4convert.smoke.checks import VISION, Check, Result
from dsv4convert.smoke.encoding import Prompt
from dsv4convert.smoke.native import Generated, generate
from dsv4convert.smoke.pictures import COLOURS, SHAPES, marked, plain, shape, written
from dsv4convert.smoke.stage import Stage, shown
from dsv4convert.smoke.talk import COMPARED, same
from dsv4convert.smoke.ties import agree

#: A block begins 0 to 3 lead tokens before START, by its position modulo 4.
_ALIGNMENTS: Final = 4
#: Texts that are tried until a picture stands at every alignment.
_MOST_WORDS: Final = 24
#: Sentences before and behind a picture: more than a page of a prefix cache, 256 tokens, each time.
_SENTENCES: Final = 40
#: Tokens that are compared after a picture was swapped.
_AFTER_SWAP: Final = 12
#: Difference in nats below which two lists of probabilities are the same.
_SAME: Final = 1e-3
_COLOUR: Final = "What colour is this picture? Answer with one word."
_SHAPE: Final = "Which shape does this picture show, a circle, a square or a triangle? Answer with one word."
_TEXT: Final = "Which number is written in this picture? Answer with the number only."
_ORDER: Final = "Name the colours of these pictures in order, separated by commas."


def checks(stage: Stage) -> Iterator[Check]:
    """Yield the checks of sight."""
    bound = f"{stage.scene.terms.tie:g} nats"
    aligned = (
        f"one picture after {_ALIGNMENTS} texts that put it at each position modulo 4, each twice and then "
        f"all in one request, is counted right, and second answers are the first but for ties within {bound}"
    )
    yield Check("vision.alignment", aligned, partial(_alignment, stage), VISION)
    swapped = (
        "when a picture between two long texts is swapped for another, the prefix cache gives no more than "
        f"the text before it, the answer changes, and each picture keeps its own but for ties within {bound}"
    )
    yield Check("vision.swap", swapped, partial(_swap, stage), VISION)
    yield Check(
        "vision.colour", "plain pictures are named by their colours", partial(_colours, stage), VISION
    )
    yield Check(
        "vision.order", "three colours in one request are named in order", partial(_order, stage), VISION
    )
    yield Check(
        "vision.shape", "a circle, a square and a triangle are named", partial(_shapes, stage), VISION
    )
    yield Check(
        "vision.reading", "a number that is written in a picture is read", partial(_reading, stage), VISION
    )


def unread(stage: Stage, where: str, picture: Picture, expected: str, text: str) -> Iterator[Finding]:
    """Yield a finding if an answer does not say what a picture shows; random weights say nothing."""
    if stage.real and expected not in text.lower().replace(",", ""):
        problem = f"the answer does not know {picture.name}"
        yield finding("smoke.picture-unread", where, problem, expected=expected, found=repr(text[:60]))


# ---- alignment


def _alignment(stage: Stage) -> Result:
    where, scene = "vision.alignment", stage.scene
    picture = marked("red", scene.terms.number)
    aligned = _aligned(stage, picture)
    if len(aligned) < _ALIGNMENTS:
        return Result(
            skipped=f"{_MOST_WORDS} texts put the picture at {len(aligned)} of {_ALIGNMENTS} alignments"
        )
    findings: list[Finding] = []
    first: dict[int, Answer] = {}
    for alignment, (turns, prompt) in (*aligned.items(), *aligned.items()):
        answer = scene.chat.ask(turns, COMPARED)
        findings += stage.miscounted(f"{where} {alignment}", answer, prompt)
        if alignment in first:
            problem = "the same picture at the same place gets another answer the second time"
            findings += same(scene, f"{where} {alignment}", turns, answer, first[alignment], problem)[1]
        first.setdefault(alignment, answer)
    together = shown(*(part for turns, _ in aligned.values() for part in turns[0].parts))
    answer = scene.chat.ask(together, COMPARED)
    findings += stage.miscounted(f"{where} together", answer, stage.encoder.encode(together))
    return Result(tuple(findings), {"number": scene.terms.number, "alignments": sorted(aligned)})


def _aligned(stage: Stage, picture: Picture) -> Mapping[int, tuple[tuple[Turn], Prompt]]:
    """Return a conversation for every alignment of a picture: start modulo 4 -> turns, prompt.

    The one with the fewest lead tokens comes first: rows kept from it are too few for the others, so that a
    server that reuses them cannot go on, while surplus rows would only be shifted.
    """
    found: dict[int, tuple[tuple[Turn], Prompt]] = {}
    for words in range(1, _MOST_WORDS + 1):
        turns = shown(f"Look:{' so' * words}.", picture, _COLOUR)
        prompt = stage.encoder.encode(turns)
        found.setdefault(prompt.blocks[0].start % _ALIGNMENTS, (turns, prompt))
        if len(found) == _ALIGNMENTS:
            break
    return dict(sorted(found.items(), reverse=True))


# ---- swapped pictures


def _swap(stage: Stage) -> Result:
    where, scene = "vision.swap", stage.scene
    story = " ".join(
        f"Picture {scene.terms.number + number} of the album was lost." for number in range(_SENTENCES)
    )
    asked: dict[str, tuple[Picture, Prompt]] = {}
    answers: dict[str, list[Generated]] = {"red": [], "blue": []}
    for colour in answers:
        picture = plain(colour)
        turns = shown(f"{story} Only this one was kept.", picture, f"{story} {_COLOUR}")
        asked[colour] = picture, stage.encoder.encode(turns)
    if reason := stage.refusal(1, asked["red"][1]):
        return Result(skipped=reason)
    text = stage.encoder.text(asked["red"][1].ids)
    for colour in (*asked, *asked):
        picture = asked[colour][0]
        gaps = not scene.server.speculates
        answers[colour].append(generate(scene.server, text, _AFTER_SWAP, gaps=gaps, pictures=(picture,)))
    findings = list(_cached(where, answers["blue"][0], asked["blue"][1]))
    for colour, (one, two) in answers.items():
        findings += _miscounted(stage, where, one, asked[colour][1])
        findings += _repeated(stage, where, colour, one, two)
    red, blue = answers.values()
    moved, noise = _distance(red[0], blue[0]), max(_distance(*red), _distance(*blue))
    judged = stage.real or bool(red[0].gaps)
    if judged and not findings and moved <= max(_SAME, 2 * noise):
        problem = "a red and a blue picture get the same answer"
        expected = f"probabilities more than {max(_SAME, 2 * noise):.2g} nats apart"
        findings.append(
            finding("smoke.picture-mixed", where, problem, expected=expected, found=f"{moved:.2g}")
        )
    facts = {
        "number": scene.terms.number,
        "picture_starts_at": asked["blue"][1].blocks[0].start,
        "cached": {colour: [_from_cache(answer) for answer in both] for colour, both in answers.items()},
        "nats_between_pictures": _shown(moved),
        "nats_between_repetitions": _shown(noise),
        "judged": judged,
    }
    return Result(tuple(findings), facts)


def _from_cache(answer: Generated) -> int | None:
    return count_at(answer.meta, "cached_tokens")


def _cached(where: str, answer: Generated, prompt: Prompt) -> Iterator[Finding]:
    cached, start = _from_cache(answer), prompt.blocks[0].start
    if cached is not None and cached > start:
        problem = (
            "for a picture that was not shown before, the prefix cache gives more than the text before it"
        )
        expected = f"at most {start:,} tokens"
        yield finding("smoke.picture-mixed", where, problem, expected=expected, found=f"{cached:,}")


def _miscounted(stage: Stage, where: str, answer: Generated, prompt: Prompt) -> Iterator[Finding]:
    counted = Answer(answer.text, "", answer.prompt_tokens, len(answer.ids))
    return stage.miscounted(where, counted, prompt)


def _repeated(stage: Stage, where: str, colour: str, one: Generated, two: Generated) -> Iterator[Finding]:
    at = agree(one.ids, two.ids)
    if at == len(one.ids):
        return
    problem = f"the {colour} picture gets another answer after another picture, from token {at} on"
    code = "smoke.picture-mixed"
    if not one.gaps:
        code, problem = (
            "smoke.unjudged",
            f"{problem}; the server gives no probabilities that could show a tie",
        )
    elif at < len(one.gaps) and one.gaps[at].get(two.ids[at], float("inf")) <= stage.scene.terms.tie:
        return
    yield finding(code, where, problem, expected=f"{one.ids[at]}", found=f"{two.ids[at]}")


def _distance(one: Generated, two: Generated) -> float:
    """Return how far two lists of probabilities are apart in nats, up to where the answers part.

    Without probabilities, and where the probable tokens are others, it is infinite if the answers differ.
    """
    if not one.gaps or not two.gaps:
        return 0.0 if one.ids == two.ids else float("inf")
    alike = agree(one.ids, two.ids) + 1
    return max(map(_apart, one.gaps[:alike], two.gaps[:alike]), default=0.0)


def _apart(one: Mapping[int, float], two: Mapping[int, float]) -> float:
    return max((abs(one[token] - two[token]) for token in one.keys() & two.keys()), default=float("inf"))


def _shown(nats: float) -> float | str:
    return round(nats, 5) if nats < float("inf") else "other tokens"


# ---- what is seen


def _colours(stage: Stage) -> Result:
    return _named(stage, "vision.colour", _COLOUR, [(plain(name), name) for name in COLOURS])


def _shapes(stage: Stage) -> Result:
    return _named(stage, "vision.shape", _SHAPE, [(shape(name), name) for name in SHAPES])


def _reading(stage: Stage) -> Result:
    return _named(stage, "vision.reading", _TEXT, [(written(text), text) for text in ("4711", "58213")])


def _named(stage: Stage, where: str, question: str, asked: Sequence[tuple[Picture, str]]) -> Result:
    if reason := _unjudged(stage):
        return Result(skipped=reason)
    texts = {
        picture.name: stage.scene.chat.ask(shown(picture, question), COMPARED).text for picture, _ in asked
    }
    findings = [
        f for picture, name in asked for f in unread(stage, where, picture, name, texts[picture.name])
    ]
    facts: dict[str, Any] = {name: text[:60] for name, text in texts.items()}
    return Result(tuple(findings), facts)


def _order(stage: Stage) -> Result:
    if reason := _unjudged(stage):
        return Result(skipped=reason)
    colours = ("blue", "yellow", "red")
    text = stage.scene.chat.ask(shown(*map(plain, colours), _ORDER), COMPARED).text
    places = [text.lower().find(colour) for colour in colours]
    facts = {"text": text[:80]}
    if -1 not in places and places == sorted(places):
        return Result(facts=facts)
    problem = "the answer does not name the colours of three pictures in order"
    expected, found = ", ".join(colours), repr(text[:60])
    return Result(
        (finding("smoke.picture-unread", "vision.order", problem, expected=expected, found=found),), facts
    )


def _unjudged(stage: Stage) -> str:
    return "" if stage.real else "`--random-weights`: a model without trained weights names nothing"
