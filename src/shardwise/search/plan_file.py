"""Plan files: a plan as JSON, written and read again; `plan --json` and `estimate --json` print the same payload.

Entry points: `dump_plan` and `load_plan` for files, `plan_payload` and `parse_plan` for the payload. Older versions of the
schema are read as well; an unknown one is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from shardwise.batch_size import LossTarget
from shardwise.book_formulas import Rule
from shardwise.hardware import MAX_QUANTITY, Calibration, Chip, Cluster, Pods, Switched, Tier, Topology, Torus
from shardwise.hardware.calibration_constants import unscale_rates
from shardwise.hardware.network.torus import TWISTABLE_SHAPES, is_twistable
from shardwise.hardware.toml_tables import MAX_DEVICES
from shardwise.layout import Layout, LayoutFacts
from shardwise.layout.payload import parse_layout
from shardwise.model import Architecture, Job, ModelFacts, get_optimizer
from shardwise.price import Estimate, Run
from shardwise.price.roofline import issue_policy
from shardwise.search.plan import (
    Alternative,
    BatchAdvice,
    LayoutPlan,
    Plan,
    PublishedComparison,
    SearchSummary,
    advise_batch,
)
from shardwise.values import (
    FileMessages,
    Flat,
    InputError,
    IssuePolicy,
    MergedFields,
    OmitEmpty,
    Payload,
    Precision,
    get_precision,
    parse_dataclass,
    raise_problems,
    read_json,
    short_repr,
    to_json,
)
from shardwise.values.payload import known_fields

PLAN_SCHEMA = "shardwise.plan/3"
PLAN_SCHEMA_1 = "shardwise.plan/1"  # its topology is at the rates that are reached, not at the rated ones
PLAN_SCHEMA_2 = "shardwise.plan/2"  # the reliability of its run, as of the first, is called `operations`
JsonObject = dict[str, Any]


def dump_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON, with everything that it depends on; `load_plan` reads it.

    Raises `InputError` if the file cannot be written. The schema is `shardwise.plan/3` (`json_schemas("plan")`).

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

    Nothing is planned again: layout and estimate are those of the file. Raises `InputError` for a file that is missing or is
    not JSON, for an unknown schema, and with one line for each wrong field.

    >>> load_plan("missing/plan.json")
    Traceback (most recent call last):
    shardwise.values.errors.InputError: plan file: cannot read missing/plan.json: No such file or directory
    """
    source = Path(path)
    payload = read_json(source, FileMessages("plan file: "), finite=True)
    return parse_plan(payload, f"plan file {source}")


def is_plan_file(path: str | Path) -> bool:
    """Return True if a file has the schema of a plan; it may still be a broken one."""
    try:
        payload = read_json(path)
    except InputError:
        return False
    return isinstance(payload, dict) and str(payload.get("schema", "")).startswith("shardwise.plan/")


def parse_plan(payload: Any, payload_name: str = "plan") -> Plan:
    """Parse a plan from its payload; `payload_name` names it in errors. Raises `InputError` with each wrong field."""
    schema = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or schema not in (PLAN_SCHEMA, PLAN_SCHEMA_2, PLAN_SCHEMA_1):
        is_other = not str(schema).startswith("shardwise.plan/")
        fix = "`shardwise plan MODEL CLUSTER --out FILE` writes one" if is_other else "plan again with this version"
        raise InputError(f"{payload_name}: found schema {short_repr(schema)}; {PLAN_SCHEMA!r} is required: {fix}")
    missing = [
        key for key in ("model", "cluster", "job", "layout", "estimate") if not isinstance(payload.get(key), dict)
    ]
    if missing:
        raise InputError(f"plan: {', '.join(missing)} missing; plan again with this version")
    model = parse_dataclass(Architecture, known_fields(Architecture, payload["model"]), "model")
    job = parse_dataclass(Job, known_fields(Job, payload["job"]), "job")
    cluster = parse_cluster(payload["cluster"], scaled=schema == PLAN_SCHEMA_1)
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        layout=parse_layout(payload["layout"], model, job),
        estimate=_read_estimate(payload["estimate"], "estimate"),
        alternatives=tuple(_parse_alternative(alternative, model, job) for alternative in _parse_list(payload, "alternatives")),
        rules=tuple(parse_dataclass(Rule, rule, "rule") for rule in _parse_list(payload, "rules")),
        search=parse_dataclass(SearchSummary, payload["search"], "search") if payload.get("search") else None,
        versions=parse_dataclass(dict[str, str], payload.get("versions", {}), "versions"),
        run=_parse_run(payload["run"], renamed=schema != PLAN_SCHEMA) if payload.get("run") else None,
        bound_s=parse_dataclass(float, payload["bound_s"], "bound_s") if payload.get("bound_s") is not None else None,
        policy=_parse_policy(payload, cluster),
        to_loss=parse_dataclass(LossTarget, payload["to_loss"], "to_loss") if payload.get("to_loss") else None,
        defaults=parse_dataclass(tuple[str, ...], payload.get("defaults", []), "defaults"),
    )  # fmt: skip


