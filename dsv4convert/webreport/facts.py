"""What a report says about a conversion, read from its manifest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from dsv4convert.names import Layout
from dsv4convert.plan import shard_metadata
from dsv4convert.webreport.budget import Memory, read_memory
from dsv4convert.webreport.cited import Cited, Manifest, checked, count, error, pointer, share

PROJECTIONS = ("w1", "w2", "w3")
#: Wider rows are counted together.
WIDEST = 12
#: Matrices in the list of the worst, and accepted roundings in theirs; the manifest has them all.
WORST, ROUNDED = 10, 50

_EXPERT = re.compile(r"(layers|mtp)\.([0-9]{1,6})\.ffn\.experts\.[0-9]{1,6}\.(w[123])\.weight_codes")
_COUNTS = (
    "rows",
    "zero_rows",
    "wide_rows",
    "max_span",
    "blocks",
    "zero_blocks",
    "doubled_blocks",
    "codes_changed",
    "codes_flushed",
)
_FAMILY = ("tensors_in", "bytes_in", "tensors_out", "bytes_out")
_SHARES = ("exact_share", "relative_error", "worst_block")


@dataclass(frozen=True, slots=True)
class Family:
    """Tensors and bytes of one role, before and after; widths are bytes in percent of the largest family."""

    name: str
    tensors_in: Cited
    bytes_in: Cited
    tensors_out: Cited
    bytes_out: Cited
    width_in: float
    width_out: float


@dataclass(frozen=True, slots=True)
class Matrix:
    """One repacked expert matrix."""

    name: str
    block: str
    projection: str
    figures: Mapping[str, Any]

    def count(self, key: str) -> Cited:
        """Return a cited count of the figures."""
        return count(self.figures[key], pointer("tensors", self.name, "figures", key))

    def error(self, key: str) -> Cited:
        """Return a cited error of the figures."""
        return error(self.figures[key], pointer("tensors", self.name, "figures", key))

    @property
    def exact_share(self) -> Cited:
        """Share of the non-zero codes that stand for exactly their value."""
        return share(self.figures["exact_share"], pointer("tensors", self.name, "figures", "exact_share"))


@dataclass(frozen=True, slots=True)
class Cell:
    """All experts of one layer and projection: mean and largest relative error, mean exact share."""

    mean: Cited
    worst: Cited
    exact: Cited


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of one layer; `cells` by projection."""

    name: str
    matrices: Cited
    exact: Cited
    cells: Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows whose scale bytes lie `label` apart; `exact` where no row of this span can round."""

    label: str
    rows: Cited
    exact: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """How the routed experts came through the repack."""

    matrices: Cited
    exact_matrices: Cited
    codes_changed: Cited
    codes_flushed: Cited
    max_relative_error: Cited
    max_span: Cited
    rows: Cited
    wide_rows: Cited
    zero_rows: Cited
    blocks: tuple[tuple[str, Cited], ...]
    spans: tuple[Span, ...]
    layers: tuple[Layer, ...]
    worst: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a report takes from the manifest."""

    title: str
    release: str | None
    source_layout: str
    layout: str
    digest: str
    tensors: Cited
    data_bytes: Cited
    source_bytes: Cited
    shards: Cited
    files: Cited
    families: tuple[Family, ...]
    family_totals: tuple[Cited, ...]
    experts: Experts | None
    rounded: tuple[Mapping[str, str], ...]
    rounded_count: Cited
    memory: Memory
    provenance: tuple[tuple[str, str | Cited], ...]


