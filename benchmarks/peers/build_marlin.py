"""Build the public kernel that the MoE is compared with: ``python benchmarks/peers/build_marlin.py OUT``.

The peer is `fused_marlin_moe` of the SGLang 0.5.16 wheel with MXFP4 experts (W4A16), together with its weight
repack and SGLang's routing alignment. Everything is fetched by pip from the package index and nothing is
changed but one thing: of the table of kernel instances only those for MXFP4 and BF16 stay, because the whole
table takes many minutes to compile and none of the others is used. The code is compiled for compute
capability 8.0 and assembled for 9.0 (``compute_80`` to ``sm_90``), or for the real thing with ``--arch
sm_80``.

OUT then holds three shared objects, the Python files of the wheel that drive them, unchanged, and
apache-tvm-ffi, which loads them: under 20 MB, for Linux x86-64 and Python 3.12, to be carried to a machine
with a GPU and named to the benchmark as ``MARLIN=OUT``. Needs g++ and some minutes; no GPU and no CUDA. No
third-party code is kept in this repository.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SGLANG = "sglang==0.5.16"
FFI = "apache-tvm-ffi==0.1.11"
TOOLS = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-nvvm==13.0.*",
)
PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in (12, 17, 24, 27, 28, 31, 34, 35, 39)))

# Module -> (source, exported name, expression), as the wheel's own loader composes them.
UNITS = {
    "moe_wna16_marlin": (
        "gemm/marlin_moe/moe_wna16_marlin.cuh",
        "moe_wna16_marlin_gemm",
        "moe_wna16_marlin_gemm<bf16_t>",
    ),
    "moe_align_block_size": (
        "moe/moe_align_kernel.cu",
        "moe_align_block_size",
        "MoeAlignBlockSizeKernel<int32_t>::run",
    ),
    "gptq_marlin_repack": ("gemm/marlin/gptq_marlin_repack.cuh", "gptq_marlin_repack", "gptq_marlin_repack"),
}

# The wheel's Python, run unchanged by `marlin.py` beside this file.
PYTHON = (
    "sglang/jit_kernel/gptq_marlin_repack.py",
    "sglang/jit_kernel/moe_align.py",
    "sglang/jit_kernel/moe_wna16_marlin.py",
    "sglang/srt/layers/moe/fused_moe_triton/fused_marlin_moe.py",
    "sglang/srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py",
    "sglang/srt/layers/quantization/marlin_utils.py",
    "sglang/srt/layers/quantization/marlin_utils_fp4.py",
)

# The instances for other formats, in the body of `get_marlin_kernel`.
_OTHERS = re.compile(r"^  (?:COMMON|NVFP4|BIGGROUP|ACT)_GET_IF\(host::\w+\)\n", re.MULTILINE)


def download(folder: Path) -> None:
    """Let pip fetch the wheels that are not in the folder yet."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    pip += ["--python-version", "3.12", "--implementation", "cp"]
    pip += [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    for requirement in (SGLANG, FFI, *TOOLS):
        name, version = requirement.replace("-", "_").rstrip("*").split("==")
        if not list(folder.glob(f"{name}-{version}*.whl")):
            subprocess.run([*pip, requirement], check=True)


def unpack(wheels: Path, pattern: str, target: Path, keep: str = "") -> None:
    """Unpack those files of the wheels of a pattern whose names begin with `keep`; programs can be run."""
    for wheel in sorted(wheels.glob(pattern)):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.filename.startswith(keep):
                    path = Path(archive.extract(member, target))
                    if "/bin/" in member.filename:
                        path.chmod(0o755)


def only_mxfp4(kernels: Path) -> None:
    """Drop the kernel instances of other formats.

    Raises:
        SystemExit: the source is not the one that this was written for.
    """
    source = kernels / "csrc" / UNITS["moe_wna16_marlin"][0]
    text, dropped = _OTHERS.subn("", source.read_text(encoding="utf-8"))
    if dropped != 7 or "MXFP4_GET_IF(host::kFE2M1f)" not in text:
        sys.exit(f"error: {source}: expected 7 rows of instances of other formats, found {dropped}")
    source.write_text(text, encoding="utf-8")


def build(work: Path, out: Path, arch: str) -> None:
    """Compile the units against the headers of the wheels."""
    cuda, ffi = work / "cuda" / "nvidia" / "cu13", work / "ffi" / "tvm_ffi"
    kernels = work / "sglang" / "sglang" / "jit_kernel"
    includes = [kernels / "include", ffi / "include", cuda / "include", cuda / "include" / "cccl"]
    flags = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC", f"-gencode=arch=compute_80,code={arch}"]
    flags += ["--expt-relaxed-constexpr", "-DSGL_CUDA_ARCH=800"]
    flags += [f"-I{path}" for path in includes]
    running = []
    for name, (source, export, expression) in UNITS.items():
        unit = work / f"{name}.cu"
        lines = [f'#include "{kernels / "csrc" / source}"']
        lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({expression}));", ""]
        unit.write_text("\n".join(lines), encoding="utf-8")
        command = [
            cuda / "bin" / "nvcc",
            *flags,
            "-shared",
            "-cudart",
            "static",
            unit,
            "-o",
            out / f"{name}.so",
        ]
        command += [f"-L{cuda / 'lib'}", f"-L{ffi / 'lib'}", "-ltvm_ffi", "-Xlinker", "-s"]
        command += ["-Xlinker", "-rpath=$ORIGIN/tvm_ffi/lib"]
        running.append((name, subprocess.Popen(command, env=os.environ | {"CUDA_HOME": str(cuda)})))
    failed = [name for name, process in running if process.wait()]
    if failed:
        sys.exit(f"error: nvcc failed for {', '.join(failed)}")


def main() -> None:
    """Fetch, cut, compile, collect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, help="folder for wheels and sources, OUT.work by default")
    parser.add_argument("--arch", default="sm_90", help="machine code to assemble the SM80 code for")
    options = parser.parse_args()
    out = options.out.resolve()
    work = (options.work or out.with_name(out.name + ".work")).resolve()
    wheels = work / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    download(wheels)
    for name in ("sglang", "cuda", "ffi"):
        shutil.rmtree(work / name, ignore_errors=True)
    unpack(wheels, "sglang-0.5.16-*.whl", work / "sglang", "sglang/jit_kernel/")
    unpack(wheels, "nvidia_*.whl", work / "cuda")
    unpack(wheels, "apache_tvm_ffi-*.whl", work / "ffi", "tvm_ffi/")
    only_mxfp4(work / "sglang" / "sglang" / "jit_kernel")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    build(work, out, options.arch)
    for name in PYTHON:
        unpack(wheels, "sglang-0.5.16-*.whl", out, name)
    ignored = shutil.ignore_patterns("3rdparty", "include", "src", "share")
    shutil.copytree(work / "ffi" / "tvm_ffi", out / "tvm_ffi", ignore=ignored)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
