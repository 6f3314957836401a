"""Entry script for crash tests: the real command line, held or starved at one shard. Not a test.

``held.py SHARD MARKER ACTION ARGUMENTS...`` runs ``dsv4convert ARGUMENTS``. When the shard SHARD has been
transformed and lies unpublished in its temporary file, ACTION happens, in whichever process does it:

``hold``  write the process id to MARKER, then wait to be killed
``fill``  before the shard is begun, fill the file system of the output with MARKER, a file on it

Worker processes import this script again under another name and so inherit the change.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsv4convert.transform import Transformer

SHARD, MARKER, ACTION = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
#: The how-maniest transform of the shard is meant; `--consume` looks at values first.
AT = int(os.environ.get("HELD_AT", "1"))
_run = Transformer.run
_met = []


def _hold() -> None:
    partial = MARKER.with_name(MARKER.name + ".partial")
    partial.write_text(str(os.getpid()))
    partial.rename(MARKER)
    time.sleep(120)


def _fill() -> None:
    with suppress(OSError), open(MARKER, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def run(self: Transformer, steps: Any) -> Any:
    """Do what `Transformer.run` does, and ACTION at the chosen shard."""
    chosen = steps[0].sources[0].shard == SHARD
    _met.extend([1] * chosen)
    chosen = chosen and len(_met) >= AT
    if chosen and ACTION == "fill":
        _fill()
    outcome = _run(self, steps)
    if chosen and ACTION == "hold":
        _hold()
    return outcome


Transformer.run = run  # type: ignore[method-assign]

if __name__ == "__main__":
    from dsv4convert.cli import main

    main(sys.argv[4:], prog_name="dsv4convert")
