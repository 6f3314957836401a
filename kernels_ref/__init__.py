"""Every operation of DeepSeek-V4 in plain torch, the whole model built from them, and its SM80 kernels.

Read it as a specification: shapes, dtypes and rounding points are in the docstrings, one operation stands in
one place, and nothing here is fast.

The model: `model` is the way in, `draft` guesses ahead of it, `block` is one layer of either. `config` says
what a checkpoint needs, `source` where weights come from, `arithmetic` what is rounded, `decisions` which
experts and entries were chosen, `pictures` what their positions see. The operations: `mhc`, `router`,
`compressor`, `rotary`, `quantize`, `tensors`. `moe`, `attention` and `indexer` define what the kernels of
`sm80` compute, under the same names and signatures.

Of `dsv4convert` only the number formats are used; `sm80` needs Triton, the rest torch and numpy.
"""