def read_facts(manifest: Manifest) -> Facts:
    """Read everything a report says.

    Raises:
        Refused: the manifest lacks something or holds something else.
    """
    rounded = manifest.get(list, "rounded")
    return Facts(
        title=manifest.text("source", "title") or "unknown model",
        release=manifest.text("source", "release"),
        source_layout=manifest.text("source", "layout") or "unknown",
        layout=manifest.text("plan", "layout") or "unknown",
        digest=manifest.text("plan", "digest") or "unknown",
        tensors=manifest.count("output", "tensors"),
        data_bytes=manifest.count("output", "data_bytes"),
        source_bytes=manifest.count("source", "file_bytes"),
        shards=count(len(manifest.get(dict, "output", "shards")), "count /output/shards/*"),
        files=count(len(manifest.get(dict, "output", "files_sha256")), "count /output/files_sha256/*"),
        families=_families(manifest),
        family_totals=tuple(_family_totals(manifest)),
        experts=_experts(manifest) if manifest.get((dict, type(None)), "experts") else None,
        rounded=tuple(_rounding(row, i) for i, row in enumerate(rounded[:ROUNDED])),
        rounded_count=count(len(rounded), "count /rounded/*"),
        memory=read_memory(manifest),
        provenance=tuple(_provenance(manifest)),
    )


def _families(manifest: Manifest) -> tuple[Family, ...]:
    names = list(manifest.get(dict, "roles"))
    rows = [[manifest.count("roles", name, key) for key in _FAMILY] for name in names]
    largest = max((row[at].value for row in rows for at in (1, 3)), default=0) or 1
    return tuple(
        Family(
            name,
            a,
            b,
            c,
            d,
            width_in=round(100 * b.value / largest, 2),
            width_out=round(100 * d.value / largest, 2),
        )
        for name, (a, b, c, d) in zip(names, rows, strict=True)
    )


def _family_totals(manifest: Manifest) -> Iterable[Cited]:
    for key in _FAMILY:
        total = sum(manifest.get(int, "roles", name, key) for name in manifest.get(dict, "roles"))
        yield count(total, f"sum /roles/*/{key}")


def _rounding(row: Any, position: int) -> dict[str, str]:
    where = pointer("rounded", position)
    checked(row, dict, where)
    return {key: checked(row.get(key), str, f"{where}/{key}") for key in ("code", "tensor", "found")}


def _provenance(manifest: Manifest) -> Iterable[tuple[str, str | Cited]]:
    layout = Layout.INT8 if manifest.text("plan", "layout") == Layout.INT8.value else Layout.MXFP4
    headers = {
        n: checked(h, str, pointer(n)) for n, h in manifest.get(dict, "source", "header_sha256").items()
    }
    libraries = manifest.get(dict, "run", "libraries")
    yield "tool", f"{manifest.text('tool', 'name')} {manifest.text('tool', 'version')}"
    yield "plan digest", manifest.text("plan", "digest") or ""
    yield "source revision", manifest.text("source", "revision") or "unknown: the download left no commit id"
    yield "source headers", shard_metadata(layout, headers)["dsv4convert.source"]
    yield "packing", manifest.text("plan", "packing") or "none: experts are kept as MXFP4"
    yield "rounding", manifest.text("plan", "rounding") or "none: experts are kept as MXFP4"
    yield "writer version", manifest.text("plan", "writer_version") or ""
    yield "python", f"{manifest.text('run', 'python')} on {manifest.text('run', 'machine')}"
    yield "libraries", ", ".join(f"{n} {checked(v, str, pointer('run', n))}" for n, v in libraries.items())
    yield "worker processes", manifest.count("run", "jobs")
    seconds = manifest.get((int, float), "run", "seconds")
    yield "seconds of the closing run", Cited(seconds, f"{seconds:,.1f}", "/run/seconds")


def _experts(manifest: Manifest) -> Experts:
    matrices = tuple(_matrices(manifest.get(dict, "tensors")))
    by_error = sorted(matrices, key=lambda m: (-m.figures["relative_error"], m.name))
    return Experts(
        **{k: manifest.count("experts", k) for k in ("matrices", "exact_matrices", "codes_changed")},
        codes_flushed=manifest.count("experts", "codes_flushed"),
        max_span=manifest.count("experts", "max_span"),
        max_relative_error=manifest.error("experts", "max_relative_error"),
        **{k: _total(matrices, k) for k in ("rows", "wide_rows", "zero_rows")},
        blocks=tuple(_block_counts(matrices)),
        spans=tuple(_spans(matrices)),
        layers=tuple(_layers(matrices)),
        worst=tuple(m for m in by_error[:WORST] if m.figures["codes_changed"]),
    )


