"""`serve`: what a serving configuration gives, which one to run, and what an engine's launch costs. Its kinds are functions:
estimate, plan and read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from shardwise import search, serve
from shardwise.hardware import Cluster, load_cluster
from shardwise.hardware.cluster import replace_chip
from shardwise.model import Architecture, load_model
from shardwise.model.load import override_architecture
from shardwise.present import charts
from shardwise.present.arguments import CLUSTER_HELP, MODEL_HELP, ClusterName, Model, overrides_argument
from shardwise.present.exports import picture
from shardwise.present.verb import Argument, Export, Mode, read_arguments, require_known_fields, verb
from shardwise.present.verbs.serving_launches import LAUNCH, serve_read
from shardwise.serve import (
    WEIGHT_FORMATS,
    BatchLimits,
    LatencyLimits,
    PooledLayout,
    ServingFormats,
    ServingLayout,
)
from shardwise.serve.engines import serving_engine_names
from shardwise.serve.formats import CACHE_FORMATS
from shardwise.values import (
    InputError,
    apply_overrides,
    argument_label,
    parse_count,
    parse_duration,
    parse_overrides,
    parse_quantity,
    raise_problems,
    run_all,
)

if TYPE_CHECKING:
    from shardwise.interop import PricedPools, PricedServing
    from shardwise.search.serving.serving_plan import ServingPlan
    from shardwise.serve import PooledEstimate, ServingEstimate

Kind = Literal["estimate", "plan", "read"]
LOAD, ENGINE, LIMITS = "load", "engine", "limits"
SERVED_ROOMS = ("model", "chip")
PLAN_EXPORTS = ("out", "pareto")
READ_CLUSTER = "launch_cluster"  # the flag --cluster of `serve read`
ModelOrLaunch = Annotated[
    "str | os.PathLike[str] | Architecture",
    Argument(metavar="MODEL", group="model", completes="models", help=f"{MODEL_HELP}; of read: the launch"),
]
OptionalCluster = Annotated[
    "str | os.PathLike[str] | Cluster | None",
    Argument(group="cluster", completes="clusters", optional=True, help=CLUSTER_HELP),
]
FORMAT_FIELDS = {"weights": "weights", "expert_weights": "experts", "attention_weights": "attention", "cache": "cache"}


class ServingFields(TypedDict, total=False):
    """Arguments of both kinds: lengths of requests, the engine, formats, limits that it starts with, replaced values."""

    isl: Annotated[int | str, Argument(flag="--isl", group=LOAD, metavar="N", help="mean input tokens of a request")]
    osl: Annotated[
        int | str,
        Argument(flag="--osl", group=LOAD, metavar="N", help="mean output tokens of a request"),
    ]
    cached_tokens: Annotated[
        int | str,
        Argument(
            flag="--cached", group=LOAD, metavar="N", help="input tokens that are in the cache already (default: 0)"
        ),
    ]
    rate_per_s: Annotated[
        float | str | None,
        Argument(
            flag="--rate", group=LOAD, metavar="N/s", help="requests that arrive, such as 4/s or 600/min, at random"
        ),
    ]
    engine: Annotated[
        str,
        Argument(
            flag="--engine",
            group=ENGINE,
            metavar="NAME",
            choices=serving_engine_names,
            help="the engine that serves (default: vllm)",
        ),
    ]
    release: Annotated[
        str | None,
        Argument(
            flag="--release", group=ENGINE, metavar="VERSION", help="its release (default: the newest with constants)"
        ),
    ]
    weights: Annotated[
        str,
        Argument(
            flag="--weights",
            group=ENGINE,
            metavar="NAME",
            choices=tuple(WEIGHT_FORMATS),
            help="format in which matrices rest (default: as the model is published)",
        ),
    ]
    expert_weights: Annotated[
        str | None,
        Argument(
            flag="--expert-weights",
            group=ENGINE,
            metavar="NAME",
            choices=tuple(WEIGHT_FORMATS),
            help="format of routed experts, where it differs",
        ),
    ]
    attention_weights: Annotated[
        str | None,
        Argument(
            flag="--attention-weights",
            group=ENGINE,
            metavar="NAME",
            choices=tuple(WEIGHT_FORMATS),
            help="format of attention's projections, where it differs",
        ),
    ]
    cache: Annotated[
        str,
        Argument(
            flag="--cache",
            group=ENGINE,
            metavar="NAME",
            choices=CACHE_FORMATS,
            help="format of keys and values (default: bf16)",
        ),
    ]
    max_num_seqs: Annotated[
        int | str | None,
        Argument(
            flag="--max-num-seqs",
            group=ENGINE,
            metavar="N",
            help="requests that run at once in a copy of attention (default: the engine's)",
        ),
    ]
    max_batched_tokens: Annotated[
        int | str | None,
        Argument(
            flag="--max-batched-tokens", group=ENGINE, metavar="N", help="tokens of a pass (default: the engine's)"
        ),
    ]
    memory_fraction: Annotated[
        float | str | None,
        Argument(
            flag="--memory-fraction",
            group=ENGINE,
            metavar="X",
            help="the engine's own share of memory: vLLM's --gpu-memory-utilization, SGLang's --mem-fraction-static",
        ),
    ]
    mtp_tokens: Annotated[
        int | str,
        Argument(flag="--draft-tokens", group=ENGINE, metavar="N", help="tokens drafted in each pass (default: 0)"),
    ]
    acceptance: Annotated[
        float | str,
        Argument(flag="--acceptance", group=ENGINE, metavar="X", help="share of drafted tokens that is accepted"),
    ]
    calibration: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--calibration",
            group=ENGINE,
            metavar="FILE",
            help="factors from results of the engine's benchmark (see: calibrate)",
        ),
    ]
    overrides: Annotated[
        Sequence[str], overrides_argument("model or chip", "chip.price_usd_per_hour=2.5", group="cluster")
    ]


def parse_rate(text: float | str, label: str) -> float:
    """Return requests per second of a number, or of texts such as "4/s", "600/min" and "1e5/h".

    >>> parse_rate("600/min", "rate"), parse_rate(4, "rate")
    (10.0, 4.0)
    """
    number, slash, unit = str(text).partition("/")
    seconds = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}.get(unit.strip() if slash else "")
    if seconds is None:
        raise InputError(f"{label}: found {text!r}; a number per s, min, h or d is required, such as 4/s")
    return parse_quantity(number, label=label) / seconds


def _resolve(model: Any, cluster: Any, fields: Mapping[str, Any], limits: LatencyLimits) -> search.ServingQuestion:
    """Return the question that arguments stand for. Raises `InputError` with all that is wrong with them."""
    require_known_fields(fields, ServingFields, required=("isl", "osl"))
    changes = parse_overrides(fields.get("overrides", ()), SERVED_ROOMS)
    architecture, loaded, isl, osl, cached, rate, batch_limits = run_all(
        lambda: model if isinstance(model, Architecture) else load_model(os.fspath(model)),
        lambda: cluster if isinstance(cluster, Cluster) else load_cluster(os.fspath(cluster)),
        lambda: parse_count(fields["isl"], label=argument_label("isl")),
        lambda: parse_count(fields["osl"], label=argument_label("osl")),
        lambda: parse_count(fields.get("cached_tokens", 0), label=argument_label("cached_tokens"), minimum=0),
        lambda: (
            None if fields.get("rate_per_s") is None else parse_rate(fields["rate_per_s"], argument_label("rate_per_s"))
        ),
        lambda: _batch_limits(fields),
    )
    architecture = override_architecture(architecture, changes["model"])
    architecture.require_context(isl + osl)
    raise_problems(_draft_problems(architecture, batch_limits))
    loaded = replace_chip(loaded, apply_overrides(loaded.chip, changes["chip"], "chip"))
    formats = _resolve_formats(architecture, fields)
    engine, path = fields.get("engine", "vllm"), fields.get("calibration")
    calibration = None if path is None else serve.load_serving_calibration(path, engine=engine, chip=loaded.chip.name)
    return search.ServingQuestion(
        architecture=architecture, cluster=loaded, isl=isl, osl=osl, cached_tokens=cached, rate_per_s=rate,
        engine=engine, release=fields.get("release"), formats=formats, batch_limits=batch_limits, latency_limits=limits,
        calibration=calibration,
    )  # fmt: skip


def _resolve_formats(architecture: Architecture, fields: Mapping[str, Any]) -> ServingFormats:
    """Return the formats that were named; without any those that the model is published in."""
    named = {part: fields[name] for name, part in FORMAT_FIELDS.items() if fields.get(name) is not None}
    published = ServingFormats() if "weights" in named else serve.published_formats(architecture)
    return replace(published, **named)


def _batch_limits(fields: Mapping[str, Any]) -> BatchLimits:
    def number(name: str, default: Any = None) -> Any:
        value = fields.get(name, default)
        return None if value is None else parse_quantity(value, label=argument_label(name))

    def count(name: str, default: int | None = None, minimum: int = 1) -> Any:
        value = fields.get(name, default)
        return None if value is None else parse_count(value, label=argument_label(name), minimum=minimum)

    return BatchLimits(
        max_num_seqs=count("max_num_seqs"), max_batched_tokens=count("max_batched_tokens"),
        memory_fraction=number("memory_fraction"), mtp_tokens=count("mtp_tokens", 0, minimum=0),
        acceptance=number("acceptance", 0.0),
    )  # fmt: skip


def _draft_problems(architecture: Architecture, limits: BatchLimits) -> list[str]:
    """Return what is wrong with drafted tokens and their acceptance, by the names of the arguments."""
    label = argument_label("mtp_tokens")
    problems = list(serve.draft_problems(architecture, limits.mtp_tokens, label))
    if limits.acceptance and not limits.mtp_tokens:
        problems.append(
            f"{argument_label('acceptance')} is {limits.acceptance:g}, and no tokens are drafted; {label} of at least 1 is "
            "required, or leave it out"
        )
    return problems


def serve_estimate(
    model: Model, cluster: ClusterName, *,
    layout: Annotated[
        str | ServingLayout | PooledLayout | None,
        Argument(
            flag="--layout", group=ENGINE, metavar="TEXT", parse=str,
            help='such as "tp=8", "tp=1 attention_dp=8 ep=8 replicas=2", or of pools "prefill: tp=4; decode: tp=8 replicas=2" '
            "(default: tp over the whole cluster, and experts over ep where tp does not split theirs)",
        ),
    ] = None,
    concurrency: Annotated[
        float | str | None,
        Argument(flag="--concurrency", group=LOAD, metavar="N", help="requests in the system at any time; or --rate"),
    ] = None,
    **fields: Unpack[ServingFields],
) -> ServingEstimate | PooledEstimate:  # fmt: skip
    """Return what one layout gives under a workload: latencies, throughput, memory, what bounds a pass.

    Without a layout it is `serve.default_serving_layout` of the whole cluster; a layout of pools parts prefill and decode.
    Raises `InputError` with all that is wrong.

    >>> import shardwise as sw
    >>> estimate = sw.serve_estimate("llama-3-8b", "h100:1", isl=1024, osl=1024, concurrency=16)
    >>> estimate.tpot_s.low < estimate.tpot_s.value < estimate.tpot_s.high, estimate.memory.verdict
    (True, 'fits')
    """
    question = _resolve(model, cluster, fields, LatencyLimits())
    if (concurrency is None) == (question.rate_per_s is None):
        state = "neither" if concurrency is None else "both"
        labels = f"{argument_label('concurrency')} and {argument_label('rate_per_s')}"
        raise InputError(f"{labels}: found {state}; one of the two is required, such as --concurrency 64")
    requests = None if concurrency is None else parse_quantity(concurrency, label=argument_label("concurrency"))
    problem = question.problem(concurrency=requests, rate_per_s=question.rate_per_s)
    if layout is None:
        layout = serve.default_serving_layout(question.architecture, question.cluster.num_devices, question.formats)
    elif isinstance(layout, str):
        layout = serve.parse_any_layout(layout, argument_label("layout"))
    if isinstance(layout, PooledLayout):
        return serve.estimate_pools(problem, layout)
    return serve.estimate_serving(problem, layout)


def serve_plan(
    model: Model, cluster: ClusterName, *,
    ttft: Annotated[
        float | str | None,
        Argument(flag="--ttft", group=LIMITS, metavar="TIME", help="longest mean time to the first token, such as 2s"),
    ] = None,
    tpot: Annotated[
        float | str | None,
        Argument(flag="--tpot", group=LIMITS, metavar="TIME", help="longest mean time of a token after it, such as 40ms"),
    ] = None,
    **fields: Unpack[ServingFields],
) -> ServingPlan:  # fmt: skip
    """Return the layout, its instances and the batch limits that serve a load within the limits.

    With a rate those on the fewest devices, without one those that serve the most on the whole cluster. Raises `InputError`
    with all that is wrong; `NothingFitsError` or `MissedLimitError` where the model does not fit or no layout meets the limits.

    >>> import shardwise as sw
    >>> plan = sw.serve_plan("llama-3.1-8b", "h100:8", isl=1000, osl=200, rate_per_s="5/s", tpot="30ms")
    >>> plan.layout.num_devices <= 8, plan.estimate.tpot_s.value <= 0.03, plan.idle_devices == 8 - plan.layout.num_devices
    (True, True, True)
    """
    ttft_s, tpot_s = run_all(lambda: _parse_time(ttft, "ttft"), lambda: _parse_time(tpot, "tpot"))
    return search.plan_serving(_resolve(model, cluster, fields, LatencyLimits(ttft_s=ttft_s, tpot_s=tpot_s)))


def _parse_time(text: float | str | None, name: str) -> float | None:
    if text is None or isinstance(text, (int, float)):
        return text
    try:
        return parse_duration(text, label=argument_label(name))
    except InputError:
        raise InputError(
            f"{argument_label(name)}: found {text!r}; a time above 0 with its unit is required, such as 2s or 40ms"
        ) from None


KINDS: Mapping[Kind, Callable[..., Any]] = {"estimate": serve_estimate, "plan": serve_plan, "read": serve_read}
# What each kind takes beside the arguments that its function declares, and what it needs of them.
SHARED: Mapping[Kind, tuple[str, ...]] = {
    "estimate": ("kind", "out"), "plan": ("kind", *PLAN_EXPORTS),
    "read": ("kind", "model", "cluster", READ_CLUSTER, "isl", "osl", "concurrency", "rate_per_s"),
}  # fmt: skip
REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    "estimate": ("cluster", "isl", "osl"),
    "plan": ("cluster", "isl", "osl"),
    "read": (),
}


def _mode(kind: Kind) -> Mode:
    """Return the mode of a kind, which refuses flags of the others."""

    def check(arguments: Mapping[str, Any]) -> None:
        accepted = {key: {*read_arguments(function), *SHARED[key]} for key, function in KINDS.items()}
        owners = {
            name: [key for key in KINDS if name in accepted[key]] for name in arguments if name not in accepted[kind]
        }
        problems = [
            f"{_flag(name)}: of `serve {' or '.join(kinds)}`, found with `serve {kind}`; leave it out"
            for name, kinds in owners.items()
        ]
        problems += [
            f"{_flag(name)}: missing; `serve {kind}` requires it" for name in REQUIRED[kind] if name not in arguments
        ]
        raise_problems(problems)

    return Mode(
        function=KINDS[kind], applies=lambda arguments: arguments["kind"] == kind, check=check,
        keywords=_read_keywords if kind == "read" else dict,
    )  # fmt: skip


def _flag(name: str) -> str:
    """Return what errors call an argument or an export."""
    return f"--{name}" if name in PLAN_EXPORTS else argument_label(name)


def _read_keywords(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of `serve_read`: the first one is the launch, and the cluster a word or a flag."""
    keywords = {name: value for name, value in arguments.items() if name not in ("kind", "model", READ_CLUSTER)}
    if "cluster" in keywords and READ_CLUSTER in arguments:
        raise InputError(f"{argument_label(READ_CLUSTER)}: a cluster is named twice; leave one out")
    if READ_CLUSTER in arguments:
        keywords["cluster"] = arguments[READ_CLUSTER]
    if "rate_per_s" in keywords:
        keywords["rate_per_s"] = parse_rate(keywords["rate_per_s"], argument_label("rate_per_s"))
    return {**keywords, "launch": arguments["model"]}


