"""Small synthetic sources, and directories as values that can be compared."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4convert import synth
from dsv4convert.synth import Recipe, synthesize
from tests.toy import Toy

_RELEASE = "deepseek-v4-flash-0731"
SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {"release": _RELEASE},
    "ragged": {"release": _RELEASE, "ragged": True},
    "preview": {"release": "deepseek-v4-flash"},
    "vision": {"release": "deepseek-v4-flash-vision-exp"},
    "v41": {"release": "deepseek-v4.1-flash"},
    # The cheapest source with several shards: for tests that convert many times.
    "short": {"release": _RELEASE, "layers": 3, "experts": 2},
}

MANIFEST = "dsv4convert.json"
INDEX = "model.safetensors.index.json"


def make_sample(root: Path, kind: str) -> Path:
    """Write the sample `kind` below `root` and return its directory."""
    target = root / kind
    synthesize(target, Recipe(**{"scale": "tiny", "seed": zlib.crc32(kind.encode()), **SAMPLES[kind]}))
    return target


def make_served(target: Path) -> Path:
    """Write a source that 4 and 8 GPUs can share, with as many layers and as wide rows as a real one.

    Spans are 0 to 2 in synthetic values; here experts of every third layer get blocks far below their row.
    """
    sides = {"moe_intermediate_size": 1024, "num_attention_heads": 8, "o_groups": 8}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in sides.items():
            patch.setitem(synth._TINY, key, value)
        synth.synthesize(target, Recipe(_RELEASE, "tiny", layers=24, experts=2))
    for layer in range(0, 24, 3):
        for projection in ("w1", "w2", "w3")[: 1 + layer % 4]:
            name = f"layers.{layer}.ffn.experts.1.{projection}.scale"
            size = len(Toy(target).row(name)[3])
            # One block in 40, 4 to 17 below the others.
            for at in range(layer, size, 40):
                Toy(target).poke(name, at, bytes([117 - layer // 2 - at % 2]))
    return target


def read_json(path: Path) -> Any:
    """Parse a JSON file."""
    return json.loads(path.read_bytes())


def tree(root: Path) -> dict[str, bytes]:
    """Return relative path -> bytes of every file; of the manifest without its section `run`.

    Two conversions of one plan must be equal as trees, whatever made them.
    """
    found = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    if MANIFEST in found:
        manifest = json.loads(found[MANIFEST])
        del manifest["run"]
        found[MANIFEST] = json.dumps(manifest).encode()
    return found


def tensors(root: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return name -> dtype, shape and bytes of every tensor of a checkpoint, read by hand."""
    from tests.shardfile import rows

    return {row[0]: row[1:] for path in sorted(root.glob("*.safetensors")) for row in rows(path)}


_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float64)


def mxfp4_values(codes: bytes, scales: bytes, n: int, k: int) -> np.ndarray:
    """Return [N, K] float64 weights of packed E2M1 codes, low nibble first, and a UE8M0 byte per 32."""
    raw = np.frombuffer(codes, np.uint8)
    nibbles = np.stack([raw & 15, raw >> 4], axis=1).reshape(n, k)
    exponent = np.frombuffer(scales, np.uint8).astype(np.int64).reshape(n, k // 32) - 127
    return _E2M1_DOUBLED[nibbles] / 2 * np.repeat(np.exp2(exponent.astype(np.float64)), 32, axis=1)


def int8_values(codes: bytes, shifts: bytes, channel: bytes, n: int, k: int) -> np.ndarray:
    """Return [N, K] float64 weights of INT8_SHIFT, written from the format's definition alone.

    In a group of 128 the byte pairs of the even-odd order lie transposed: [16][2] instead of [2][16].
    """
    groups = -(-k // 128)
    pairs = np.frombuffer(codes, "<u2").reshape(n, groups, 16, 2).swapaxes(2, 3)
    raw = np.ascontiguousarray(pairs).view(np.uint8).reshape(n, groups * 64)
    nibbles = np.stack([raw & 15, raw >> 4], axis=2).reshape(n, groups * 128)[:, :k]
    packed = np.frombuffer(shifts, np.uint8).reshape(n, groups)
    per_block = np.stack([packed >> 2 * b & 3 for b in range(4)], axis=2).reshape(n, groups * 4)
    scale = np.frombuffer(channel, "<f4").astype(np.float64)[:, None]
    return scale * _E2M1_DOUBLED[nibbles] * np.exp2(np.repeat(per_block, 32, axis=1)[:, :k])
