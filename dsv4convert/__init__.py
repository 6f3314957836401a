"""dsv4convert: validate, convert and prove DeepSeek-V4 checkpoints for SM80 GPUs.

Importing the package loads nothing else. The Python interface is `dsv4convert.api`.
"""

from __future__ import annotations

__version__ = "0.1.0"
