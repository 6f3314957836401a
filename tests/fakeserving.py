"""A machine and an SGLang that are not there: packages in a directory that goes on PYTHONPATH.

The processes that `preflight` and `serve` start are real ones; what they import is what lies here. The
stand-in for torch shows the cards of a JSON file; that for SGLang listens, logs and fails as it is told.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
A100: Final = {
    "name": "NVIDIA A100-SXM4-80GB",
    "capability": [8, 0],
    "total_bytes": 79 * 2**30 + 2**28,
    "free_bytes": 78 * 2**30 + 2**29,
}
#: Versions that SGLang 0.5.16 pins, as its metadata and those of the libraries say.
VERSIONS: Final = {
    "sglang": "0.5.16",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "transformers": "5.12.1",
    "sglang-kernel": "0.4.5",
    "apache-tvm-ffi": "0.1.11",
    "tilelang": "0.1.11",
}
_PINS: Final = ("torch==2.11.0", "transformers==5.12.1", "sglang-kernel==0.4.5", "tilelang==0.1.11")

_TORCH: Final = """
import json, pathlib, sys
from types import SimpleNamespace as _N
__version__ = "2.11.0+cu130"
_here = json.loads((pathlib.Path(__file__).parent / "cards.json").read_text())
version = _N(cuda=_here["cuda"])
_cards = _here["devices"]
if _here.get("complains"):
    print(_here["complains"], file=sys.stderr)
if _here.get("fails"):
    raise ImportError(_here["fails"])
cuda = _N(
    device_count=lambda: len(_cards),
    get_device_properties=lambda i: _N(
        name=_cards[i]["name"], major=_cards[i]["capability"][0], minor=_cards[i]["capability"][1]
    ),
    mem_get_info=lambda i: (_cards[i]["free_bytes"], _cards[i]["total_bytes"]),
)
"""

_SERVER_ARGS: Final = """
import argparse

class ServerArgs:
    api_key = None

def prepare_server_args(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "port", "tp-size", "speculative-algorithm"):
        parser.add_argument("--" + name)
    known, rest = parser.parse_known_args(argv)
    args = ServerArgs()
    args.__dict__.update(vars(known), rest=rest)
    return args
"""

_LAUNCH: Final = """
import http.server, json, os, pathlib, signal, subprocess, sys, threading, time, urllib.parse

