"""`convert --device`: the same bytes and the same manifest wherever the arithmetic is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4convert import convert as conversion
from dsv4convert import device
from dsv4convert.convert import convert
from dsv4convert.decoder import Bytes, CpuDecoder
from dsv4convert.errors import EnvironmentFault
from dsv4convert.formats.fp8 import Fp8Decoder, Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import Repacker
from tests.kernels import weights
from tests.kernels.interpreted import call
from tests.samples import tree

Sample = Callable[[str], Path]


class LateDecoder(CpuDecoder):
    """Does nothing before it must: what a GPU may do at worst. Input is read into three places in turn."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self._rooms = [CpuDecoder() for _ in range(self.depth + 1)]
        self.waited = 0

    def staging(self, size: int) -> Bytes:
        """Return the room of the oldest strip."""
        self._rooms.append(self._rooms.pop(0))
        return self._rooms[-1].staging(size)

    def fp8(self, *strip: Any) -> Callable[[], Fp8Stats]:
        """Note a strip."""
        return partial(self._late, super().fp8, *strip)

    def mxfp4(self, *strip: Any) -> Callable[[], RepackStats]:
        """Note a strip."""
        return partial(self._late, super().mxfp4, *strip)

    def _late(self, work: Callable[..., Callable[[], Any]], *strip: Any) -> Any:
        self.waited += 1
        return work(*strip)()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDecoder:
    """Let the device `cuda` be a late CPU; strips are small, so that many are under way."""
    decoder = LateDecoder()
    monkeypatch.setattr(conversion, "require_device", lambda name: None)
    monkeypatch.setattr(conversion, "decoder_of", lambda name: decoder)
    monkeypatch.setattr("dsv4convert.transform.STRIP", 4096)
    return decoder


@pytest.mark.parametrize("kind", ["short", "ragged"])
@pytest.mark.parametrize("experts", ["int8", "mxfp4"])
def test_strips_that_finish_late_give_the_same_files(
    kind: str, experts: str, sample: Sample, tmp_path: Path, late: LateDecoder
) -> None:
    made = convert(sample(kind), tmp_path / "late", experts=experts, device="cuda")
    assert made.manifest
    assert made.manifest["run"]["device"] == "cuda"
    assert late.waited > 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "decoder_of", device.decoder_of)
        convert(sample(kind), tmp_path / "cpu", experts=experts)
    assert tree(tmp_path / "late") == tree(tmp_path / "cpu")


def test_an_error_waits_for_the_strips_under_way(sample: Sample, tmp_path: Path, late: LateDecoder) -> None:
    """A later strip fails to begin: those before it must come to an end before their buffers are freed."""
    begun = 0
    begin = late.fp8

    def fail(*strip: Any) -> Callable[[], Fp8Stats]:
        nonlocal begun
        begun += 1
        if begun == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nAnd so on.")
        return begin(*strip)

    late.fp8 = fail  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault) as failed:
        convert(sample("ragged"), tmp_path / "out", device="cuda")
    assert [f.code for f in failed.value.findings] == ["device.failed"]
    assert failed.value.findings[0].found == "CUDA out of memory. Tried to allocate 2.00 MiB."
    assert late.waited == 2
    late.fp8 = begin  # type: ignore[method-assign]
    convert(sample("ragged"), tmp_path / "out", device="cuda")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_gpu_fault_is_a_finding_also_when_torch_came_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker process torch is loaded by the first strip, inside."""
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(EnvironmentFault) as failed, device.device_faults("a shard"):
        monkeypatch.setitem(sys.modules, "torch", torch)
        raise error
    (found,) = failed.value.findings
    assert (found.code, found.where) == ("device.failed", "a shard")
    assert found.found == str(error).splitlines()[0]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("something else"), OSError(28, "No space")])
def test_faults_of_others_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as passed, device.device_faults("a shard"):
        raise error
    assert passed.value is error


# ---- the GPU's own code, interpreted


def convert_interpreted(source: str, target: str, experts: str) -> None:
    """Convert with the GPU's strips, kernels interpreted, on CPU tensors."""
    from kernels_ref.sm80 import convert as kernels
    from kernels_ref.sm80 import figures
    from kernels_ref.sm80.strips import StripDecoder

    with pytest.MonkeyPatch.context() as patch:
        # The interpreter's time goes by programs, not by codes.
        patch.setattr(kernels, "FP8_TILE", 1 << 16)
        patch.setattr(kernels, "FP8_ROWS", 128)
        patch.setattr(kernels, "REPACK_BYTES", 1 << 14)
        patch.setattr(figures, "FIGURES_TILE", 1 << 12)
        patch.setattr(conversion, "require_device", lambda name: None)
        patch.setattr(conversion, "decoder_of", lambda name: StripDecoder("cpu"))
        convert(source, target, experts=experts, device="cuda")


@pytest.mark.slow
def test_conversion_by_the_kernels_is_that_of_the_cpu(sample: Sample, tmp_path: Path) -> None:
    source = sample("short")
    call(convert_interpreted, str(source), str(tmp_path / "gpu"), "int8")
    convert(source, tmp_path / "cpu")
    assert tree(tmp_path / "gpu") == tree(tmp_path / "cpu")


