"""What a model takes of each GPU under SGLang 0.5.16: weights, rope tables, KV pools, and what is left.

The weights follow from the table of tensors and from which linears SGLang splits; the KV side repeats its
pool accounting with BF16 keys and an INT8 index cache, as the SM80 runtime stores them. Every formula, its
source and its comparison with measured servers is in ``docs/memory.md``. Nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4convert.errors import Finding, finding
from dsv4convert.formats.spec import INT8_SHIFT, Stored, ceil_div, nbytes
from dsv4convert.geometry import Geometry
from dsv4convert.names import Layout, Unit, unit_kinds
from dsv4convert.releases import Release
from dsv4convert.survey import Survey
from dsv4convert.table import Role, Storage

#: Bytes that CUDA reports as the size of an A100 or A800 with 80 GB: 79.25 GiB, as torch prints it.
CARD_BYTES = 79 * 2**30 + 2**28
#: Bytes of a card that no list of weights, pools and graphs explains: CUDA context, NCCL, workspaces.
#: Measured on 4 x A800: 56.5 GiB in use, of which 38.49 + 2.82 + 11.83 + 1.81 GiB are accounted for.
RUNTIME_BYTES = 1_664_299_827
#: Requests SGLang admits when it is not told: without and with a draft.
REQUESTS = {False: 256, True: 48}

_PAGE = 256
#: Tokens of the sliding-window pool per token of context capacity (SGLang's default for this model).
_WINDOW_SHARE = 0.1
#: Rows of compressor state per window of 4-fold compression and per request of 128-fold compression,
#: without and with a draft: verification keeps twice the tail.
_RING = {4: {False: 8, True: 16}, 128: {False: 128, True: 256}}
_STATE_ITEM = 4  # F32

#: Axis along which a GPU holds a part; everything else is on every GPU.
_SPLIT_AXIS = {
    (Role.EMBEDDING, "embed"): 0,
    (Role.HEAD, "head"): 0,
    (Role.ATTENTION, "wq_b"): 0,
    (Role.ATTENTION, "wo_a"): 0,
    (Role.ATTENTION, "wo_b"): 1,
    **{(role, w): 0 for role in (Role.SHARED_EXPERT, Role.ROUTED_EXPERT) for w in ("w1", "w3")},
    **{(role, "w2"): 1 for role in (Role.SHARED_EXPERT, Role.ROUTED_EXPERT)},
}
_VOCABULARY_PADDING = 64
#: Plain tensors that the runtime keeps in another dtype than the checkpoint.
_RUNTIME_DTYPE = {(Role.ROUTER, "tid2eid"): "I32", (Role.COMPRESSOR, "norm"): "F32"}


def _leaf(unit: Unit) -> tuple[Role, str]:
    return unit.row.role, unit.row.pattern.removesuffix(".weight").rsplit(".", 1)[-1]


def _share(unit: Unit, size: int, tp: int) -> int:
    """Return the rows or columns of a split axis that one GPU holds, padding included."""
    if unit.row.role in (Role.EMBEDDING, Role.HEAD):
        return ceil_div(ceil_div(size, _VOCABULARY_PADDING) * _VOCABULARY_PADDING, tp)
    if unit.row.role is Role.ROUTED_EXPERT:
        # The K of w2: whole groups, and w1 and w3 have to agree with it.
        return INT8_SHIFT.groups(ceil_div(size, tp)) * INT8_SHIFT.group
    return ceil_div(size, tp)


def _on_gpu(unit: Unit, layout: Layout, tp: int) -> Iterable[Stored]:
    """Return dtype and shape of the tensors that one GPU holds of a unit."""
    leaf = _leaf(unit)
    shape = list(unit.shape)
    if leaf in _SPLIT_AXIS:
        axis = _SPLIT_AXIS[leaf]
        shape[axis] = _share(unit, shape[axis], tp)
    part = unit._replace(shape=tuple(shape))
    if unit.row.storage is Storage.PLAIN:
        return [(_RUNTIME_DTYPE.get(leaf, unit.row.dtype), part.shape)]
    return part.stored(layout).values()


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight bytes of one GPU: the target's by role, and those of the draft."""

    roles: Mapping[Role, int]
    draft: int

    @property
    def target(self) -> int:
        """Bytes of the model without its draft."""
        return sum(self.roles.values())


