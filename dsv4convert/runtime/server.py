"""The server process: SGLang's own start, with the API key put in after the arguments were parsed.

    python -m dsv4convert.runtime.server [--api-key-file FILE] -- SGLANG ARGUMENTS

`serve` starts it with the shim's environment. The key is read here, so that it stands neither on a command
line nor in the environment. SGLang spawns its ranks, which import this module again under another name:
importing it does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4convert.errors import Exit, Refused
from dsv4convert.runtime import hook
from dsv4convert.runtime.keys import read_key

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Serve until SGLang ends.

    Raises:
        SystemExit: the shim is not active, or the key cannot be used.
    """
    split = arguments.index("--")
    ours, theirs = arguments[:split], list(arguments[split + 1 :])
    _end_with_parent()
    if not hook.is_installed():
        _refuse("the SM80 shim is not active in this process: start it with `dsv4convert serve`")
    key = None
    if ours:
        try:
            key = read_key(Path(ours[1]))
        except Refused as error:
            _refuse(str(error))
    _serve(theirs, key)


def _serve(arguments: list[str], key: str | None) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(arguments)
    server_args.api_key = key
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _refuse(sentence: str) -> None:
    print(f"dsv4convert: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(int(Exit.REFUSED))


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when `serve` is killed, so that no server is left without a supervisor."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
