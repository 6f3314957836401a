"""What `smoke` sends, read by SGLang's own classes: every request is legal, and the protocols say the same.

The suites run against the fake server, through the official clients; its record is what a server would get.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.managers.io_struct import GenerateReqInput

from dsv4convert.smoke import pictures, refusals, vision
from dsv4convert.smoke.answers import Tool, Turn
from dsv4convert.smoke.bodies import chat_body, messages_body, responses_body
from dsv4convert.smoke.checks import Scene, Suite, Terms
from dsv4convert.smoke.server import open_server
from dsv4convert.smoke.stage import shown
from dsv4convert.smoke.suite import run_suite
from tests.fakechat import KEY, FakeChat, chat_ids, golden

READERS: Final = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/generate": GenerateReqInput,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
#: Endpoints that each suite must have used, so that an empty record proves nothing.
USED: Final[dict[Suite, set[str]]] = {
    "full": {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
    },
    "vision": READERS.keys() - {"/v1/messages/count_tokens"},
}


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[Suite, list[tuple[str, dict[str, Any]]]]]:
    """Return path and body of every request that a suite sent, answered or refused."""
    chat = "Say the names of ten rivers of Europe"
    found: dict[Suite, list[tuple[str, dict[str, Any]]]] = {}
    with FakeChat() as server:
        server.context, server.limit = 32768, 12
        with open_server(server.url, KEY, 20.0) as reached, Scene.of(reached, Terms()) as scene:
            for suite in USED:
                terms = Terms(
                    suite=suite,
                    lengths=(1024,),
                    concurrency=(1,),
                    pictures=(1, 8),
                    golden=golden(chat_ids(chat), chat),
                )
                server.seen.clear()
                run_suite(replace(scene, terms=terms))
                found[suite] = [(path, body) for path, _, body in server.seen]
        server.shutdown()
    yield found


@pytest.mark.parametrize("suite", USED)
def test_every_request_is_legal(
    suite: Suite, recorded: dict[Suite, list[tuple[str, dict[str, Any]]]]
) -> None:
    assert {path for path, _ in recorded[suite]} == USED[suite]
    for path, body in recorded[suite]:
        READERS[path](**body)


def test_no_field_is_ignored(recorded: dict[Suite, list[tuple[str, dict[str, Any]]]]) -> None:
    """SGLang's classes take unknown fields without a word: none of ours may be one."""
    unknown = {
        (path, name)
        for bodies in recorded.values()
        for path, body in bodies
        for name in body.keys() - _fields(READERS[path])
    }
    assert unknown == set()


def _fields(reader: Any) -> set[str]:
    return set(getattr(reader, "model_fields", None) or reader.__dataclass_fields__)


# ---- one conversation, three protocols

VIEWED = vision._viewed("This is door.png.", pictures.plain("green"), "Taken today.")
CONVERSATIONS: Final[dict[str, tuple[tuple[Turn, ...], tuple[Tool, ...]]]] = {
    "picture": (shown("Look.", pictures.plain("red"), "What is it?"), ()),
    "turns": ((*shown(pictures.plain("red"), "This."), Turn("assistant", "Yes."), Turn("user", "Sure?")), ()),
    **{
        f"text {number}": (turns, (refusals._FIND,))
        for number, turns in enumerate(refusals._conversations("<｜deepseek_image｜>"))
        # Messages writes thoughts in its own way.
        if not any(turn.reasoning for turn in turns)
    },
    "tool": (VIEWED, (vision._VIEW,)),
}


def _by_chat(turns: tuple[Turn, ...], tools: tuple[Tool, ...]) -> Any:
    return ChatCompletionRequest(**chat_body("m", turns, 8, tools))


def _by_messages(turns: tuple[Turn, ...], tools: tuple[Tool, ...]) -> Any:
    serving = SimpleNamespace(_merge_inline_system=False)
    body = messages_body("m", turns, tools) | {"max_tokens": 8, "temperature": 0}
    request = AnthropicMessagesRequest(**body)
    return AnthropicServing._convert_to_chat_completion_request(serving, request)


def _by_responses(turns: tuple[Turn, ...], tools: tuple[Tool, ...]) -> Any:
    request = ResponsesRequest(**responses_body("m", turns, 8, tools))
    serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
    messages = serving._construct_input_messages(request)
    tools_of_chat = serving._response_tools_to_chat_tools(request) or None
    return ChatCompletionRequest(model="m", messages=messages, tools=tools_of_chat)


def _said(request: Any) -> list[dict[str, Any]]:
    """Return the messages of a request without what means nothing: absent fields, no text, JSON escapes."""
    rows = [message.model_dump(exclude_none=True) for message in request.messages]
    for call in (call for row in rows for call in row.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return [{name: value for name, value in row.items() if value not in ("", None)} for row in rows]


@pytest.mark.parametrize("convert", [_by_messages, _by_responses])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_protocols_say_the_same(name: str, convert: Any) -> None:
    turns, tools = CONVERSATIONS[name]
    if (convert, name) == (_by_responses, "tool"):
        # What `vision.responses-tools` says: refused, and not lost.
        with pytest.raises(ValueError, match="content"):
            convert(turns, tools)
        return
    expected, found = _by_chat(turns, tools), convert(turns, tools)
    assert _said(found) == _said(expected)
    assert [t.model_dump() for t in found.tools or ()] == [t.model_dump() for t in expected.tools or ()]


def test_responses_drop_a_picture_of_the_system() -> None:
    """The reason why `vision.roles` only warns there."""
    turns = (Turn("system", parts=("House.", pictures.plain("red"))), Turn("user", "What?"))
    assert _said(_by_responses(turns, ()))[0] == {"role": "system", "content": "House."}
