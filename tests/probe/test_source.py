"""Every weight of every layout, as numbers: against decoders that share no code with this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4convert import api
from dsv4convert.formats.block import dequantize_fp8_block, dequantize_mxfp4
from dsv4convert.names import Layout, Unit
from dsv4convert.probe.source import _SCALES, CheckpointSource, _scaled
from dsv4convert.survey import Survey, survey
from dsv4convert.table import Storage
from tests.samples import int8_values


def _stored(seen: Survey, unit: Unit) -> list[torch.Tensor]:
    """Return what is stored of a unit as uint8 tensors of the stored shape."""
    tensors = [seen.checkpoint.tensors[name] for name in unit.stored(seen.layout or Layout.OFFICIAL)]
    return [
        torch.frombuffer(seen.checkpoint.read(t.name), dtype=torch.uint8).reshape(t.shape[0], -1)
        for t in tensors
    ]


@pytest.mark.parametrize("kind", ["plain", "ragged"])
def test_every_weight_of_an_official_checkpoint(sample: Callable[[str], Path], kind: str) -> None:
    seen = survey(api.open(sample(kind)))
    kinds = set()
    with CheckpointSource(seen) as source:
        for unit in seen.units:
            if unit.base.startswith("mtp") and unit.row.storage is Storage.EXPERT_MXFP4:
                continue  # The same kind as those of the trunk.
            found, parts = source.tensor(unit.base), _stored(seen, unit)
            assert found.shape == unit.shape
            if unit.row.storage is Storage.DENSE_FP8:
                wanted = dequantize_fp8_block(*parts, unit.block)
            elif unit.row.storage is Storage.EXPERT_MXFP4:
                wanted = dequantize_mxfp4(*parts)
            else:
                wanted = parts[0].reshape(-1).view(found.dtype).reshape(unit.shape)
            assert torch.equal(found, wanted), unit.base
            kinds.add((unit.row.storage, found.dtype))
    assert len(kinds) == 5


@pytest.mark.parametrize("kind", ["plain", "ragged"])
def test_repacked_experts_are_the_numbers_of_the_format(
    sample: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    api.convert(sample(kind), tmp_path / "out")
    seen = survey(api.open(tmp_path / "out"))
    experts = [u for u in seen.units if u.row.storage is Storage.EXPERT_MXFP4 and u.base.startswith("layers")]
    with CheckpointSource(seen) as source:
        for unit in experts:
            parts = [seen.checkpoint.read(name) for name in unit.stored(Layout.INT8)]
            wanted = torch.from_numpy(int8_values(*map(bytes, parts), *unit.shape))
            assert torch.equal(source.tensor(f"{unit.base}.weight").double(), wanted), unit.base
        one = source.expert("layers.0", 1)
        assert torch.equal(one.w2, source.tensor("layers.0.ffn.experts.1.w2.weight"))
    assert len(experts) > 100


def test_both_conversions_keep_dense_weights_exactly(trio: dict[str, Path]) -> None:
    seen = {layout: survey(api.open(root)) for layout, root in trio.items()}
    sources = {layout: CheckpointSource(s) for layout, s in seen.items()}
    for unit in seen["official"].units:
        wanted = sources["official"].tensor(unit.base)
        assert torch.equal(sources["mxfp4"].tensor(unit.base), wanted)
        if unit.row.storage is not Storage.EXPERT_MXFP4:
            assert torch.equal(sources["int8"].tensor(unit.base), wanted)
    for source in sources.values():
        source.__exit__(None, None, None)


def test_every_code_at_every_scale_byte() -> None:
    """All 256 bytes at all 256 scales, those that overflow, vanish or are NaN included."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    wanted = dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scales))
    found = _scaled(packed, torch.from_numpy(_SCALES[scales]))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0))


def test_absent_weight_is_a_key_error(trio: dict[str, Path]) -> None:
    with CheckpointSource(survey(api.open(trio["int8"]))) as source, pytest.raises(KeyError):
        source.tensor("layers.0.attn.wq_c.weight")