def _parse_run(payload: Any, *, renamed: bool) -> Run:
    """Parse a run; `renamed`: its reliability has the key of older plans."""
    if renamed and isinstance(payload, Mapping):
        payload = {"reliability" if key == "operations" else key: value for key, value in payload.items()}
    return parse_dataclass(Run, payload, "run")


def parse_cluster(payload: Mapping[str, Any], *, scaled: bool = False) -> Cluster:
    """Parse a cluster; `scaled`: the rates of the topology are the reached ones of its calibration, not the rated ones."""
    topology_fields = parse_dataclass(dict[str, Any], payload.get("topology"), "cluster.topology")
    kind = topology_fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in TOPOLOGIES:
        raise InputError(f"cluster.topology: found kind {short_repr(kind)}; one of {', '.join(TOPOLOGIES)} is required")
    chip = parse_dataclass(Chip, payload.get("chip_specification"), "cluster.chip_specification")
    topology = parse_dataclass(TOPOLOGIES[kind], topology_fields, "cluster.topology")
    raise_problems(_topology_problems(topology))
    stored = payload.get("calibration")
    calibration = None if stored is None else parse_dataclass(Calibration, stored, "cluster.calibration")
    if scaled and calibration is not None:
        topology = unscale_rates(topology, calibration["link_fraction"], calibration["network_fraction"])
    return Cluster(name=str(payload.get("name")), chip=chip, topology=topology, calibration=calibration)


def _topology_problems(topology: Topology) -> list[str]:
    """List impossible sizes, rates and latencies."""
    torus = topology.torus if isinstance(topology, Pods) else topology
    links: list[Torus | Tier | Pods] = [torus] if isinstance(torus, Torus) else list(torus.tiers)
    links += [topology] if isinstance(topology, Pods) else []
    levels = topology.levels
    problems = []
    if isinstance(torus, Torus) and torus.twisted and not is_twistable(torus.shape):
        problems.append(
            f"cluster.topology: found a twisted torus of shape {torus.shape}; {TWISTABLE_SHAPES} is required"
        )
    if not levels or min(levels) < 1 or math.prod(levels) > MAX_DEVICES:
        problems.append(f"cluster.topology: sizes are {levels}; sizes of 1 to {MAX_DEVICES:,} devices are required")
    for link in links:
        if isinstance(link, Tier) and link.links and link.links < link.size - 1:
            problems.append(
                f"cluster.topology: {link.links} links join {link.size} devices of {link.name}; a link to each other is required"
            )
        fraction = link.fraction if isinstance(link, Tier) else 1.0
        latencies = [] if isinstance(link, Pods) else [link.hop_latency_s]
        latencies += [link.base_latency_s] if isinstance(link, Tier) else []
        if not (
            1 <= link.bytes_per_s <= MAX_QUANTITY
            and 1e-6 <= fraction <= 1
            and all(0 <= latency_s <= 1 for latency_s in latencies)
        ):
            problems.append(
                f"cluster.topology: bytes_per_s {link.bytes_per_s:g}, fraction {fraction:g}, latencies {latencies}; at least "
                "1 byte/s, a fraction of at most 1 and latencies of 0 to 1 s are required"
            )
    return problems


def _parse_policy(payload: JsonObject, cluster: Cluster) -> IssuePolicy:
    """Parse the issue policy; a file of an earlier version has none and takes that of its stack."""
    return (
        parse_dataclass(IssuePolicy, payload["issue_policy"], "issue_policy")
        if "issue_policy" in payload
        else issue_policy(cluster)
    )


def _parse_list(payload: JsonObject, key: str) -> list[Any]:
    return parse_dataclass(list[Any], payload.get(key, []), key)


def _parse_alternative(payload: Any, model: Architecture, job: Job) -> Alternative:
    if not isinstance(payload, dict) or not {"layout", "estimate", "reason"} <= payload.keys():
        raise InputError("alternatives: each needs a layout, an estimate and a reason; plan again with this version")
    return Alternative(
        layout=parse_layout(payload["layout"], model, job),
        estimate=_read_estimate(payload["estimate"], "alternative"),
        reason=str(payload["reason"]),
    )  # fmt: skip


