"""How SGLang 0.5.16 is started: options of ours in, its arguments and its environment out. Pure, no I/O.

Every argument that the shim relies on is passed explicitly, so that no default of SGLang decides, and none
of them can be given a second time. Names and choices: ``sglang/srt/server_args.py`` of 0.5.16.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dsv4convert
from dsv4convert.files import printable
from dsv4convert.memory import REQUESTS, Demand
from dsv4convert.runtime import contract
from dsv4convert.runtime.settings import MOE_BACKENDS

#: The backend of our own kernels, the only one that reads the layout `int8`.
OURS: Final = MOE_BACKENDS[0]
#: SGLang's ``--moe-runner-backend``; our method takes the place of its Marlin method.
_RUNNER: Final = {"ours": "marlin", "marlin": "marlin", "humming": "humming"}

#: SGLang's own default for cards below 90 GB, and what it must be a multiple of.
LARGEST_CHUNK, PAGE = 8192, 256
#: Pictures of a request: 96 of the largest take 37,000 tokens, and 370 MB of shared memory on their way.
LIMIT_IMAGES: Final = 96
#: Share of the memory left beside weights and pools that indexer scores of one chunk may take.
SCORES_SHARE: Final = 1 / 4

#: Arguments that `serve` sets or that change what the budget and the key rest on -> what to do instead.
_FIXED: Final = "fixed by the SM80 runtime"
_ONE_NODE: Final = "one machine with tensor parallelism is what the runtime supports"
_OTHER_WEIGHTS: Final = "the weights are those of DST, in the formats that `convert` wrote"
_OTHER_POOLS: Final = "the memory budget and the INT8 index cache rest on SGLang's own KV pools"
_OTHER_CARDS: Final = "choose the cards with `CUDA_VISIBLE_DEVICES`; `preflight` looks at the first ones"
_TLS: Final = "put TLS in a proxy before the server; `serve` asks for its health over plain HTTP"
_OTHER_SERVER: Final = "it starts another server than the one that checks the key"
_OWNED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--model-path", "--model"), "DST is the model"),
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "use `--tp`"),
    "--host": "use `--host` before `--`",
    "--port": "use `--port` before `--`",
    "--context-length": "use `--context`",
    "--mem-fraction-static": "use `--mem-fraction-static` before `--`",
    "--max-running-requests": "use `--concurrency`",
    "--speculative-algorithm": "use `--dspark`",
    "--moe-runner-backend": "use `--moe-backend`",
    "--speculative-moe-runner-backend": "use `--moe-backend`",
    "--api-key": "use `--api-key-file`; every user of the machine can read a command line",
    "--admin-api-key": "every user of the machine can read a command line",
    "--ssl-keyfile-password": "every user of the machine can read a command line",
    **dict.fromkeys(
        (
            "--dtype",
            "--quantization",
            "--kv-cache-dtype",
            "--attention-backend",
            "--prefill-attention-backend",
            "--decode-attention-backend",
            "--page-size",
            "--swa-full-tokens-ratio",
            "--max-total-tokens",
            "--load-format",
            "--json-model-override-args",
            "--speculative-draft-model-path",
            "--speculative-draft-model",
            "--speculative-draft-model-quantization",
            "--speculative-draft-attention-backend",
            "--skip-server-warmup",
            "--model-impl",
            "--is-embedding",
            "--dllm-algorithm",
        ),
        _FIXED,
    ),
    **dict.fromkeys(
        (
            "--custom-weight-loader",
            "--speculative-draft-load-format",
            "--torchao-config",
            "--modelopt-quant",
            "--quantize-and-serve",
            "--rl-quant-profile",
            "--kt-weight-path",
        ),
        _OTHER_WEIGHTS,
    ),
    "--delete-ckpt-after-loading": "it would delete DST",
    **dict.fromkeys(
        (
            "--enable-hisparse",
            "--enable-hierarchical-cache",
            "--enable-unified-memory",
            "--enable-page-major-kv-layout",
            "--enable-deepseek-v4-fp4-indexer",
        ),
        _OTHER_POOLS,
    ),
    **dict.fromkeys(("--device", "--base-gpu-id", "--gpu-id-step"), _OTHER_CARDS),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile"), _TLS),
    "--crash-dump-folder": "a dump holds SGLang's arguments with the API key, and prompts",
    **dict.fromkeys(("-h", "--help"), "ask SGLang itself: `python -m sglang.launch_server --help`"),
    "--config": "a file could contradict what `serve` checked; pass its arguments one by one",
    **dict.fromkeys(
        (
            "--pp-size",
            "--pipeline-parallel-size",
            "--dp-size",
            "--data-parallel-size",
            "--enable-dp-attention",
            "--ep-size",
            "--ep",
            "--expert-parallel-size",
            "--moe-a2a-backend",
            "--speculative-moe-a2a-backend",
            "--elastic-ep-backend",
            "--moe-dp-size",
            "--moe-data-parallel-size",
            "--nnodes",
            "--dcp-size",
            "--decode-context-parallel-size",
            "--attn-cp-size",
            "--attention-context-parallel-size",
            "--enable-prefill-cp",
            "--enable-prefill-context-parallel",
            "--enable-dsa-prefill-context-parallel",
            "--enable-nsa-prefill-context-parallel",
            "--disaggregation-mode",
        ),
        _ONE_NODE,
    ),
    **dict.fromkeys(
        (
            "--grpc-port",
            "--grpc-mode",
            "--smg-grpc-mode",
            "--smg-http-sidecar-port",
            "--grpc-http-sidecar-port",
            "--sidecar",
            "--use-ray",
            "--encoder-only",
        ),
        _OTHER_SERVER,
    ),
    "--tokenizer-worker-num": "SGLang checks the API key with one tokenizer process only",
}
#: Tokens of a prefill step, port of NCCL and name of the model: arguments of SGLang that `serve` reads, too.
CHUNK, NCCL_PORT, NAME = "--chunked-prefill-size", "--nccl-port", "--served-model-name"
#: Each of them -> what its value has to be, in words and as a test that may raise ValueError. SGLang 0.5.16
#: ends at a chunk that is no multiple of a page. -1 is its word for no chunks; 0 and less than -1 mean that
#: to its scheduler only, as other parts compare with -1.
_READ: Final[Mapping[str, tuple[str, Callable[[str], bool]]]] = {
    CHUNK: (
        f"a multiple of {PAGE}, or -1 for prompts in one step",
        lambda value: int(value) == -1 or (int(value) > 0 and int(value) % PAGE == 0),
    ),
    NCCL_PORT: ("a port, 1 to 65535", lambda value: 1 <= int(value) <= 65535),
    NAME: ("a name", bool),
}
#: Arguments that `serve` sets unless SGLang's arguments do.
_DEFAULTS: Final = (NAME, "--reasoning-parser", "--tool-call-parser", CHUNK)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be served, and how.

    Attributes:
        root: The converted checkpoint.
        tp: Tensor-parallel size.
        dspark: Speculate with the DSpark draft of the checkpoint.
        host: Address to listen on.
        port: TCP port of the API.
        key_file: File with the API key; None to ask for no key.
        demand: Context, concurrency and share of the card; its draft is `dspark`.
        backend: One of `settings.MOE_BACKENDS`.
        extra: Further arguments of SGLang.
        parallel_indexer: Split the index queries of a long prefill between the ranks.
        limit_images: Pictures of a request, for a checkpoint with a vision tower.
        whole_prompts: Prefill every prompt in one step, and keep no prefixes.
    """

    root: Path
    tp: int
    dspark: bool
    host: str
    port: int
    key_file: Path | None
    demand: Demand
    backend: str = OURS
    extra: tuple[str, ...] = ()
    parallel_indexer: bool = False
    limit_images: int = LIMIT_IMAGES
    whole_prompts: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that the shim needs in every process of the server."""
        return contract.environment(self.backend, parallel_indexer=self.parallel_indexer)

    @property
    def is_exposed(self) -> bool:
        """Tell whether other machines can reach the address."""
        try:
            return not ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def url(self) -> str:
        """Address at which this machine reaches the server."""
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host.strip("[]"), self.host.strip("[]"))
        return f"http://{f'[{local}]' if ':' in local else local}:{self.port}"


def contradictions(extra: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that `serve` sets itself, each with what to do instead; never a value.

    argparse completes abbreviations, so the beginning of an owned name counts as that name.
    """
    for argument in extra:
        name = argument.partition("=")[0]
        owner = name if name in _OWNED else next((o for o in _OWNED if _abbreviates(name, o)), None)
        if owner is not None:
            yield owner, _OWNED[owner]
    if value_of(extra, "--log-level") not in (None, "debug", "info"):
        yield (
            "--log-level",
            "use debug or info; the lines of the shim that `serve` waits for are of level info",
        )


