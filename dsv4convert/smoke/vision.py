"""Pictures: answers, streams, turns, tool results, and how many fit.

Three things are judged. Protocol: what every answer must have. Counts: as many prompt tokens as the official
layout makes of the request, which a picture that was lost, moved or resized otherwise changes. And, unless
the weights are random, whether the model saw what was shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke import refusals, sight
from dsv4convert.smoke.answers import Call, Picture, Tool, Turn
from dsv4convert.smoke.checks import VISION, Check, Result, Scene
from dsv4convert.smoke.encoding import Encoder, Prompt
from dsv4convert.smoke.pictures import many, plain
from dsv4convert.smoke.protocols import Speaker
from dsv4convert.smoke.server import Trouble
from dsv4convert.smoke.sight import unread
from dsv4convert.smoke.stage import FEW, Stage, shown
from dsv4convert.smoke.talk import COMPARED, stream_result

_BEFORE: Final = "Look at this picture."
_AFTER: Final = "Describe it in one sentence."
_STREAMED: Final = "Say what this picture shows."
_FIRST: Final = "What was the first colour that I showed you? Answer with one word."
_VIEW: Final = Tool(
    "view_picture",
    "Shows a picture.",
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
_CALL: Final = Call("call_1", _VIEW.name, json.dumps({"name": "door.png"}))
_DOOR: Final = "What colour is the door in door.png? Answer with one word."
_VIEWED: Final = "This is door.png."
#: What may follow the picture in a tool result: texts of several lengths.
_REMARKS: Final = (
    "Taken today.",
    "Taken this morning.",
    "Taken on a rainy day.",
    "The door of the old shed.",
)


def checks(scene: Scene) -> Iterator[Check]:
    """Yield the checks of pictures."""
    stage = Stage(scene, Encoder(scene.server))
    for speaker in scene.speakers:
        yield from _of_protocol(stage, speaker)
    for number in scene.terms.pictures:
        counted = f"a request with {number} pictures of several shapes is answered and counted as laid out"
        yield Check(f"vision.{number}", counted, partial(_many, stage, number), VISION)
    for part in (refusals, sight):
        yield from part.checks(stage)


def _of_protocol(stage: Stage, speaker: Speaker) -> Iterator[Check]:
    name = speaker.name
    answer = (
        "a picture between two texts stays there, gets an answer, and is counted as the official layout does"
    )
    yield Check(f"vision.{name}", answer, partial(_answer, stage, speaker), VISION)
    stream = "a stream about a picture is complete and says what the same request says without a stream"
    run = partial(_stream, stage, speaker)
    yield Check(f"vision.{name}-stream", stream, run, VISION)
    turns = "pictures of earlier turns are still there: every turn is counted, and the first colour is known"
    yield Check(f"vision.{name}-turns", turns, partial(_turns, stage, speaker), VISION)
    tools = "a picture in a tool result keeps its place there, and its colour is known"
    if name == "responses":
        tools += "; or it is refused with 400, as by SGLang 0.5.16 without the shim, and never lost"
    yield Check(f"vision.{name}-tools", tools, partial(_tools, stage, speaker), VISION)


def _answer(stage: Stage, speaker: Speaker) -> Result:
    where = f"vision.{speaker.name}"
    turns = shown(_BEFORE, plain("red", 96, 48), _AFTER)
    prompt = stage.encoder.encode(turns)
    answer = speaker.ask(turns, COMPARED)
    findings = list(stage.misplaced(where, prompt, [(_BEFORE, _AFTER)]))
    findings += stage.miscounted(where, answer, prompt)
    if not answer.text and answer.completion_tokens != 1:
        problem = "the answer lacks what the protocol promises"
        findings.append(finding("smoke.answer", where, problem, expected="text"))
    facts = {"prompt_tokens": answer.prompt_tokens, "laid_out": prompt.tokens, "text": answer.text[:80]}
    return Result(tuple(findings), facts)


def _stream(stage: Stage, speaker: Speaker) -> Result:
    turns, where = shown(plain("blue"), _STREAMED), f"vision.{speaker.name}-stream"
    result = stream_result(stage.scene, speaker, turns, where)
    if result.findings:
        return result
    counted = stage.miscounted(where, speaker.stream(turns, FEW), stage.encoder.encode(turns))
    return Result(tuple(counted), result.facts)


def _turns(stage: Stage, speaker: Speaker) -> Result:
    where = f"vision.{speaker.name}-turns"
    turns = (
        *shown(plain("yellow"), "Remember this colour."),
        Turn("assistant", "I will."),
        *shown("And remember this one.", plain("blue", 60, 80)),
        Turn("assistant", "I will remember both."),
        Turn("user", _FIRST),
    )
    findings: list[Finding] = []
    text = ""
    for length in (1, 3, 5):
        prompt = stage.encoder.encode(turns[:length])
        answer = speaker.ask(turns[:length], COMPARED if length == len(turns) else FEW)
        findings += stage.miscounted(f"{where} {length // 2 + 1}", answer, prompt)
        text = answer.text
    findings += unread(stage, where, plain("yellow"), "yellow", text)
    return Result(tuple(findings), {"judged": stage.real, "text": text[:80]})


def _tools(stage: Stage, speaker: Speaker) -> Result:
    where, picture = f"vision.{speaker.name}-tools", plain("green", 80, 60)
    remark = _telling(stage, picture)
    turns = _viewed(_VIEWED, picture, remark)
    prompt = stage.encoder.encode(turns, (_VIEW,))
    try:
        answer = speaker.ask(turns, COMPARED, tools=(_VIEW,))
    except Trouble as trouble:
        if speaker.name != "responses" or trouble.status != 400:
            raise
        return Result(facts={"refused": f"{trouble}"[:120]})
    findings = list(stage.misplaced(where, prompt, [(_VIEWED, remark)]))
    findings += stage.miscounted(where, answer, prompt)
    findings += unread(stage, where, picture, "green", answer.text)
    facts = {"prompt_tokens": answer.prompt_tokens, "laid_out": prompt.tokens, "judged": stage.real}
    return Result(tuple(findings), facts)


def _viewed(*parts: str | Picture) -> tuple[Turn, ...]:
    return (
        Turn("user", _DOOR),
        Turn("assistant", calls=(_CALL,)),
        Turn("tool", call_id=_CALL.id, parts=parts),
    )


def _telling(stage: Stage, picture: Picture) -> str:
    """Return a remark that makes the count tell whether the picture stands before or behind it."""

    def tokens(*parts: str | Picture) -> int:
        prompt: Prompt = stage.encoder.encode(_viewed(*parts), (_VIEW,))
        return prompt.tokens

    for remark in _REMARKS:
        if tokens(_VIEWED, picture, remark) != tokens(_VIEWED, remark, picture):
            return remark
    return _REMARKS[0]


def _many(stage: Stage, number: int) -> Result:
    where, pictures = f"vision.{number}", many(number)
    # Two pictures follow one another without a text between them, then comes a text.
    parts: list[str | Picture] = []
    for at, picture in enumerate(pictures):
        parts += [picture, f"That was number {at + 1}."] if at % 3 != 1 else [picture]
    turns = shown(*parts, "How many pictures were there?")
    if reason := stage.refusal(number):
        return Result(skipped=reason)
    prompt = stage.encoder.encode(turns)
    if reason := stage.refusal(number, prompt):
        return Result(skipped=reason)
    answer = stage.scene.chat.ask(turns, FEW)
    facts = {"prompt_tokens": answer.prompt_tokens, "laid_out": prompt.tokens}
    return Result(tuple(stage.miscounted(where, answer, prompt)), facts)
