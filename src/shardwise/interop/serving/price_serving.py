"""Price the launch of an engine on a cluster under a load, and judge whether it fits, as far as all of it is priced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.hardware import Cluster
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.faster_launches import FasterServingLaunch, list_faster_launches
from shardwise.interop.serving.read_serving import ReadServing
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.serve import (
    BatchLimits,
    Prediction,
    ServingEstimate,
    ServingFormats,
    ServingLayout,
    ServingMemory,
    ServingProblem,
    ServingVerdict,
    Workload,
    estimate_serving,
)
from shardwise.values import InputError, Payload
from shardwise.values.errors import join_words

# The load of a launch that says none, as no engine's options do.
DEFAULT_WORKLOAD = Workload(isl=1024, osl=1024, concurrency=64)
NO_LOAD_NOTE = (
    f"the launch says no load: priced with {DEFAULT_WORKLOAD.isl:,} tokens in, {DEFAULT_WORKLOAD.osl:,} out and "
    f"{DEFAULT_WORKLOAD.concurrency:g} requests at once; --isl, --osl and --concurrency or --rate say another"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingField:
    """A field of a launch by dotted name, its value as a text ("": the engine's default), and what it was read from."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedServing:
    """A launch that was read, its price, and changes on the same devices that are `faster`.

    `estimate` is None without a cluster, or where the model is not known; `reason` says why. `verdict` says whether it fits; it
    is "not known" where something changes the memory that is not priced.
    """

    reading: ReadServing
    cluster: Cluster | None
    workload: Workload | None
    estimate: ServingEstimate | None
    verdict: ServingVerdict
    reason: str = ""
    faster: tuple[FasterServingLaunch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[ServingField, ...]:
        """Fields of the launch with what each was read from."""
        return tuple(list_fields(self.reading))


def price_serving(reading: ReadServing, cluster: Cluster | None, workload: Workload | None) -> PricedServing:
    """Return a launch with what it costs on a cluster.

    Without a workload it is that of `DEFAULT_WORKLOAD`, and a note says so. Raises `InputError` for a layout that the model or
    the cluster does not allow, and for requests that are longer than the launch takes.
    """
    launch, notes = reading.launch, []
    if cluster is None:
        return _unpriced(reading, None, workload, "no cluster is named; --cluster prices it, such as h100:8")
    if launch.architecture is None or not reading.model_is_known:
        return _unpriced(reading, cluster, workload, model_reason(reading))
    if launch.pool is not None:
        reason = (
            f"the launch is the {launch.pool} pool of a disaggregated deployment, which is not priced by itself: what it gives "
            "follows from both pools and the transfer of the cache between them; give the commands of both"
        )
        return _unpriced(reading, cluster, workload, reason)
    load = workload or DEFAULT_WORKLOAD
    if workload is None:
        notes.append(NO_LOAD_NOTE)
    require_length(launch, load)
    problem = ServingProblem(
        architecture=launch.architecture, cluster=cluster, workload=load, engine=launch.engine, formats=launch.formats,
        batch_limits=reading.engine.limits_with_fraction(launch.batch_limits),
    )  # fmt: skip
    estimate = estimate_serving(problem, launch.layout)
    verdict: ServingVerdict = estimate.verdict if reading.memory_is_known else "not known"
    return PricedServing(
        reading=reading, cluster=cluster, workload=load, estimate=estimate, verdict=verdict,
        reason="" if reading.memory_is_known else memory_reason(reading), notes=tuple(notes),
        faster=tuple(list_faster_launches(reading, estimate)),
    )  # fmt: skip


def require_length(launch: ServingLaunch, load: Workload) -> None:
    """Raise `InputError` for requests that are longer than a launch takes."""
    if launch.max_model_len is None and launch.architecture is not None:
        option = ENGINES[launch.engine].field_options["max_model_len"][0]
        launch.architecture.require_context(load.total_tokens, f"--{option} {load.total_tokens} in the launch")
    if launch.max_model_len is not None and load.total_tokens > launch.max_model_len:
        raise InputError(
            f"workload: requests of {load.total_tokens:,} tokens; at most the {launch.max_model_len:,} that the launch takes are "
            "required"
        )


def _unpriced(reading: ReadServing, cluster: Cluster | None, workload: Workload | None, reason: str) -> PricedServing:
    return PricedServing(
        reading=reading, cluster=cluster, workload=workload, estimate=None, verdict="not known", reason=reason
    )  # fmt: skip


def model_reason(reading: ReadServing) -> str:
    """Return why the model of a launch is not known."""
    changed = [name for name, effect in reading.not_priced.items() if effect == "model"]
    reason = (
        f"{join_words(changed, 'and')} {'makes' if len(changed) == 1 else 'make'} the model another one than its name says"
        if changed
        else f"the catalogue has no model {reading.launch.checkpoint[:80]!r}"
    )
    return f"{reason}; --model names one, or gives its config.json"


def memory_reason(reading: ReadServing) -> str:
    """Return which options and variables change the memory without being priced."""
    names = [name for name, effect in reading.not_priced.items() if effect == "memory"]
    verb = "changes" if len(names) == 1 else "change"
    return f"{join_words(names, 'and')} {verb} the memory, which is not priced"


def list_fields(reading: ReadServing) -> Iterator[ServingField]:
    """Yield the fields of a launch: the model, the layout, formats and limits."""
    launch, origins = reading.launch, reading.origins
    yield ServingField(name="engine", value=f"{reading.engine.title} {reading.engine.version}", origin=reading.source)
    model = launch.architecture.name if launch.architecture else "not known"
    yield ServingField(name="model", value=model, origin=launch.checkpoint)
    if launch.pool is not None:
        yield ServingField(name="pool", value=launch.pool, origin=origins["pool"])
    limits, layout = launch.batch_limits, launch.layout
    values: Mapping[str, Any] = {
        "layout.tp": layout.tp, "layout.attention_dp": layout.attention_dp, "layout.pp": layout.pp, "layout.cp": layout.cp,
        "layout.ep": layout.ep, "layout.dispatch": layout.dispatch, "layout.redundant_experts": layout.redundant_experts,
        "layout.replicas": layout.replicas, "formats": _without_cache(launch.formats),
        "formats.cache": launch.formats.cache, "batch_limits.max_num_seqs": limits.max_num_seqs,
        "batch_limits.max_batched_tokens": limits.max_batched_tokens, "batch_limits.memory_fraction": limits.memory_fraction,
        "batch_limits.chunked_prefill": limits.chunked_prefill, "batch_limits.mtp_tokens": limits.mtp_tokens,
        "max_model_len": launch.max_model_len,
    }  # fmt: skip
    if limits.admission_passes > 1:
        values = {**values, "batch_limits.admission_passes": limits.admission_passes}
    for name, value in values.items():
        if name not in origins:  # a form that the engine has no option for
            continue
        text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        is_default = value == 1 and name in ("layout.attention_dp", "layout.replicas")  # one option says either
        origin = f"default of {reading.engine.title} {reading.engine.version}" if is_default else origins[name]
        if name == "layout.replicas" and reading.replicas is not None and reading.replicas > 1:
            origin = f"{reading.replicas} replicas of {reading.source}"
        if name == "formats" and origin.startswith("default"):
            origin = f"checkpoint {launch.checkpoint}"
        yield ServingField(name=name, value=text, origin=origin)


def _without_cache(formats: ServingFormats) -> str:
    return str(ServingFormats(weights=formats.weights, attention=formats.attention, experts=formats.experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFiguresRead:
    """Price of a launch that was read. Times are seconds."""

    ttft_s: Prediction
    tpot_s: Prediction
    tokens_per_s_per_device: Prediction
    requests_per_s: float
    bound: str
    memory: ServingMemory
    usd_per_million_output_tokens: Prediction | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunchRecord(Payload):
    """Launch of an engine: what it says, by field with what each was read from, and what it costs.

    `not_priced` are options and variables with what they change: model, memory or time. `price` is null where it is not known,
    and `reason` says why; `verdict` is "not known" where the memory is.
    """

    SCHEMA = "shardwise.serving-launch/1"
    engine: str
    release: str
    checkpoint: str
    model_name: str | None
    layout: ServingLayout
    formats: ServingFormats
    batch_limits: BatchLimits
    max_model_len: int | None
    fields: Sequence[ServingField]
    not_priced: Mapping[str, str]
    unread: Sequence[str]
    workload: Workload | None
    verdict: ServingVerdict
    reason: str
    price: ServingFiguresRead | None
    faster: Sequence[FasterServingLaunch]
    notes: Sequence[str]

    @classmethod
    def of(cls, priced: PricedServing) -> ServingLaunchRecord:
        """Return the record of a launch."""
        reading, estimate = priced.reading, priced.estimate
        launch = reading.launch
        price = None if estimate is None else ServingFiguresRead(
            ttft_s=estimate.ttft_s, tpot_s=estimate.tpot_s, tokens_per_s_per_device=estimate.tokens_per_s_per_device,
            requests_per_s=estimate.requests_per_s, bound=estimate.bound, memory=estimate.memory,
            usd_per_million_output_tokens=estimate.usd_per_million_output_tokens, notes=estimate.notes,
        )  # fmt: skip
        return cls(
            engine=launch.engine, release=reading.engine.version, checkpoint=launch.checkpoint,
            model_name=launch.architecture.name if launch.architecture else None, layout=launch.layout, formats=launch.formats,
            batch_limits=launch.batch_limits, max_model_len=launch.max_model_len, fields=priced.fields,
            not_priced=reading.not_priced, unread=reading.unread, workload=priced.workload, verdict=priced.verdict,
            reason=priced.reason, price=price, faster=priced.faster, notes=(*reading.notes, *priced.notes),
        )  # fmt: skip
