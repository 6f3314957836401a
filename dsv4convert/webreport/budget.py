"""What one GPU holds, read from the section `memory` of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4convert.files import printable
from dsv4convert.webreport.cited import Cited, Manifest, checked, pointer

#: Cards that weights are compared with: GiB of the two kinds of A100 and A800.
CARDS = (40, 80)
_GIB = 1 << 30

#: Pools in the order of the table -> what they hold.
_POOLS = {
    "window": "window keys, BF16",
    "draft_window": "window keys of the draft, BF16",
    "c4": "C4 keys, BF16",
    "c128": "C128 keys, BF16",
    "index": "C4 index, INT8 and a scale",
    "c4_state": "C4 compressor state, F32",
    "c128_state": "C128 compressor state, F32",
    "page_lists": "page lists",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a kind of memory and its bytes on a GPU, by tensor-parallel size."""

    label: str
    cells: tuple[Cited, ...]
    total: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """Weights of one of `size` GPUs.

    Attributes:
        size: Tensor-parallel size.
        weights: Bytes, draft included.
        fill: GiB of a card -> share of it that the weights take, in percent.
        cuts: What cannot be split evenly.
        bar: Kind of memory -> share of the card in percent, for the picture; empty without a budget.
    """

    size: str
    weights: Cited
    fill: dict[int, float]
    cuts: tuple[str, ...]
    bar: dict[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """What GPUs hold: weights for every size, and the whole budget for those that serve the model.

    Attributes:
        gpus: One for each tensor-parallel size.
        sizes: The sizes with a budget; `rows` have a cell for each.
        groups: Heading -> rows of the table of the budget; no rows without one.
    """

    gpus: tuple[Gpu, ...]
    sizes: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]


def read_memory(manifest: Manifest) -> Memory:
    """Read what GPUs hold.

    Raises:
        Refused: the manifest lacks something or holds something else.
    """
    gpus = tuple(_gpu(manifest, size) for size in manifest.get(dict, "memory"))
    sizes = tuple(gpu.size for gpu in gpus if gpu.bar)
    return Memory(gpus, sizes, tuple(_groups(manifest, sizes)) if sizes else ())


def _gpu(manifest: Manifest, size: str) -> Gpu:
    weights = _bytes(manifest, "memory", size, "weight_bytes")
    place = pointer("memory", size, "cuts")
    cuts = tuple(printable(checked(c, str, place)) for c in manifest.get(list, "memory", size, "cuts"))
    fill = {card: round(100 * weights.value / (card * _GIB), 2) for card in CARDS}
    budget = manifest.get((dict, type(None)), "memory", size, "budget")
    return Gpu(size, weights, fill, cuts, _bar(manifest, size) if budget else {})


def _text(size: int) -> str:
    """Return bytes as people read them: one unit per order of magnitude that a card can hold."""
    return f"{size / _GIB:,.2f} GiB" if abs(size) >= _GIB // 10 else f"{size / 2**20:,.2f} MiB"


def _bytes(manifest: Manifest, *keys: str) -> Cited:
    value = manifest.get(int, *keys)
    return Cited(value, _text(value), pointer(*keys))


def _sum(manifest: Manifest, *keys: str) -> Cited:
    value = sum(manifest.get(int, *keys, name) for name in manifest.get(dict, *keys))
    return Cited(value, _text(value), f"sum {pointer(*keys)}/*")


def _bar(manifest: Manifest, size: str) -> dict[str, float]:
    at = ("memory", size, "budget")
    parts = {
        "runtime": manifest.get(int, *at, "runtime_bytes") + manifest.get(int, *at, "rope_table_bytes"),
        "weights": _sum(manifest, *at, "weight_bytes").value,
        "draft": manifest.get(int, *at, "draft_bytes"),
        "pools": _sum(manifest, *at, "pool_bytes").value,
    }
    card = manifest.get(int, *at, "card_bytes") or 1
    return {kind: round(100 * size / card, 2) for kind, size in parts.items()}


def _groups(manifest: Manifest, sizes: Sequence[str]) -> Iterable[tuple[str, tuple[Row, ...]]]:
    places = [("memory", size, "budget") for size in sizes]

    def row(label: str, *keys: str) -> Row:
        return Row(label, tuple(_bytes(manifest, *at, *keys) for at in places))

    def total(label: str, key: str) -> Row:
        return Row(label, tuple(_sum(manifest, *at, key) for at in places), total=True)

    roles = manifest.get(dict, *places[0], "weight_bytes")
    by_size = sorted(roles, key=lambda r: (-manifest.get(int, *places[0], "weight_bytes", r), r))
    yield "card", (row("as CUDA reports it", "card_bytes"), row("CUDA, NCCL, workspaces", "runtime_bytes"))
    weights = [row(printable(role), "weight_bytes", role) for role in by_size]
    yield "weights, experts as INT8", (*weights, total("all weights of the target", "weight_bytes"))
    yield "beside them", (row("draft weights", "draft_bytes"), row("rope tables", "rope_table_bytes"))
    pools = [row(label, "pool_bytes", key) for key, label in _POOLS.items()]
    yield "KV pools at that capacity", (*pools, total("all pools", "pool_bytes"))
    yield "capacity", tuple(_capacity(manifest, places))


def _capacity(manifest: Manifest, places: Sequence[tuple[str, ...]]) -> Iterable[Row]:
    def row(label: str, key: str, form: str, kind: type | tuple[type, ...] = int) -> Row:
        cells = []
        for at in places:
            value = manifest.get(kind, *at, key)
            cells.append(Cited(value, format(value, form), pointer(*at, key)))
        return Row(label, tuple(cells))

    yield row("--mem-fraction-static", "mem_fraction_static", ".2f", (int, float))
    yield row("bytes per token", "bytes_per_token", ",.1f", (int, float))
    yield row("requests at once", "concurrency", ",")
    yield row("longest context, tokens", "context", ",")
    yield Row(
        "tokens of all requests", tuple(manifest.count(*at, "max_total_num_tokens") for at in places), True
    )
    left = [(manifest.signed(*at, "left_bytes"), pointer(*at, "left_bytes")) for at in places]
    cells = [Cited(value, _text(value), place) for value, place in left]
    yield Row("left for graphs and activations", tuple(cells), total=True)
