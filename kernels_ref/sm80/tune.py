"""Measure how experts, attention and index scores run fastest on this card, and write it to a file.

``python -m kernels_ref.sm80.tune FILE``; the environment variable DSV4_SM80_TILES then makes the kernels read
FILE. Prints what it chose. Some minutes, most of them compiling. On a card other than compute capability 8.0
the SM80 code is measured, as the driver translates it. Memory: the experts of one layer, ``experts * 1.5 *
hidden * intermediate`` bytes, then 3 GiB for attention.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

if __name__ == "__main__" and find_spec("triton") is None:
    sys.exit("error: expected Triton, which comes with torch for CUDA; found none beside this python")

from kernels_ref.sm80 import table_file, tune_attention, tune_experts
from kernels_ref.sm80.gate import require_card
from kernels_ref.sm80.inputs import Pools
from kernels_ref.sm80.measure import CannotRunError, code_of_sm80, merge
from kernels_ref.sm80.tiles import AnyPlan, Plan, Table
from kernels_ref.sm80.tune_experts import Layer, preferred


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_ref.sm80.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--intermediate", type=int, nargs="+", default=[2048, 1024, 512, 256], help="of a rank"
    )
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=tune_experts.TOKENS, help="of the experts")
    parser.add_argument("--processes", type=int, default=min(16, multiprocessing.cpu_count()))
    return parser


def _require_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse, before minutes of measuring, sizes that no kernel takes and a file that cannot be written."""
    for name in ("hidden", "intermediate"):
        for size in sizes if isinstance(sizes := getattr(options, name), list) else [sizes]:
            if size < 128 or size % 128:
                parser.error(f"--{name}: expected a multiple of 128, found {size}")
    if min(options.tokens) < 1:
        parser.error(f"--tokens: expected 1 or more, found {min(options.tokens)}")
    if not 1 <= options.topk <= options.experts:
        parser.error(f"--topk: expected 1 to --experts {options.experts}, found {options.topk}")
    if options.processes < 1:
        parser.error(f"--processes: expected 1 or more, found {options.processes}")
    if options.file.is_dir() or not os.access(options.file.absolute().parent, os.W_OK):
        parser.error(f"{options.file}: expected a file in a folder that can be written to")


def _experts_of(layer: Layer, tokens: Sequence[int], processes: int) -> dict[str, tuple[Plan, ...]]:
    """Measure one layer of experts and print each choice, ``*`` beside that of ``auto``."""
    tune_experts.compile_all(layer, tokens, processes)
    rows: dict[str, list[Plan]] = {"auto": [], "w4a16": [], "w4a8": []}
    with code_of_sm80():
        for best in tune_experts.tune(layer, tokens):
            choice = preferred(best)
            for name, (us, plan) in best.items():
                mark = "*" if name == choice else " "
                print(f"I={layer.intermediate} {plan.tokens} tokens{mark} {us:.1f} us {plan}", flush=True)
                rows[name].append(plan)
            rows["auto"].append(best[choice][1])
    return {name: merge(plans) for name, plans in rows.items()}


def _merged(what: str, measured: Iterable[tuple[float, AnyPlan]]) -> tuple[AnyPlan, ...]:
    """Print each choice and return them as a table."""
    plans = []
    for us, plan in measured:
        print(f"{what}, {plan.tokens} tokens {us:.1f} us {plan}", flush=True)
        plans.append(plan)
    return merge(plans)


def _measure(options: argparse.Namespace) -> None:
    """Measure and write; the file is complete, and holds what has been measured so far, at any time."""
    card = torch.cuda.get_device_name()
    tokens = sorted(set(options.tokens))
    experts: Table = {}
    for intermediate in options.intermediate:
        layer = Layer(options.hidden, intermediate, options.experts, options.topk)
        experts[intermediate] = _experts_of(layer, tokens, options.processes)
        table_file.write(options.file, card, experts)
    tune_attention.compile_all(options.processes)
    with code_of_sm80():
        attention = _merged("attention", tune_attention.tune_attention(Pools.draw()))
        table_file.write(options.file, card, experts, attention)
        scores = _merged("index scores", tune_attention.tune_scores())
    table_file.write(options.file, card, experts, attention, scores)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _require_sizes(parser, options)
    require_card()
    try:
        _measure(options)
    except CannotRunError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
