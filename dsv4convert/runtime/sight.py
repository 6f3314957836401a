"""What a server process would see, told by a process with the server's environment.

    python -m dsv4convert.runtime.sight modules      where SGLang is, versions, whether the shim is active
    python -m dsv4convert.runtime.sight gpus         what torch says about the cards

`look` starts such a process and returns the JSON object it prints. Neither the caller nor ``modules`` loads
torch or SGLang.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from dsv4convert.runtime import contract

#: Distributions without which SGLang cannot serve the model on CUDA.
NEEDED: Final = ("torch", "triton", "transformers", "sglang-kernel", "apache-tvm-ffi", "tilelang")


def look(subject: str, environment: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """Run one of the subjects above in a process of its own.

    Args:
        subject: ``modules`` or ``gpus``.
        environment: Environment of the process.
        timeout: Seconds until the process is given up.

    Returns:
        What it saw; ``{"failed": sentence}`` when it ended without an answer.
    """
    command = [sys.executable, "-m", __name__, subject]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=timeout, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {timeout:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        seen: dict[str, Any] = json.loads(lines[-1])
        return seen | {"stderr": _last(done.stderr)}
    return {"failed": _last(done.stderr) or f"exit status {done.returncode}"}


def _last(text: str) -> str:
    """Return the last line that says what happened, not what to do about it."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("hint:")]
    return lines[-1][:300] if lines else ""


def see_modules() -> dict[str, Any]:
    """Say where SGLang is, which versions are installed, and what the shim has done, loading none of it."""
    spec = importlib.util.find_spec("sglang")
    return {
        "sglang": spec.origin if spec else None,
        "versions": {name: _version(name) for name in ("sglang", *NEEDED, "starlette")},
        "requires": _requires("sglang"),
        "compilers": compilers(),
        "shim": contract.status(),
        "loaded": [name for name in ("sglang", "torch", "triton") if name in sys.modules],
    }


def compilers() -> dict[str, str | None]:
    """Return the programs that compile kernels at a first start, each as TVM-FFI and Triton look for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "bin")] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return {
        "nvcc": shutil.which("nvcc", path=os.pathsep.join(places)),
        "ninja": shutil.which("ninja"),
        "c++": shutil.which(os.environ.get("CXX", "c++")),
        "cc": shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requires(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def see_gpus() -> dict[str, Any]:
    """Say what torch sees: its own build, and name, capability and memory in bytes of every card."""
    import torch

    devices = []
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


SUBJECTS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {"modules": see_modules, "gpus": see_gpus}


if __name__ == "__main__":
    # Libraries print on stdout when they like; the answer is the last line.
    print(json.dumps(SUBJECTS[sys.argv[1]]()))
