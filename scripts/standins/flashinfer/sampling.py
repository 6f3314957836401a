"""Names that ``sglang.srt.layers.sampler`` imports; see the package."""

from flashinfer import absent as __getattr__  # noqa: F401 - PEP 562
