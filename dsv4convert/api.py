"""The documented Python interface.

    from dsv4convert import api

    report = api.verify("DeepSeek-V4-Flash-0731")        # structure of a download
    plan = api.plan("DeepSeek-V4-Flash-0731", "int8")    # totals, before a byte is written
    api.convert("DeepSeek-V4-Flash-0731", "out", experts="int8", jobs=4)
    api.verify("out", reference="DeepSeek-V4-Flash-0731", read_data=100)
    api.probe("out", ids=[11, 42, 7], reference="DeepSeek-V4-Flash-0731", tokens=2)

Names here are stable; other modules are not. Functions raise `Refused` or `EnvironmentFault`, both with
``findings``; they never print and never exit.
"""

from __future__ import annotations

import os

from dsv4convert.checkpoint import Checkpoint
from dsv4convert.checkpoint import open_checkpoint as open
from dsv4convert.convert import Result, convert, finalize
from dsv4convert.errors import Dsv4Error, EnvironmentFault, Finding, Refused
from dsv4convert.limits import Limits
from dsv4convert.names import Layout
from dsv4convert.plan import Plan
from dsv4convert.plan import plan as _plan
from dsv4convert.probe import Probed, probe
from dsv4convert.validate import verify
from dsv4convert.validate.report import Report

__all__ = [
    "Checkpoint",
    "Dsv4Error",
    "EnvironmentFault",
    "Finding",
    "Layout",
    "Limits",
    "Plan",
    "Probed",
    "Refused",
    "Report",
    "Result",
    "convert",
    "finalize",
    "open",
    "plan",
    "probe",
    "verify",
]


def plan(source: str | os.PathLike[str] | Checkpoint, experts: Layout | str = Layout.INT8) -> Plan:
    """Plan the conversion of a checkpoint without writing anything.

    Args:
        source: Directory, or what `open` returned.
        experts: ``int8`` or ``mxfp4``.

    Raises:
        Refused: the source has errors; all of them are reported together.
    """
    return _plan(source if isinstance(source, Checkpoint) else open(source), experts)
