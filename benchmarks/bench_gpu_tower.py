"""The vision tower of Vision-Exp in its true size on a card: BF16 against FP32, and the time of a picture.

    python benchmarks/bench_gpu_tower.py [--rounds N] [--out FILE]

Weights are random (466 million parameters), pixels too. The yardstick is the cosine of a row of the language
model: rows differ in length, and the largest of a few may hide the others. Time is from patches on the card
to rows on the card, without decoding the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HOME = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(HOME))

import torch  # noqa: E402

from dsv4convert import releases  # noqa: E402
from dsv4convert.vision.config import VisionConfig  # noqa: E402
from dsv4convert.vision.layout import plan_size  # noqa: E402
from dsv4convert.vision.tower import Tower  # noqa: E402

#: A small picture, a usual one, the largest block, the most patches.
SIZES = ((200, 150), (640, 640), (1920, 1080), (2600, 1950))


def main() -> None:
    """Measure every size and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: expected a CUDA device for the tower; found none with torch {torch.__version__}"
        )
    vision = VisionConfig.from_config(releases.config("deepseek-v4-flash-vision-exp"))
    if vision is None:
        raise SystemExit("error: the release has no vision tower")
    exact, fast = _towers(vision)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds}")
    print(
        f"{'picture':>12}{'patches':>9}{'rows':>6}{'fp32 ms':>9}{'bf16 ms':>9}{'cosine: least':>15}{'1 %':>9}"
    )
    table = [measure(exact, fast, vision, *size, options.rounds) for size in SIZES]
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _towers(vision: VisionConfig) -> tuple[Tower, Tower]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        exact, fast = Tower(vision), Tower(vision)
    for name, parameter in exact.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)
        # Both hold weights of the checkpoint, which are BF16.
        parameter.data = parameter.data.bfloat16().float()
    fast.load_state_dict(exact.state_dict())
    return exact.float().requires_grad_(False), fast.bfloat16().requires_grad_(False)


def measure(
    exact: Tower, fast: Tower, vision: VisionConfig, width: int, height: int, rounds: int
) -> dict[str, Any]:
    """Run both towers on one picture; print and return a row of the table."""
    grid = plan_size(width, height, vision)
    shape = (grid.patches, 3, vision.patch, vision.patch)
    patches = (torch.rand(shape, device="cuda") * 2 - 1).bfloat16()
    a, b = exact.features(patches.float(), grid), fast.features(patches, grid)
    cosine = torch.nn.functional.cosine_similarity(a, b.float(), dim=1)
    times = {"fp32": _ms(exact, patches.float(), grid, rounds), "bf16": _ms(fast, patches, grid, rounds)}
    least, low = cosine.min().item(), cosine.quantile(0.01).item()
    row = {"picture": f"{width}x{height}", "patches": grid.patches, "rows": grid.tokens, **times}
    print(
        f"{row['picture']:>12}{grid.patches:>9,}{grid.tokens:>6}{times['fp32']:>9.2f}{times['bf16']:>9.2f}"
        f"{least:>15.6f}{low:>9.6f}"
    )
    return row | {"least_cosine": least, "cosine_1_percent": low}


def _ms(tower: Tower, patches: torch.Tensor, grid: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        tower.rows(patches, grid, 0)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


if __name__ == "__main__":
    main()
