"""Everything that can be known before a server is started, in seconds and without loading a model.

All failures are reported together. Nothing here imports torch or SGLang: what a server process would see is
told by short processes with its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from dsv4convert.checkpoint import open_checkpoint
from dsv4convert.errors import Dsv4Error, Finding, errors_of, finding
from dsv4convert.files import printable
from dsv4convert.formats.spec import PACKING
from dsv4convert.handoff import split_findings
from dsv4convert.memory import CARD_BYTES, GpuMemory, budgets, is_served, read_positions
from dsv4convert.names import Layout
from dsv4convert.runtime import contract, machine, settings
from dsv4convert.runtime.installation import findings as sglang_findings
from dsv4convert.runtime.installation import installation
from dsv4convert.runtime.keys import look_at_key
from dsv4convert.runtime.launch import (
    LIMIT_IMAGES,
    NCCL_PORT,
    OURS,
    Launch,
    chunk_size,
    number_of,
    variables,
)
from dsv4convert.runtime.sight import look
from dsv4convert.runtime.vision.options import conflicts, longest_whole_prompt
from dsv4convert.survey import Survey, survey
from dsv4convert.validate.structure import check_converted, facts

ARCHITECTURE: Final = "DeepseekV4ForCausalLM"
#: Seconds for a process that loads torch and asks every card; the first read of torch may be slow.
_PATIENCE: Final = 180
#: Variables under which the key does not guard the server, or its log cannot be read.
_FORBIDDEN: Final = {
    "SGLANG_GRPC_PORT": "the gRPC port that it opens does not ask for the API key",
    "SGLANG_LOGGING_CONFIG_PATH": "lines of the shim are known by the beginning that SGLang gives them",
}

_NOT_CHECKED: Final = (
    "contents: no tensor byte was read; `dsv4convert converted DST --read-data` does",
    "kernels: none was compiled or run",
    "links: NVLink, PCIe and NCCL between the cards",
)


@dataclass(frozen=True, slots=True)
class Preflight:
    """What `preflight` found.

    Attributes:
        subject: Name of the checkpoint's directory.
        title: What it was taken for.
        findings: Everything in the way, errors first.
        facts: Checkpoint, SGLang, cards, budget and shim, for ``--json``.
        checked: What was looked at, in words.
        not_checked: What was not.
        name: Name of the model for clients.
        budget: Memory of a card, None when it could not be worked out.
        pictures: The checkpoint has a vision tower.
    """

    subject: str
    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]
    checked: tuple[str, ...]
    not_checked: tuple[str, ...] = _NOT_CHECKED
    name: str = "model"
    budget: GpuMemory | None = None
    pictures: bool = False

    def ok(self, *, strict: bool = False) -> bool:
        """Tell whether nothing is in the way or, under `strict`, nothing was found at all."""
        return not (self.findings if strict else errors_of(self.findings))

    def as_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the JSON form; its ``ok`` is the verdict of the exit status."""
        errors = len(errors_of(self.findings))
        return {
            "ok": self.ok(strict=strict),
            "subject": self.subject,
            "title": self.title,
            "errors": errors,
            "warnings": len(self.findings) - errors,
            "facts": dict(self.facts),
            "checked": list(self.checked),
            "not_checked": list(self.not_checked),
            "findings": [f.as_dict() for f in self.findings],
        }


@dataclass(slots=True)
class _Notes:
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)


def preflight(launch: Launch, environ: Mapping[str, str], arch: Sequence[int] = (80,)) -> Preflight:
    """Check checkpoint, options and machine.

    Args:
        launch: What is to be served, and how.
        environ: Environment that the server would inherit.
        arch: Capabilities of cards that are accepted, as 80 for 8.0.
    """
    server = {**environ, **variables(launch, environ)}
    with ThreadPoolExecutor(2) as pool:
        modules = pool.submit(look, "modules", server, _PATIENCE)
        gpus = pool.submit(look, "gpus", server, _PATIENCE)
        notes = _Notes()
        seen = _check_checkpoint(launch, notes)
        _check_options(launch, seen, environ, notes)
        _check_sglang(modules.result(), notes)
        budget = _check_cards(launch, seen, gpus.result(), arch, notes)
        _check_steps(launch, seen, budget, notes)
    return _result(launch, seen, budget, notes)


