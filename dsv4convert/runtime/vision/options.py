"""What pictures ask of the options of a server. No torch, no SGLang, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dsv4convert.errors import Finding, finding
from dsv4convert.memory import GpuMemory
from dsv4convert.runtime.launch import CHUNK, PAGE, SCORES_SHARE, number_of, value_of

#: Smallest ``--chunked-prefill-size``: a step has room for two pictures of at most 381 tokens, so that one
#: that does not end inside a picture always goes on.
SMALLEST_CHUNK: Final = 1024

_UNTESTED: Final = "its combination with pictures is not supported"
_OTHER_WAY: Final = (
    "pictures reach the model as `serve` checked them, from the tokenizer's process by the CPU"
)
#: Arguments of SGLang that are free for text -> what to know.
_REFUSED: Final[Mapping[str, str]] = {
    "--limit-mm-data-per-request": "use `--limit-images` before `--`",
    "--allow-auto-truncate": "a prompt could be cut inside a picture",
    "--chat-template": "the encoder of this model family puts pictures into the prompt",
    "--skip-tokenizer-init": "prompts have to be read to find the places of pictures",
    **dict.fromkeys(
        (
            "--enable-two-batch-overlap",
            "--enable-single-batch-overlap",
            "--enable-mixed-chunk",
            "--enable-dynamic-chunking",
            "--enable-return-routed-experts",
            "--mm-process-config",
        ),
        _UNTESTED,
    ),
    **dict.fromkeys(
        (
            "--mm-enable-dp-encoder",
            "--mm-feature-transport",
            "--keep-mm-feature-on-device",
            "--enable-mm-global-cache",
            "--enable-prefix-mm-cache",
            "--enable-adaptive-dispatch-to-encoder",
            "--language-only",
            "--encoder-urls",
        ),
        _OTHER_WAY,
    ),
}


def conflicts(extra: Sequence[str], chunk: int | None) -> Iterator[Finding]:
    """Yield the options that cannot be combined with pictures.

    Args:
        extra: Further arguments of SGLang.
        chunk: Tokens of a prefill step that the memory budget allows; None when it could not be worked out,
            -1 without steps.
    """
    for name, reason in _REFUSED.items():
        if value_of(extra, name) is not None:
            yield finding("serve.pictures", name, reason, expected="not set")
    given = number_of(extra, CHUNK)
    size = chunk if given is None else given
    if size is not None and 0 <= size < SMALLEST_CHUNK:
        problem = "a prefill step is too short for pictures, which are computed whole"
        hint = "lower `--context`, whose index scores decide how long a step may be" if given is None else ""
        expected = f"at least {SMALLEST_CHUNK:,} tokens"
        yield finding("serve.pictures", CHUNK, problem, expected=expected, found=f"{size:,}", hint=hint)


def longest_whole_prompt(budget: GpuMemory) -> int:
    """Return the tokens of the longest prompt that one prefill step can take.

    Its index scores are 4 bytes for every token and compressed key, a quarter of its tokens, and its window
    rows have to fit into their pool at once.
    """
    scores = math.isqrt(max(0, int(SCORES_SHARE * budget.left)))
    window = budget.window_tokens - 4 * PAGE
    return max(0, min(scores, window)) // PAGE * PAGE