def _read_estimate(payload: Any, label: str) -> Estimate:
    """Return an estimate; plans of before the verdict on memory have the two values of `fits`."""
    if not isinstance(payload, dict):
        raise InputError(f"{label}: found {short_repr(payload)}; an object is required")
    if (largest := max(_numbers(payload), default=0.0)) > MAX_QUANTITY:
        raise InputError(f"{label}: found {largest:g}; numbers of at most {MAX_QUANTITY:g} are required")
    verdict = "fits" if payload.get("fits") else "does not fit"
    return parse_dataclass(Estimate, {"verdict": verdict, **payload}, label)


def _numbers(payload: Any) -> Iterator[float]:
    """Yield the sizes of all numbers in a payload."""
    children = payload.values() if isinstance(payload, dict) else payload if isinstance(payload, list) else ()
    for child in children:
        yield from _numbers(child)
    if isinstance(payload, (int, float)):
        yield abs(payload)


TOPOLOGIES: Mapping[str, type[Topology]] = {"torus": Torus, "pods": Pods, "switched": Switched}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts(Payload):
    """A cluster: the chip by name and with all its values, the network at its rated links, and what was measured (or null)."""

    name: str
    chip: str
    num_devices: int
    chip_specification: Chip
    topology: (
        Annotated[JsonObject, MergedFields(Torus, kind=Literal["torus"])]
        | Annotated[JsonObject, MergedFields(Pods, kind=Literal["pods"])]
        | Annotated[JsonObject, MergedFields(Switched, kind=Literal["switched"])]
    )
    calibration: Calibration | None

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterFacts:
        """Return the facts of a cluster."""
        kind = next(name for name, kind in TOPOLOGIES.items() if isinstance(cluster.topology, kind))
        return cls.from_attributes(
            cluster,
            chip=cluster.chip.name,
            chip_specification=cluster.chip,
            topology={"kind": kind, **asdict(cluster.topology)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts(Payload):
    """A job, the values of its precision recipe, and of its optimizer's fields unless a run's recipe sets others."""

    job: Annotated[Job, Flat]
    precision_recipe: Precision
    optimizer_fields: Mapping[str, float]

    @classmethod
    def of(cls, job: Job) -> JobFacts:
        """Return the facts of a job."""
        fields_of_optimizer = get_optimizer(job.optimizer).resolve_hyperparameters({})
        return cls(job=job, precision_recipe=get_precision(job.precision), optimizer_fields=fields_of_optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeRecord(Payload):
    """Rejected layout, with its cost and the reason."""

    layout: LayoutFacts
    estimate: Estimate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Payload):
    """A plan. `smallest_change` is present where `estimate` prices a layout that does not fit.

    `defaults` is present where something was left out and assumed: `seq_len`, `batch_tokens` or `layout`. `batch_advice` is
    present where the batch is too small for the devices, and `published` where there are published runs near the plan.
    """

    SCHEMA = PLAN_SCHEMA
    model: ModelFacts
    cluster: ClusterFacts
    job: JobFacts
    layout: LayoutFacts
    estimate: Estimate
    alternatives: Sequence[AlternativeRecord]
    rules: Sequence[Rule]
    search: SearchSummary | None
    versions: Mapping[str, str]
    run: Run | None
    bound_s: float | None
    issue_policy: IssuePolicy
    to_loss: LossTarget | None
    defaults: Annotated[Sequence[str], OmitEmpty]
    smallest_change: Annotated[str, OmitEmpty] = ""
    batch_advice: Annotated[BatchAdvice | None, OmitEmpty] = None
    published: Annotated[PublishedComparison | None, OmitEmpty] = None

    @classmethod
    def of(cls, plan: Plan, smallest_change: str = "") -> PlanRecord:
        """Return the record of a plan."""
        return cls.from_attributes(
            plan, model=ModelFacts.of(plan.model), cluster=ClusterFacts.of(plan.cluster), job=JobFacts.of(plan.job),
            layout=layout_of_plan(plan), issue_policy=plan.policy, smallest_change=smallest_change,
            batch_advice=advise_batch(plan),
            alternatives=[
                AlternativeRecord.from_attributes(alternative, layout=layout_of_plan(plan, alternative.layout))
                for alternative in plan.alternatives
            ],
        )  # fmt: skip

    @classmethod
    def of_layout_plan(cls, priced: LayoutPlan) -> PlanRecord:
        """Return the record of a priced layout: its plan, and for one that does not fit the smallest change that would."""
        return cls.of(priced.plan, priced.smallest_change or "")


def plan_payload(plan: Plan) -> JsonObject:
    """Return the versioned payload that `plan --json` prints."""
    payload: JsonObject = to_json(PlanRecord.of(plan))
    return payload


def layout_of_plan(plan: Plan, layout: Layout | None = None) -> LayoutFacts:
    """Return the facts of the layout of a plan, or of another layout of its job."""
    return LayoutFacts.of(layout or plan.layout, plan.model, plan.job, plan.cluster.topology)