def decode_strips(strips: list[tuple[np.ndarray, np.ndarray]], block: tuple[int, int]) -> list[Any]:
    """Decode FP8 strips, three under way at once; return bits and statistics of each."""
    from kernels_ref.sm80.strips import StripDecoder

    decoder = StripDecoder("cpu")
    waits, outs = [], []
    for row, (codes, scales) in enumerate(strips):
        staged = decoder.staging(codes.size).reshape(codes.shape)
        staged[:] = codes
        outs.append(np.full(codes.shape, 0x5A5A, np.int16))
        waits.append(decoder.fp8(block, staged, scales, outs[-1], 64 * row))
    return [(torch.from_numpy(out), wait()) for out, wait in zip(outs, waits, strict=True)]


def test_strips_with_unusual_values_report_as_on_the_cpu(seed: int) -> None:
    """Clean, NaN codes, inexact and NaN scales, in flight together."""
    draw = torch.Generator().manual_seed(seed)
    strips = []
    for strange in ("none", "codes", "scales"):
        codes, scales = (t.numpy() for t in weights.fp8((64, 96), (32, 32), draw))
        if strange == "codes":
            codes[5, 7], codes[63, 95] = 0xFF, 0x7F
        if strange == "scales":
            scales[0, 1], scales[1, 0], scales[1, 2] = 1, 250, 255
        strips.append((codes, scales))
    found = call(decode_strips, strips, (32, 32))
    assert [stats.clean for _, stats in found] == [True, False, False]
    for row, ((codes, scales), (bits, stats)) in enumerate(zip(strips, found, strict=True)):
        expected = np.empty(codes.shape, np.int16)
        assert stats == Fp8Decoder((32, 32), 96).decode(codes, scales, expected, row=64 * row)
        assert bits.numpy().tobytes() == expected.tobytes()


def repack_strip(packed: np.ndarray, scales: np.ndarray, row: int) -> tuple[Any, ...]:
    """Repack one strip."""
    from kernels_ref.sm80.strips import StripDecoder

    decoder = StripDecoder("cpu")
    staged = decoder.staging(packed.size).reshape(packed.shape)
    staged[:] = packed
    n, groups = len(packed), -(-packed.shape[1] // 64)
    out = np.full((n, groups * 64), 0xA5, np.uint8)
    shift2, channel = np.full((n, groups), 0xA5, np.uint8), np.full(n, np.nan, np.float32)
    stats = decoder.mxfp4(staged, scales, out, shift2, channel, row)()
    return *map(torch.from_numpy, (out, shift2, channel)), stats


@pytest.mark.parametrize("nan_scale", [False, True])
def test_a_repacked_strip_reports_as_on_the_cpu(nan_scale: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    packed, scales = (t.numpy() for t in weights.mxfp4(16, 160, draw, 100, 120))
    if nan_scale:
        scales[3, 2] = 255
    *found, stats = call(repack_strip, packed, scales, 7)
    expected = [np.empty(t.shape, t.numpy().dtype) for t in found]
    assert stats == Repacker(160).repack(packed, scales, *expected, row=7)
    for bits, right in zip(found, expected, strict=True):
        assert bits.numpy().tobytes() == right.tobytes()


# ---- which device


def test_without_a_gpu_cuda_is_refused_before_anything_is_written(
    cli: Callable[..., Any], sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = cli("convert", sample("short"), tmp_path / "out", "--device", "cuda")
    assert ran.exit_code == 4
    assert "no CUDA GPU can be used" in ran.err
    assert "device.unavailable" in ran.err
    assert "--device cpu" in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("capability", "triton", "problem"),
    [((7, 5), True, "too old"), ((8, 0), False, "Triton is not installed"), ((8, 0), True, None)],
)
def test_an_old_card_or_a_missing_triton_is_named(
    capability: tuple[int, int], triton: bool, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    if not triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    if problem is None:
        device.require_device("cuda")
        return
    with pytest.raises(EnvironmentFault, match=problem) as refused:
        device.require_device("cuda")
    assert refused.value.findings[0].code == "device.unavailable"


def test_an_unknown_device_is_a_usage_error(cli: Callable[..., Any], tmp_path: Path) -> None:
    assert cli("convert", tmp_path, tmp_path / "out", "--device", "tpu").exit_code == 2
    with pytest.raises(ValueError, match="one of cpu, cuda"):
        convert(tmp_path, tmp_path / "out", device="tpu")


# ---- a real card


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "experts", "jobs"),
    [
        ("plain", "int8", 1),
        ("plain", "int8", 3),
        ("ragged", "int8", 1),
        ("ragged", "mxfp4", 1),
        ("v41", "int8", 1),
    ],
)
def test_a_gpu_gives_the_same_files(
    kind: str, experts: str, jobs: int, sample: Sample, tmp_path: Path
) -> None:
    convert(sample(kind), tmp_path / "gpu", experts=experts, jobs=jobs, device="cuda")
    convert(sample(kind), tmp_path / "cpu", experts=experts)
    assert tree(tmp_path / "gpu") == tree(tmp_path / "cpu")


@pytest.mark.gpu
def test_a_conversion_begun_on_the_cpu_is_continued_on_the_gpu(sample: Sample, tmp_path: Path) -> None:
    source = sample("short")
    convert(source, tmp_path / "out", part=(0, 2))
    convert(source, tmp_path / "out", device="cuda")
    convert(source, tmp_path / "cpu")
    assert tree(tmp_path / "out") == tree(tmp_path / "cpu")
