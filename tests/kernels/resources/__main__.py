"""Rewrite the tables: ``python -m tests.kernels.resources [MODULE ...]``, all modules by default."""

import sys

from tests.kernels.resources import modules, write

for module in sys.argv[1:] or modules():
    print(f"wrote {write(module)}")