def check_launch(launch: Launch, environ: Mapping[str, str]) -> Preflight:
    """Check checkpoint and options only; the machine may be another one. See `preflight`."""
    notes = _Notes()
    seen = _check_checkpoint(launch, notes)
    _check_options(launch, seen, environ, notes)
    budget = _budget(launch, seen, launch.demand.card_bytes)
    notes.findings += budget.findings() if budget else ()
    _check_steps(launch, seen, budget, notes)
    result = _result(launch, seen, budget, notes)
    return replace(
        result, not_checked=("machine: SGLang, shim, cards, ports; `preflight` does", *_NOT_CHECKED)
    )


def _result(launch: Launch, seen: Survey | None, budget: GpuMemory | None, notes: _Notes) -> Preflight:
    ordered = tuple(sorted(dict.fromkeys(notes.findings), key=lambda f: f.severity))
    name = seen.release.key if seen and seen.release else launch.root.resolve().name
    title = seen.title if seen else "unknown model"
    return Preflight(
        launch.root.resolve().name,
        title,
        ordered,
        notes.facts,
        tuple(notes.checked),
        name=name,
        budget=budget,
        pictures=has_pictures(seen),
    )


def has_pictures(seen: Survey | None) -> bool:
    """Tell whether a checkpoint has a vision tower."""
    return seen is not None and seen.geometry is not None and seen.geometry.vision is not None


# ---- the checkpoint


def _check_checkpoint(launch: Launch, notes: _Notes) -> Survey | None:
    try:
        checkpoint = open_checkpoint(launch.root)
    except Dsv4Error as error:
        notes.findings += error.findings
        return None
    seen = survey(checkpoint)
    report = check_converted(checkpoint, seen=seen)
    notes.findings += report.findings
    notes.facts["checkpoint"] = {**facts(seen), "packing": PACKING if seen.layout is Layout.INT8 else None}
    notes.checked += report.checked
    notes.findings += _model_findings(launch, seen)
    notes.checked.append("model: release, architecture, draft, and its split over the GPUs")
    return seen


def _model_findings(launch: Launch, seen: Survey) -> Iterator[Finding]:
    if seen.geometry is None or seen.layout not in (Layout.INT8, Layout.MXFP4):
        return  # Reported by the structural check.
    where = seen.checkpoint.root.name
    if not is_served(seen.geometry, seen.release):
        yield finding("serve.release", where, f"{seen.title} has no runtime in this project")
        return
    if read_positions(seen.checkpoint.config) is None:
        problem = "positions, window or rope are not described, so that no memory budget can be made"
        yield finding("config.field", "max_position_embeddings", problem)
    named = seen.checkpoint.config.get("architectures")
    if named != [ARCHITECTURE]:
        problem, expected = "names another model class than the one the shim knows", f"`[{ARCHITECTURE!r}]`"
        yield finding("config.field", "architectures", problem, expected=expected, found=repr(named)[:80])
    if launch.dspark and not seen.geometry.draft.is_dspark:
        problem = "the checkpoint holds no DSpark draft"
        yield finding("serve.draft", where, problem, expected="the four `dspark_*` fields and their tensors")
    if launch.backend != OURS and seen.layout is Layout.INT8:
        problem = f"the backend `{launch.backend}` reads MXFP4 experts"
        yield finding("serve.backend", "--moe-backend", problem, expected="layout mxfp4", found="layout int8")
    # Our kernels hold INT8 groups, also when the experts were stored as MXFP4.
    held = Layout.INT8 if launch.backend == OURS else seen.layout
    yield from split_findings(seen.geometry, held, launch.tp)


# ---- options and environment