def weights_per_gpu(units: Iterable[Unit], layout: Layout, tp: int) -> Weights:
    """Return the weight bytes that each of `tp` GPUs holds.

    Args:
        units: The logical weights of the model.
        layout: How the runtime holds routed experts. The SM80 runtime holds ``int8`` whatever the
            checkpoint stores, because it repacks MXFP4 while loading.
        tp: Tensor-parallel size.
    """
    roles: dict[Role, int] = {}
    draft = 0
    units = list(units)
    for in_draft in (False, True):
        for unit, count in unit_kinds(u for u in units if u.base.startswith("mtp.") is in_draft):
            size = count * sum(nbytes(dtype, shape) for dtype, shape in _on_gpu(unit, layout, tp))
            if in_draft:
                draft += size
            else:
                roles[unit.row.role] = roles.get(unit.row.role, 0) + size
    return Weights(roles, draft)


@dataclass(frozen=True, slots=True)
class Positions:
    """Numbers of `config.json` about positions: the longest context, the window, and the rope tables.

    Attributes:
        limit: Longest context in tokens.
        window: Sliding window in tokens.
        rope_dim: Rotated dimensions of a head.
        yarn_rows: Positions of a YaRN table: original length times factor.
    """

    limit: int
    window: int
    rope_dim: int
    yarn_rows: int


def read_positions(config: Mapping[str, Any]) -> Positions | None:
    """Return the numbers about positions, or None when `config.json` lacks one of them."""
    scaling = config.get("rope_scaling")
    found = {**scaling, **config} if isinstance(scaling, dict) else config
    keys = ("max_position_embeddings", "sliding_window", "qk_rope_head_dim")
    numbers = [found.get(key) for key in (*keys, "original_max_position_embeddings", "factor")]
    whole = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 1 << 40]
    if len(whole) < len(numbers):
        return None
    limit, window, rope_dim, original, factor = whole
    return Positions(limit, window, rope_dim, original * factor)


def table_bytes(g: Geometry, positions: Positions, draft: bool) -> int:
    """Return the bytes of the rope tables: two per rope base of the trunk, one more for DSpark."""
    bases = len({ratio > 0 for ratio in g.ratios})
    complex_table = positions.limit * positions.rope_dim // 2 * 8
    yarn_table = positions.yarn_rows * positions.rope_dim * 4
    own = complex_table if draft and g.draft.is_dspark else 0
    return bases * (complex_table + yarn_table) + own


def _state_row(ratio: int, dim: int) -> int:
    # Keys and scores side by side; ratio 4 overlaps two windows and keeps both halves.
    return 2 * (2 if ratio == 4 else 1) * dim * _STATE_ITEM


def bytes_per_token(g: Geometry, positions: Positions, draft: bool) -> float:
    """Return the bytes SGLang reserves per token of context capacity, BF16 keys and INT8 index."""
    kv, c4, c128 = 2 * g.head_dim, g.ratios.count(4), g.ratios.count(128)
    state = _RING[4][draft] / positions.window * c4 * _state_row(4, g.head_dim + g.index_dim)
    own = _WINDOW_SHARE * (kv * g.layers + state) + kv * c128 / 128 + (kv + g.index_dim + 4) * c4 / 4
    # One draft layer is reserved, however many the draft has.
    return own * (g.layers + 1) / g.layers if draft else own


def request_state_bytes(g: Geometry, concurrency: int, draft: bool) -> int:
    """Return the bytes of the 128-fold compressor state, which is kept per request, not per token."""
    ring = _RING[128][draft]
    rows = ceil_div((concurrency + 2) * ring + 1, 128) * 128
    return rows * _state_row(128, g.head_dim) * g.ratios.count(128)


def _window_tokens(tokens: int) -> int:
    return int(tokens * _WINDOW_SHARE) // _PAGE * _PAGE


