"""Run functions with Triton's interpreter, in a process of their own.

`TRITON_INTERPRET` is read when a kernel is decorated, so a process has compiled or interpreted kernels, never
both. One process is started on first use and serves all calls of this test session. This module must not
import Triton, nor anything that does.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any

import torch


class InterpretedError(AssertionError):
    """A function failed in the other process; the text is its traceback there."""


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, run where all Triton kernels are interpreted.

    Args:
        function: At module level of an importable module, for instance a function of `kernels_ref.sm80`.
        args, kwargs: Tensors and whatever else `torch.save` takes. The function may write into tensors; hand
            back what it should be judged by, because the caller's tensors stay as they are.

    Raises:
        InterpretedError: the function raised.
    """
    buffer = io.BytesIO()
    torch.save((args, kwargs), buffer)
    task = _process().submit(_run, function.__module__, function.__qualname__, buffer.getvalue())
    done, data = task.result()
    if not done:
        raise InterpretedError(data.decode())
    return torch.load(io.BytesIO(data), weights_only=False)


@lru_cache(maxsize=1)
def _process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
    atexit.register(pool.shutdown)
    return pool


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _run(module: str, name: str, data: bytes) -> tuple[bool, bytes]:
    from importlib import import_module

    try:
        # By name: the function itself would be unpickled, and its module imported, before `_prepare` ran.
        function: Any = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        args, kwargs = torch.load(io.BytesIO(data), weights_only=False)
        result = io.BytesIO()
        torch.save(function(*args, **kwargs), result)
        return True, result.getvalue()
    except Exception:
        return False, traceback.format_exc().encode()
