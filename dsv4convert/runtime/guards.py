"""What the log of a server must say before it may be used, and what it must never say.

The shim logs one line for every process that builds a model, and one for every model and rank:

    dsv4convert guard: model=DeepseekV4ForCausalLM rank=0/4 filled=1234 fp8=0 experts=ours/int8 layers=43

A rank without them runs stock code, which no health check would notice.

A line counts by how its message begins, never by what stands inside it: SGLang also logs what clients send.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from dsv4convert.runtime.contract import GUARD_LINE, SHIM_LINE

#: What SGLang logs when its warm-up is over, or was skipped.
READY_LINE: Final = "The server is fired up and ready to roll!"
#: Warnings of SGLang after which a model is wrong: tensors without a parameter, parameters without a tensor.
_WRONG: Final = re.compile(
    r"\S+ not found in params_dict\.$|Some weights are not initialized from checkpoints: "
)
#: What SGLang puts before a message: ``[2026-11-29 21:00:00 TP0] ``, with milliseconds if so wished.
_PREFIX: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ")
TARGET: Final = "DeepseekV4ForCausalLM"
DSPARK: Final = "DeepseekV4ForCausalLMDSpark"


class Guards:
    """Watches the lines of a server.

    Args:
        tp: Ranks, each of which has to speak.
        dspark: A draft is loaded beside the target.
        backend: Backend of the routed experts.
        pictures: The target has a vision tower.

    Attributes:
        is_up: SGLang has said that it is ready.
        lines: Lines of the shim, from its first word on.
    """

    def __init__(self, tp: int, dspark: bool, backend: str, pictures: bool = False) -> None:
        self._tp, self._backend, self._pictures = tp, backend, pictures
        self._ranks: dict[str, set[str]] = {TARGET: set(), **({DSPARK: set()} if dspark else {})}
        self._processes = 0
        self._failed: list[str] = []
        self.is_up = False
        self.lines: list[str] = []

    def feed(self, line: str) -> bool:
        """Take a line; tell whether it says something."""
        message = _message(line)
        if message == READY_LINE:
            self.is_up = True
        elif _WRONG.match(message):
            self._failed.append(line)
        elif message.startswith(SHIM_LINE):
            self._processes += 1
            self.lines.append(message)
        elif message.startswith(GUARD_LINE):
            self.lines.append(message)
            self._take(message)
        else:
            return False
        return True

    def _take(self, line: str) -> None:
        facts = dict(word.partition("=")[::2] for word in line.removeprefix(GUARD_LINE).split())
        self._failed += (f"{reason}: {line}" for reason in self._wrong(facts))
        # Ranks of a model that nothing was said about are counted, too, but not required.
        self._ranks.setdefault(facts.get("model", ""), set()).add(facts.get("rank", ""))

    def _wrong(self, facts: Mapping[str, str]) -> Iterator[str]:
        if facts.get("fp8") != "0":
            yield "parameters were quantized to FP8"
        if facts.get("experts", "").partition("/")[0] != self._backend:
            yield f"routed experts do not run on the backend `{self._backend}`"
        if self._pictures and facts.get("model") == TARGET and facts.get("pictures", "0") == "0":
            yield "the model has no vision tower, so that pictures would be ignored"
        if facts.get("main_proj", "bfloat16") != "bfloat16":
            yield "the draft's main_proj is not BF16, so that drafts would hardly ever be accepted"

    @property
    def failed(self) -> tuple[str, ...]:
        """What is wrong with the models that were loaded, in words."""
        return tuple(self._failed)

    def missing(self) -> tuple[str, ...]:
        """Return what the ranks have not said, in words."""
        return tuple(self._missing())

    def _missing(self) -> Iterator[str]:
        if self._processes < self._tp:
            yield f"no line `{SHIM_LINE}` from {self._tp - self._processes} of {self._tp} ranks"
        for model in (name for name in (TARGET, DSPARK) if name in self._ranks):
            wanted = {f"{rank}/{self._tp}" for rank in range(self._tp)}
            late = sorted(wanted - self._ranks[model])
            if late:
                yield f"no line `{GUARD_LINE}` for {model} of rank {', '.join(late)}"


def _message(line: str) -> str:
    """Return what SGLang logged in a line, without its prefix."""
    _, bar, text = line.rpartition("\r")
    # A progress bar ends in no line end, so that the next line of another rank follows it.
    prefix = _PREFIX.search(text) if bar else _PREFIX.match(text)
    return text[prefix.end() :] if prefix else text
