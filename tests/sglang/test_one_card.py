"""How ranks that share a card come to it: what `scripts/one_card` expects of SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent.parent / "scripts"
SEE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['NCCL_HOSTID'] == str(os.getpid()))"
ASK = f"""
import json, os, subprocess, sys
from sglang.srt.utils import common
common.is_cuda_alike = lambda: True
seen = []
for rank in (0, 3):
    with common.maybe_reindex_device_id(rank) as gpu:
        seen.append([gpu, subprocess.check_output([sys.executable, "-c", {SEE!r}], text=True).split()])
print(json.dumps([*seen, os.environ["CUDA_VISIBLE_DEVICES"]]))
"""


def test_every_rank_is_a_process_that_sees_the_first_card() -> None:
    path = os.pathsep.join(map(os.fspath, (SCRIPTS / "one_card", HERE / "stubs")))
    shared = {"SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    environment = os.environ | {"PYTHONPATH": path} | shared
    environment.pop("ENABLE_DSV4_SM80", None)
    ran = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rank = [0, ["0", "True"]]
    assert json.loads(ran.stdout.splitlines()[-1]) == [rank, rank, "0,1,2,3"]
