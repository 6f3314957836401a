"""Kernels and the model of DeepSeek-V4: torch references, and beside them Triton kernels for SM80.

A module of this package is a definition in torch, written to be read and to be compared with. The module of
the same name in `kernels_ref.sm80` holds Triton kernels behind the same function names and signatures. Of
`dsv4convert` only the number formats are used; everything else needs torch, numpy and, for `sm80`, Triton.
"""