def run_server(args):
    plan = json.loads((pathlib.Path(__file__).parent / "plan.json").read_text())
    key_seen = any(args.api_key and args.api_key in text for text in (*sys.argv, *os.environ.values()))
    say = lambda text: print(text, flush=True)
    say(f"[2026-11-29 21:00:00] key_given={args.api_key is not None} key_seen={key_seen}")
    if plan.get("tells_key"):
        say(f"server_args=ServerArgs(api_key={args.api_key!r})")
    if plan.get("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        say(f"child {child.pid}")
    if plan.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif plan.get("drains"):
        def drain(number, frame):
            say("draining")
            time.sleep(plan["drains"])
            say("drained")
            os._exit(0)
        signal.signal(signal.SIGTERM, drain)
    for line in plan.get("lines", ()):
        say(line)
    if plan.get("crashes"):
        raise RuntimeError(plan["crashes"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(plan.get("health", 200))
            self.end_headers()
            if self.path != "/health":
                say(urllib.parse.unquote(self.path[1:]))
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer((args.host, int(args.port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if plan.get("ready", True):
        say("[2026-11-29 21:00:01] The server is fired up and ready to roll!")
    if plan.get("dies_after"):
        time.sleep(plan["dies_after"])
        os._exit(3)
    while True:
        time.sleep(0.1)
"""

_MODULES: Final = {
    "sglang/__init__.py": "",
    "sglang/launch_server.py": _LAUNCH,
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins/__init__.py": "def load_plugins():\n    pass\n",
    "sglang/srt/server_args.py": _SERVER_ARGS,
    "sglang/srt/utils/__init__.py": "def kill_process_tree(pid, include_parent=True):\n    pass\n",
    "torch/__init__.py": _TORCH,
}
#: Stands for the directory of the shim: says that the hook is armed, and arms nothing.
_ARMED: Final = "from dsv4convert.runtime import hook\nhook.is_installed = lambda: True\n"
#: Runs the command line as if SGLang had no file to compare. The machine is looked at when that is the point,
#: because it takes two more processes.
_DRIVER: Final = """
import os
from pathlib import Path
from dsv4convert.runtime import contract, machine, preflight, supervise
here = Path(__file__).parent
supervise._HEALTH_EVERY = 0.2
if "TEST_LOOKS_AT_MACHINE" not in os.environ:
    preflight.preflight = lambda launch, environ, arch: preflight.check_launch(launch, environ)
contract.SITE, contract.HASHES, machine.SHM = here / "armed", {}, str(here)
from dsv4convert.cli import main
main(prog_name="dsv4convert")
"""


class FakeServing:
    """A directory with the stand-ins.

    Args:
        root: Where they are written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in {**_MODULES, "armed/sitecustomize.py": _ARMED, "driver.py": _DRIVER}.items():
            self.put(name, text)
        for name, version in VERSIONS.items():
            self.version(name, version)
        for name in ("nvcc", "ninja", "c++", "gcc"):
            self.put(f"bin/{name}", "#!/bin/sh\n")
            (self.root / "bin" / name).chmod(0o755)
        self.cards([A100])
        self.plan()

    def put(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def version(self, name: str, version: str | None) -> None:
        """Say which version of a distribution is installed; None for none."""
        for old in self.root.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
        if version is not None:
            requires = "".join(f"Requires-Dist: {pin}\n" for pin in _PINS) if name == "sglang" else ""
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
            self.put(f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text)

    def cards(self, devices: list[dict[str, Any]], **more: Any) -> None:
        """Say which cards torch shows."""
        self.put("torch/cards.json", json.dumps({"cuda": "13.0", "devices": devices, **more}))

    def plan(self, **plan: Any) -> None:
        """Say what the server does."""
        self.put("sglang/plan.json", json.dumps(plan))

    def environ(self, **more: str) -> dict[str, str]:
        """Return an environment in which these packages come first."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "DSV4", "ENABLE_"))}
        for name in ("CUDA_HOME", "CUDA_PATH", "CC", "CXX"):
            kept.pop(name, None)
        path = os.pathsep.join((os.fspath(self.root / "bin"), kept.get("PATH", os.defpath)))
        return {**kept, "PATH": path, "PYTHONPATH": os.fspath(self.root), **more}

    def command(self, *arguments: object) -> list[str]:
        """Return the command that runs ``dsv4convert`` in this world."""
        return [sys.executable, os.fspath(self.root / "driver.py"), *map(str, arguments)]

    def driver_environ(self, **more: str) -> dict[str, str]:
        """Return the environment for `command`: the stand-ins, and this checkout."""
        environ = self.environ(**more)
        return {**environ, "PYTHONPATH": os.pathsep.join((os.fspath(self.root), os.fspath(ROOT)))}


def guard_lines(tp: int = 1, dspark: bool = False, **facts: str) -> list[str]:
    """Return what a healthy server logs, with some facts replaced."""
    models = ["DeepseekV4ForCausalLM", *(["DeepseekV4ForCausalLMDSpark"] if dspark else [])]
    lines = [f"[2026-11-29 21:00:00 TP{r}] dsv4convert shim: SGLang 0.5.16, experts ours" for r in range(tp)]
    for rank in range(tp):
        for model in models:
            said: Mapping[str, str] = {
                "model": model,
                "rank": f"{rank}/{tp}",
                "filled": "1234",
                "fp8": "0",
                "experts": "ours/int8",
                "layers": "43",
                **({"main_proj": "bfloat16"} if model.endswith("DSpark") else {}),
                **facts,
            }
            words = " ".join(f"{name}={value}" for name, value in said.items())
            lines.append(f"[2026-11-29 21:00:00 TP{rank}] dsv4convert guard: {words}")
    return lines
