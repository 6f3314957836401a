"""What must be refused with a sentence, and what must not: a conversation never ends because of its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import Call, Picture, Tool, Turn
from dsv4convert.smoke.checks import VISION, Check, Result
from dsv4convert.smoke.native import generate
from dsv4convert.smoke.pictures import damaged, many, plain
from dsv4convert.smoke.protocols import Speaker
from dsv4convert.smoke.server import Trouble
from dsv4convert.smoke.stage import FEW, Stage, shown
from dsv4convert.vision.layout import PLACEHOLDER

_ASKED: Final = "What do you see?"
_FIND: Final = Tool(
    "find_text",
    "Finds a text in files.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
#: Text that other software takes for a picture; the second one names a file that every server has.
_TAGS: Final = "<image> and <image>/etc/hostname</image>"


def checks(stage: Stage) -> Iterator[Check]:
    """Yield the checks of refusals."""
    lives = "and the server goes on"
    limit = f"one picture more than the server's limit gets 400 and both counts in every protocol, {lives}"
    yield Check("vision.limit", limit, partial(_limit, stage), VISION)
    surplus = f"more pictures than places for them get 400 and both counts, {lives}"
    yield Check("vision.surplus", surplus, partial(_mismatch, stage, "vision.surplus", 2, 3), VISION)
    missing = f"fewer pictures than places for them get 400 and both counts, {lives}"
    yield Check("vision.missing", missing, partial(_mismatch, stage, "vision.missing", 3, 2), VISION)
    broken = f"files that are no pictures get 400 in every protocol, {lives}"
    yield Check("vision.undecodable", broken, partial(_undecodable, stage), VISION)
    roles = f"pictures in turns of the system and of the assistant get 400, {lives}"
    yield Check("vision.roles", roles, partial(_roles, stage), VISION)
    for speaker in stage.scene.speakers:
        literal = (
            f"the text `{PLACEHOLDER}` in every role, beside a picture too, is text: it gets 200, "
            "no picture is counted for it, and the conversation goes on"
        )
        run = partial(_text, stage, speaker, "literal", PLACEHOLDER)
        yield Check(f"vision.{speaker.name}-literal", literal, run, VISION)
        tags = "the text `<image>` in every role, with a path too, is text: as above"
        yield Check(
            f"vision.{speaker.name}-tags", tags, partial(_text, stage, speaker, "tags", _TAGS), VISION
        )


def _limit(stage: Stage) -> Result:
    limit = stage.limit
    if limit is None:
        return Result(skipped="`/server_info` names no limit: `limit_mm_data_per_request` has no `image`")
    where, turns = "vision.limit", shown(*many(limit + 1), _ASKED)
    findings: list[Finding] = []
    for speaker in stage.scene.speakers:
        what = f"a request with {limit + 1} pictures"
        ask = partial(speaker.ask, turns, FEW)
        findings += stage.refused(f"{where} {speaker.name}", what, ask, (limit, limit + 1))
    findings += stage.alive(where)
    return Result(tuple(findings), {"limit": limit})


def _mismatch(stage: Stage, where: str, places: int, pictures: int) -> Result:
    """Send a prompt with other numbers of places and pictures, which only SGLang's own endpoint takes."""
    parts: Sequence[str | Picture] = many(max(places, pictures))
    prompt = stage.encoder.encode(shown(*parts[:places], _ASKED))
    text = stage.encoder.text(prompt.ids)
    given = many(pictures)
    ask = partial(generate, stage.scene.server, text, FEW, pictures=given)
    what = f"a prompt with {places} places for pictures and {pictures} pictures"
    findings = list(stage.refused(where, what, ask, (places, pictures)))
    return Result((*findings, *stage.alive(where)))


def _undecodable(stage: Stage) -> Result:
    where = "vision.undecodable"
    findings: list[Finding] = []
    for picture in damaged():
        for speaker in stage.scene.speakers:
            ask = partial(speaker.ask, shown(picture, _ASKED), FEW)
            findings += stage.refused(f"{where} {speaker.name}", f"{picture.name} as a picture", ask)
    findings += stage.alive(where)
    return Result(tuple(findings))


def _roles(stage: Stage) -> Result:
    where, scene = "vision.roles", stage.scene
    picture, last = plain("red"), Turn("user", _ASKED)
    of_system = (Turn("system", parts=("This is the house.", picture)), last)
    of_assistant = (
        Turn("user", "Draw a house."),
        Turn("assistant", parts=("Here it is.", picture)),
        last,
    )
    # Messages has no system turns: its parameter `system` is text.
    asked: list[tuple[Speaker, str, tuple[Turn, ...]]] = [
        (speaker, "the assistant", of_assistant) for speaker in scene.speakers
    ]
    asked += [(scene.chat, "the system", of_system), (scene.responses, "the system", of_system)]
    findings: list[Finding] = []
    for speaker, role, turns in asked:
        what = f"a picture in a turn of {role}"
        found = list(stage.refused(f"{where} {speaker.name}", what, partial(speaker.ask, turns, FEW)))
        if found and turns is of_system and speaker is scene.responses:
            # SGLang 0.5.16 joins the texts of system turns before the model's encoder sees any.
            problem = (
                f"{what} was not refused: SGLang 0.5.16 keeps the texts of such turns and drops the rest"
            )
            found = [finding("smoke.picture-dropped", f"{where} {speaker.name}", problem)]
        findings += found
    return Result((*findings, *stage.alive(where)))


def _text(stage: Stage, speaker: Speaker, kind: str, text: str) -> Result:
    """Put a text into every role, then go on with the conversation, then show a picture beside it."""
    where = f"vision.{speaker.name}-{kind}"
    findings: list[Finding] = []
    for turns in _conversations(text):
        # Messages puts thoughts into the prompt by rules of its own: only that it takes them is asked.
        counted = speaker.name != "messages" or not any(turn.reasoning for turn in turns)
        try:
            answer = speaker.ask(turns, FEW, tools=(_FIND,))
            if counted:
                findings += stage.miscounted(where, answer, stage.encoder.encode(turns, (_FIND,)))
        except Trouble as trouble:
            if trouble.kind not in ("status", "pictures"):
                raise
            problem = f"a conversation with the text `{text}` is refused or misread"
            findings.append(finding("smoke.placeholder", where, problem, found=f"{trouble}"[:160]))
    return Result(tuple(findings))


def _conversations(text: str) -> Iterator[tuple[Turn, ...]]:
    """Yield conversations in which every role has said a text: each goes on where the first one ends."""
    turns = _spoken(text)
    yield turns
    yield (*turns, Turn("assistant", f"It was {text}."), Turn("user", f"Is {text} still text?"))
    shows = shown(f"{text} is text, this is none:", plain("red"), text)
    yield (*turns, Turn("assistant", "It was."), *shows)
    yield tuple(replace(turn, reasoning=f"They mean {text}.") if turn.calls else turn for turn in turns)


def _spoken(text: str) -> tuple[Turn, ...]:
    """Return a conversation in which every role has said a text."""
    call = Call("call_1", _FIND.name, json.dumps({"text": text}, ensure_ascii=False))
    return (
        Turn("system", f"The word {text} is text."),
        Turn("user", f"Find {text} in my notes."),
        Turn("assistant", f"I look for {text}.", calls=(call,)),
        Turn("tool", f"notes.txt: {text} and more", call_id=call.id),
        Turn("assistant", f"{text} is in notes.txt."),
        Turn("user", f"Thank you. What is {text}?"),
    )
