"""Tests of the kernels, in four ways; the first two need no GPU and belong to `make test`.

1. **Against the reference, interpreted.** Triton decides when a kernel is decorated whether it is compiled,
   so interpreted kernels live in a process of their own: `interpreted.call(function, ...)`. Put `function` at
   module level; its tensors, and what it returns, travel. Four traps of Triton 3.6's interpreter: numpy must
   be older than 2.4; `tl.dot` on bf16 operands is wrong (upcast operands to fp32 in the kernel when a
   constexpr says so); a cast from fp32 to bf16 truncates (store fp32 and round in torch); inline assembly
   does not run.
2. **The compile gate.** `cases_<module>.py` exposes `CASES`, one `case.Case` for each configuration that is
   shipped (`<module>` as in `kernels_ref.sm80.<module>`). `test_gate.py` finds these files, compiles every
   case for SM80 and compares it with the row of its name in `resources/<module>.json`: registers, shared
   memory, matrix instructions, copies. To accept new numbers: ``python -m tests.kernels.resources`` (all
   modules) or ``... resources moe``; the difference is then part of the commit.
3. **On a GPU** (`make test-gpu`): tests marked `gpu` in ``test_<module>_gpu.py``. The fixture `code` of the
   folder's conftest runs each test twice: with native code of the card, and with the PTX for SM80 of the gate
   (`kernels_ref.sm80.gate.sm80_code`). Fill outputs with NaN (or 0xA5) first; draw fresh inputs from `seed`.
4. **Under compute-sanitizer**: ``compute-sanitizer python -m pytest --gpu -m gpu tests/kernels -k ...``.

These tests import torch, triton, numpy, safetensors and pytest only: a machine with a GPU may hold nothing
else.
"""