@verb(
    description="""What serving a model gives and costs. `estimate` prices one layout: time to the first token, time per token,
tokens per second and device, memory, what bounds a pass. `plan` finds the layout, the number of instances and the batch limits
that serve a rate within limits on latency on the fewest devices, or without a rate the most on the whole cluster. `read` takes
the launch of vLLM, SGLang or TensorRT-LLM (a command line, a script, a manifest, a file of options, a folder of them), or those
of a prefill and a decode pool, and says what it is, what it costs and whether it fits. Nothing of what is read is run.""",
    examples=(
        'shardwise serve estimate qwen3-32b b200:2 --layout "tp=2" --engine vllm --concurrency 64 --isl 8192 --osl 1024',
        "shardwise serve plan llama-3.3-70b h100:8 --isl 2000 --osl 500 --rate 4/s --ttft 2s --tpot 40ms --engine vllm",
        "shardwise serve plan deepseek-v3 h200:32 --isl 4000 --osl 1000 --tpot 30ms --engine sglang --pareto front.svg",
        'shardwise serve read "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-num-seqs 256" --cluster h100:4',
    ),
    modes=tuple(_mode(kind) for kind in KINDS),
    switches={
        READ_CLUSTER: Argument(
            flag="--cluster",
            group=LAUNCH,
            metavar="CLUSTER",
            completes="clusters",
            help="what the launch runs on, such as h100:4",
        )
    },
    exports=(
        Export(
            flag="--out",
            help="of `plan` and `estimate`: write it as JSON, which `shardwise export` takes",
            write=search.dump_serving_plan,
        ),
        picture("--pareto", "of `plan`: draw the tokens/s of a user against those of a device", charts.serving_chart),
    ),
    group_order=("model", "cluster", LOAD, ENGINE, LIMITS, LAUNCH, "output"),
    has_details=True,
)
def serving(
    kind: Annotated[Kind, Argument(group="model", metavar="WHAT", choices=tuple(KINDS), help=" or ".join(KINDS))],
    model: ModelOrLaunch,
    cluster: OptionalCluster = None,
    **arguments: Any,
) -> ServingEstimate | PooledEstimate | ServingPlan | PricedServing | PricedPools:
    """Answer a question of a kind: `serving("plan", "llama-3-70b", "h100:8", ...)` is `serve_plan("llama-3-70b", ...)`.

    Raises `InputError` as the kind does.
    """
    answer: ServingEstimate | PooledEstimate | ServingPlan | PricedServing | PricedPools = KINDS[kind](
        model, cluster, **arguments
    )
    return answer
