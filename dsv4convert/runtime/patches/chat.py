"""Chats with pictures: SGLang's encoder for this family knows text only, and drops every other part.

A picture becomes a mark that nobody can guess, then SGLang writes the prompt, then marks become the special
token. So each picture stays in its place, tool results included, and their order is that of the prompt, in
which tool results may have been sorted. The special token as somebody's text never stands for a picture.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from dsv4convert.vision.layout import PLACEHOLDER

#: Messages that may hold pictures, as with the official API; tool results do when a tool looks at something.
ROLES: Final = ("user", "tool")
#: What the special token is written as where it is text: a zero-width space keeps it from being one.
AS_TEXT: Final = PLACEHOLDER.replace("｜>", "\u200b｜>")
#: How the official encoder joins the parts of a message.
_BETWEEN: Final = "\n\n"


def with_pictures(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V2: prompt text and pictures of a chat; Responses, Messages and token counts pass here, too."""

    def _apply_jinja_template(self: Any, request: Any, tools: Any, is_multimodal: bool) -> Any:
        marks = _Marks()
        result = stock(self, marks.replace_pictures(request), tools, is_multimodal)
        tokenizer = self.tokenizer_manager.tokenizer
        # Only the text of a prompt is sent on with pictures, and stock leaves it empty.
        written = tokenizer.decode(result.prompt_ids, clean_up_tokenization_spaces=False)
        result.prompt, pictures = marks.resolve(written)
        if result.prompt != written:
            result.prompt_ids = tokenizer.encode(result.prompt)
        if pictures:
            # A list of lists is one list per prompt; with one prompt and several answers it has to be said.
            result.image_data = [pictures] if (request.n or 1) > 1 else pictures
        return result

    return _apply_jinja_template


def with_places(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V2b: what V2 refuses, said where Messages makes 400 of it; of an error inside V2 it makes 500."""

    def _validate_request(self: Any, request: Any) -> str | None:
        faults = (fault for message in request.messages if (fault := _fault(message)))
        problem: str | None = stock(self, request) or next(faults, None)
        return problem

    return _validate_request


def of_responses(stock: Any, module: ModuleType) -> Callable[..., Any]:
    """V2c: pictures in function results of Responses; none in its system turns, where stock drops them."""

    def _construct_input_messages(self: Any, request: Any, prev_response: Any = None) -> Any:
        items = request.input if isinstance(request.input, list) else []
        for item in map(_plain, items):
            parts = item.get("content")
            role = item.get("role")
            if role in ("system", "developer") and isinstance(parts, list):
                kinds = {_plain(part).get("type") for part in parts}
                if kinds & {"input_image", "image_url"}:
                    raise ValueError(_misplaced(role))
        messages = stock(self, request, prev_response)
        for message in messages:
            if message.get("role") == "tool" and isinstance(message.get("content"), list):
                # Stock does this to every other message.
                message["content"] = list(
                    map(self._normalize_response_content_part_for_chat, message["content"])
                )
        return messages

    return _construct_input_messages


def _plain(value: Any) -> Mapping[str, Any]:
    found = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
    return found if isinstance(found, Mapping) else {}


def _misplaced(role: str) -> str:
    return f"pictures belong into messages of {' and '.join(ROLES)}, found one of role {role!r}"


def _fault(message: Any) -> str | None:
    """Say why a message cannot be encoded; None if it can."""
    kinds = [part.type for part in message.content] if isinstance(message.content, list) else []
    for kind in ("video_url", "audio_url"):
        if kind in kinds:
            return f"this model sees pictures, and a message holds a part of type {kind!r}"
    return _misplaced(message.role) if "image_url" in kinds and message.role not in ROLES else None


class _Marks:
    """The pictures of a request and what stands for them while SGLang writes the prompt."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._urls: list[str] = []

    def replace_pictures(self, request: Any) -> Any:
        """Return the request with text in place of every message that holds a picture.

        Raises:
            ValueError: something that is neither text nor a picture, or a picture where none may be.
        """
        messages = [self._as_text(message) for message in request.messages]
        return request.model_copy(update={"messages": messages}) if self._urls else request

    def _as_text(self, message: Any) -> Any:
        if fault := _fault(message):
            raise ValueError(fault)
        if not isinstance(message.content, list) or all(part.type != "image_url" for part in message.content):
            return message
        text = _BETWEEN.join(self._parts(message.content))
        return message.model_copy(update={"content": text})

    def _parts(self, content: list[Any]) -> Iterator[str]:
        for part in content:
            if part.type == "image_url":
                yield f"{self._secret}-{len(self._urls)}-"
                self._urls.append(part.image_url.url)
            elif part.type == "text":
                yield part.text

    def resolve(self, prompt: str) -> tuple[str, list[str]]:
        """Return the prompt with special tokens, and the pictures in the order of their places."""
        pictures: list[str] = []

        def put(match: re.Match[str]) -> str:
            pictures.append(self._urls[int(match[1])])
            return PLACEHOLDER

        # First what others wrote: from here on, a special token is a picture.
        prompt = prompt.replace(PLACEHOLDER, AS_TEXT)
        return re.sub(rf"{self._secret}-(\d+)-", put, prompt), pictures
