"""What replaces attributes of SGLang: one maker per row of `contract.PATCHES`.

A maker takes what is there and the module it lies in, and returns what takes its place. No maker holds a copy
of SGLang's code: a kernel keeps the signature and the meaning, a wrapper calls what it wraps.
"""
