"""Conversations: answers, streams, turns, functions, grammars, and what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.smoke.answers import Answer, Call, Tool, Turn
from dsv4convert.smoke.checks import FULL, QUICK, Check, Result, Scene
from dsv4convert.smoke.protocols import Speaker
from dsv4convert.smoke.server import Trouble
from dsv4convert.smoke.ties import Verdict, agree, compare

#: Tokens of an answer that is compared.
COMPARED: Final = 32
#: Tokens of an answer that must hold a word or a call, and of one whose tokens are counted.
_SAID, _COUNTED = 256, 8

_QUESTION: Final = (Turn("user", "Name three rivers of Europe, one on a line, and nothing else."),)
_NUMBER: Final = "4711"
_MEMORY: Final = (
    Turn("user", f"My bicycle is red, and the number on its frame is {_NUMBER}. Remember that."),
    Turn("assistant", "I will remember it."),
    Turn("user", "What is the number on the frame of my bicycle? Answer with the number only."),
)
_STOCK: Final = Tool(
    "count_stock",
    "Returns how many pieces of an article lie in the store.",
    {
        "type": "object",
        "properties": {"article": {"type": "string", "description": "Name of the article."}},
        "required": ["article"],
    },
)
_PRICE: Final = Tool("look_up_price", "Returns the price of an article in euros.", _STOCK.parameters)
_ORDER: Final = (
    Turn("user", "How many bicycle bells lie in our store? Ask count_stock, then tell me the number."),
)
_COLOURS: Final = ("red", "green", "blue")
_GRAMMAR: Final = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": list(_COLOURS)}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def checks(scene: Scene) -> Iterator[Check]:
    """Yield the checks of conversations."""
    for speaker in scene.speakers:
        yield from _of_protocol(scene, speaker)
    counts = (
        "all protocols count the same prompt tokens, streamed or not, as many as are counted without an "
        "answer, and no answer is longer than asked for"
    )
    yield Check("usage", counts, partial(_usage, scene))
    schema = "an answer under a JSON schema fits it"
    yield Check("chat.grammar", schema, partial(_grammar, scene), suites=FULL)
    named = "of two functions the one that `tool_choice` names is called"
    yield Check("chat.named-tool", named, partial(_named, scene), suites=FULL)
    why = "Responses of SGLang 0.5.16 takes `auto`, `required` and `none` as `tool_choice`, and no name"
    yield Check("responses.named-tool", named, lambda: Result(skipped=why), suites=FULL)


def _of_protocol(scene: Scene, speaker: Speaker) -> Iterator[Check]:
    name = speaker.name
    yield Check(
        f"{name}.answer",
        "a question gets text and a legal end, and both sides are counted",
        partial(_answer, speaker),
    )
    whole = "a stream has its end" + (", its `[DONE]`" if name == "chat" else "")
    equal = "and its usage counts, and at temperature 0 it says what the same request says without a stream"
    yield Check(
        f"{name}.stream",
        f"{whole} {equal}",
        partial(stream_result, scene, speaker, _QUESTION, f"{name}.stream"),
    )
    recall = "what was said two turns ago is known, and earlier turns are counted"
    yield Check(f"{name}.turns", recall, partial(_turns, scene, speaker), suites=FULL)
    loop = "a function is called with legal arguments, and the answer uses what it returned"
    yield Check(
        f"{name}.tools", loop, partial(_tools, scene, speaker), suites=QUICK if name == "chat" else FULL
    )


def _answer(speaker: Speaker) -> Result:
    answer = speaker.ask(_QUESTION, COMPARED)
    lacking = [
        what
        for what, there in (
            ("text", answer.text or answer.completion_tokens == 1),
            ("a reason why it ended", answer.finish or speaker.name == "responses"),
            ("counts of tokens", answer.prompt_tokens and answer.completion_tokens),
        )
        if not there
    ]
    facts = {"finish": answer.finish, "text": answer.text[:80]}
    problem = "the answer lacks what the protocol promises"
    where = f"{speaker.name}.answer"
    return Result(tuple(finding("smoke.answer", where, problem, expected=what) for what in lacking), facts)


def stream_result(scene: Scene, speaker: Speaker, turns: Sequence[Turn], where: str) -> Result:
    """Judge a stream: that it is whole, and that it says what the same request says without a stream."""
    streamed, whole = speaker.stream(turns, COMPARED), speaker.ask(turns, COMPARED)
    faults = streamed.faults
    if speaker is scene.chat and not scene.chat.done(turns, _COUNTED):
        faults += ("`data: [DONE]`",)
    problem = "the stream lacks what the protocol promises"
    findings = [finding("smoke.stream", where, problem, expected=part) for part in faults]
    if faults:
        return Result(tuple(findings))
    problem = "the stream says something else than the same request without a stream"
    verdict, differences = same(scene, where, turns, streamed, whole, problem)
    findings += differences
    if streamed.text == whole.text and whole.finish and streamed.finish != whole.finish:
        problem = "the stream says the same and ends for another reason"
        expected, found = whole.finish, streamed.finish
        findings.append(finding("smoke.stream", where, problem, expected=expected, found=found))
    return Result(tuple(findings), {"compared": verdict, "characters": len(whole.text)})


def same(
    scene: Scene, where: str, turns: Sequence[Turn], answer: Answer, expected: Answer, problem: str
) -> tuple[Verdict, list[Finding]]:
    """Compare two answers to the same question, of at most `COMPARED` tokens; report all but ties."""
    equal = answer.text == expected.text
    trace = () if equal else scene.chat.trace(turns, COMPARED)
    verdict = compare(answer.text, expected.text, trace, scene.terms.tie)
    if verdict in ("equal", "tie"):
        return verdict, []
    at, code = agree(answer.text, expected.text), "smoke.differs"
    if verdict == "unknown":
        code = "smoke.unjudged"
        problem = f"{problem}; the server gives no probabilities that could show a tie"
    shown = [repr(text[max(0, at - 10) : at + 20]) for text in (expected.text, answer.text)]
    problem = f"{problem}, from character {at:,} on"
    return verdict, [finding(code, where, problem, expected=shown[0], found=shown[1])]


def _turns(scene: Scene, speaker: Speaker) -> Result:
    where = f"{speaker.name}.turns"
    last, all_turns = speaker.ask(_MEMORY[-1:], _COUNTED), speaker.ask(_MEMORY, _SAID)
    findings = []
    if (all_turns.prompt_tokens or 0) <= (last.prompt_tokens or 0):
        problem, expected = "earlier turns do not make the prompt longer", f"more than {last.prompt_tokens}"
        findings.append(
            finding("smoke.turns", where, problem, expected=expected, found=f"{all_turns.prompt_tokens}")
        )
    if not scene.terms.random_weights and _NUMBER not in all_turns.text:
        problem = "the answer does not know what was said two turns ago"
        found = repr(all_turns.text[:60])
        findings.append(finding("smoke.turns", where, problem, expected=_NUMBER, found=found))
    return Result(tuple(findings), {"judged": not scene.terms.random_weights})


def _tools(scene: Scene, speaker: Speaker) -> Result:
    terms = scene.terms
    if terms.choice == "required" and scene.server.grammar_refusal:
        return Result(skipped=f"`--tool-choice required` needs a grammar: {scene.server.grammar_refusal}")
    where = f"{speaker.name}.tools"
    asked = speaker.ask(_ORDER, _SAID, tools=(_STOCK,), choice=terms.choice)
    findings = list(_call_faults(where, asked.calls, must=not terms.random_weights))
    facts = {"judged": not terms.random_weights, "called": [call.name for call in asked.calls]}
    if findings:
        return Result(tuple(findings), facts)
    # Random weights call nothing: what a model would have called shows that the server can go on from there.
    calls = asked.calls or (Call("call_1", _STOCK.name, json.dumps({"article": "bicycle bell"})),)
    results = [Turn("tool", json.dumps({"pieces": int(_NUMBER)}), call_id=call.id) for call in calls]
    answer = speaker.ask((*_ORDER, Turn("assistant", calls=calls), *results), _SAID, tools=(_STOCK,))
    if not terms.random_weights and _NUMBER not in answer.text.replace(",", ""):
        problem, found = "the answer does not use what the function returned", repr(answer.text[:60])
        findings.append(finding("smoke.tools", where, problem, expected=_NUMBER, found=found))
    return Result(tuple(findings), facts)


def _call_faults(where: str, calls: tuple[Call, ...], *, must: bool) -> Iterator[Finding]:
    if must and not calls:
        yield finding("smoke.tools", where, "no function was called", expected=f"a call of {_STOCK.name}")
    for call in calls:
        if not call.id:
            yield finding("smoke.tools", where, "the call has no id, so that no result can be given")
        if call.name != _STOCK.name:
            problem = "a function was called that was not offered"
            yield finding("smoke.tools", where, problem, expected=_STOCK.name, found=call.name)
        elif not isinstance(_json(call.arguments).get("article"), str):
            problem, found = "the arguments do not fit the function's schema", repr(call.arguments[:60])
            yield finding("smoke.tools", where, problem, expected='{"article": "..."}', found=found)


def _json(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(scene: Scene) -> Result:
    counted = scene.messages.count(_QUESTION)
    facts: dict[str, Any] = {"counted": counted}
    findings: list[Finding] = []
    for speaker in scene.speakers:
        forms: tuple[tuple[str, Callable[..., Answer]], ...] = (
            ("", speaker.ask),
            (" stream", speaker.stream),
        )
        for form, ask in forms:
            name = f"{speaker.name}{form}"
            try:
                answer = ask(_QUESTION, _COUNTED)
            except Trouble as trouble:
                # The check of this answer or this stream asks the same and reports it.
                facts[name] = f"{trouble}"
                continue
            facts[name] = [answer.prompt_tokens, answer.completion_tokens]
            if answer.faults:
                continue
            if counted is None:
                # A server without the page is judged by its first answer.
                counted = answer.prompt_tokens
            findings += _count_faults(name, answer, counted)
    return Result(tuple(findings), facts)


def _count_faults(name: str, answer: Answer, counted: int | None) -> Iterator[Finding]:
    if answer.prompt_tokens != counted:
        problem, found = "the prompt tokens are counted wrong", f"{answer.prompt_tokens}"
        yield finding("smoke.usage", name, problem, expected=f"{counted}", found=found)
    number = answer.completion_tokens or 0
    if not 0 < number <= _COUNTED or (answer.finish == "length" and number != _COUNTED):
        exactly = f"{_COUNTED}" if answer.finish == "length" else f"1 to {_COUNTED}"
        problem = "the tokens of the answer are counted wrong"
        yield finding("smoke.usage", name, problem, expected=exactly, found=f"{answer.completion_tokens}")


def _grammar(scene: Scene) -> Result:
    if scene.server.grammar_refusal:
        return Result(skipped=scene.server.grammar_refusal)
    answer = scene.chat.ask((Turn("user", "Which colour has grass?"),), _SAID, response_format=_GRAMMAR)
    facts = {"text": answer.text[:80]}
    # Random weights may fill an answer with the blanks that JSON allows; then nothing was said yet.
    cut = scene.terms.random_weights and answer.finish == "length"
    if cut or _json(answer.text).get("colour") in _COLOURS:
        return Result(facts=facts)
    problem, expected = "the answer does not fit its JSON schema", '{"colour": "green"}'
    found = repr(answer.text[:60])
    return Result((finding("smoke.grammar", "chat.grammar", problem, expected=expected, found=found),), facts)


def _named(scene: Scene) -> Result:
    if scene.server.grammar_refusal:
        return Result(skipped=scene.server.grammar_refusal)
    choice = {"type": "function", "function": {"name": _PRICE.name}}
    answer = scene.chat.ask(_ORDER, _SAID, tools=(_STOCK, _PRICE), choice=choice)
    names = [call.name for call in answer.calls]
    cut = scene.terms.random_weights and answer.finish == "length"
    if cut or names == [_PRICE.name]:
        return Result(facts={"called": names})
    problem, found = "the function that was named was not called", ", ".join(names) or "no call"
    fault = finding("smoke.tools", "chat.named-tool", problem, expected=_PRICE.name, found=found)
    return Result((fault,), {"called": names})
