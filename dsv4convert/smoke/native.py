"""SGLang's own endpoint: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsv4convert.smoke.answers import Picture, count_at, pick, rows_at, text_at
from dsv4convert.smoke.server import Server, Trouble

#: Tokens beside the winner whose probability is asked for.
TOP: Final = 5


@dataclass(frozen=True, slots=True)
class Generated:
    """What the server generated.

    Attributes:
        ids: Token ids of the answer.
        text: The answer as text.
        prompt_tokens: Tokens of the prompt as the server counts them.
        meta: All it says about the request.
        gaps: For every token the most probable ids, each with its distance to the first in nats; empty if
            they were not asked for.
    """

    ids: tuple[int, ...]
    text: str
    prompt_tokens: int | None
    meta: Mapping[str, Any]
    gaps: tuple[Mapping[int, float], ...] = ()


def generate(
    server: Server,
    prompt: str | Sequence[int],
    tokens: int,
    *,
    gaps: bool = False,
    pictures: Sequence[Picture] = (),
) -> Generated:
    """Generate exactly `tokens` tokens at temperature 0, past the end of an answer.

    Args:
        server: Who is asked.
        prompt: Text, or token ids.
        tokens: How many tokens.
        gaps: Ask for probabilities, which SGLang refuses under DSpark.
        pictures: One for every placeholder in the prompt.

    Raises:
        Trouble: there is no usable answer, or not that many tokens.
    """
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": TOP} if gaps else {}
    if pictures:
        more["image_data"] = [picture.url for picture in pictures]
    page = server.post("/generate", {**asked, "sampling_params": sampling, **more})
    if page.status != 200:
        text = server.clean(f"`/generate`: status {page.status}: {page.text[:200]}")
        raise Trouble("status", text, page.status)
    answer = page.json()
    ids = rows_at(answer, "output_ids")
    if len(ids) != tokens or not all(isinstance(i, int) for i in ids):
        raise Trouble("protocol", f"`/generate` was asked for {tokens:,} ids and returned {len(ids):,}")
    meta = pick(answer, "meta_info") or {}
    found = tuple(map(_gaps, rows_at(meta, "output_top_logprobs"))) if gaps else ()
    return Generated(tuple(ids), text_at(answer, "text"), count_at(meta, "prompt_tokens"), meta, found)


def _gaps(row: Any) -> Mapping[int, float]:
    # Rows of [logprob, id, text].
    known = [(part[0], part[1]) for part in row or () if isinstance(part[0], int | float)]
    best = max((logprob for logprob, _ in known), default=0.0)
    return {token: best - logprob for logprob, token in known}
