"""Every operation of DeepSeek-V4 in plain torch, the whole model built from them, and its SM80 kernels.

Read it as a specification: shapes, dtypes and rounding points are in the docstrings, one operation stands in
one place, and nothing here is fast. `model` is the way in; below it come `block` (attention and experts of
one layer), then the operations: `mhc`, `router`, `compressor`, `rotary`, `quantize`, `tensors`. `moe`,
`attention` and `indexer` define what the kernels of `sm80` compute, under the same names and signatures.
Weights come from `dsv4convert.formats` and from nothing else of the package; `sm80` needs triton, the rest
torch and numpy.
"""
