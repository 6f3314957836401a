"""What the machine must offer a server: cards, memory on them, shared memory, ports."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dsv4convert.errors import Finding, finding
from dsv4convert.memory import RUNTIME_BYTES, Demand, GpuMemory

SHM: Final = "/dev/shm"
#: What NVIDIA recommends for containers with several GPUs; Docker's default is 64 MiB.
SHM_BYTES: Final = 1 << 30
#: Memory that a card may miss without being called busy: our own process that asked, and the driver.
_OWN_BYTES: Final = 1 << 30
_SMI: Final = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def gpu_findings(seen: Mapping[str, Any], tp: int, arch: Sequence[int]) -> Iterator[Finding]:
    """Yield what is wrong with the cards.

    Args:
        seen: What `sight` says about cards.
        tp: Cards needed; SGLang takes the first ones that CUDA shows.
        arch: Capabilities that are accepted, as 80 for 8.0.
    """
    if "failed" in seen:
        problem = "torch could not be asked about the cards"
        yield finding("gpu.unseen", "torch", problem, found=seen["failed"])
        return
    devices = seen["devices"]
    if len(devices) < tp:
        yield _too_few(seen, len(devices), tp)
    for index, device in enumerate(devices[:tp]):
        major, minor = device["capability"]
        if 10 * major + minor not in arch:
            expected = " or ".join(f"{a // 10}.{a % 10}" for a in arch)
            problem = f"{device['name']} has another architecture than the kernels are for"
            found = f"capability {major}.{minor}"
            yield finding("gpu.arch", f"GPU {index}", problem, expected=expected, found=found)


def _too_few(seen: Mapping[str, Any], count: int, tp: int) -> Finding:
    problem, found = f"tensor parallelism over {tp} GPUs needs as many", f"{count:,}"
    if seen["cuda"] is None:
        problem = "torch was built without CUDA"
        hint = "install the CUDA build of torch that SGLang pins"
        return finding("gpu.count", "torch", problem, expected=f"at least {tp:,}", found=found, hint=hint)
    driver = _driver()
    if len(driver) > count:
        problem = f"the driver shows {len(driver):,} GPUs, torch fewer"
        hint = "look at `CUDA_VISIBLE_DEVICES`, the driver version and what the container was given"
        if seen["stderr"]:
            found = f"{found} and: {seen['stderr']}"
        return finding("gpu.count", "torch", problem, expected=f"at least {tp:,}", found=found, hint=hint)
    return finding("gpu.count", "torch", problem, expected=f"at least {tp:,}", found=found)


def _driver() -> list[str]:
    """Return a line for every GPU that the driver shows; none when it cannot be asked."""
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def card_bytes(seen: Mapping[str, Any], tp: int) -> int | None:
    """Return the size of the smallest card that would be used, None when there are too few."""
    sizes = [d["total_bytes"] for d in seen.get("devices", ())[:tp]]
    return min(sizes) if len(sizes) == tp else None


def memory_findings(
    seen: Mapping[str, Any], budget: GpuMemory, rebudget: Callable[[Demand], GpuMemory]
) -> Iterator[Finding]:
    """Yield what stands in the way on the cards as they are now.

    Args:
        seen: What `sight` says about cards.
        budget: The budget of an empty card.
        rebudget: Called with a demand, returns the budget for it.
    """
    faults = budget.findings()
    yield from faults
    for index, device in enumerate(seen["devices"][: budget.tp]):
        taken = device["total_bytes"] - device["free_bytes"]
        if taken <= _OWN_BYTES:
            continue
        now = rebudget(replace(budget.demand, card_bytes=device["free_bytes"] + RUNTIME_BYTES))
        where, found = f"GPU {index}", f"{taken:,} bytes in use"
        if not faults and now.findings():
            problem = "other processes hold memory that weights and KV pools need"
            expected = f"{budget.demand.card_bytes - _OWN_BYTES:,} bytes free"
            yield finding("gpu.memory", where, problem, expected=expected, found=found)
        else:
            problem = f"other processes hold memory: capacity would be {now.tokens:,} tokens"
            yield finding("gpu.busy", where, problem, expected=f"{budget.tokens:,} tokens", found=found)


def shm_findings(tp: int, pictures: bool = False) -> Iterator[Finding]:
    """Yield a finding when the ranks have too little memory to share; pictures come that way, too."""
    try:
        status = os.statvfs(SHM)
    except OSError as error:
        yield finding("host.shm", SHM, "shared memory cannot be looked at", found=str(error.strerror))
        return
    free = status.f_bavail * status.f_frsize
    if (tp > 1 or pictures) and free < SHM_BYTES:
        users = ["NCCL between the ranks"] * (tp > 1) + ["pictures on their way to the model"] * pictures
        problem = f"too little shared memory for {' and '.join(users)}"
        yield finding("host.shm", SHM, problem, expected=f"{SHM_BYTES:,} bytes free", found=f"{free:,}")


def port_findings(host: str, ports: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Yield a finding for every port that cannot be opened; `ports` are names and numbers."""
    for name, port in ports:
        try:
            _open(host, port)
        except (socket.gaierror, UnicodeError) as error:
            problem = f"cannot be resolved: {getattr(error, 'strerror', None) or error}"
            yield finding("host.port", "--host", problem, expected="an address of this machine", found=host)
            return
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            problem = (
                "is taken by another process" if taken else f"cannot be opened: {error.strerror or error}"
            )
            yield finding("host.port", name, problem, expected="a free port", found=f"{host}:{port}")


def _open(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a connection that lingers from the last run does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
