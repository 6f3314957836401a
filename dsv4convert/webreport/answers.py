"""What a checkpoint answered, read from a golden file, with the place of every number.

Places are JSON pointers into that file, after ``golden:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4convert.errors import Refused, finding
from dsv4convert.files import printable
from dsv4convert.golden import describe, read_golden
from dsv4convert.survey import Survey
from dsv4convert.webreport.cited import Cited, count, error, pointer

#: Prompt tokens shown; the file has them all.
PROMPT_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Token:
    """One answered token: its id, text, gap to the runner-up and logarithm of its probability."""

    token: Cited
    text: str
    margin: Cited
    logprob: Cited


@dataclass(frozen=True, slots=True)
class Compared:
    """One layer beside the reference: errors of its parts and of the streams, shares of equal choices."""

    layer: str
    attention: Cited
    routed: Cited
    shared: Cited
    streams: Cited
    chosen: Cited
    picked: Cited | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything a report takes from a golden file."""

    numerics: str
    prompt: str
    prompt_tokens: Cited
    text: str | None
    tokens: tuple[Token, ...]
    reference: str | None
    expectation: str
    limit: Cited | None
    logits: Cited | None
    equal_tokens: Cited | None
    layers: tuple[Compared, ...]


def read_answers(file: Path, seen: Survey) -> Answers:
    """Read the golden file of a checkpoint.

    Raises:
        Refused: it is none, or it is about another checkpoint.
        EnvironmentFault: it cannot be read.
    """
    golden = read_golden(file)
    own, theirs = describe(seen), golden["checkpoint"]
    for key in ("headers_sha256", "manifest_sha256"):
        if own[key] != theirs[key]:
            expected, found = (f"{key} {str(value)[:12]}" for value in (own[key], theirs[key]))
            problem = "is about another checkpoint"
            raise Refused(finding("golden.other", file.name, problem, expected=expected, found=found))
    prompt, agreement = golden["prompt"], golden["agreement"] or {}
    shown = ", ".join(map(str, prompt["ids"][:PROMPT_SHOWN]))
    ids = shown + (", …" if len(prompt["ids"]) > PROMPT_SHOWN else "")
    pictures = "".join(f"[{printable(picture['file'])}] " for picture in prompt.get("pictures", ()))
    return Answers(
        numerics=golden["numerics"],
        prompt=pictures + (ids if prompt["text"] is None else printable(prompt["text"], 4096)),
        prompt_tokens=count(len(prompt["ids"]), "count golden:/prompt/ids/*"),
        text=golden["text"],
        tokens=tuple(_token(step, i) for i, step in enumerate(golden["steps"])),
        reference=agreement["reference"]["name"] if agreement else None,
        expectation=agreement.get("expectation", ""),
        limit=error(agreement["limit"], "golden:/agreement/limit") if agreement.get("limit") else None,
        logits=error(agreement["logits"], "golden:/agreement/logits") if agreement else None,
        equal_tokens=count(agreement["equal_tokens"], "golden:/agreement/equal_tokens")
        if agreement
        else None,
        layers=tuple(_layers(agreement.get("layers", ()))),
    )


def _token(step: Mapping[str, Any], position: int) -> Token:
    best = step["top"][0]
    where = f"golden:{pointer('steps', position)}"
    logprob = Cited(best["logprob"], f"{best['logprob']:.3f}", f"{where}/top/0/logprob")
    margin = Cited(step["margin"], f"{step['margin']:.3g}", f"{where}/margin")
    text = "" if best["text"] is None else printable(best["text"])
    return Token(Cited(step["token"], str(step["token"]), f"{where}/token"), text, margin, logprob)


def _layers(rows: Iterable[Mapping[str, Any]]) -> Iterable[Compared]:
    for position, row in enumerate(rows):
        where = f"golden:{pointer('agreement', 'layers', position)}"
        errors = {
            key: error(row[key], f"{where}/{key}") for key in ("attention", "routed", "shared", "streams")
        }
        picked = None if row["picked"] is None else _share(row["picked"], f"{where}/picked")
        yield Compared(row["layer"], **errors, chosen=_share(row["chosen"], f"{where}/chosen"), picked=picked)


def _share(value: float, source: str) -> Cited:
    return Cited(value, f"{value:.2%}".replace("%", " %"), source)
