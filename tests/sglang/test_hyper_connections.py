"""TileLang lowers SGLang's kernels for hyper-connections to SM80 code: the one compiler of the path not ours.

On an A100 a failure shows when the server loads: minutes in, after the weights. Nothing is run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: What SM80 lacks, as TileLang writes it: bulk copies and barriers, warp groups, clusters, dependent launch.
NEWER = ("tma_", "mbarrier", "wgmma", "setmaxnreg", "cluster", "cudaGridDependency", "griddepcontrol")


def test_all_kernels_become_code_for_sm80() -> None:
    # `make test-sglang` puts it there: the other tests see SGLang without TileLang.
    tilelang = Path(sys.prefix, "tilelang")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.fspath, (tilelang, HERE / "stubs")))}
    environment.pop("ENABLE_DSV4_SM80", None)
    command = [sys.executable, HERE / "lower_mhc.py", "sm_80"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lowered = json.loads(ran.stdout.splitlines()[-1])
    assert {name: row.get("error") for name, row in lowered.items()} == dict.fromkeys(lowered)
    assert set(lowered) == {"split", "product", "mix", "mix_and_norm", "post", "sinkhorn"}
    found = {name: [word for word in NEWER if word in row["code"]] for name, row in lowered.items()}
    assert found == {name: [] for name in lowered}
    # And it is the code of a kernel, with the asynchronous copies that SM80 does have.
    assert all("__global__" in row["code"] for row in lowered.values())
    assert "cp_async" in lowered["split"]["code"]
