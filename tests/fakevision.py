"""What the fake server makes of conversations with pictures: text, tokens, blocks, and what is seen in them.

Its tokens are words. Blocks are counted by code of their own, from the official rules, so that the layout of
the package is not held against itself.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Final

from PIL import Image, UnidentifiedImageError

PLACEHOLDER: Final = "<｜deepseek_image｜>"
PLACE: Final = 129264
_BROKEN: Final = "<｜deepseek_image\u200b｜>"
_MARKS: Final = r"<｜(?:deepseek_image|begin|end|extra|system|user|assistant|tool)｜>"
_COLOURS: Final = {
    (220, 20, 20): "red",
    (20, 160, 40): "green",
    (20, 40, 220): "blue",
    (250, 220, 20): "yellow",
}


class Refusal(Exception):
    """An answer that is an error: HTTP status and sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Seen:
    """A decoded picture."""

    width: int
    height: int
    digest: int
    colour: str
    shape: str
    text: str


@dataclass
class Talk:
    """A conversation: turns of role and text, in which a placeholder stands for every picture."""

    turns: list[tuple[str, str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def last(self) -> str:
        """Who spoke last."""
        return self.turns[-1][0]

    def lines(self) -> str:
        """Return the conversation as the model hears it: pictures by their content."""
        text = "\n".join(f"{role}: {said}" for role, said in self.turns)
        for seen in self.seen:
            text = text.replace(PLACEHOLDER, f"[{seen.digest}]", 1)
        return text

    def render(self, extra: bool = False) -> str:
        """Return the conversation as the text of a prompt."""
        said = "".join(f"<｜{role}｜>{text}" for role, text in self.turns)
        return f"<｜begin｜>{'<｜extra｜>' if extra else ''}{said}<｜end｜>"


@dataclass
class Words:
    """Tokens: special ones and words with the blanks after them."""

    known: dict[int, str] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        pieces = re.findall(rf"{_MARKS}|(?:(?!{_MARKS})\S)+\s*|\s+", text)
        ids = [PLACE if piece == PLACEHOLDER else zlib.crc32(piece.encode()) % 10**9 for piece in pieces]
        self.known.update(zip(ids, pieces, strict=True))
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.known[token] for token in ids)


def block(seen: Seen, start: int) -> list[int]:
    """Return what stands for a picture at a position: lead tokens and its body; ids tell the content."""
    width, height = seen.width, seen.height
    width = min(width, 8 * height)
    if width * height < 147456:
        factor = math.sqrt(147456 / (width * height))
        width, height = int(width * factor), int(height * factor)
    rows = math.ceil(math.ceil(height / 14) / 3)
    row = math.ceil(math.ceil(width / 14) / 3) + 1
    body = (rows + rows % 2) * row
    body += body % 4
    return [10**6 + seen.digest] * (3 - start % 4 + body + 2)


def expand(ids: list[int], seen: list[Seen], skew: int = 0) -> tuple[list[int], list[int]]:
    """Return a prompt with its blocks, and where they begin; `skew` is how far places are taken wrong."""
    result: list[int] = []
    starts = []
    rest = iter(seen)
    for token in ids:
        if token == PLACE:
            starts.append(len(result))
            result += block(next(rest), len(result) + skew * (len(starts) - 1))
        else:
            result.append(token)
    return result, starts


def require_places(places: int, pictures: int) -> None:
    """Refuse other numbers of places than of pictures."""
    if places != pictures:
        raise Refusal(
            400, f"the prompt has {places} places for a picture, and {pictures} pictures were given"
        )


def look(url: str) -> Seen:
    """Decode a picture."""
    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
        image = Image.open(BytesIO(data)).convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError) as error:
        raise Refusal(400, f"a picture cannot be decoded: {error}") from None
    counted = sorted(image.getcolors(1 << 16) or (), reverse=True)
    named = [(number, _COLOURS[pixel]) for number, pixel in counted if pixel in _COLOURS]
    number, colour = named[0] if named else (0, "white")
    dark = sum(number for number, pixel in counted if sum(pixel) < 300 and pixel not in _COLOURS)
    return Seen(
        *image.size, zlib.crc32(image.tobytes()) % 10**6, colour, _shape(number, image), f"dark {dark}"
    )


