"""SGLang's benchmark client in a process of its own, with the API key read from standard input.

    python -m dsv4convert.smoke.client ARGUMENTS OF sglang.benchmark.serving

The client takes its key from the environment. It is put there after the process began, so that it shows
neither on a command line nor in what the system tells about the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Where SGLang 0.5.16 keeps the client, below its package.
MODULE: Final = Path("benchmark/serving.py")


def main(arguments: Sequence[str]) -> None:
    """Run the client to its end."""
    for name in ("OPENAI_API_KEY", "API_KEY"):
        os.environ.pop(name, None)
    if key := sys.stdin.readline().strip():
        os.environ["OPENAI_API_KEY"] = key
    from sglang.benchmark.serving import cli_main

    sys.argv = ["sglang.benchmark.serving", *arguments]
    cli_main()


if __name__ == "__main__":
    main(sys.argv[1:])
