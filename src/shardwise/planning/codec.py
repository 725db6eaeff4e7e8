"""Plan files: written as JSON and read again. The schema has a version; a plan of an unknown version is refused by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardwise.batch.target import LossTarget
from shardwise.books.rules import Rule
from shardwise.cluster.calibration import Calibration, unscaled
from shardwise.cluster.chip import MOST, Chip
from shardwise.cluster.cluster import MOST_DEVICES, Cluster
from shardwise.cost.estimate import Estimate
from shardwise.cost.rates import policy_of
from shardwise.cost.run import Run
from shardwise.errors import InputError, require
from shardwise.issuing import IssuePolicy
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of, num_micro_batches, seqs_per_replica
from shardwise.layout.placement import Placement
from shardwise.layout.stages import MOST_EMPTY, held_layers, layers_per_stage, stages_on_ranks
from shardwise.model.architecture import Architecture
from shardwise.network.topology import Pods, Tier, Topology, Torus
from shardwise.network.twist import LEGAL, is_twistable
from shardwise.planning.payload import TOPOLOGIES, Payload, plan_payload
from shardwise.planning.plan import SCHEMA, Alternative, Plan, SearchSummary

Value = TypeVar("Value")
FIRST_SCHEMA = "shardwise.plan/1"  # its topology is at the rates that are reached, not at the rated ones
SECOND_SCHEMA = "shardwise.plan/2"  # the reliability of its run, as of the first, is called `operations`
# Keys of a layout's payload that follow from the others; they are checked, not trusted.
DERIVED = ("num_micro_batches", "max_seqs_per_replica")


def require_writable(path: str | Path) -> None:
    """Raise `InputError` where a file cannot be written, before there is anything to write; nothing is created."""
    target = Path(path)
    folder = target.parent
    problem = (
        "no such folder" if not folder.is_dir()
        else "it is a folder" if target.is_dir()
        else "" if os.access(target if target.exists() else folder, os.W_OK)
        else "permission denied"
    )  # fmt: skip
    if problem:
        raise InputError(f"cannot write {target}: {problem}; choose a writable path")


def dump_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON, with everything that it depends on; `load_plan` reads it.

    Raises `InputError` where the file cannot be written. The schema is `shardwise.plan/3` (`json_schemas("plan")`).

    >>> import pathlib, tempfile
    >>> import shardwise as sw
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> path = pathlib.Path(tempfile.mkdtemp(), "plan.json")
    >>> dump_plan(plan, path)
    >>> load_plan(path).layout == plan.layout
    True
    """
    target = Path(path)
    try:
        target.write_text(json.dumps(plan_payload(plan), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"plan file: cannot write {target}: {error.strerror}; choose a writable path") from None


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `dump_plan`, or `--out` of the command line, has written.

    Nothing is planned again: layout and estimate are those of the file. Raises `InputError` for a file that is missing or is not
    JSON, for an unknown schema, and with one line for each field that is wrong.

    >>> load_plan("missing/plan.json")
    Traceback (most recent call last):
    shardwise.errors.InputError: plan file: cannot read missing/plan.json: No such file or directory
    """
    source = Path(path)
    try:
        payload = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"plan file: cannot read {source}: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, not JSON, numbers too long, a null byte, nested too deeply
        raise InputError(f"plan file: {source} is not JSON: {error}") from None
    return parse_plan(payload, f"plan file {source}")


def is_plan(path: str | Path) -> bool:
    """Whether a file has the schema of a plan; it may still be a broken one."""
    try:
        payload = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(payload, dict) and str(payload.get("schema", "")).startswith("shardwise.plan/")


def parse_plan(payload: Any, where: str = "plan") -> Plan:
    """A plan from its payload. Raises `InputError` that names each field that is wrong; `where` is what a payload of something
    else is called."""
    found = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or found not in (SCHEMA, SECOND_SCHEMA, FIRST_SCHEMA):
        is_other = not str(found).startswith("shardwise.plan/")
        fix = "`shardwise plan MODEL CLUSTER --out FILE` writes one" if is_other else "plan again with this version"
        raise InputError(f"{where}: found schema {found!r}; {SCHEMA!r} is required: {fix}")
    missing = [
        key for key in ("model", "cluster", "job", "layout", "estimate") if not isinstance(payload.get(key), dict)
    ]
    if missing:
        raise InputError(f"plan: {', '.join(missing)} missing; plan again with this version")
    model = parse(Architecture, _only(Architecture, payload["model"]), "model")
    job = parse(Job, _only(Job, payload["job"]), "job")
    cluster = _parse_cluster(payload["cluster"], scaled=found == FIRST_SCHEMA)
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        layout=parse_layout(payload["layout"], model, job),
        estimate=parse(Estimate, payload["estimate"], "estimate"),
        alternatives=tuple(_parse_alternative(other, model, job) for other in _list(payload, "alternatives")),
        rules=tuple(parse(Rule, rule, "rule") for rule in _list(payload, "rules")),
        search=parse(SearchSummary, payload["search"], "search") if payload.get("search") else None,
        versions=parse(dict[str, str], payload.get("versions", {}), "versions"),
        run=_parse_run(payload["run"], renamed=found != SCHEMA) if payload.get("run") else None,
        bound_s=parse(float, payload["bound_s"], "bound_s") if payload.get("bound_s") is not None else None,
        policy=_parse_policy(payload, cluster),
        to_loss=parse(LossTarget, payload["to_loss"], "to_loss") if payload.get("to_loss") else None,
    )  # fmt: skip


def _parse_run(payload: Any, *, renamed: bool) -> Run:
    """A run from its payload; `renamed`: the key of its reliability is the one that older plans have."""
    if renamed and isinstance(payload, Mapping):
        payload = {"reliability" if key == "operations" else key: value for key, value in payload.items()}
    return parse(Run, payload, "run")


def _parse_cluster(payload: Mapping[str, Any], *, scaled: bool) -> Cluster:
    """A cluster from its payload; `scaled`: the topology has the rates that its calibration says are reached."""
    described = parse(dict[str, Any], payload.get("topology"), "cluster.topology")
    kind = described.pop("kind", None)
    if kind not in TOPOLOGIES:
        raise InputError(f"cluster.topology: found kind {kind!r}; one of {', '.join(TOPOLOGIES)} is required")
    chip = parse(Chip, payload.get("chip_specification"), "cluster.chip_specification")
    topology = parse(TOPOLOGIES[kind], described, "cluster.topology")
    require(_topology_problems(topology))
    found = payload.get("calibration")
    calibration = None if found is None else parse(Calibration, found, "cluster.calibration")
    if scaled and calibration is not None:
        topology = unscaled(topology, calibration["link_fraction"], calibration["network_fraction"])
    return Cluster(name=str(payload.get("name")), chip=chip, topology=topology, calibration=calibration)


def _topology_problems(topology: Topology) -> list[str]:
    """Sizes, rates and latencies that are impossible."""
    torus = topology.torus if isinstance(topology, Pods) else topology
    links: list[Torus | Tier | Pods] = [torus] if isinstance(torus, Torus) else list(torus.tiers)
    links += [topology] if isinstance(topology, Pods) else []
    levels = topology.levels
    problems = []
    if isinstance(torus, Torus) and torus.twisted and not is_twistable(torus.shape):
        problems.append(f"cluster.topology: found a twisted torus of shape {torus.shape}; {LEGAL} is required")
    if not levels or min(levels) < 1 or math.prod(levels) > MOST_DEVICES:
        problems.append(f"cluster.topology: sizes are {levels}; sizes of 1 to {MOST_DEVICES:,} devices are required")
    for link in links:
        if isinstance(link, Tier) and link.links and link.links < link.size - 1:
            problems.append(
                f"cluster.topology: {link.links} links join {link.size} devices of {link.name}; a link to each other is required"
            )
        fraction = link.fraction if isinstance(link, Tier) else 1.0
        latencies = [] if isinstance(link, Pods) else [link.hop_latency_s]
        latencies += [link.base_latency_s] if isinstance(link, Tier) else []
        if not (1 <= link.bytes_per_s <= MOST and 1e-6 <= fraction <= 1 and all(0 <= late <= 1 for late in latencies)):
            problems.append(
                f"cluster.topology: bytes_per_s {link.bytes_per_s:g}, fraction {fraction:g}, latencies {latencies}; at least "
                "1 byte/s, a fraction of at most 1 and latencies of 0 to 1 s are required"
            )
    return problems


def _parse_policy(payload: Payload, cluster: Cluster) -> IssuePolicy:
    """The issue policy of a plan; a file of an earlier version has none, and takes that of its stack."""
    return (
        parse(IssuePolicy, payload["issue_policy"], "issue_policy") if "issue_policy" in payload else policy_of(cluster)
    )


def _list(payload: Payload, key: str) -> list[Any]:
    return parse(list[Any], payload.get(key, []), key)


def _parse_alternative(payload: Any, model: Architecture, job: Job) -> Alternative:
    if not isinstance(payload, dict) or not {"layout", "estimate", "reason"} <= payload.keys():
        raise InputError("alternatives: each needs a layout, an estimate and a reason; plan again with this version")
    return Alternative(
        layout=parse_layout(payload["layout"], model, job), estimate=parse(Estimate, payload["estimate"], "alternative"),
        reason=str(payload["reason"]),
    )  # fmt: skip


def parse_layout(payload: Mapping[str, Any], model: Architecture, job: Job) -> Layout:
    """A layout from its payload's keys. Derived keys may be given, and must then be what follows from the others.

    `layers_per_stage` may say what is natural; only other numbers are a choice, and are kept as one.
    """
    own = dict(parse(dict[str, Any], payload, "layout"))
    given, text = {key: own.pop(key) for key in DERIVED if key in own}, own.pop("text", None)
    if isinstance(own.get("placement"), Mapping):
        own["placement"] = _only(Placement, own["placement"])
    layout = settled_layout(parse(Layout, own, "layout"), given, model, job)
    if text is not None and _placed_anywhere(Layout.parse(str(text)), model) != _placed_anywhere(layout, model):
        raise InputError(
            f"layout: text is {text!r}, but {str(layout)!r} follows from the rest; leave it out or change the others"
        )
    return layout


def _placed_anywhere(layout: Layout, model: Architecture) -> Layout:
    """The layout without its placement, which a text may leave out."""
    return replace(_natural(layout, model), placement=None)


def settled_layout(layout: Layout, given: Mapping[str, Any], model: Architecture, job: Job) -> Layout:
    """A layout of a model and job. Raises `InputError` where what is given of `DERIVED` does not follow from it."""
    layout = _natural(layout, model)
    degrees = degrees_of(layout)
    follows = {
        "num_micro_batches": num_micro_batches(job, degrees),
        "max_seqs_per_replica": seqs_per_replica(job, degrees),
    }
    wrong = [
        f"layout: {key} is {given[key]!r}, but {value!r} follows from the rest; leave it out or change the degrees"
        for key, value in follows.items()
        if key in given and given[key] != value
    ]
    if wrong:
        raise InputError(*wrong)
    return layout


def _natural(layout: Layout, model: Architecture) -> Layout:
    """The layout without layers per stage, if these are the natural ones."""
    if layout.pp * layout.num_virtual_stages > model.num_layers + MOST_EMPTY:  # the legality rules report what is wrong
        return layout
    return (
        replace(layout, layers_per_stage=None)
        if held_layers(model, layout) == layers_per_stage(model, stages_on_ranks(layout))
        else layout
    )


def _only(kind: type, payload: Mapping[str, Any]) -> Payload:
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in payload.items() if key in names}


def parse(kind: type[Value], payload: Any, what: str) -> Value:
    """A dataclass value from plain data. Raises `InputError` with one line for each field that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(payload)
    except ValidationError as error:
        lines = [
            f"{what}: {'.'.join(map(str, e['loc'])) or 'value'}: found {_shown(e['input'])}; {e['msg']}"
            for e in error.errors()
        ]
        raise InputError(*lines) from None


def _shown(value: Any) -> str:
    """A value in an error: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