def _check_options(launch: Launch, seen: Survey | None, environ: Mapping[str, str], notes: _Notes) -> None:
    if launch.key_file is not None:
        notes.findings += look_at_key(launch.key_file)[1]
        notes.checked.append("key: mode, owner and form of its file")
    elif launch.is_exposed:
        problem = "other machines would reach the server, which asks for no key"
        notes.findings.append(
            finding("serve.exposed", "--host", problem, expected="`--api-key-file FILE`", found=launch.host)
        )
    needed = launch.environment | dict(contract.PICTURES if has_pictures(seen) else {})
    for name, wanted in needed.items():
        found = environ.get(name, wanted)
        if found != wanted:
            problem = "is set to a value that the shim cannot work with"
            notes.findings.append(finding("serve.environment", name, problem, expected=wanted, found=found))
    # SGLang would take them for every checkpoint of this architecture, with or without a tower.
    foreign = (
        {} if has_pictures(seen) else dict.fromkeys(contract.PICTURES, "the checkpoint has no vision tower")
    )
    for name, reason in (_FORBIDDEN | foreign).items():
        if environ.get(name):
            notes.findings.append(finding("serve.environment", name, reason, expected="not set"))
    notes.findings += _older_findings(launch, environ)
    notes.findings += _switch_findings(environ)
    notes.findings += _idle_findings(launch, seen, environ)
    notes.checked.append("options: address, environment variables")
    if environ.get(settings.TILES):
        _check_tiles(environ[settings.TILES], notes)


