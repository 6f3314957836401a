"""Requests of the three protocols, as JSON.

The fields are those of the official interfaces and of SGLang 0.5.16 (``srt/entrypoints/openai/protocol.py``,
``srt/entrypoints/anthropic/protocol.py``), whose own classes read them in the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4convert.smoke.answers import Call, Picture, Tool, Turn

# ---- Chat


def chat_body(
    model: str,
    turns: Sequence[Turn],
    tokens: int,
    tools: Sequence[Tool] = (),
    choice: str | Mapping[str, Any] = "auto",
) -> dict[str, Any]:
    """Return a request to ``/v1/chat/completions`` for at most `tokens` tokens at temperature 0."""
    asked = {"model": model, "messages": chat_messages(turns), "max_tokens": tokens, "temperature": 0}
    return asked | ({"tools": chat_tools(tools), "tool_choice": choice} if tools else {})


def chat_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the messages of a conversation; ``/tokenize`` reads them too."""
    return [_chat_message(turn) for turn in turns]


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return functions as Chat describes them."""
    return [{"type": "function", "function": _described(tool)} for tool in tools]


def _chat_message(turn: Turn) -> dict[str, Any]:
    content = list(map(_chat_part, turn.parts)) if turn.parts else turn.text
    if turn.role == "tool":
        return {"role": "tool", "tool_call_id": turn.call_id, "content": content}
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = list(map(_chat_call, turn.calls))
    return message


def _chat_part(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part}


def _chat_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


# ---- Responses


def responses_body(
    model: str, turns: Sequence[Turn], tokens: int, tools: Sequence[Tool] = (), choice: str = "auto"
) -> dict[str, Any]:
    """Return a request to ``/v1/responses``."""
    items = [item for turn in turns for item in _response_items(turn)]
    asked = {"model": model, "input": items, "max_output_tokens": tokens, "temperature": 0, "store": False}
    flat = [{"type": "function", **_described(tool)} for tool in tools]
    return asked | ({"tools": flat, "tool_choice": choice} if tools else {})


def _response_items(turn: Turn) -> list[dict[str, Any]]:
    spoken = "output_text" if turn.role == "assistant" else "input_text"
    content = [_response_part(part, spoken) for part in turn.parts] if turn.parts else turn.text
    if turn.role == "tool":
        return [{"type": "function_call_output", "call_id": turn.call_id, "output": content}]
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        thought = [{"type": "summary_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": thought})
    if content:
        items.append({"role": turn.role, "content": content})
    return items + [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in turn.calls
    ]


def _response_part(part: str | Picture, spoken: str) -> dict[str, Any]:
    if isinstance(part, Picture):
        return {"type": "input_image", "image_url": part.url, "detail": "auto"}
    return {"type": spoken, "text": part}


# ---- Messages


def messages_body(
    model: str, turns: Sequence[Turn], tools: Sequence[Tool] = (), choice: str = "auto"
) -> dict[str, Any]:
    """Return what ``/v1/messages`` and its ``count_tokens`` have in common.

    System turns stand apart there, and are text.
    """
    system = "\n".join(turn.text for turn in turns if turn.role == "system")
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(turn) for turn in turns if turn.role != "system"],
    }
    if system:
        body["system"] = system
    if tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in tools
        ]
        body["tool_choice"] = {"type": "any" if choice == "required" else "auto"}
    return body


def greedy(tokens: int) -> dict[str, Any]:
    """Return what makes `messages_body` a request for at most `tokens` tokens at temperature 0.

    Newer clients have no parameter `temperature`; the protocol of SGLang has the field.
    """
    return {"max_tokens": tokens, "extra_body": {"temperature": 0}}


def _message(turn: Turn) -> dict[str, Any]:
    shown = list(map(_message_block, turn.parts))
    if turn.role == "tool":
        result = {"type": "tool_result", "tool_use_id": turn.call_id, "content": shown or turn.text}
        return {"role": "user", "content": [result]}
    if not turn.calls and not turn.reasoning:
        return {"role": turn.role, "content": shown or turn.text}
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    blocks += shown or ([{"type": "text", "text": turn.text}] if turn.text else [])
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in turn.calls
    ]
    return {"role": turn.role, "content": blocks}


def _message_block(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, Picture):
        source = {"type": "base64", "media_type": part.media, "data": part.base64}
        return {"type": "image", "source": source}
    return {"type": "text", "text": part}
