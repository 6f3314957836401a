"""Chats with pictures: SGLang's encoder for this family knows text only, and drops every other part.

A picture becomes a mark that nobody can guess, then SGLang writes the prompt, then marks become the special
token. So each picture stays in its place, tool results included, and their order is that of the prompt, in
which tool results may have been sorted. The special token as somebody's text never stands for a picture.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
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
        written = tokenizer.decode(result.prompt_ids)
        result.prompt, pictures = marks.resolve(written)
        if result.prompt != written:
            result.prompt_ids = tokenizer.encode(result.prompt)
        if pictures:
            # A list of lists is one list per prompt; with one prompt and several answers it has to be said.
            result.image_data = [pictures] if (request.n or 1) > 1 else pictures
        return result

    return _apply_jinja_template


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
        if not isinstance(message.content, list):
            return message
        kinds = [part.type for part in message.content]
        for kind in ("video_url", "audio_url"):
            if kind in kinds:
                raise ValueError(f"this model sees pictures, and a message holds a part of type {kind!r}")
        if "image_url" not in kinds:
            return message
        if message.role not in ROLES:
            places = " and ".join(ROLES)
            raise ValueError(f"pictures belong into messages of {places}, found one of role {message.role!r}")
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
