"""What every parameter must hold, from the bytes of the official checkpoint and the rules of this page alone.

Nothing here comes from the converter or from SGLang: dense weights are E4M3 times a power of two, experts
E2M1 times a power of two or the definition of the repack, and the cut for a rank is the one a matrix product
needs: rows of what is split by output, columns of what is split by input.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dsv4convert.formats.repack import Repacker
from tests.shardfile import rows

#: Parameter -> how tensor parallelism cuts it; everything else is whole on every rank.
_BY_OUTPUT = (
    "attn.wq_b.weight",
    "wo_a.weight",
    "gate_up_proj.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)
_BY_INPUT = ("wo_b.weight", "down_proj.weight")


class Official:
    """An official checkpoint, read by hand."""

    def __init__(self, root: Path) -> None:
        found = [row for path in sorted(root.glob("*.safetensors")) for row in rows(path)]
        self._rows = {name: (dtype, shape, data) for name, dtype, shape, data in found}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._rows)

    def value(self, name: str) -> torch.Tensor:
        """Return the number a tensor stands for, with the scale of its blocks where it has one."""
        dtype, shape, data = self._rows[name]
        if dtype == "F8_E4M3":
            return self._dense(name, shape, data)
        kind = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}[dtype]
        return torch.frombuffer(bytearray(data), dtype=kind).view(shape)

    def _dense(self, name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
        _, grid, scale = self._rows[name.replace(".weight", ".scale")]
        codes = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).view(shape).double()
        exponents = np.frombuffer(scale, np.uint8).astype(np.float64).reshape(grid) - 127
        factors = torch.from_numpy(np.exp2(exponents)).repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (codes * factors[: shape[0], : shape[1]]).to(torch.bfloat16)

    def mxfp4(self, base: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed codes [N, K / 2] and the scale bytes [N, K / 32] of an expert matrix."""
        pair = (self._rows[f"{base}.{leaf}"] for leaf in ("weight", "scale"))
        codes, scales = (np.frombuffer(data, np.uint8).reshape(shape) for _, shape, data in pair)
        return codes, scales


def source_names(parameter: str, target_layers: int) -> list[str]:
    """Return the tensors of the official checkpoint that a dense parameter is made of, in order.

    Args:
        parameter: Name in SGLang's model.
        target_layers: Layers of the target.
    """
    name = parameter
    for theirs, official in (
        ("model.decoder.", "mtp.0."),
        ("stages.", "mtp."),
        ("model.layers.", "layers."),
        (".self_attn.", ".attn."),
        (".mlp.", ".ffn."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        (".topk.tid2eid", ".gate.tid2eid"),
        ("e_score_correction_bias", "bias"),
        ("model.embed_tokens", "embed"),
        ("lm_head", "head"),
        ("down_proj", "w2"),
    ):
        name = name.replace(theirs, official)
    for fused, parts in (
        ("wqkv_a", ("wq_a", "wkv")),
        ("gate_up_proj", ("w1", "w3")),
        ("wkv_gate", ("wkv", "wgate")),
    ):
        if fused in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def dense(official: Official, names: list[str], parameter: str, rank: int, size: int) -> torch.Tensor:
    """Return what a rank holds of a dense parameter."""
    parts = [official.value(name) for name in names]
    if parameter.endswith(_BY_OUTPUT):
        parts = [part.chunk(size)[rank] for part in parts]
    if parameter.endswith(_BY_INPUT):
        parts = [part.chunk(size, 1)[rank] for part in parts]
    if parameter.endswith(".ape") and len(parts[0]) == 4:
        # SGLang keeps the halves of overlapping windows one after the other: [4, 2, D] as [2, 4, D].
        parts = [part.view(4, 2, -1).transpose(0, 1).reshape(4, -1) for part in parts]
    return torch.cat(parts)


def experts(
    official: Official, prefix: str, matrix: str, layout: str, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, shifts and row scales that a rank holds of all experts of a layer.

    Layout `int8` was repacked before it was cut, `mxfp4` afterwards. The repack is the converter's, which its
    own tests hold against the definition; the shim has another one.
    """
    found = []
    for expert in range(4):
        pieces = []
        for part in ("w1", "w3") if matrix == "w13" else ("w2",):
            pair = official.mxfp4(f"{prefix}.{expert}.{part}")
            axis = 1 if part == "w2" else 0
            cut = lambda a, axis=axis: np.array_split(a, size, axis)[rank]  # noqa: E731
            if layout == "mxfp4":
                pieces.append(_repack(*map(cut, pair)))
            else:
                codes, shifts, scales = _repack(*pair)
                pieces.append((cut(codes), cut(shifts), scales if axis else cut(scales)))
        found.append([np.concatenate(arrays) for arrays in zip(*pieces, strict=True)])
    codes, shifts, scales = (np.stack(arrays) for arrays in zip(*found, strict=True))
    return codes, shifts, scales


def _repack(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, k = len(codes), 2 * codes.shape[1]
    groups = -(-k // 128)
    out = np.empty((n, groups * 64), np.uint8), np.empty((n, groups), np.uint8), np.empty(n, np.float32)
    Repacker(k).repack(np.ascontiguousarray(codes), np.ascontiguousarray(scales), *out)
    return out
