"""The kernels of the experts in every configuration of the tile table, for a hidden size of 4096."""

from __future__ import annotations

from collections.abc import Iterator

from kernels_ref.sm80.align import CHUNK, SMALL, count_kernel, place_kernel
from kernels_ref.sm80.few_tokens import few_kernel, reduce_kernel
from kernels_ref.sm80.many_tokens import many_kernel
from kernels_ref.sm80.quantize import quantize_kernel, warps_of_row
from kernels_ref.sm80.tiles import DEFAULT, Plan, Tile
from tests.kernels.case import INT8_MMA, Case

HIDDEN, TOPK, EXPERTS = 4096, 6, 256

_PRODUCT = {
    "X": "*i8", "X_SCALE": "*fp32", "CODES": "*u8", "SHIFT2": "*u8", "CHANNEL_SCALE": "*fp32",
    "SORTED": "*i32", "EXPERT_IDS": "*i32", "OUT": "*bf16", "pairs": "i32", "limit": "fp32",
}  # fmt: skip


def _product(plan: Plan, intermediate: int, gated: bool) -> Case:
    tile: Tile = plan.w13 if gated else plan.w2
    n, k = (2 * intermediate, HIDDEN) if gated else (HIDDEN, intermediate)
    digits = 1 if plan.arithmetic == "w4a8" else 2
    halves = min(tile.halves, k // 64)
    constexprs = {
        "N": n, "K": k, "TOPK": TOPK if gated else 1, "DIGITS": digits,
        "COLUMNS": plan.columns or 8, "ROWS": tile.rows, "HALVES": halves, "STAGES": tile.stages,
    }  # fmt: skip
    label = (
        f"{tile.rows}x{plan.columns or 8} h{halves} s{tile.stages} w{tile.warps} {plan.arithmetic} {n}x{k}"
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "mma": frozenset({INT8_MMA})}
    signature = dict(_PRODUCT)
    constexprs |= {"GATED": gated, "LIMITED": gated}
    if not plan.columns:
        del signature["SORTED"]
        constexprs["SORTED"] = None
        label += " pairs"
    kernel = many_kernel if tile.kernel == "many" else few_kernel
    return Case(f"{tile.kernel}{' gated' if gated else ''} {label}", kernel, signature, constexprs, **options)


def _around() -> Iterator[Case]:
    """The kernels around the products."""
    for k, digits in ((HIDDEN, 1), (HIDDEN, 2), (2048, 1), (512, 2)):
        yield Case(
            f"quantize {k} digits {digits}",
            quantize_kernel,
            {"X": "*bf16", "Q": "*i8", "S": "*fp32", "IDS": "*i32"},
            {"K": k, "DIGITS": digits, "BLOCK": k},
            num_warps=warps_of_row(k),
        )
    outputs = {"SORTED": "*i32", "EXPERT_IDS": "*i32", "pairs": "i32", "size": "i32"}
    placed = {"IDS": "*i32", "TOTAL": "*i32", **outputs}
    sizes = {"EXPERTS": EXPERTS, "BINS": 2 * EXPERTS}
    one = sizes | {"BLOCK": 4, "COUNTS": None, "CHUNK": CHUNK, "SMALL": SMALL}
    yield Case("align, small", place_kernel, placed, one, num_warps=8)
    sizes |= {"BLOCK": 128, "CHUNK": 4 * CHUNK}
    counted = {"IDS": "*i32", "COUNTS": "*i32", **outputs}
    yield Case("align, count", count_kernel, counted, sizes, num_warps=4)
    yield Case("align, place", place_kernel, placed | counted, sizes | {"SMALL": SMALL}, num_warps=8)
    yield Case(
        "reduce",
        reduce_kernel,
        {"OUTPUTS": "*bf16", "TOPK_WEIGHTS": "*fp32", "TOPK_IDS": "*i32", "OUT": "*bf16"},
        {"N": HIDDEN, "TOPK": TOPK, "COLUMNS": 1024},
    )


_PRODUCTS = [
    _product(plan, intermediate, gated)
    for intermediate, table in DEFAULT.items()
    for plans in table.values()
    for plan in plans
    for gated in (True, False)
]
CASES = [*{case.name: case for case in _PRODUCTS}.values(), *_around()]
