"""Which layers a manifest says to have lost nothing when their experts were repacked."""

from __future__ import annotations

from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.journal import MANIFEST
from dsv4convert.survey import Survey
from dsv4convert.validate.provenance import read_manifest


def exact_layers(seen: Survey, layers: int) -> tuple[frozenset[str], tuple[Finding, ...]]:
    """Return the layers whose experts lost nothing, and a warning where the manifest does not say.

    Args:
        seen: The checkpoint with ``int8`` experts.
        layers: How many the trunk has.
    """
    manifest, faults = read_manifest(seen.checkpoint.root)
    if manifest is None:
        reason = "; ".join(f.problem for f in faults)
        return frozenset(), (_silent(f"the manifest {reason}"),)
    losses = manifest["losses"] if isinstance(manifest["losses"], dict) else {}
    names = [f"layers.{index}" for index in range(layers)]
    changed = {name: _codes_changed(losses.get(name)) for name in names}
    unknown = [name for name in names if changed[name] is None]
    warnings = (_silent(f"section `losses` has no figures of `{unknown[0]}`"),) if unknown else ()
    return frozenset(name for name in names if changed[name] == 0), warnings


def _codes_changed(parts: Any) -> int | None:
    """Return how many codes of a layer were rounded, None where its figures are not there."""
    if not isinstance(parts, dict) or parts.keys() != {"w1", "w2", "w3"}:
        return None
    counts = [part.get("codes_changed") if isinstance(part, dict) else None for part in parts.values()]
    known = [count for count in counts if type(count) is int]
    return sum(known) if len(known) == len(counts) else None


def _silent(reason: str) -> Finding:
    problem = "does not say which layers lost nothing, so none of these was held to bit-equality"
    return finding("probe.no-losses", MANIFEST, problem, found=reason)