def _older_findings(launch: Launch, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the older names of the shim's variables ask for and do not get."""
    name = settings.OLD_MOE
    accepted = (launch.backend, *(["mxfp4_int8"] if launch.backend == OURS else []))
    found = environ.get(name, "").strip() or launch.backend
    if found not in accepted:
        problem = "contradicts `--moe-backend`, which `serve` passes on"
        yield finding("serve.environment", name, problem, expected=" or ".join(accepted), found=found)
    yield from settings.indexer_faults(environ)


def _switch_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the switches of the shim, and those that no server for users should have."""
    yield from settings.switch_faults(environ)
    if environ.get(settings.POISON, "").strip() == "1":
        problem = "fills padded heads and tokens with NaN before attention, on every rank"
        yield finding("serve.poison", settings.POISON, problem, expected="unset", found="1")


def _check_tiles(path: str, notes: _Notes) -> None:
    """Look at the file of tiles that the kernels would read at their first launch."""
    from kernels_ref.sm80.table_file import EXPECTED, parse  # Loads neither torch nor Triton.

    shown = printable(path)
    try:
        parse(Path(path))
    except ValueError as error:
        problem, found = f"names a file that the kernels cannot take: {shown}", printable(error)
        notes.findings.append(finding("serve.tiles", settings.TILES, problem, expected=EXPECTED, found=found))
    else:
        notes.checked.append(f"kernels: every number of their tiles in {shown}, in place of the shipped ones")


def _idle_findings(launch: Launch, seen: Survey | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what was asked for and changes nothing about this server."""
    if launch.parallel_indexer and launch.tp == 1:
        problem = "one GPU has nobody to share index queries with"
        yield finding("serve.no-effect", "--parallel-indexer", problem, expected="`--tp` above 1", found="1")
    if seen is not None and not has_pictures(seen) and launch.limit_images != LIMIT_IMAGES:
        problem, found = (
            "the checkpoint has no vision tower, so that a request holds no pictures",
            "text only",
        )
        yield finding("serve.no-effect", "--limit-images", problem, expected="Vision-Exp", found=found)
    for name in sorted(environ):
        if name.startswith(settings.PREFIX) and name not in settings.NAMES:
            problem, expected = "nothing reads a variable of this name", ", ".join(settings.NAMES)
            yield finding("serve.no-effect", name, problem, expected=expected, found=name)


def _check_steps(launch: Launch, seen: Survey | None, budget: GpuMemory | None, notes: _Notes) -> None:
    """Look at the prefill steps that follow from the memory budget, and at options that pictures rule out."""
    steps = prefill_steps(launch, budget) if budget and not errors_of(budget.findings()) else None
    if steps and not steps.context:
        problem = "no prompt fits into a prefill step: weights and pools leave too little memory"
        notes.findings.append(finding("serve.memory", "--whole-prompts", problem))
    elif steps and steps.context < (launch.demand.context or 0):
        problem = "the context is longer than a prompt that one prefill step can take"
        expected, asked = f"at most {steps.context:,} tokens", f"{launch.demand.context:,}"
        notes.findings.append(
            finding("serve.context", "--whole-prompts", problem, expected=expected, found=asked)
        )
    if has_pictures(seen):
        notes.findings += conflicts(launch.extra, steps.chunk if steps else None)
        notes.checked.append("pictures: options of SGLang that rule them out")


class Steps(NamedTuple):
    """How prompts are cut: longest request and tokens of a prefill step, -1 for all of a prompt."""

    context: int
    chunk: int


def prefill_steps(launch: Launch, budget: GpuMemory) -> Steps:
    """Return the steps that the memory of a card allows."""
    if launch.whole_prompts:
        return Steps(min(budget.context, longest_whole_prompt(budget)), -1)
    return Steps(budget.context, chunk_size(budget.context, budget.left))


# ---- SGLang and the machine


def _check_sglang(modules: Mapping[str, Any], notes: _Notes) -> None:
    if "failed" in modules:
        problem = "a process with the environment of the server could not be started"
        notes.findings.append(finding("shim.inactive", "python", problem, found=modules["failed"]))
        return
    place = installation(modules)
    notes.findings += sglang_findings(place, modules)
    shim = modules["shim"]
    notes.facts["sglang"] = {
        "path": str(place.root) if place else None,
        "version": place.version if place else None,
        "commit": place.commit if place else None,
        "versions": modules["versions"],
        "compilers": modules["compilers"],
    }
    notes.facts["shim"] = shim
    if not shim["installed"]:
        problem = "is not active in a process with the environment of the server"
        found = "switched on, not installed" if shim["enabled"] else "not switched on"
        notes.findings.append(finding("shim.inactive", "sitecustomize", problem, found=found))
    elif modules["loaded"]:
        problem = "loads libraries into every Python process"
        loaded = ", ".join(modules["loaded"])
        notes.findings.append(
            finding("shim.inactive", "sitecustomize", problem, expected="none", found=loaded)
        )
    notes.checked.append("shim: active in a process with the environment of the server")
    if place:
        files = f"{len(contract.HASHES):,} files against their hashes"
        notes.checked.append(f"SGLang: version, commit of a checkout, {files}, libraries")


def _check_cards(
    launch: Launch, seen: Survey | None, gpus: Mapping[str, Any], arch: Sequence[int], notes: _Notes
) -> GpuMemory | None:
    notes.findings += machine.gpu_findings(gpus, launch.tp, arch)
    notes.findings += machine.shm_findings(launch.tp, has_pictures(seen))
    notes.findings += machine.port_findings(launch.host, _ports(launch))
    notes.facts["gpus"] = gpus.get("devices", [])
    notes.checked.append("machine: GPUs, memory free on them, shared memory, ports")
    size = machine.card_bytes(gpus, launch.tp)
    budget = _budget(launch, seen, size or CARD_BYTES)
    if budget is None or seen is None:
        return None
    notes.facts["memory"] = budget.as_dict()
    if size is None:
        notes.findings += budget.findings()
    else:
        notes.findings += machine.memory_findings(gpus, budget, lambda d: budgets(seen, [launch.tp], d)[0])
    return budget


def _ports(launch: Launch) -> Iterator[tuple[str, int]]:
    yield "--port", launch.port
    other = number_of(launch.extra, NCCL_PORT)
    if other is not None:
        yield NCCL_PORT, other


def _budget(launch: Launch, seen: Survey | None, size: int) -> GpuMemory | None:
    demand = replace(launch.demand, card_bytes=size, draft=launch.dspark)
    return next(iter(budgets(seen, [launch.tp], demand)), None) if seen else None
