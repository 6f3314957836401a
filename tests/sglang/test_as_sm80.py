"""What `scripts/as_sm80` makes SGLang and TVM-FFI compile for: validation on a newer card rests on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent.parent / "scripts"
ASK = """
import json, torch
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.current_device = lambda: 0
from sglang.jit_kernel.utils import arch
from tvm_ffi.cpp import extension
import os
os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch.get_jit_cuda_arch().target_name
target = extension._get_cuda_target()
print(json.dumps([arch.get_default_target_flags()[0], arch.is_arch_support_pdl(), target]))
"""
NATIVE = ["-DSGL_CUDA_ARCH=900", True, "-gencode=arch=compute_90a,code=sm_90a"]
SM80 = ["-DSGL_CUDA_ARCH=800", False, "-gencode arch=compute_80,code=compute_80"]


@pytest.mark.parametrize(("extra", "expected"), [((), NATIVE), ((SCRIPTS / "as_sm80",), SM80)])
def test_cuda_of_sglang_is_compiled_for_sm80(extra: tuple[Path, ...], expected: list[object]) -> None:
    path = os.pathsep.join(map(os.fspath, (*extra, HERE / "stubs")))
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("ENABLE_DSV4_SM80", None)
    ran = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == expected
