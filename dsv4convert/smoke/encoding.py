"""Prompts with pictures: how a server encodes them, and how long the official layout makes them.

SGLang's page ``/tokenize`` returns a conversation with one placeholder for every picture. The length of what
stands for a picture depends on where it stands, so the official layout is applied to these tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dsv4convert import releases
from dsv4convert.smoke.answers import Picture, Tool, Turn, rows_at, text_at
from dsv4convert.smoke.bodies import chat_messages, chat_tools
from dsv4convert.smoke.server import Server, Trouble
from dsv4convert.vision.config import VisionConfig
from dsv4convert.vision.layout import PLACEHOLDER, Block, expand, plan_size

_RELEASE: Final = "deepseek-v4-flash-vision-exp"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as tokens.

    Attributes:
        ids: As the server encodes it, one placeholder for every picture.
        places: Positions of the placeholders among `ids`.
        blocks: What stands for the pictures in the expanded prompt.
        tokens: Length of the expanded prompt.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]
    blocks: tuple[Block, ...]
    tokens: int


@dataclass(slots=True)
class Encoder:
    """A server's encoding. Every method may raise `Trouble`.

    Attributes:
        server: Who is asked.
        vision: Numbers of the layout: the official ones, which synthetic checkpoints share.
    """

    server: Server
    vision: VisionConfig = field(default_factory=lambda: official())
    _placeholder: int | None = None

    @property
    def placeholder(self) -> int:
        """The token that stands for a picture."""
        if self._placeholder is None:
            ids = self._ids({"prompt": PLACEHOLDER, "add_special_tokens": False})
            if len(ids) != 1:
                problem = f"`{PLACEHOLDER}` is {len(ids)} tokens of the server's tokenizer, expected 1"
                raise Trouble("protocol", f"{problem}: this is no tokenizer of a model with pictures")
            self._placeholder = ids[0]
        return self._placeholder

    def encode(self, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> Prompt:
        """Return a conversation as tokens."""
        more = {"tools": chat_tools(tools)} if tools else {}
        ids = self._ids({"messages": chat_messages(turns), **more})
        return self.prompt(ids, [picture for turn in turns for picture in turn.pictures])

    def prompt(self, ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        """Return tokens with their placeholders as a prompt."""
        grids = [plan_size(picture.width, picture.height, self.vision) for picture in pictures]
        try:
            whole = expand(ids, grids, self.placeholder, self.vision.vocab)
        except ValueError as error:
            raise Trouble("pictures", f"in the server's chat encoding {error}") from None
        places = tuple(at for at, token in enumerate(ids) if token == self.placeholder)
        return Prompt(tuple(ids), places, whole.blocks, len(whole.ids))

    def text(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones too."""
        if not ids:
            return ""
        answer = self._post("/detokenize", {"tokens": list(ids), "skip_special_tokens": False})
        return text_at(answer, "text")

    def _ids(self, asked: Mapping[str, Any]) -> list[int]:
        ids = rows_at(self._post("/tokenize", {"model": self.server.model, **asked}), "tokens")
        if not ids or not all(isinstance(token, int) for token in ids):
            raise Trouble("protocol", "`/tokenize` returned no list of token ids")
        return list(ids)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        page = self.server.post(path, body)
        if page.status != 200:
            text = self.server.clean(f"`{path}`: status {page.status}: {page.text[:200]}")
            raise Trouble("status", text, page.status)
        return page.json()


def official() -> VisionConfig:
    """Return the numbers of the official release."""
    vision = VisionConfig.from_config(releases.config(_RELEASE))
    if vision is None:
        raise ValueError(f"the config of {_RELEASE} has no vision tower")
    return vision