def pool_bytes(
    g: Geometry, positions: Positions, tokens: int, context: int, concurrency: int, draft: bool
) -> dict[str, int]:
    """Return the bytes of each pool that is allocated for a capacity of `tokens` tokens.

    Args:
        g: The geometry.
        positions: Numbers about positions.
        tokens: Capacity, ``max_total_num_tokens``; whole pages of 256.
        context: Tokens of the longest request, the width of the page list.
        concurrency: Requests at once.
        draft: A draft is loaded; its layers have a window pool of their own.
    """
    kv, c4, c128 = 2 * g.head_dim, g.ratios.count(4), g.ratios.count(128)
    window_tokens = _window_tokens(tokens)
    ring = _RING[4][draft]
    rows4 = ceil_div(window_tokens // positions.window * ring + ring + 1, 4) * 4

    def rows(size: int, page: int) -> int:
        return (size + page + 1) // page * page

    return {
        "window": rows(window_tokens, _PAGE) * kv * g.layers,
        "c4": rows(tokens // 4, _PAGE // 4) * kv * c4,
        "c128": rows(tokens // 128, _PAGE // 128) * kv * c128,
        "index": rows(tokens // 4, _PAGE // 4) * (g.index_dim + 4) * c4,
        "c4_state": rows4 * _state_row(4, g.head_dim + g.index_dim) * c4,
        "c128_state": request_state_bytes(g, concurrency, draft),
        "draft_window": rows(window_tokens, _PAGE) * kv * g.draft.stages if draft else 0,
        "page_lists": (concurrency + 1) * context * 4 + (tokens + _PAGE + 1) * 8,
    }


@dataclass(frozen=True, slots=True)
class Demand:
    """What a server is asked for; None means SGLang's default.

    Attributes:
        context: Tokens of the longest request.
        concurrency: Requests at once.
        fraction: ``--mem-fraction-static``: share of the free card for weights and KV pools.
        card_bytes: Bytes of a card as CUDA reports them.
        draft: Load the draft that the checkpoint holds.
    """

    context: int | None = None
    concurrency: int | None = None
    fraction: float = 0.70
    card_bytes: int = CARD_BYTES
    draft: bool = True

    @property
    def is_asked(self) -> bool:
        """Tell whether a context or a concurrency was named, which has to fit then."""
        return self.context is not None or self.concurrency is not None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory budget of one GPU, in bytes unless said otherwise. See `gpu_memory`.

    Attributes:
        tp: Tensor-parallel size.
        demand: What was asked for.
        limit: Longest context of the model, in tokens.
        context: Tokens of the longest request.
        concurrency: Requests at once.
        weights: The target's weights by role; the draft's are 0 when it is not loaded.
        tables: Rope tables.
        per_token: Bytes reserved per token of capacity.
        tokens: Capacity, SGLang's ``max_total_num_tokens``, in tokens.
        pools: The pools for that capacity.
    """

    tp: int
    demand: Demand
    limit: int
    context: int
    concurrency: int
    weights: Weights
    tables: int
    per_token: float
    tokens: int
    pools: Mapping[str, int]

    @property
    def left(self) -> int:
        """Bytes left for CUDA graphs, activations and pictures; negative when the weights do not fit."""
        taken = self.weights.target + self.weights.draft + self.tables + sum(self.pools.values())
        return self.demand.card_bytes - RUNTIME_BYTES - taken

    @property
    def window_tokens(self) -> int:
        """Tokens whose uncompressed keys the window pool holds, in whole pages."""
        return _window_tokens(self.tokens)

    @property
    def needed(self) -> int:
        """Tokens that `concurrency` requests of `context` tokens hold, in whole pages."""
        return self.concurrency * ceil_div(self.context, _PAGE) * _PAGE

    @property
    def longest(self) -> int:
        """Tokens that each of `concurrency` requests may have at once."""
        return min(self.limit, self.tokens // self.concurrency // _PAGE * _PAGE)

    def findings(self) -> list[Finding]:
        """Return what stands in the way of serving this."""
        where = f"TP{self.tp}"
        if self.context > self.limit:
            problem = "the context is longer than the model's"
            expected, found = f"at most {self.limit:,} tokens", f"{self.context:,}"
            return [finding("serve.context", "--context", problem, expected=expected, found=found)]
        if not self.tokens:
            problem = f"weights leave no room for a KV pool at fraction {self.demand.fraction:g}"
            held = self.weights.target + self.weights.draft + self.tables
            room = int(self.demand.fraction * (self.demand.card_bytes - RUNTIME_BYTES))
            expected, found = f"less than {room:,} bytes per GPU", f"{held:,}"
            hint = "raise `--tp` or `--mem-fraction-static`; context and requests play no part in this"
            return [finding("serve.memory", where, problem, expected=expected, found=found, hint=hint)]
        if self.demand.is_asked and self.needed > self.tokens:
            problem = f"{self.concurrency:,} requests of {self.context:,} tokens do not fit at once"
            expected, found = f"at least {self.needed:,} tokens of capacity", f"{self.tokens:,}"
            return [finding("serve.memory", where, problem, expected=expected, found=found)]
        return []

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "card_bytes": self.demand.card_bytes,
            "runtime_bytes": RUNTIME_BYTES,
            "mem_fraction_static": self.demand.fraction,
            "context": self.context,
            "concurrency": self.concurrency,
            "weight_bytes": {role.value: size for role, size in self.weights.roles.items()},
            "draft_bytes": self.weights.draft,
            "rope_table_bytes": self.tables,
            "bytes_per_token": self.per_token,
            "max_total_num_tokens": self.tokens,
            "pool_bytes": dict(self.pools),
            "left_bytes": self.left,
            "fits": not self.findings() and self.needed <= self.tokens,
        }


def implements(g: Geometry) -> bool:
    """Tell whether the pools below are those of the model: V4 attention with ratios 0, 4 and 128."""
    return g.family == "v4" and set(g.ratios) <= {0, 4, 128}


def is_served(g: Geometry | None, release: Release | None) -> bool:
    """Tell whether the runtime of this project is meant to serve a model."""
    meant = release is None or release.served
    return meant and g is not None and implements(g)


def budgets(seen: Survey, sizes: Iterable[int], demand: Demand) -> tuple[GpuMemory, ...]:
    """Return the memory budget for each tensor-parallel size; none for a model that nothing here serves."""
    positions = read_positions(seen.checkpoint.config)
    if seen.geometry is None or positions is None or not is_served(seen.geometry, seen.release):
        return ()
    return tuple(gpu_memory(seen.geometry, positions, seen.units, tp, demand) for tp in sizes)


def bytes_per_gpu(
    units: Iterable[Unit], g: Geometry | None, release: Release | None, layout: Layout, tp: int
) -> int:
    """Return the weight bytes of one of `tp` GPUs, draft included.

    What this project serves holds its experts as INT8 on the card, however the checkpoint stores them.
    """
    held = Layout.INT8 if is_served(g, release) else layout
    weights = weights_per_gpu(units, held, tp)
    return weights.target + weights.draft


def gpu_memory(
    g: Geometry, positions: Positions, units: Iterable[Unit], tp: int, demand: Demand
) -> GpuMemory:
    """Work out the memory budget of one of `tp` GPUs.

    Args:
        g: The geometry of a model that `implements` accepts.
        positions: Numbers about positions.
        units: The logical weights.
        tp: Tensor-parallel size; `handoff.split_findings` says whether the model divides.
        demand: What is asked for.
    """
    draft = demand.draft and g.draft.stages > 0
    weights = weights_per_gpu(units, Layout.INT8, tp)
    weights = weights if draft else Weights(weights.roles, 0)
    context, concurrency = demand.context or positions.limit, demand.concurrency or REQUESTS[draft]
    tables = table_bytes(g, positions, draft)
    per_token = bytes_per_token(g, positions, draft)
    room = (demand.card_bytes - RUNTIME_BYTES) * demand.fraction - weights.target - weights.draft - tables
    room -= request_state_bytes(g, concurrency, draft)
    tokens = max(0, int(room / per_token)) // _PAGE * _PAGE
    pools = pool_bytes(g, positions, tokens, context, concurrency, draft)
    return GpuMemory(
        tp, demand, positions.limit, context, concurrency, weights, tables, per_token, tokens, pools
    )
