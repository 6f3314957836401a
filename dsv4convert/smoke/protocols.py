"""Chat, Responses and Messages: one question in, one `Answer` out, through the official clients.

What a client returns is read as plain JSON: the clients build their objects without checking them, and a
field that a server leaves out must become a finding, not an error of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from dsv4convert.smoke.answers import Answer, Call, Finish, Tool, Turn, count_at, pick, rows_at, text_at
from dsv4convert.smoke.bodies import chat_body, greedy, messages_body, responses_body
from dsv4convert.smoke.native import TOP
from dsv4convert.smoke.server import Server, Trouble
from dsv4convert.smoke.ties import Step

_CHAT_FINISH: Final[Mapping[str, Finish]] = {"stop": "stop", "length": "length", "tool_calls": "tool"}
_MESSAGES_FINISH: Final[Mapping[str, Finish]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool",
}


class Speaker(Protocol):
    """A protocol that can hold a conversation."""

    name: str

    def close(self) -> None:
        """Close the connections."""

    def ask(
        self, turns: Sequence[Turn], tokens: int, *, tools: Sequence[Tool] = (), choice: str = "auto"
    ) -> Answer:
        """Ask for at most `tokens` tokens at temperature 0; `choice` is ``auto`` or ``required``.

        Raises:
            Trouble: there is no usable answer.
        """

    def stream(self, turns: Sequence[Turn], tokens: int) -> Answer:
        """Ask the same, and put the answer together from its events."""


def speakers(server: Server) -> tuple[Chat, Responses, Messages]:
    """Return the three protocols of a server."""
    return Chat(server), Responses(server), Messages(server)


def _plain(value: Any) -> Mapping[str, Any]:
    """Return an object of a client as JSON."""
    if not hasattr(value, "model_dump"):
        raise Trouble("protocol", f"the answer is no JSON object: {f'{value}'[:80]}")
    plain: Mapping[str, Any] = value.model_dump(warnings=False)
    return plain


def _events(stream: Any) -> Iterator[Mapping[str, Any]]:
    with stream:
        for event in stream:
            plain = _plain(event)
            if pick(plain, "error") and plain.get("type") in (None, "error"):
                raise Trouble("protocol", f"the stream holds an error: {json.dumps(plain['error'])[:120]}")
            yield plain


class _OpenAI:
    """What speaks through the `openai` client."""

    def __init__(self, server: Server) -> None:
        from openai import OpenAI

        self._server = server
        self._client: Any = OpenAI(
            base_url=f"{server.url}/v1", api_key=server.key or "none", timeout=server.seconds, max_retries=0
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Chat(_OpenAI):
    """``/v1/chat/completions``."""

    name = "chat"

    def ask(
        self,
        turns: Sequence[Turn],
        tokens: int,
        *,
        tools: Sequence[Tool] = (),
        choice: str | Mapping[str, Any] = "auto",
        **extra: Any,
    ) -> Answer:
        """Ask once; `extra` goes into the request as it is."""
        body = chat_body(self._server.model, turns, tokens, tools, choice) | extra
        with self._server.troubles(self._server.seconds):
            plain = _plain(self._client.chat.completions.create(**body))
        choices = pick(plain, "choices", 0)
        return Answer(
            _said(pick(choices, "message")),
            _CHAT_FINISH.get(text_at(choices, "finish_reason"), ""),
            count_at(plain, "usage", "prompt_tokens"),
            count_at(plain, "usage", "completion_tokens"),
            tuple(map(_chat_call, rows_at(choices, "message", "tool_calls"))),
        )

    def stream(self, turns: Sequence[Turn], tokens: int) -> Answer:
        """Ask once, and put the answer together from its events."""
        text, finish = "", ""
        usage: Any = None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with self._server.troubles(self._server.seconds):
            for event in _events(
                self._client.chat.completions.create(**self._body(turns, tokens), **options)
            ):
                text += _said(pick(event, "choices", 0, "delta"))
                finish = text_at(event, "choices", 0, "finish_reason") or finish
                usage = pick(event, "usage") or usage
        faults = _missing(("a finish reason", finish), ("usage counts", usage))
        prompt, completion = count_at(usage, "prompt_tokens"), count_at(usage, "completion_tokens")
        return Answer(text, _CHAT_FINISH.get(finish, ""), prompt, completion, faults=faults)

    def models(self) -> list[str]:
        """Return the names of the models that the server lists."""
        with self._server.troubles(self._server.seconds):
            plain = _plain(self._client.models.list())
        return [text_at(row, "id") for row in rows_at(plain, "data")]

    def trace(self, turns: Sequence[Turn], tokens: int) -> tuple[Step, ...]:
        """Ask once, and return the most probable tokens of every position; none where the server gives none.

        SGLang refuses probabilities under DSpark.
        """
        if self._server.speculates:
            return ()
        more = {"logprobs": True, "top_logprobs": TOP}
        with self._server.troubles(self._server.seconds):
            plain = _plain(self._client.chat.completions.create(**self._body(turns, tokens), **more))
        return tuple(map(_step, rows_at(plain, "choices", 0, "logprobs", "content")))

    def done(self, turns: Sequence[Turn], tokens: int) -> bool:
        """Tell whether a stream ends with the line that ends it; the client does not show it."""
        lines = self._server.lines("/v1/chat/completions", self._body(turns, tokens) | {"stream": True})
        return lines[-1:] == ["[DONE]"]

    def _body(self, turns: Sequence[Turn], tokens: int) -> dict[str, Any]:
        return chat_body(self._server.model, turns, tokens)


def _chat_call(row: Any) -> Call:
    return Call(text_at(row, "id"), text_at(row, "function", "name"), text_at(row, "function", "arguments"))


def _step(row: Any) -> Step:
    text, best = text_at(row, "token"), pick(row, "logprob") or 0.0
    others = [
        (text_at(other, "token"), abs(best - (pick(other, "logprob") or 0.0)))
        for other in rows_at(row, "top_logprobs")
        if text_at(other, "token") != text
    ]
    return Step(text, tuple(sorted(others, key=lambda pair: pair[1])))


def _said(message: Any) -> str:
    # SGLang's reasoning parser decides which part is which; together they are what the model said.
    return text_at(message, "reasoning_content") + text_at(message, "content")


def _missing(*parts: tuple[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in parts if not value)


class Responses(_OpenAI):
    """``/v1/responses``."""

    name = "responses"

    def ask(
        self, turns: Sequence[Turn], tokens: int, *, tools: Sequence[Tool] = (), choice: str = "auto"
    ) -> Answer:
        """Ask once."""
        body = responses_body(self._server.model, turns, tokens, tools, choice)
        with self._server.troubles(self._server.seconds):
            return _response(_plain(self._client.responses.create(**body)))

    def stream(self, turns: Sequence[Turn], tokens: int) -> Answer:
        """Ask once, and put the answer together from its events."""
        pieces, ended = "", None
        body = responses_body(self._server.model, turns, tokens)
        with self._server.troubles(self._server.seconds):
            for event in _events(self._client.responses.create(**body, stream=True)):
                kind = text_at(event, "type")
                if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
                    pieces += text_at(event, "delta")
                elif kind in ("response.completed", "response.incomplete", "response.failed"):
                    ended = pick(event, "response")
        whole = _response(ended or {})
        faults = _missing(("`response.completed`", ended), ("usage counts", whole.prompt_tokens))
        if ended and whole.text != pieces:
            faults += ("a last event with the text of the pieces",)
        return Answer(pieces, whole.finish, whole.prompt_tokens, whole.completion_tokens, faults=faults)


def _response(plain: Mapping[str, Any]) -> Answer:
    items = rows_at(plain, "output")
    texts = [
        text_at(part, "text")
        for kind in ("reasoning", "message")
        for item in items
        if pick(item, "type") == kind
        for part in rows_at(item, "content")
    ]
    calls = tuple(
        Call(text_at(item, "call_id"), text_at(item, "name"), text_at(item, "arguments"))
        for item in items
        if pick(item, "type") == "function_call"
    )
    # SGLang says `completed` for an answer that was cut, too.
    finish: Finish = "tool" if calls else "length" if pick(plain, "status") == "incomplete" else ""
    # SGLang 0.5.16 counts under the names of Chat where nothing is streamed: seen on a real server.
    prompt, completion = (
        next((n for n in (count_at(plain, "usage", name) for name in names) if n is not None), None)
        for names in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens"))
    )
    return Answer("".join(texts), finish, prompt, completion, calls)


class Messages:
    """``/v1/messages``, the protocol of Anthropic."""

    name = "messages"

    def __init__(self, server: Server) -> None:
        from anthropic import Anthropic

        self._server = server
        # Both headers are set, so that no key of the environment goes to this server.
        key = server.key or "none"
        self._client: Any = Anthropic(
            base_url=server.url,
            auth_token=key,
            default_headers={"X-Api-Key": key},
            timeout=server.seconds,
            max_retries=0,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self, turns: Sequence[Turn], tokens: int, *, tools: Sequence[Tool] = (), choice: str = "auto"
    ) -> Answer:
        """Ask once."""
        body = messages_body(self._server.model, turns, tools, choice) | greedy(tokens)
        with self._server.troubles(self._server.seconds):
            plain = _plain(self._client.messages.create(**body))
        parts = rows_at(plain, "content")
        calls = tuple(
            Call(text_at(part, "id"), text_at(part, "name"), json.dumps(pick(part, "input")))
            for part in parts
            if pick(part, "type") == "tool_use"
        )
        text = "".join(text_at(part, "thinking") + text_at(part, "text") for part in parts)
        finish = _MESSAGES_FINISH.get(text_at(plain, "stop_reason"), "")
        return Answer(text, finish, _input_tokens(pick(plain, "usage")), _output_tokens(plain), calls)

    def stream(self, turns: Sequence[Turn], tokens: int) -> Answer:
        """Ask once, and put the answer together from its events."""
        text, reason, ended = "", "", False
        start: Any = None
        last: Any = None
        body = messages_body(self._server.model, turns) | greedy(tokens) | {"stream": True}
        with self._server.troubles(self._server.seconds):
            for event in _events(self._client.messages.create(**body)):
                kind = text_at(event, "type")
                if kind == "message_start":
                    start = pick(event, "message", "usage")
                elif kind == "content_block_delta":
                    text += text_at(event, "delta", "thinking") + text_at(event, "delta", "text")
                elif kind == "message_delta":
                    reason, last = text_at(event, "delta", "stop_reason"), event
                ended = ended or kind == "message_stop"
        prompt, completion = _input_tokens(start), _output_tokens(last)
        parts = (
            ("a stop reason", reason),
            ("`message_stop`", ended),
            ("usage counts", prompt and completion),
        )
        return Answer(text, _MESSAGES_FINISH.get(reason, ""), prompt, completion, faults=_missing(*parts))

    def count(self, turns: Sequence[Turn]) -> int | None:
        """Return the tokens of a prompt as the server counts them without answering; None if it does not."""
        body = messages_body(self._server.model, turns)
        try:
            with self._server.troubles(self._server.seconds):
                plain = _plain(self._client.messages.count_tokens(**body))
        except Trouble as trouble:
            if trouble.status == 404:
                return None
            raise
        return count_at(plain, "input_tokens")


def _input_tokens(usage: Any) -> int | None:
    """Return the tokens of a prompt; this protocol counts cached ones apart."""
    fresh = count_at(usage, "input_tokens")
    return None if fresh is None else fresh + (count_at(usage, "cache_read_input_tokens") or 0)


def _output_tokens(value: Any) -> int | None:
    return count_at(value, "usage", "output_tokens")