def _matrices(tensors: Mapping[str, Any]) -> Iterable[Matrix]:
    for name, row in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match and isinstance(row, dict) and "figures" in row:
            figures = checked(row["figures"], dict, where := pointer("tensors", name, "figures"))
            for key in _COUNTS:
                checked(figures.get(key), int, f"{where}/{key}")
            for key in _SHARES:
                checked(figures.get(key), (int, float), f"{where}/{key}")
            for key in ("spans", "rounded_blocks"):
                for item in checked(figures.get(key), list, f"{where}/{key}"):
                    checked(item, int, f"{where}/{key}")
            yield Matrix(name, f"{match[1]}.{match[2]}", match[3], figures)


def _total(matrices: Iterable[Matrix], key: str) -> Cited:
    return count(sum(m.figures[key] for m in matrices), f"sum /tensors/*/figures/{key}")


def _sums(matrices: Iterable[Matrix], key: str, length: int) -> list[int]:
    """Return the sums of a list of the figures, place by place; what lies beyond `length` in the last."""
    sums = [0] * length
    for matrix in matrices:
        for position, item in enumerate(matrix.figures[key]):
            sums[min(position, length - 1)] += item
    return sums


def _block_counts(matrices: Sequence[Matrix]) -> Iterable[tuple[str, Cited]]:
    yield "all, of 32 codes", _total(matrices, "blocks")
    yield "zero throughout", _total(matrices, "zero_blocks")
    yield "doubled, same values", _total(matrices, "doubled_blocks")
    labels = ("4", "5", "6", "7", "8 or more")
    for position, (label, total) in enumerate(zip(labels, _sums(matrices, "rounded_blocks", 5), strict=True)):
        source = f"sum /tensors/*/figures/rounded_blocks/{position}"
        yield f"{label} below the row", count(total, source)


def _spans(matrices: Sequence[Matrix]) -> Iterable[Span]:
    sums = _sums(matrices, "spans", WIDEST + 1)
    widest = max((span for span, rows in enumerate(sums) if rows), default=0)
    for span, rows in enumerate(sums[: widest + 1]):
        pooled = span == WIDEST
        place = f"{span}.." if pooled else f"{span}"
        yield Span(
            f"{span} or more" if pooled else f"{span}",
            count(rows, f"sum /tensors/*/figures/spans/{place}"),
            span <= 3,
        )


def _layers(matrices: Iterable[Matrix]) -> Iterable[Layer]:
    groups: dict[str, dict[str, list[Matrix]]] = {}
    for matrix in matrices:
        groups.setdefault(matrix.block, {}).setdefault(matrix.projection, []).append(matrix)
    for name in sorted(groups, key=_block_order):
        held = groups[name]
        every = [m for group in held.values() for m in group]
        cells = {p: _cell(name, p, held[p]) for p in PROJECTIONS if p in held}
        exact = sum(m.figures["codes_changed"] == 0 for m in every)
        place = f"/tensors/{name}.ffn.experts.*/figures/codes_changed"
        yield Layer(name, count(len(every), f"count {place}"), count(exact, f"zeros {place}"), cells)


def _block_order(name: str) -> tuple[bool, int]:
    kind, _, number = name.partition(".")
    return kind == "mtp", int(number)


def _cell(block: str, projection: str, matrices: Sequence[Matrix]) -> Cell:
    def place(key: str) -> str:
        return f"/tensors/{block}.ffn.experts.*.{projection}.weight_codes/figures/{key}"

    def mean(key: str, form: Callable[[float, str], Cited]) -> Cited:
        return form(fsum(m.figures[key] for m in matrices) / len(matrices), f"mean {place(key)}")

    largest = max(m.figures["relative_error"] for m in matrices)
    return Cell(
        mean("relative_error", error),
        error(largest, f"max {place('relative_error')}"),
        mean("exact_share", share),
    )
