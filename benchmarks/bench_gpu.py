"""All kernels on this GPU in one table: ``python benchmarks/bench_gpu.py [-h]``.

Everything runs SM80 code. The ceilings are measured first; then each module measures its kernels beside its
baselines, in this process. A kernel whose result is wrong gets no time. The public peer of the MoE is used
when ``--marlin DIR`` (or the variable MARLIN) names what ``benchmarks/peers/build_marlin.py DIR`` has built.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if find_spec("triton") is None:
    sys.exit("error: expected Triton, which comes with torch for CUDA; found none beside this python")

from benchmarks.gpu import Context, Row, as_json, markdown, measure_ceilings
from kernels_ref.sm80.gate import require_card, sm80_code

# Each has `rows(context) -> Iterable[Row]`.
MODULES = ("convert", "moe", "attention")


def _options() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--only", default=",".join(MODULES), help=f"some of {','.join(MODULES)}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--marlin", default=os.environ.get("MARLIN"), help="folder of the built peer")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = _options()
    unknown = sorted(set(options.only.split(",")) - set(MODULES))
    if unknown:
        sys.exit(f"error: --only: expected some of {','.join(MODULES)}, found {','.join(unknown)}")
    require_card()
    marlin = None
    if options.marlin:
        from benchmarks.peers.marlin import Marlin

        marlin = Marlin(Path(options.marlin))
    ceilings = measure_ceilings()
    context = Context(ceilings, marlin, options.quick)
    rows: list[Row] = []
    for name in options.only.split(","):
        module = import_module(f"benchmarks.bench_gpu_{name}")
        with sm80_code():
            for row in module.rows(context):
                print(f"{row.group}: {row.case}: {row.name}: {row.us:.1f} us", file=sys.stderr, flush=True)
                rows.append(row)
                _save(rows, context, options)
        torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}. {markdown(rows, ceilings)}")


def _save(rows: list[Row], context: Context, options: argparse.Namespace) -> None:
    """Write what there is so far, so that an interrupted run leaves its numbers."""
    if options.markdown:
        options.markdown.write_text(markdown(rows, context.ceilings) + "\n", encoding="utf-8")
    if options.json:
        document = json.dumps(as_json(rows, context.ceilings), indent=1)
        options.json.write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
