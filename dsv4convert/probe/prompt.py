"""The prompt of a probe: token ids, given or made from text by the checkpoint's own tokenizer.

Nothing of a checkpoint is ever executed: `tokenizer.json` is data, and the chat form of one user turn is
written here from its published rule. The encoding script that official repositories carry is Python from a
download; whoever wants its output runs it and passes the ids.

Source: ``tokenizer.json`` of the ``tokenizers`` library; DeepSeek-V4 ``encoding/``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsv4convert.errors import EnvironmentFault, Refused, encodable, finding
from dsv4convert.files import printable, read_whole
from dsv4convert.vision.layout import PLACEHOLDER, Block, Expanded, Grid, expand

TOKENIZER: Final = "tokenizer.json"
_MAX_TOKENIZER_BYTES: Final = 64 << 20
#: One user turn, answered without thinking: what stands before the text and after it.
_BEFORE: Final = ("<｜begin▁of▁sentence｜>", "<｜User｜>")
_AFTER: Final = ("<｜Assistant｜>", "</think>")
#: What stands between the parts of a turn, pictures and texts.
_BETWEEN: Final = "\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given.

    Attributes:
        ids: Token ids, at least one; a picture is one placeholder here.
        text: The text they were made from; None when ids were given.
        chat: The text was wrapped as one user turn.
        expanded: The same with the positions of its pictures; None without pictures.
    """

    ids: tuple[int, ...]
    text: str | None = None
    chat: bool = False
    expanded: Expanded | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """Ids that the model runs on: every picture is its block of pseudo ids."""
        return self.expanded.ids if self.expanded else self.ids

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Where its pictures stand."""
        return self.expanded.blocks if self.expanded else ()

    def with_pictures(self, grids: Sequence[Grid], placeholder: int, vocab: int) -> Prompt:
        """Give every placeholder the positions of a picture.

        Raises:
            Refused: ``probe.pictures``; there are more or fewer placeholders than pictures.
        """
        try:
            return replace(self, expanded=expand(self.ids, grids, placeholder, vocab))
        except ValueError as error:
            raise Refused(finding("probe.pictures", "prompt", str(error))) from None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"ids": list(self.ids), "text": self.text, "chat": self.chat}


class Vocabulary:
    """The tokenizer of a checkpoint.

    Args:
        root: Directory of the checkpoint.

    Raises:
        Refused: there is no usable `tokenizer.json`.
        EnvironmentFault: the file cannot be read, or `tokenizers` is not installed.
    """

    def __init__(self, root: Path) -> None:
        self._tokenizer = _load(root)

    @property
    def placeholder(self) -> int | None:
        """Id that stands for a picture; None in a vocabulary of text."""
        found: int | None = self._tokenizer.token_to_id(PLACEHOLDER)
        return found

    def encode(self, text: str, *, chat: bool, pictures: int = 0) -> tuple[int, ...]:
        """Return the ids of a text, with what `tokenizer.json` itself adds to it.

        Args:
            text: Markers such as ``<｜User｜>`` in it become their tokens, as they do in a server.
            chat: Wrap it as one user turn, to be answered without thinking.
            pictures: How many are shown; they come before a text that names no place for them.

        Raises:
            Refused: ``probe.chat``; a marker of the chat form is no token here. ``probe.prompt``; the text
                holds bytes that are none.
        """
        if encodable(text) != text:
            problem = "is no text: it holds bytes that are not UTF-8"
            raise Refused(finding("probe.prompt", "prompt", problem, expected="UTF-8"))
        if pictures and PLACEHOLDER not in text:
            text = _BETWEEN.join([PLACEHOLDER] * pictures + ([text] if text else []))
        if not chat:
            return tuple(self._tokenizer.encode(text).ids)
        missing = [m for m in (*_BEFORE, *_AFTER) if self._tokenizer.token_to_id(m) is None]
        if missing:
            problem = f"`{missing[0]}`, a marker of the chat form, is no token of this tokenizer"
            raise Refused(finding("probe.chat", TOKENIZER, problem))
        wrapped = "".join((*_BEFORE, text, *_AFTER))
        return tuple(self._tokenizer.encode(wrapped, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _load(root: Path) -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        hint = "pip install 'dsv4convert[probe]', or pass token ids with `--ids`"
        problem = "is not installed; text is encoded with it"
        raise EnvironmentFault(finding("env.missing", "tokenizers", problem, hint=hint))
    from tokenizers import Tokenizer

    path = root / TOKENIZER
    if not path.is_file():
        raise Refused(finding("probe.no-tokenizer", TOKENIZER, "not there: text cannot be encoded"))
    data = read_whole(path, TOKENIZER, _MAX_TOKENIZER_BYTES, "probe.tokenizer")
    try:
        return Tokenizer.from_str(data.decode())
    # The library raises bare `Exception` for whatever its parser meets.
    except Exception as error:
        problem = f"is no tokenizer: {printable(error, 120)}"
        raise Refused(finding("probe.tokenizer", TOKENIZER, problem)) from None


def check_prompt(prompt: Prompt, vocab: int, longest: int) -> None:
    """Refuse a prompt that the model cannot be given.

    Args:
        prompt: The prompt.
        vocab: Number of token ids.
        longest: Most tokens of prompt and answer together.

    Raises:
        Refused: ``probe.prompt`` or ``probe.token-id``.
    """
    if not prompt.ids:
        raise Refused(finding("probe.prompt", "prompt", "holds no token", expected="at least one"))
    if len(prompt.positions) > longest:
        expected, found = f"at most {longest:,} tokens", f"{len(prompt.positions):,}"
        problem = "is longer than `max_position_embeddings` leaves room for"
        raise Refused(finding("probe.prompt", "prompt", problem, expected=expected, found=found))
    outside = [(at, i) for at, i in enumerate(prompt.ids) if not 0 <= i < vocab]
    if outside:
        at, token = outside[0]
        problem = f"{len(outside):,} token ids lie outside the vocabulary"
        if prompt.text is not None:
            problem += ": `tokenizer.json` belongs to another model"
        found = f"{token} at position {at:,}"
        raise Refused(finding("probe.token-id", "prompt", problem, expected=f"0..{vocab - 1:,}", found=found))
