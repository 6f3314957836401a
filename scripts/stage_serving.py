"""Carry SGLang 0.5.16 and the official clients to a machine with a GPU and without a network.

    python3 scripts/stage_serving.py pack STAGE                      where pip works
    python3 scripts/stage_serving.py unpack STAGE WORK [PART ...]    there

`pack` writes three archives of at most 60 MiB, each to be carried by itself, and `staged.json` with the
SHA-256 of every wheel and archive. `unpack` fills WORK/server and WORK/client.

The machine brings Python 3.12, torch 2.11 (CUDA 13), Triton 3.6, numpy, nvcc and ninja. Everything else is
read from `constraints/staged-*.txt` and taken from wheels. What serving one model on one machine never loads
is left out (`_LEFT_OUT`), and four packages that are only imported have stand-ins (`scripts/standins`).
Uses the standard library, tar and xz.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 60 << 20
#: Part -> directory that it is unpacked into. Of two versions of a package the server's stay with the server.
PARTS = {"server": "server", "client": "client", "tilelang": "server"}
#: pip matches the tag of a platform exactly, so that every glibc up to the machine's is named.
_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
#: Files of wheels that stay behind: other models, other architectures, kernels of backends that are not used.
_LEFT_OUT = (
    "sglang/multimodal_gen/*",
    "sglang/test/*",
    "sgl_kernel/flash_ops*",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/flashmla_ops*",
    "sgl_kernel/sm100/*",
    "jedi/third_party/*",
    "tilelang/3rdparty/composable_kernel/*",
    "tilelang/3rdparty/tvm/src/*",
)


def pack(stage: Path) -> None:
    """Download the wheels of every part and write one archive each."""
    _make(stage)
    record = {}
    for part in PARTS:
        with TemporaryDirectory() as work:
            wheels, tree = Path(work, "wheels"), Path(work, "tree")
            _download(HERE.parent / "constraints" / f"staged-{part}.txt", wheels)
            for wheel in sorted(wheels.iterdir()):
                _unzip(wheel, tree)
            if part == "server":
                shutil.copytree(HERE / "standins", tree, dirs_exist_ok=True)
            archive = stage / f"{part}.tar.xz"
            _archive(tree, archive)
            record[part] = {
                "wheels": {wheel.name: _sha256(wheel) for wheel in sorted(wheels.iterdir())},
                "archive": {"bytes": archive.stat().st_size, "sha256": _sha256(archive)},
            }
        print(f"{part}: {len(record[part]['wheels'])} wheels, {archive.stat().st_size / 2**20:.1f} MiB")
    content = {
        "left_out": _LEFT_OUT,
        "standins": sorted(p.name for p in (HERE / "standins").iterdir()),
        "parts": record,
    }
    (stage / "staged.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"error: {folder}: cannot be made a directory: {error.strerror}") from None


def _download(pins: Path, wheels: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "any"]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "--dest",
        str(wheels),
        "--requirement",
        str(pins),
    ]
    subprocess.run([*command, *(part for name in platforms for part in ("--platform", name))], check=True)


def _unzip(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _LEFT_OUT):
                content.extract(name, tree)


def _archive(tree: Path, archive: Path) -> None:
    # Sorted, of one owner and time: packing the same wheels twice gives the same bytes.
    plain = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=2026-01-01"]
    subprocess.run(
        ["tar", "-C", tree, *plain, "--use-compress-program=xz -T0 -6", "-cf", archive, "."], check=True
    )
    if archive.stat().st_size > LIMIT:
        raise SystemExit(
            f"error: {archive.name}: {archive.stat().st_size:,} bytes: expected at most {LIMIT:,}"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _record(stage: Path) -> Mapping[str, Any]:
    """Return the parts of `staged.json`, or end the script with the reason why there are none."""
    file = stage / "staged.json"
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no staged.json" if stage.is_dir() else "is no directory"
        raise SystemExit(
            f"error: {stage}: {what}: expected the STAGE that `pack` wrote, archives beside staged.json"
        ) from None
    except OSError as error:
        raise SystemExit(f"error: {file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        parts = None
    if not isinstance(parts, dict):
        raise SystemExit(f"error: {file}: is not what `pack` writes; carry it again")
    return parts


def unpack(stage: Path, work: Path, parts: list[str]) -> None:
    """Unpack the archives that are there, or those named, after checking their SHA-256."""
    record = _record(stage)
    wanted = parts or [part for part in PARTS if (stage / f"{part}.tar.xz").exists()]
    if not wanted:
        raise SystemExit(f"error: {stage}: holds no archive: expected {', '.join(PARTS)}, each as .tar.xz")
    for part in wanted:
        archive, target = stage / f"{part}.tar.xz", work / PARTS[part]
        if not archive.is_file() or part not in record:
            raise SystemExit(f"error: {archive}: is not there, or not in staged.json; carry both")
        if _sha256(archive) != record[part]["archive"]["sha256"]:
            raise SystemExit(f"error: {archive.name}: is not the archive of staged.json; carry both again")
        _make(target)
        subprocess.run(["tar", "-C", target, "-xJf", archive], check=True)
        print(f"{part}: unpacked into {target}")


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("stage", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("stage", type=Path)
    unpacking.add_argument("work", type=Path)
    unpacking.add_argument(
        "parts", nargs="*", metavar="PART", type=_part, help=f"one of {', '.join(PARTS)}; default: all there"
    )
    return parser.parse_args()


def main() -> None:
    """Run one of the two commands."""
    arguments = _arguments()
    if arguments.command == "pack":
        pack(arguments.stage)
    else:
        unpack(arguments.stage, arguments.work, arguments.parts)


if __name__ == "__main__":
    main()