def _shape(number: int, image: Image.Image) -> str:
    side = image.width - 2 * (image.width // 6)
    share = number / side**2
    return "square" if share > 0.9 else "circle" if share > 0.65 else "triangle"


# ---- requests


def plain_text(text: str) -> str:
    """Return text whose placeholders are text."""
    return text.replace(PLACEHOLDER, _BROKEN)


class Reader:
    """Reads the requests of the three protocols.

    Args:
        has: Tells whether a fault is on.
        protocol: ``chat``, ``responses`` or ``messages``.
        limit: Most pictures in a request.
    """

    def __init__(self, has: Callable[[str], bool], protocol: str, limit: int) -> None:
        self.has, self.protocol, self.limit, self.talk = has, protocol, limit, Talk()

    def read(self, body: dict[str, Any]) -> Talk:
        """Return the conversation of a request.

        Raises:
            Refusal: it is refused.
        """
        read = {"chat": self._chat, "responses": self._responses, "messages": self._messages}
        for role, text in read[self.protocol](body):
            turns = self.talk.turns
            if turns and turns[-1][0] == role == "assistant":
                text = "\n\n".join(filter(None, (turns.pop()[1], text)))
            turns.append((role, text))
        self._faulty_turns()
        self._look()
        return self.talk

    def _chat(self, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for message in body["messages"]:
            text = self._content(message["role"], message.get("content") or "")
            calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
            yield message["role"], self._with_calls(text, calls)

    def _responses(self, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if isinstance(body["input"], str):
            yield "user", plain_text(body["input"])
            return
        for item in body["input"]:
            kind = item.get("type")
            if kind == "function_call_output":
                if isinstance(item["output"], list) and not self.has("responses-tool-pictures"):
                    raise Refusal(400, "Input should be a valid string")
                yield "tool", self._content("tool", item["output"])
            elif kind == "function_call":
                yield "assistant", self._with_calls("", [item["arguments"]])
            elif kind != "reasoning":
                yield item["role"], self._content(item["role"], item["content"])

    def _messages(self, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if system := body.get("system"):
            yield "system", plain_text(system)
        for message in body["messages"]:
            role, content = message["role"], message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for result in (b for b in blocks if b["type"] == "tool_result"):
                yield "tool", self._content("tool", result["content"])
            said = [b for b in blocks if b["type"] in ("text", "image")]
            calls = [json.dumps(b["input"], ensure_ascii=False) for b in blocks if b["type"] == "tool_use"]
            if said or calls:
                yield role, self._with_calls(self._content(role, said), calls)

    def _with_calls(self, text: str, calls: list[str]) -> str:
        return "\n\n".join(filter(None, (text, *map(plain_text, calls))))

    def _content(self, role: str, content: str | list[dict[str, Any]]) -> str:
        if isinstance(content, str):
            return self._text(role, content)
        parts = []
        for part in content:
            if "text" in part:
                parts.append(self._text(role, part["text"]))
                continue
            if self.has("text-only"):
                continue
            if role == "system" and self.has(f"{self.protocol}-drops-system-pictures"):
                continue
            if role in ("system", "assistant") and not self.has(f"{role}-pictures"):
                raise Refusal(400, f"a picture in a turn of the {role}")
            self.talk.urls.append(_url(part))
            parts.append(PLACEHOLDER)
        if self.has(f"{self.protocol}-moves-tool-picture") and role == "tool":
            parts.sort(key=PLACEHOLDER.__eq__)
        return "\n\n".join(parts)

    def _text(self, role: str, text: str) -> str:
        if PLACEHOLDER in text:
            if self.has(f"{self.protocol}-literal-fails"):
                raise Refusal(500, "Internal server error")
            if (
                self.has(f"{self.protocol}-literal-kills-turns")
                and role == "assistant"
                and text.startswith("It was")
            ):
                raise Refusal(400, "the message holds a special token")
            if self.has(f"{self.protocol}-literal-counts"):
                return text
        if "<image>/" in text and self.has(f"{self.protocol}-opens-tags"):
            raise Refusal(500, "No such file or directory")
        return plain_text(text)

    def _faulty_turns(self) -> None:
        talk = self.talk
        if self.has(f"{self.protocol}-forgets-pictures") and len(talk.turns) > 4 and talk.last == "user":
            # Those of all turns but the last that has any.
            shown = [at for at, (_, text) in enumerate(talk.turns) if PLACEHOLDER in text]
            for at in shown[:-1]:
                role, text = talk.turns[at]
                talk.turns[at] = role, text.replace(PLACEHOLDER, "")
                talk.urls.pop(0)
        if self.has(f"{self.protocol}-loses-picture") and talk.turns[-1][1].startswith("Look at"):
            talk.turns[-1] = talk.last, talk.turns[-1][1].replace(PLACEHOLDER, "")
            talk.urls.clear()
        if self.has("moves-picture") and talk.turns[-1][1].startswith("Look at"):
            before, _, after = talk.turns[-1][1].partition(PLACEHOLDER)
            talk.turns[-1] = talk.last, f"{before}{after.strip()}\n\n{PLACEHOLDER}"

    def _look(self) -> None:
        talk, has = self.talk, self.has
        require_places(sum(text.count(PLACEHOLDER) for _, text in talk.turns), len(talk.urls))
        if len(talk.urls) > self.limit and not has("limit-ignored"):
            counts = (
                "" if has("limit-uncounted") else f" {len(talk.urls)} exceeds limit {self.limit} per request"
            )
            raise Refusal(500 if has("limit-fails") else 400, f"Image count{counts}.")
        if len(talk.urls) >= 48 and has("many-fail"):
            raise Refusal(500, "out of shared memory")
        for url in talk.urls:
            try:
                talk.seen.append(look(url))
            except Refusal as refusal:
                if has("undecodable-fails"):
                    raise Refusal(500, f"{refusal}") from None
                if not has("undecodable-shown"):
                    raise
                talk.seen.append(Seen(64, 64, 1, "white", "square", ""))


def _url(part: dict[str, Any]) -> str:
    if "source" in part:
        return f"data:{part['source']['media_type']};base64,{part['source']['data']}"
    url = part["image_url"]
    return str(url["url"] if isinstance(url, dict) else url)


def describe(talk: Talk, has: Callable[[str], bool]) -> str | None:
    """Return what a model that sees says to the last question; None where it is none about a picture."""
    question, seen = talk.turns[-1][1], talk.seen
    asked = "\n".join(text for _, text in talk.turns)
    if not seen:
        return None
    if "first colour" in question:
        return seen[-1 if has("forgets-first-colour") else 0].colour
    if "colour is the door" in asked:
        return f"It is {'grey' if has('door-unseen') else seen[-1].colour}."
    if question.startswith(PLACEHOLDER) and "What colour" in question:
        return "grey" if has("colour-blind") else seen[0].colour.capitalize() + "."
    if "Which shape" in question:
        return "A circle." if has("shape-blind") else f"A {seen[0].shape}."
    if "Which number" in question:
        return None if has("cannot-read") else _NUMBERS.get(seen[0].text, "nothing")
    if "in order" in question:
        colours = [one.colour for one in seen]
        return ", ".join(reversed(colours) if has("disorders") else colours)
    return None


_NUMBERS: Final[dict[str, str]] = {}


def teach(number: str, url: str) -> None:
    """Let the model know what a picture of a number looks like."""
    _NUMBERS[look(url).text] = number
