"""View of serving: the layout for a load, what a user gets against what a device gives, and what a pass's time is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.present.explorer.control_values import Option, doublings
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.number_provenance import EXACT, Field, Fields, fields_payload
from shardwise.present.explorer.request import ViewRequest, head
from shardwise.search import ServingQuestion, plan_serving
from shardwise.search.serving.payloads import PooledFigures, ServingFigures, ServingPointRecord
from shardwise.search.serving.serving_plan import ServingPlan
from shardwise.serve import BatchLimits, LatencyLimits, get_serving_engine, published_formats, serving_engine_names
from shardwise.values import (
    InputError,
    format_binary,
    format_seconds,
    parse_count,
    parse_duration,
    parse_quantity,
    to_json,
)

# Lengths of a chat's question with its context, and of an answer; a choice.
USUAL_LENGTHS: Mapping[str, int] = {"isl": 2048, "osl": 512}
LENGTHS: Mapping[str, tuple[int, int]] = {"isl": (128, 1 << 17), "osl": (16, 1 << 14)}  # from and to
LATENCY_LIMITS: Mapping[str, tuple[float, ...]] = {
    "ttft": (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0), "tpot": (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
}  # fmt: skip
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # requests per second
CONTROLS = ("model", "chip", "devices")  # of the page that serving depends on
NO_LIMIT, ALL_THAT_FITS = "any", "as many as fit"
SOURCE = "serve/steady_state.py"
PREDICTED = "a prediction, fitted to published rows, with a 90% interval"


def serving(request: ViewRequest) -> dict[str, Any]:
    """Return the serving plan of the model on the cluster, under the load of the address.

    Details: `isl` and `osl`, tokens in and out of a request; `rate`, requests per second (none: as many as the limits allow);
    `ttft` and `tpot`, the longest latencies; `engine`. Raises `InputError` for wrong ones, and what `plan_serving` raises.
    """
    question = _question(request)
    plan = plan_serving(question)
    figures = to_json(ServingFigures.of(plan.estimate))
    return head(request) | {
        "layout_text": str(plan.layout), "engine": question.engine, "engines": _engine_edits(),
        "formats": str(question.formats), "num_devices": plan.layout.num_devices, "idle_devices": plan.idle_devices,
        "isl": question.isl, "osl": question.osl, "rate_per_s": question.rate_per_s,
        "ttft_limit_s": question.latency_limits.ttft_s, "tpot_limit_s": question.latency_limits.tpot_s,
        "estimate": figures, "front": _points(plan.front), "curve": _points(plan.curve), "knee": _points([plan.knee])[0],
        "doubled_devices": plan.doubled_devices, "pools": _pools(plan), "pools_gain": plan.pools_gain,
        "sliders": [*_length_sliders(question), *_limit_sliders(question)],
        "controls": [control for control in controls(request) if control["name"] in CONTROLS], "fields": fields_payload(FIELDS),
    }  # fmt: skip


def _pools(plan: ServingPlan) -> dict[str, Any] | None:
    """Return the best deployment of two pools with its layouts as texts; None where there is none."""
    if plan.pools is None:
        return None
    layout = plan.pools.layout
    texts = {"prefill_text": str(layout.prefill), "decode_text": str(layout.decode)}
    return {**to_json(PooledFigures.of(plan.pools)), **texts}


def _question(request: ViewRequest) -> ServingQuestion:
    details = {name: request.state.detail(name) for name in ("isl", "osl", "rate", "ttft", "tpot", "engine")}
    lengths: dict[str, Any] = {
        name: parse_count(details[name] or default, label=name) for name, default in USUAL_LENGTHS.items()
    }
    request.model.require_context(sum(lengths.values()))
    ttft_s, tpot_s = (
        None if (text := details[name]) is None else parse_duration(text, label=name) for name in LATENCY_LIMITS
    )
    engine = details["engine"] or serving_engine_names()[0]
    get_serving_engine(engine)
    rate = None if details["rate"] is None else parse_quantity(details["rate"], label="rate", unit="")
    if rate is not None and not 0 < rate <= 1e9:
        raise InputError(f"rate: found {details['rate']!r}; more than 0 requests per second is required")
    return ServingQuestion(
        architecture=request.model, cluster=request.cluster, **lengths, rate_per_s=rate, engine=engine, release=None,
        formats=published_formats(request.model), batch_limits=BatchLimits(),
        latency_limits=LatencyLimits(ttft_s=ttft_s, tpot_s=tpot_s),
    )  # fmt: skip


def _points(points: Iterable[Any]) -> list[dict[str, Any]]:
    """Return points with their layout as text, and the tokens per second of a user."""
    return [
        {
            **to_json(ServingPointRecord.of(point)),
            "layout_text": str(point.layout),
            "tokens_per_s_per_user": point.tokens_per_s_per_user,
        }
        for point in points
    ]


def _engine_edits() -> list[dict[str, Any]]:
    return [{"name": name, "edit": {"engine": name}} for name in serving_engine_names()]


def _length_sliders(question: ServingQuestion) -> Iterable[dict[str, Any]]:
    for name, label in (("isl", "tokens in"), ("osl", "tokens out")):
        current = getattr(question, name)
        sizes = doublings(current, *LENGTHS[name])
        options = [Option(value=format_binary(size), edit={name: str(size)}).payload() for size in sizes]
        yield {"label": label, "value": format_binary(current), "options": options}


def _limit_sliders(question: ServingQuestion) -> Iterable[dict[str, Any]]:
    """Yield the rate and both limits; the last option of each is none."""
    rates = sorted({*RATES, *([question.rate_per_s] if question.rate_per_s else [])})
    options = [Option(value=f"{rate:g}", edit={"rate": f"{rate:g}"}).payload() for rate in rates]
    options.append(Option(value=ALL_THAT_FITS, edit={"rate": None}).payload())
    current = ALL_THAT_FITS if question.rate_per_s is None else f"{question.rate_per_s:g}"
    yield {"label": "requests/s", "value": current, "options": options}
    for name, values in LATENCY_LIMITS.items():
        limit = getattr(question.latency_limits, f"{name}_s")
        seconds = sorted({*values, *([limit] if limit else [])})
        options = [
            Option(value=format_seconds(value), edit={name: f"{value * 1e3:g}ms"}).payload() for value in seconds
        ]
        options.append(Option(value=NO_LIMIT, edit={name: None}).payload())
        value = NO_LIMIT if limit is None else format_seconds(limit)
        yield {"label": f"{name.upper()} at most", "value": value, "options": options}


def _memory_field(meaning: str, unit: str = "B") -> Field:
    return Field(
        meaning,
        "the engine's own rule of what it may use",
        unit,
        "serve/memory.py",
        "a prediction of the engine's rule",
    )


END = Field(
    "an end of the 90% prediction interval", "value · exp(± 1.645 · spread)", "", "serve/estimate.py", PREDICTED
)
PASS_COST = "serve/pass_cost.py"
FRONT_FIELDS: Fields = {
    "front.*.tpot_s": Field("mean time of a token after the first", "as of the chosen layout", "s", SOURCE, PREDICTED),
    "front.*.ttft_s": Field("mean time to the first token", "as of the chosen layout", "s", SOURCE, PREDICTED),
    "front.*.tokens_per_s_per_device": Field(
        "output tokens per second of a device", "as of the chosen layout", "tokens/s", SOURCE, PREDICTED
    ),
    "front.*.concurrency": Field(
        "requests in an instance", "a step of the search", "requests", "search/serving/candidates.py", EXACT
    ),
}
POOLS = "serve/pools.py"
POOL_FIELDS: Fields = {
    **{f"pools.{name}.{end}": END for name in ("ttft_s", "tpot_s", "tokens_per_s_per_device") for end in ("low", "high")},
    "pools.num_devices": Field("devices of both pools", "those of prefill and decode", "", "the layout", EXACT),
    "pools.ttft_s.value": Field(
        "mean time to the first token", "server + queue + prefill + transfer + wait for the decode pool", "s", POOLS, PREDICTED
    ),
    "pools.tpot_s.value": Field(
        "mean time of a token after the first", "pass(b) / tokens per pass, without inputs", "s", POOLS, PREDICTED
    ),
    "pools.tokens_per_s_per_device.value": Field(
        "output tokens per second of a device of both pools", "requests/s · osl / devices", "tokens/s", POOLS, PREDICTED
    ),
    "pools.ttft_terms.*": Field("a term of the time to the first token", "a part of the sum", "s", POOLS, PREDICTED),
    **{
        f"pools.{pool}.busy_share": Field(
            f"share of the {pool} pool's rate in use", "requests/s over the most that it serves", "", POOLS, PREDICTED
        )
        for pool in ("prefill", "decode")
    },
    "pools.prefill_devices_per_decode_device": Field(
        "devices that prefill for each that decodes, so that neither waits", "requests/s of a device that decodes, over one that "
        "prefills", "", POOLS, PREDICTED,
    ),
}  # fmt: skip
FIELDS: Fields = {
    **FRONT_FIELDS,
    **POOL_FIELDS,
    **{f"estimate.{name}.{end}": END for name in ("ttft_s", "tpot_s", "tokens_per_s_per_device") for end in ("low", "high")},
    "num_devices": Field("devices of all instances", "tp · attention_dp · pp · cp · ws · replicas", "", "the layout", EXACT),
    "estimate.max_rate_per_s": Field(
        "requests per second at which the queue grows without end", "the most of any concurrency", "requests/s", SOURCE, PREDICTED
    ),
    "estimate.memory.weight_bytes": _memory_field("weights of the fullest device"),
    "estimate.memory.activation_bytes": _memory_field("what the largest pass takes beside them"),
    "estimate.memory.runtime_bytes": _memory_field("context, captured graphs, buffers of collectives"),
    "estimate.memory.cache_bytes": _memory_field("what is left for keys and values"),
    "estimate.memory.cache_tokens": _memory_field("tokens that the cache of a copy of attention holds", "tokens"),
    "estimate.memory.largest_batch": _memory_field("requests of this load that it holds", "requests"),
    "estimate.decode_terms.*": Field("a term of a decode pass", "bytes or FLOPs over a fitted rate", "s", PASS_COST, PREDICTED),
    "estimate.prefill_terms.*": Field("a term of a prefill", "bytes or FLOPs over a fitted rate", "s", PASS_COST, PREDICTED),
    "estimate.ttft_s.value": Field(
        "mean time to the first token", "host + passes until scheduled + chunks of the prompt + those of prompts before it", "s",
        SOURCE, PREDICTED,
    ),
    "estimate.tpot_s.value": Field(
        "mean time of a token after the first", "pass(b) / tokens per pass + (b - 1) / osl · seconds of a prompt", "s",
        SOURCE, PREDICTED, {"b": "estimate.running", "pass(b)": "estimate.decode_pass_s"},
    ),
    "estimate.tokens_per_s_per_device.value": Field(
        "output tokens per second of a device", "requests/s · osl / devices", "tokens/s", SOURCE, PREDICTED,
        {"requests/s": "estimate.requests_per_s", "osl": "osl", "devices": "num_devices"},
    ),
    "estimate.requests_per_s": Field(
        "requests per second of all instances", "requests in the system / (TTFT + (osl - 1) · TPOT)", "requests/s", SOURCE,
        PREDICTED,
    ),
    "estimate.decode_pass_s": Field(
        "seconds of a decode pass", "the sum of its terms", "s", PASS_COST, PREDICTED
    ),
    "estimate.prefill_s": Field(
        "seconds of one request's prefill by itself", "the sum of its terms", "s", PASS_COST, PREDICTED
    ),
}  # fmt: skip
