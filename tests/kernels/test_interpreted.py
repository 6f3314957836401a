"""The process for interpreted kernels: values travel, kernels are interpreted there and compiled here."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreted import InterpretedError, call


@triton.jit
def _add_one(X, N, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(X + at, tl.load(X + at, mask=at < N) + 1, mask=at < N)


def add_one(x: torch.Tensor) -> tuple[torch.Tensor, str, int]:
    """Launch a kernel on a CPU tensor, which only an interpreted one allows."""
    _add_one[(triton.cdiv(x.numel(), 16),)](x, x.numel(), TILE=16)
    return x, os.environ["TRITON_INTERPRET"], os.getpid()


def fail() -> None:
    """Raise."""
    raise KeyError("told so")


def test_a_kernel_runs_in_the_other_process_and_its_result_comes_back() -> None:
    x = torch.arange(40, dtype=torch.float32)
    result, interpreted, pid = call(add_one, x)
    assert torch.equal(result, torch.arange(1, 41, dtype=torch.float32))
    assert torch.equal(x, torch.arange(40, dtype=torch.float32))
    assert (interpreted, os.environ.get("TRITON_INTERPRET")) == ("1", None)
    assert pid != os.getpid()
    assert isinstance(_add_one, triton.JITFunction)


def test_a_failure_there_is_a_failure_here_and_the_process_goes_on() -> None:
    with pytest.raises(InterpretedError, match="KeyError: 'told so'"):
        call(fail)
    assert call(add_one, torch.zeros(1))[0].item() == 1
