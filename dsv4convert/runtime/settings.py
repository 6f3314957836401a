"""The environment variables of the shim, and the older names they replace.

| variable | older name | values |
|---|---|---|
| ENABLE_DSV4_SM80 | ENABLE_SGLANG_DSV4_A100_PATCH | 1: patch SGLang; anything else: leave it alone |
| DSV4_SM80_MOE | SGLANG_DSV4_MXFP4_MOE_BACKEND | ours (older: mxfp4_int8), marlin, humming |
| DSV4_SM80_ALLOW_HASH | | SHA-256 values, comma-separated: changed files of SGLang to accept |
| | SGLANG_DSV4_A100_INT8_INDEXER | 1; the indexer is always INT8 on SM80 |
| DSV4_SM80_PARALLEL_INDEXER | | 1: split the index queries of a long prefill between the ranks; 0 |
| DSV4_SM80_PARALLEL_INDEXER_FROM | | scores of a step from which on it is split, 16777216 |
| DSV4_SM80_POISON | | 1: fill what attention must not read with NaN, for tests; 0 |

The new name wins when both are set. The switch itself is read by `hook`, before anything is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from dsv4convert.errors import Finding, finding
from dsv4convert.runtime.refusal import refusal, refuse_all

SWITCH: Final = "ENABLE_DSV4_SM80"
MOE: Final = "DSV4_SM80_MOE"
ALLOW_HASH: Final = "DSV4_SM80_ALLOW_HASH"
PARALLEL_INDEXER: Final = "DSV4_SM80_PARALLEL_INDEXER"
PARALLEL_FROM: Final = "DSV4_SM80_PARALLEL_INDEXER_FROM"
POISON: Final = "DSV4_SM80_POISON"
#: What is off unless its variable is 1.
SWITCHES: Final = (PARALLEL_INDEXER, POISON)
#: How names of ours begin, and all that there are; TILES is read by the kernels.
PREFIX: Final = "DSV4_SM80_"
TILES: Final = "DSV4_SM80_TILES"
NAMES: Final = (MOE, ALLOW_HASH, PARALLEL_INDEXER, PARALLEL_FROM, POISON, TILES)
#: Default of `PARALLEL_FROM`. So many scores take an A100 about 1 ms, by the share of its INT8 peak that an
#: H200 reaches; gathering what was selected takes up to 0.3 ms over PCIe.
LEAST_SCORES: Final = 1 << 24

#: SGLang's variable for a package of model classes. Ours in it is what turns pictures on.
MODEL_PACKAGE: Final = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODELS: Final = "dsv4convert.runtime.vision.models"

OLD_MOE: Final = "SGLANG_DSV4_MXFP4_MOE_BACKEND"
OLD_INDEXER: Final = "SGLANG_DSV4_A100_INT8_INDEXER"

#: Our kernels; SGLang's Marlin without its refusal of SM80; Humming, which supports SM75 and newer.
MOE_BACKENDS: Final = ("ours", "marlin", "humming")
_OLD_VALUES: Final = {"mxfp4_int8": "ours"}


def moe_backend() -> str:
    """Return the backend of the routed experts, one of `MOE_BACKENDS`.

    Raises:
        Refused: a variable asks for something that does not exist.
    """
    for fault in indexer_faults(os.environ):
        raise refuse_all([fault])
    name = MOE if MOE in os.environ else OLD_MOE
    value = os.environ.get(name, "").strip() or MOE_BACKENDS[0]
    backend = _OLD_VALUES.get(value, value)
    if backend not in MOE_BACKENDS:
        problem = "names no backend for the routed experts"
        raise refusal("shim.setting", name, problem, expected=" or ".join(MOE_BACKENDS), found=value)
    return backend


def sees_pictures() -> bool:
    """Tell whether this process serves a checkpoint with a vision tower."""
    return os.environ.get(MODEL_PACKAGE) == MODELS


def indexer_faults(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if the older name asks for another indexer than the one there is."""
    found = environ.get(OLD_INDEXER, "").strip() or "1"
    if found != "1":
        problem = "asks for an indexer that SM80 does not have: it has no FP8, so index keys are INT8"
        yield finding("shim.setting", OLD_INDEXER, problem, expected="1 or unset", found=found)


def switched_on() -> tuple[str, ...]:
    """Return those of `SWITCHES` that are on.

    Raises:
        Refused: a variable is neither 0 nor 1.
    """
    for fault in switch_faults(os.environ):
        raise refuse_all([fault])
    return tuple(name for name in SWITCHES if os.environ.get(name, "").strip() == "1")


def switch_faults(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each of `SWITCHES` that is neither on nor off, and for a limit that is none."""
    for name in SWITCHES:
        found = environ.get(name, "").strip() or "0"
        if found not in ("0", "1"):
            problem = "is neither on nor off"
            yield finding("shim.setting", name, problem, expected="1, 0 or unset", found=found)
    found = environ.get(PARALLEL_FROM, "").strip() or "1"
    if not found.isdecimal() or int(found) < 1:
        problem = "is no number of scores"
        yield finding("shim.setting", PARALLEL_FROM, problem, expected="at least 1, or unset", found=found)


def least_scores() -> int:
    """Return how many scores a prefill step must have to be split.

    Raises:
        Refused: the variable is no number.
    """
    for fault in switch_faults(os.environ):
        raise refuse_all([fault])
    return int(os.environ.get(PARALLEL_FROM, "").strip() or LEAST_SCORES)


def allowed_hashes() -> frozenset[str]:
    """Return the SHA-256 values, in hexadecimal, of changed files that the user accepts."""
    values = os.environ.get(ALLOW_HASH, "").replace(",", " ").split()
    return frozenset(value.lower() for value in values)
