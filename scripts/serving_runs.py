"""The ways to serve: layouts, drafts, decoding, chunks, ranks and switches, for `validate_serving`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from serving_checkpoints import CHECKPOINTS


@dataclass(frozen=True, slots=True)
class Run:
    """One server.

    Attributes:
        layout: One of `CHECKPOINTS`.
        draft: Speculate with the DSpark draft.
        graph: Decode with CUDA graphs.
        chunk: Tokens of a prefill step; -1 for whole prompts.
        tp: Tensor-parallel size.
        switch: Name of what `variables` and `extra` switch on.
        variables: More environment variables, as NAME=VALUE.
        extra: More arguments of SGLang.
    """

    layout: str
    draft: bool = False
    graph: bool = True
    chunk: int = -1
    tp: int = 1
    switch: str = ""
    variables: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name, such as ``int8-dspark-eager-1024``; one GPU and no switch are not named."""
        parts = [self.layout, "dspark" if self.draft else "base", "graph" if self.graph else "eager"]
        parts.append("whole" if self.chunk < 0 else str(self.chunk))
        return "-".join([*parts, *([f"tp{self.tp}"] if self.tp > 1 else []), *filter(None, [self.switch])])

    @property
    def is_full(self) -> bool:
        """Tell whether the whole suite and the load are run, and not only the golden tokens."""
        pictures = CHECKPOINTS[self.layout].pictures
        return bool(pictures) or (self.graph and self.chunk < 0 and not self.switch)


_KINDS = tuple(product(("int8", "mxfp4"), (False, True), (True, False), (-1, 1024)))
_WIDE = ("int8wide", "mxfp4wide")
_SWITCHES = (
    ("poison", ("DSV4_SM80_POISON=1",)),
    # Prompts are short here: every step is split.
    ("parallel", ("DSV4_SM80_PARALLEL_INDEXER=1", "DSV4_SM80_PARALLEL_INDEXER_FROM=1")),
)
RUNS = (
    Run("foreseen", draft=True),
    *(Run(*kind) for kind in _KINDS),
    *(Run(*kind, tp=2) for kind in _KINDS),
    *(
        Run("int8", draft, tp=2, switch=switch, variables=variables)
        for draft in (False, True)
        for switch, variables in _SWITCHES
    ),
    *(Run(layout, draft, tp=tp) for tp, layout, draft in product((4, 8), _WIDE, (False, True))),
    *(Run("vision", draft, chunk=chunk) for draft in (False, True) for chunk in (-1, 1024, 8192)),
    Run("vision", chunk=1024, switch="no-radix", extra=("--disable-radix-cache",)),
)


def chosen(names: Sequence[str] | None, gpus: int, one_card: bool) -> list[Run]:
    """Return the runs of these names, each once and in order; without names, all that the cards are for."""
    if not names:
        return [run for run in RUNS if (run.tp > 1 if one_card else run.tp <= gpus)]
    named = {run.name: run for run in RUNS}
    return [named[name] for name in dict.fromkeys(names)]
