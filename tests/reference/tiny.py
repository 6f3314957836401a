"""Small models whose numbers mean something, and their weights in memory.

`synth` fills tensors with the statistics of real ones, but a model of width 256 made of them decides nothing
and saturates nowhere. Here every matrix has unit gain, so that all parts of the model move the logits:

- ``plain``: Gaussian weights. For tolerances of rounding paths.
- ``hard``: block scales that differ by factors of up to 64, experts that run into the SwiGLU limit, embedding
  rows so small that the epsilon of the norms counts, streams that Sinkhorn needs all its iterations for.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsv4convert.formats.block import dequantize_fp8_block, dequantize_mxfp4
from dsv4convert.synth import Recipe, synthesize
from kernels_ref.config import ModelConfig
from kernels_ref.source import Expert
from kernels_ref.tensors import Int8Shift
from tests.shardfile import Row, rows, write_shard

RELEASE = "deepseek-v4-flash-0731"
VISION_RELEASE = "deepseek-v4-flash-vision-exp"
KINDS = ("plain", "hard")

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
}
# Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of E2M1.
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def make(root: Path, kind: str, release: str = RELEASE) -> Path:
    """Write the checkpoint `kind` (5 layers, all three kinds of attention, 3 draft stages) below `root`."""
    target = root / kind
    synthesize(target, Recipe(release, "tiny"))
    for path in sorted(target.glob("model-*.safetensors")):
        made: dict[str, Row] = {}
        for row in rows(path):
            if not row[0].endswith(".scale"):
                made |= {name: (name, *rest) for name, *rest in _fill(row, kind)}
        write_shard(path, [made[name] for name, *_ in rows(path)])
    return target


def _fill(row: Row, kind: str) -> list[Row]:
    """Return new rows for one tensor, and for its scales if it has any."""
    name, dtype, shape, _ = row
    hard = kind == "hard"
    gen = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    scale_name = name.removesuffix(".weight") + ".scale"
    if dtype == "I64":
        return [row]
    if dtype == "I8":
        n, k = shape[0], 2 * shape[1]
        gain = 6.0 if hard and not name.endswith("w2.weight") else 1.0
        w = torch.randn(n, k, generator=gen) * gain * k**-0.5
        codes, scales = _mxfp4(_uneven(w, (1, 32), 0.7, gen) if hard else w)
        return [(name, dtype, shape, codes), (scale_name, "F8_E8M0", (n, k // 32), scales)]
    if dtype == "F8_E4M3":
        w = torch.randn(shape, generator=gen) * shape[1] ** -0.5
        codes, scales = fp8_bytes(_uneven(w, (128, 128), 1.5, gen) if hard else w)
        grid = (-(-shape[0] // 128), -(-shape[1] // 128))
        return [(name, dtype, shape, codes), (scale_name, "F8_E8M0", grid, scales)]
    return [(name, dtype, shape, _bytes(_floats(name, shape, hard, gen).to(_DTYPES[dtype])))]


def _floats(name: str, shape: tuple[int, ...], hard: bool, gen: torch.Generator) -> Tensor:
    """Return the numbers of a tensor that is not quantized."""
    x = torch.randn(shape, generator=gen)
    if name == "embed.weight":
        # Mean squares around 1e-6, the epsilon, in every second row.
        return torch.where(torch.arange(shape[0])[:, None] % 2 == 0, 1e-3 * x, x) if hard else x
    if re.search(r"norm[12]?\.weight$", name):
        return 1 + 0.1 * x
    if name.endswith(("hc_attn_fn", "hc_ffn_fn", "hc_head_fn")):
        return 0.02 * x
    if name.endswith("_scale"):
        return 1 + 0.1 * x
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return x * (4.0 if hard else 0.5)
    if re.search(r"(hc_head_base|gate\.bias|gate\.bias_vl|\.ape)$", name):
        return 0.3 * x
    return x * (shape[-1] ** -0.5 if len(shape) == 2 else 1.0)


def _uneven(w: Tensor, block: tuple[int, int], spread: float, gen: torch.Generator) -> Tensor:
    """Multiply every block by a power of two, 2^round(spread * N(0, 1))."""
    grid = [-(-side // b) for side, b in zip(w.shape, block, strict=True)]
    factor = torch.exp2((spread * torch.randn(grid, generator=gen)).round())
    factor = factor.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return w * factor[: w.shape[0], : w.shape[1]]


def _scale_bytes(largest: Tensor, limit: float) -> Tensor:
    return (torch.log2(largest / limit).ceil() + 127).to(torch.uint8)


def mxfp4_matrix(w: Tensor) -> Tensor:
    """Round a matrix [N, K] to MXFP4 and return its values, bfloat16."""
    codes, scales = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in _mxfp4(w))
    return dequantize_mxfp4(codes.reshape(len(w), -1), scales.reshape(len(w), -1))


def _mxfp4(w: Tensor) -> tuple[bytes, bytes]:
    blocks = w.unflatten(1, (-1, 32))
    scales = _scale_bytes(blocks.abs().amax(-1), 6.0)
    x = blocks / torch.exp2(scales.float() - 127)[..., None]
    codes = torch.bucketize(x.abs(), _E2M1_MIDPOINTS).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
    codes = codes.flatten(1)
    return _bytes(codes[:, 0::2] | codes[:, 1::2] << 4), _bytes(scales)


def fp8_bytes(w: Tensor) -> tuple[bytes, bytes]:
    """Return E4M3 codes and UE8M0 scales per 128 x 128 of a matrix [N, K], both sides whole blocks."""
    n, k = w.shape
    blocks = w.reshape(n // 128, 128, k // 128, 128)
    scales = _scale_bytes(blocks.abs().amax((1, 3)), 448.0)
    x = blocks / torch.exp2(scales.float() - 127)[:, None, :, None]
    return _bytes(x.reshape(n, k).to(torch.float8_e4m3fn)), _bytes(scales)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Weights:
    """A checkpoint in memory, in any layout: a `Source` of the reference model.

    Attributes:
        stored: Name -> tensor as stored; E8M0 and packed codes as uint8.
    """

    stored: dict[str, Tensor]
    # `init=False`: whatever is made with other tensors begins with nothing decoded.
    _decoded: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> Weights:
        """Read every tensor of a directory, by hand."""
        found = {}
        for path in sorted(root.glob("*.safetensors")):
            for name, dtype, shape, data in rows(path):
                raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
                found[name] = raw.view(_DTYPES[dtype]).reshape(shape)
        return cls(found)

    def changed(self, name: str, change: Callable[[Tensor], Tensor]) -> Weights:
        """Return the same with one tensor as stored replaced."""
        base = name.rpartition(".")[0]
        made = Weights(self.stored | {name: change(self.stored[name].clone())})
        made._decoded.update({known: x for known, x in self._decoded.items() if known != base})
        return made

    def tensor(self, name: str) -> Tensor:
        """See `kernels_ref.source.Source`."""
        found = self.stored[name]
        if found.dtype is not torch.float8_e4m3fn:
            return found
        return self._values(name.removesuffix(".weight"), dequantize_fp8_block)

    def expert(self, prefix: str, index: int) -> Expert:
        """See `kernels_ref.source.Source`."""
        return Expert(*(self._matrix(f"{prefix}.ffn.experts.{index}.{w}") for w in ("w1", "w2", "w3")))

    def _matrix(self, base: str) -> Tensor | Int8Shift:
        if f"{base}.weight" in self.stored:
            return self._values(base, dequantize_mxfp4)
        parts = ("weight_codes", "weight_shift2", "channel_scale")
        return Int8Shift(*(self.stored[f"{base}.{part}"] for part in parts))

    def _values(self, base: str, decode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if base not in self._decoded:
            self._decoded[base] = decode(self.stored[f"{base}.weight"], self.stored[f"{base}.scale"])
        return self._decoded[base]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk and in memory.

    Attributes:
        root: The directory.
        config: Its numbers.
        weights: Its tensors.
    """

    root: Path
    config: ModelConfig
    weights: Weights

    @classmethod
    def read(cls, root: Path) -> Tiny:
        """Read a directory."""
        config = ModelConfig.from_dict(json.loads((root / "config.json").read_bytes()))
        return cls(root, config, Weights.read(root))


def prompt(length: int, vocab: int = 512, seed: int = 0) -> Tensor:
    """Return random token ids, [length] int64."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def relative(a: Tensor, b: Tensor) -> float:
    """Return the Frobenius norm of ``a - b`` over that of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())
