"""What every protocol is asked and answers, in one form."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["stop", "length", "tool", ""]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function: what the model wants to be run.

    Attributes:
        id: The server's name for it.
        name: Name of the function.
        arguments: JSON text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a request holds it.

    Attributes:
        name: What it shows, for reports.
        width, height: Pixels.
        data: The file.
        media: Its media type.
    """

    name: str
    width: int
    height: int
    data: bytes
    media: str = "image/png"

    @property
    def base64(self) -> str:
        """The file as base64."""
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The file as a ``data:`` address."""
        return f"data:{self.media};base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        role: Who speaks; a ``tool`` turn is the result of a call.
        text: What is said.
        calls: What an assistant calls.
        call_id: Which call this is the result of.
        parts: What is said and shown, in order, in place of `text`.
        reasoning: What an assistant thought before it spoke.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    parts: tuple[str | Picture, ...] = ()
    reasoning: str = ""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """What is shown."""
        return tuple(part for part in self.parts if isinstance(part, Picture))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        text: Everything that was said, reasoning first.
        finish: Why it ended; empty when the protocol does not say.
        prompt_tokens: Tokens of the prompt, None without a count.
        completion_tokens: Tokens of the answer, None without a count.
        calls: Functions that were called.
        faults: What the protocol promises and is not there; only streams can lack something.
    """

    text: str
    finish: Finish
    prompt_tokens: int | None
    completion_tokens: int | None
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


def pick(value: Any, *path: str | int) -> Any:
    """Return what lies at a path of keys and positions, None where the path ends early."""
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def text_at(value: Any, *path: str | int) -> str:
    """Return the text at a path, empty if there is none."""
    found = pick(value, *path)
    return found if isinstance(found, str) else ""


def count_at(value: Any, *path: str | int) -> int | None:
    """Return the count at a path, None if there is none."""
    found = pick(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def rows_at(value: Any, *path: str | int) -> Sequence[Any]:
    """Return the list at a path, empty if there is none."""
    found = pick(value, *path)
    return found if isinstance(found, list) else ()