def faulty_values(extra: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that `serve` reads itself and whose values SGLang cannot use, each with why."""
    for name, (expected, fits) in _READ.items():
        # argparse stops at the first that is none, also where a later one would count.
        for value in _values(extra, name):
            # The next argument is no value, and may hold a secret.
            given = "" if value.startswith("--") else value
            try:
                taken = given != "" and fits(given)
            except ValueError:
                taken = False
            if not taken:
                yield name, f"expected {expected}, found {printable(given, 40) or 'nothing'}"


def _abbreviates(name: str, owner: str) -> bool:
    return name.startswith("--") and name != "--" and owner.startswith(name)


def value_of(extra: Sequence[str], name: str) -> str | None:
    """Return the last value that `extra` gives an argument, abbreviated or not; None if it does not."""
    values = list(_values(extra, name))
    return values[-1] if values else None


def number_of(extra: Sequence[str], name: str) -> int | None:
    """Return the last value of an argument that SGLang reads as an integer; None if `extra` does not give it.

    Raises:
        ValueError: it is none; `faulty_values` says so before.
    """
    value = value_of(extra, name)
    return None if value is None else int(value)


def _values(extra: Sequence[str], name: str) -> Iterator[str]:
    """Yield every value that `extra` gives an argument; a missing one is empty."""
    for position, argument in enumerate(extra):
        key, equals, value = argument.partition("=")
        if _abbreviates(key, name):
            yield value if equals else next(iter(extra[position + 1 :]), "")


def chunk_size(context: int, left: int) -> int:
    """Return ``--chunked-prefill-size``: tokens of a prefill step.

    The indexer scores every token of a step against all compressed keys, 4 bytes for each of `context` / 4.

    Args:
        context: Longest request in tokens.
        left: Bytes of a card that weights and pools leave free.
    """
    rows = int(SCORES_SHARE * left) // max(1, context)
    size = LARGEST_CHUNK
    while size > PAGE and size > rows:
        size //= 2
    return size


def arguments(launch: Launch, *, name: str, context: int, chunk: int, pictures: bool = False) -> list[str]:
    """Return SGLang's arguments.

    Args:
        launch: What is to be served.
        name: Name of the model for clients.
        context: Longest request in tokens.
        chunk: Tokens of a prefill step; -1: all of a prompt.
        pictures: The checkpoint has a vision tower.
    """
    defaults = dict(zip(_DEFAULTS, (name, "deepseek-v4", "deepseekv4", str(chunk)), strict=True))
    pairs = {
        "--model-path": os.path.abspath(launch.root),
        "--host": launch.host,
        "--port": str(launch.port),
        "--tp-size": str(launch.tp),
        "--dtype": "bfloat16",
        # The way to the MXFP4 expert classes; what is BF16 is on the skip list of `config.json`.
        "--quantization": "fp8",
        "--moe-runner-backend": _RUNNER[launch.backend],
        "--kv-cache-dtype": "bfloat16",
        "--context-length": str(context),
        "--mem-fraction-static": f"{launch.demand.fraction:g}",
        "--max-running-requests": str(launch.demand.concurrency or REQUESTS[launch.dspark]),
        **{key: value for key, value in defaults.items() if value_of(launch.extra, key) is None},
        **({"--limit-mm-data-per-request": json.dumps({"image": launch.limit_images})} if pictures else {}),
    }
    mode = ["--speculative-algorithm", "DSPARK"] if launch.dspark else ["--skip-server-warmup"]
    mode += ["--disable-radix-cache"] if launch.whole_prompts else []
    return [part for pair in pairs.items() for part in pair] + mode + list(launch.extra)


def command(launch: Launch, sglang: Sequence[str]) -> list[str]:
    """Return the command of the server process; the key is named by its file."""
    key = ["--api-key-file", os.path.abspath(launch.key_file)] if launch.key_file else []
    return [sys.executable, "-m", "dsv4convert.runtime.server", *key, "--", *sglang]


def variables(launch: Launch, base: Mapping[str, str], *, pictures: bool = False) -> dict[str, str]:
    """Return the environment variables that `serve` sets, on top of those of `base`.

    Args:
        launch: What is to be served.
        base: Environment that the server would inherit.
        pictures: The checkpoint has a vision tower.
    """
    return {
        **launch.environment,
        **(contract.PICTURES if pictures else {}),
        "PYTHONPATH": os.pathsep.join(_search_path(base.get("PYTHONPATH", ""))),
        **_programs(base.get("PATH", os.defpath)),
        # Lines of a dying process must not stay in its buffer.
        "PYTHONUNBUFFERED": "1",
        # Everything is in DST: a start must not wait for a hub that cannot be reached.
        "HF_HUB_OFFLINE": base.get("HF_HUB_OFFLINE", "1"),
        **_without_chunks(launch),
    }


def _without_chunks(launch: Launch) -> dict[str, str]:
    """Return what a server without chunked prefill needs besides."""
    # SGLang compiles its hyper-connections ahead for every chunk size up to this one, and -1 is none.
    chunk = number_of(launch.extra, CHUNK)
    whole = launch.whole_prompts if chunk is None else chunk == -1
    return {"SGLANG_DSV4_MHC_PREWARM": "0"} if whole else {}


def _programs(inherited: str) -> dict[str, str]:
    """Return a PATH with the programs beside this Python, if they are not there already."""
    # A service that starts an environment without activating it does not find its `ninja`.
    beside = os.path.dirname(sys.executable)
    return {} if beside in inherited.split(os.pathsep) else {"PATH": f"{beside}{os.pathsep}{inherited}"}


def _search_path(inherited: str) -> Iterator[str]:
    yield os.fspath(contract.SITE)
    home = Path(dsv4convert.__file__).resolve().parent.parent
    # An installed package is found without help; a checkout is not, before its `sitecustomize` runs.
    if home.name not in ("site-packages", "dist-packages"):
        yield os.fspath(home)
    ours = {os.fspath(contract.SITE), os.fspath(home)}
    yield from (part for part in inherited.split(os.pathsep) if part and part not in ours)
