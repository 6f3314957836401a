"""The named operations, strip by strip: read, transform, hand to the sink.

No function here holds a whole tensor, whatever its size, except row scales and shift bytes. Source bytes
are never modified. What a value check finds is returned as findings; whether it stops the conversion is
decided by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsv4convert.decoder import CpuDecoder, Decoder
from dsv4convert.errors import Finding, finding
from dsv4convert.formats.codes import count_mxfp4_overflow, count_nan_scales
from dsv4convert.formats.fp8 import Fp8Stats
from dsv4convert.formats.int8_shift import RepackStats
from dsv4convert.formats.repack import weigh
from dsv4convert.formats.spec import ceil_div
from dsv4convert.header import ShardReader, TensorInfo
from dsv4convert.plan import Op, Step
from dsv4convert.sink import Buffer, Sink
from dsv4convert.table import Role

Bytes = NDArray[np.uint8]

#: Bytes of one strip, and of each buffer in flight.
STRIP: Final = 4 << 20


@dataclass(slots=True)
class Outcome:
    """What happened to the tensors of a shard.

    Attributes:
        findings: Values that cannot be converted, or only with rounding.
        figures: Weight name without suffix -> figures for the manifest.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


class Transformer:
    """Carries out the steps of one shard.

    Args:
        reader: Reads the source.
        sink: Takes the output.
        progress: Called with the number of source bytes of each strip.
        decoder: Does the arithmetic; the CPU by default.
    """

    def __init__(
        self,
        reader: ShardReader,
        sink: Sink,
        progress: Callable[[int], None],
        decoder: Decoder | None = None,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._progress = progress
        self._decoder = decoder or CpuDecoder()
        self.outcome = Outcome()

    def run(self, steps: Sequence[Step]) -> Outcome:
        """Carry out all steps of a shard and return what happened."""
        for group in group_steps(steps):
            op = group[0].op
            if op is Op.KEEP:
                self._keep(group)
            elif op is Op.DEQUANTIZE_BF16:
                self._dequantize(group[0])
            else:
                self._repack(group)
        return self.outcome

    def _read(self, source: TensorInfo, start: int, count: int) -> Bytes:
        """Read bytes of a tensor to where the decoder wants the next strip."""
        view = self._decoder.staging(count)
        self._reader.pread_into(source, start, view.data)
        self._progress(count)
        return view

    def _read_all(self, source: TensorInfo) -> Bytes:
        data = np.empty(source.nbytes, np.uint8)
        self._reader.pread_into(source, 0, data.data)
        self._progress(source.nbytes)
        return data

    # Kept tensors ---------------------------------------------------------------------------------

    def _keep(self, run: Sequence[Step]) -> None:
        """Copy a run of tensors that lie one after the other in the source and in the output.

        The bytes pass through a buffer because they are hashed. To copy them in the kernel beside that
        (`copy_file_range`, `sendfile`) reads everything twice and took a fifth longer.
        """
        first, end = run[0].sources[0], run[-1].sources[0].end
        pieces = _pieces(run)
        for position in range(first.start, end, STRIP):
            buffer = self._sink.take()
            view = memoryview(buffer)[: min(STRIP, end - position)]
            self._reader.pread_into(first.shard, position, view)
            for step, start, stop in next(pieces):
                part = view[step.sources[0].start + start - position :][: stop - start]
                self._sink.hash(step.name, part)
                self._check_kept(step, np.frombuffer(part, np.uint8), start)
            self._sink.write(None, buffer, len(view), run[0].start + position - first.start)
            self._progress(len(view))

    def _check_kept(self, step: Step, piece: Bytes, start: int) -> None:
        """Look for codes that stand for no number in kept quantized tensors; everything else is opaque."""
        source = step.sources[0]
        if source.dtype == "F8_E8M0" and piece.max(initial=0) >= 253:
            self._check_scales(step, piece, start)
        if source.dtype == "F8_E4M3":
            nans, first = count_e4m3_nan(piece)
            if nans:
                at = divmod(start + first, source.shape[-1])
                self.outcome.findings.append(e4m3_nan(step.name, nans, at))

    def _check_scales(self, step: Step, piece: Bytes, start: int) -> None:
        source = step.sources[0]
        nans, first = count_nan_scales(piece.reshape(1, -1))
        if nans and first:
            at = divmod(start + first[1], source.shape[-1])
            self.outcome.findings.append(scale_nan(step.name, nans, at))
        if step.role is Role.ROUTED_EXPERT and len(step.sources) == 2:
            # Only a block with large codes overflows, so the codes of this strip's rows are needed.
            weight = step.sources[1]
            whole = start == 0 and piece.size == source.nbytes
            rows = piece if whole else self._read_all(source)
            packed = self._read_all(weight).reshape(weight.shape[0], -1)
            self._note_overflow(step.name, packed, rows.reshape(source.shape))

    def _note_overflow(self, name: str, packed: Bytes, scales: Bytes, row: int = 0) -> None:
        count, first = count_mxfp4_overflow(packed, scales)
        if count and first:
            at = first[0] + row, first[1]
            self.outcome.findings.append(mxfp4_overflow(name, count, int(scales[first]), at))

    # FP8 ------------------------------------------------------------------------------------------

    def _dequantize(self, step: Step) -> None:
        weight, scale = step.sources
        k = weight.shape[1]
        scales = self._read_all(scale).reshape(scale.shape)
        with _Flight(self._sink, self._decoder, step, Fp8Stats()) as flight:
            for row, codes in self._rows_of(weight, k, 2 * k, step.block[0]):
                buffer, out = flight.take(2 * codes.size)
                first = row // step.block[0]
                scale_rows = scales[first : first + ceil_div(len(codes), step.block[0])]
                bits = out.view(np.int16).reshape(codes.shape)
                wait = self._decoder.fp8(step.block, codes, scale_rows, bits, row)
                flight.add(wait, buffer, out.nbytes, 2 * row * k)
        stats = flight.stats
        if stats.nan_codes and stats.first_nan:
            self.outcome.findings.append(e4m3_nan(weight.name, stats.nan_codes, stats.first_nan))
        if stats.nan_scales and stats.first_nan_scale:
            self.outcome.findings.append(scale_nan(scale.name, stats.nan_scales, stats.first_nan_scale))
        if stats.inexact_blocks:
            self._note_inexact(weight, scale, stats)

    def _note_inexact(self, weight: TensorInfo, scale: TensorInfo, stats: Fp8Stats) -> None:
        self.outcome.findings.append(inexact(weight.name, scale.shape[0] * scale.shape[1], stats))
        listed = [[b.row, b.column, b.scale] for b in stats.inexact]
        self.outcome.figures[weight.name.removesuffix(".weight")] = {
            "inexact_blocks": stats.inexact_blocks,
            "first_inexact": listed,
        }

    # MXFP4 -> INT8_SHIFT --------------------------------------------------------------------------

    def _repack(self, group: Sequence[Step]) -> None:
        codes_step = next(s for s in group if s.name.endswith(".weight_codes"))
        shift_step = next(s for s in group if s.name.endswith(".weight_shift2"))
        scale_step = next(s for s in group if s.name.endswith(".channel_scale"))
        weight, scale = codes_step.sources
        n, blocks = scale.shape
        half, width = blocks * 16, codes_step.shape[1]
        scales = self._read_all(scale).reshape(n, blocks)
        self._check_nan_scales(scale, scales)
        shifts, channel = np.empty(shift_step.shape, np.uint8), np.empty(n, np.float32)
        with _Flight(self._sink, self._decoder, codes_step, RepackStats(), self._decoder.finish) as flight:
            for row, packed in self._rows_of(weight, half, width):
                part = slice(row, row + len(packed))
                if scales[part].max(initial=0) >= 253:
                    self._note_overflow(weight.name, packed, scales[part], row)
                buffer, out = flight.take(len(packed) * width)
                codes = out.reshape(-1, width)
                wait = self._decoder.mxfp4(packed, scales[part], codes, shifts[part], channel[part], row)
                flight.add(wait, buffer, out.nbytes, row * width)
        stats = flight.stats
        self._sink.write_small(shift_step.name, shifts.tobytes(), shift_step.start)
        self._sink.write_small(scale_step.name, channel.astype("<f4").tobytes(), scale_step.start)
        if not stats.exact:
            # Errors are relative to all weights of the tensor, so it is read once more, which is rare.
            for row, packed in self._rows_of(weight, half, width):
                stats += weigh(packed, scales[row : row + len(packed)])
        self._note_repack(weight, stats)

    def _rows_of(
        self, weight: TensorInfo, width_in: int, width_out: int, multiple: int = 1
    ) -> Iterator[tuple[int, Bytes]]:
        """Yield (first row, [R, bytes of a row] stored codes) of each strip, as long as the decoder says."""
        n = weight.shape[0]
        rows = _strip_rows(n, width_in, width_out, multiple)
        for row in range(0, n, rows):
            count = min(rows, n - row)
            yield row, self._read(weight, row * width_in, count * width_in).reshape(count, width_in)

    def _check_nan_scales(self, scale: TensorInfo, scales: Bytes) -> None:
        nans, first = count_nan_scales(scales)
        if nans and first:
            self.outcome.findings.append(scale_nan(scale.name, nans, first))

    def _note_repack(self, weight: TensorInfo, stats: RepackStats) -> None:
        if stats.low_rows:
            self.outcome.findings.append(low_rows(weight.name, stats))
        self.outcome.figures[weight.name.removesuffix(".weight")] = stats.as_dict()


class _Flight:
    """The strips of one tensor whose arithmetic is under way, oldest first.

    Args:
        sink: Takes their output.
        decoder: Does the arithmetic; as many strips as its depth stay under way.
        step: The step whose tensor they are strips of.
        stats: The statistics of nothing, to which theirs are added.
        finish: What the writing thread does to each of them first.
    """

    def __init__(
        self,
        sink: Sink,
        decoder: Decoder,
        step: Step,
        stats: Any,
        finish: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._sink, self._decoder, self._step, self._finish = sink, decoder, step, finish
        self._strips: deque[tuple[Callable[[], Any], Buffer, int, int]] = deque()
        self.stats = stats

    def take(self, size: int) -> tuple[Buffer, Bytes]:
        """Return a buffer for a strip, larger than others if a single block row needs it, and its bytes."""
        buffer = self._sink.take()
        if len(buffer) < size:
            buffer = self._decoder.allocate(size)
        return buffer, np.frombuffer(buffer, np.uint8)[:size]

    def add(self, wait: Callable[[], Any], buffer: Buffer, count: int, offset: int) -> None:
        """Note a strip that was handed to the decoder, and hand older ones to the sink."""
        self._strips.append((wait, buffer, count, offset))
        self._land(self._decoder.depth)

    def _land(self, left: int) -> None:
        while len(self._strips) > left:
            wait, buffer, count, offset = self._strips.popleft()
            self.stats += wait()
            self._sink.write(self._step.name, buffer, count, self._step.start + offset, self._finish)

    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._land(0)
        # After an error nothing may still be writing into buffers that others will get.
        for wait, *_ in self._strips:
            with suppress(Exception):
                wait()


def group_steps(steps: Sequence[Step]) -> Iterable[list[Step]]:
    """Group steps that are carried out together.

    Kept tensors that lie one after the other on both sides form one run; the three outputs of a repacked
    weight form one group, at the place of its codes, which lie at different places of the file.
    """
    run: list[Step] = []
    for step in steps:
        if run and not (step.op is Op.KEEP and _continues(run[-1], step)):
            yield run
            run = []
        if step.op is Op.KEEP:
            run.append(step)
        elif step.op is Op.DEQUANTIZE_BF16:
            yield [step]
    if run:
        yield run
    repacked: dict[str, list[Step]] = {}
    for step in steps:
        if step.op is Op.REPACK_INT8_SHIFT:
            repacked.setdefault(step.sources[0].name, []).append(step)
    yield from repacked.values()


def _continues(previous: Step, step: Step) -> bool:
    before, here = previous.sources[0], step.sources[0]
    return before.shard == here.shard and before.end == here.start and previous.end == step.start


def _pieces(run: Sequence[Step]) -> Iterator[list[tuple[Step, int, int]]]:
    """Yield, for each strip of a run, the (step, first byte, last byte + 1 of its tensor) that lie in it."""
    limit = run[0].sources[0].start + STRIP
    strip: list[tuple[Step, int, int]] = []
    for step in run:
        source, start = step.sources[0], 0
        while source.end > limit:
            strip.append((step, start, limit - source.start))
            yield strip
            strip, start, limit = [], limit - source.start, limit + STRIP
        strip.append((step, start, source.nbytes))
    yield strip


def _strip_rows(n: int, bytes_in: int, bytes_out: int, multiple: int) -> int:
    """Return how many rows make a strip: whole block rows, both sides within one buffer if possible."""
    fitting = STRIP // max(bytes_in, bytes_out, 1)
    return min(n, max(multiple, fitting // multiple * multiple)) or 1


# Findings about values; checks that convert nothing report the same ones. ----------------------------------


def count_e4m3_nan(piece: Bytes) -> tuple[int, int]:
    """Return the number of NaN codes of a flat strip, and the position of the first one."""
    if not piece.size or not (piece.max() == 0xFF or piece.view(np.int8).max() == 0x7F):
        return 0, 0
    nans = np.flatnonzero((piece & 0x7F) == 0x7F)
    return len(nans), int(nans[0])


def e4m3_nan(name: str, count: int, at: tuple[int, int]) -> Finding:
    """Return the finding about NaN codes, the first of them at row and column `at`."""
    problem = f"{count:,} E4M3 codes are NaN"
    return finding("value.e4m3-nan", name, problem, expected="none", found=f"the first at [{at[0]}, {at[1]}]")


def scale_nan(name: str, count: int, at: tuple[int, int]) -> Finding:
    """Return the finding about scale bytes 255, the first of them at row and column `at` of the grid."""
    problem = f"{count:,} UE8M0 scale bytes are 255, which is NaN"
    return finding(
        "value.scale-nan", name, problem, expected="0..254", found=f"the first at [{at[0]}, {at[1]}]"
    )


def mxfp4_overflow(name: str, count: int, scale: int, at: tuple[int, int]) -> Finding:
    """Return the finding about MXFP4 blocks beyond BF16, the first at `at` with scale byte `scale`."""
    problem = f"{count:,} MXFP4 blocks overflow BF16"
    found = f"scale byte {scale} at block [{at[0]}, {at[1]}]"
    return finding("value.mxfp4-overflow", name, problem, expected="scale bytes 0..252", found=found)


def inexact(name: str, total: int, stats: Fp8Stats) -> Finding:
    """Return the finding about FP8 blocks, of `total`, that BF16 cannot hold exactly."""
    block = stats.inexact[0]
    problem = f"{stats.inexact_blocks:,} of {total:,} blocks are outside BF16's exact range"
    found = f"{block.scale} at block [{block.row}, {block.column}]"
    return finding("value.inexact", name, problem, expected="scale bytes 3..246", found=found)


def low_rows(name: str, stats: RepackStats) -> Finding:
    """Return the finding about rows whose channel scale would be no normal F32."""
    problem = f"{stats.low_rows:,} rows need a channel scale below the normal range of F32"
    found = f"row {stats.first_low_row}"
    return finding("value.scale-range", name, problem, expected="an exponent >= 5", found=found)
