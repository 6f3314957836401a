"""Serving on SM80: the shim for SGLang 0.5.16, and the commands around it.

SGLang keeps its control flow; only kernels that SM80 cannot run are replaced, when their modules are
imported. `contract` is the table of what is touched, `hook` the mechanism, `activate/` the directory that
switches it on. Without ``ENABLE_DSV4_SM80=1`` nothing here runs and SGLang is the stock one.

Imported at the start of every Python process that inherits the environment, so this file loads nothing.
"""

from __future__ import annotations


def applied() -> tuple[str, ...]:
    """Return the ids of the patches that are in force in this process, in the order they were applied."""
    from dsv4convert.runtime import hook

    return tuple(hook.APPLIED)
