"""With this directory on PYTHONPATH the ranks of one server share the first card: for validation only.

What a rank computes, its slices, heads and collectives, is what it would be with a card of its own; how long
it takes is not, because the ranks take turns. NCCL refuses two ranks on one card, but only when it takes them
for processes of one host; so each process gets a host of its own, and they talk through sockets. SGLang
has to be told SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=1, --disable-custom-all-reduce, which needs peers, and
CUDA_VISIBLE_DEVICES with a number for every rank: 0,1,2,3.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _pretend(cards: int) -> None:
    """Let `preflight` see as many cards as there are ranks."""
    import torch

    properties, memory = torch.cuda.get_device_properties, torch.cuda.mem_get_info
    torch.cuda.device_count = lambda: cards
    torch.cuda.get_device_properties = lambda device=None: properties(0)  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda device=None: memory(0)  # type: ignore[assignment]


def _hand_over() -> None:
    """Run the `sitecustomize` that this one hides, such as that of `as_sm80`.

    Places that had their turn are kept where `dsv4convert.runtime.activate` keeps them, too.
    """
    visited: set[str] = sys.__dict__.setdefault("dsv4convert_sitecustomize", set())
    visited.add(os.path.realpath(os.path.dirname(__file__)))
    others = [entry for entry in sys.path if os.path.realpath(entry) not in visited]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        visited.add(os.path.realpath(os.path.dirname(spec.origin or "")))
        module = module_from_spec(spec)
        # The import system takes what lies here when this file is done.
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
if sys.orig_argv[-2:] == ["dsv4convert.runtime.sight", "gpus"]:
    _pretend(len(_visible))
elif len(_visible) == 1 and _visible[0].isdecimal():
    # A rank: SGLang has left it the one number that is its own.
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
_hand_over()
