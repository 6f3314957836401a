"""What a function of this package may be given: one check, one sentence for every tensor that does not fit.

A kernel computes addresses from shapes and strides, so a tensor of another shape, dtype or layout would not
fail on a card: it would give other numbers, or read beyond its end. Values are never looked at: that would
wait for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What the kernels take where the model has bfloat16; interpreted ones compute in float32.
FLOATS = (torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def expect(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    *,
    gaps: str = "anywhere",
) -> None:
    """Refuse a tensor that is not what a function takes.

    Args:
        name: The argument.
        tensor: What was given.
        dtypes: What it may be.
        shape: Sizes; None is any.
        gaps: ``anywhere``; ``between rows``: the last dimension has stride 1; ``nowhere``: contiguous.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    sizes = tensor.shape
    fits = tensor.dtype in dtypes and len(sizes) == len(shape)
    fits = fits and all(want is None or want == size for want, size in zip(shape, sizes, strict=True))
    if fits and gaps != "anywhere" and tensor.numel() and not tensor.is_contiguous():
        fits = gaps == "between rows" and (tensor.stride(-1) == 1 or sizes[-1] == 1)
    if not fits:
        layout = {"nowhere": ", contiguous", "between rows": ", stride 1 in the last dimension"}.get(gaps, "")
        names = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(sizes)}, strides {list(tensor.stride())}"
        raise ValueError(f"`{name}`: expected {names} {_sizes(shape)}{layout}; found {found}")


def expect_length(name: str, tensor: Tensor, least: int) -> None:
    """Refuse a list of integers, one per token, that is shorter than `least` or has gaps.

    Raises:
        ValueError: it does.
    """
    expect(name, tensor, INTEGERS, (None,), gaps="nowhere")
    if len(tensor) < least:
        raise ValueError(f"`{name}`: expected at least {least} entries, one per token; found {len(tensor)}")


def _sizes(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
