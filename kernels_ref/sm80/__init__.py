"""Triton kernels for compute capability 8.0, each the twin of a reference of the same name in `kernels_ref`.

They use what an A100 has: `mma.sync`, `cp.async` and `ldmatrix`; no FP8 or FP4 types, no `wgmma`, no TMA, no
clusters. `gate` compiles them for SM80 without a GPU and lets any newer card run exactly that code. Importing
a module of this package loads Triton, but for `tiles` and `table_file`; `TRITON_INTERPRET` decides at that
moment whether kernels are compiled.
"""
