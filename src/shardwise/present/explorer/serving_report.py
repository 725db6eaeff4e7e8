"""Report of the serving view."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.charts.axis_ticks import padded_range
from shardwise.present.charts.chart import Axis, Chart, Curve, Mark, Points, RuleLine
from shardwise.present.charts.common_charts import curve_chart
from shardwise.present.explorer.page_sections import PLOT_HEIGHT, panel, quiet
from shardwise.present.rendering.page_report import (
    DataTable,
    PageAction,
    PageBlock,
    PageCell,
    PageReport,
    Paragraph,
    Slider,
)
from shardwise.present.rendering.payload_text import Payload, PayloadText
from shardwise.values import format_seconds

SMALLEST_GAIN = 0.005  # of pools that is said in percent


def serving_report(payload: Payload) -> PageReport:
    """Return the plan of a load: its figures, users against devices, what both kinds of pass are made of, and memory."""
    text = PayloadText(payload)
    sliders: list[PageBlock] = [
        Slider(slider["label"], slider["value"], slider["value"], slider["options"]) for slider in payload["sliders"]
    ]
    return [
        panel("Serving", *_lead(payload, text), _engines(payload), *sliders),
        panel("Users against devices", _tradeoff(payload), quiet(_knee(payload)), half=True),
        panel("What a pass is made of", *_terms(text), half=True),
        panel("Prefill and decode in pools of their own", *_pools(payload, text)),
        panel("Memory of a device", _memory(text)),
        panel("The front", _front(text)),
    ]


def _lead(payload: Payload, text: PayloadText) -> list[PageBlock]:
    lead = text(
        "{layout_text}: {estimate.ttft_s.value:s} to the first token, {estimate.tpot_s.value:s} for each further one, "
        "{estimate.tokens_per_s_per_device.value:n} tokens/s of a device",
        "lead",
    )
    rates = text(
        "{num_devices:n} devices serve {estimate.requests_per_s:g} requests/s (at most {estimate.max_rate_per_s:g}); bound by "
        "{estimate.bound}"
    )
    formats = quiet(f"weights {payload['formats']}; means in a steady state, with 90% intervals:")
    return [lead, rates, formats, _intervals(text), *map(quiet, payload["estimate"]["notes"])]


def _intervals(text: PayloadText) -> Paragraph:
    cells: list[PageCell] = []
    for name, key, unit in (
        ("TTFT", "ttft_s", "s"), ("TPOT", "tpot_s", "s"), ("tokens/s of a device", "tokens_per_s_per_device", "n"),
    ):  # fmt: skip
        low, high = (text.value(f"estimate.{key}.{end}") for end in ("low", "high"))
        if low is not None and low != high:
            cells += [f"{'; ' if cells else ''}{name} "]
            cells += text.cells(f"{{estimate.{key}.low:{unit}}} to {{estimate.{key}.high:{unit}}}")
    return Paragraph(cells or ["none, as nothing was measured there"], "quiet")


def _engines(payload: Payload) -> Paragraph:
    cells: list[PageCell] = [f"engine {payload['engine']}; or "]
    for engine in payload["engines"]:
        if engine["name"] != payload["engine"]:
            cells += [PageAction(engine["name"], engine["edit"]), " "]
    return Paragraph(cells)


def _tradeoff(payload: Payload) -> Chart:
    """Return tokens/s of a user against tokens/s of a device: the front of all layouts, the chosen layout, knee and limit."""
    front, curve = _places(payload["front"]), _places(payload["curve"])
    x_ends, y_ends = (padded_range(values, log=True) for values in zip(*(*front, *curve), strict=True))
    limit = payload["tpot_limit_s"]
    marks: list[Mark] = [
        Curve(points=front, hover="the best of all layouts", reference=True),
        Curve(points=curve, hover="this layout at more and more requests", colour="term:forward"),
        Points(points=_places([payload["knee"]]), hover="knee", colour="term:backward", shape="ring"),
        *([RuleLine(at=1.0 / limit, label="limit")] if limit and x_ends[0] <= 1.0 / limit <= x_ends[1] else []),
    ]
    return curve_chart(
        "tokens/s of a device over tokens/s of a user", "", Axis(title="tokens/s of a user", log=True, ends=x_ends),
        Axis(title="tokens/s of a device", log=True, ends=y_ends), marks, PLOT_HEIGHT,
    )  # fmt: skip


def _places(points: Sequence[Payload]) -> tuple[tuple[float, float], ...]:
    return tuple((point["tokens_per_s_per_user"], point["tokens_per_s_per_device"]) for point in points)


def _knee(payload: Payload) -> str:
    knee = payload["knee"]
    at_knee = f"{knee['concurrency']:g} requests in an instance and {format_seconds(knee['tpot_s'])} a token"
    return (
        f"dashed: the best of all layouts; the ring is the knee of this one, {at_knee}: beyond it a token's time grows "
        "faster than what a device gives"
    )


def _terms(text: PayloadText) -> list[PageBlock]:
    """Return the terms of a decode pass and of a prefill, the largest first."""
    blocks: list[PageBlock] = []
    for name, caption in (
        ("decode", "a decode pass, {estimate.decode_pass_s:s}"),
        ("prefill", "a prefill, {estimate.prefill_s:s}"),
    ):
        terms = text.value(f"estimate.{name}_terms")
        total = sum(terms.values()) or 1.0
        ordered = sorted(terms, key=terms.__getitem__, reverse=True)
        rows: list[list[PageCell]] = [["term", "seconds", "share"]]
        rows += [
            [term, *text.cells(f"{{estimate.{name}_terms.{term}:s}}"), f"{terms[term] / total:.0%}"]
            for term in ordered if terms[term] > 0
        ]  # fmt: skip
        blocks += [text(caption), DataTable(f"terms of {name}", rows)]
    return blocks


def _pools(payload: Payload, text: PayloadText) -> list[PageBlock]:
    """Return the best deployment of two pools, beside the layout of the view, and what its first tokens are made of."""
    pools, gain = payload["pools"], payload["pools_gain"]
    if pools is None or gain is None:
        return [quiet("none on this cluster meets the limits")]
    saved = payload["rate_per_s"] is not None
    kind = "devices" if saved else "tokens/s of all devices"
    against = (
        f"{-gain if saved else gain:+.0%} {kind} against the layout above"
        if abs(gain) >= SMALLEST_GAIN
        else f"as many {kind}"
    )
    terms = pools["ttft_terms"]
    rows: list[list[PageCell]] = [["term", "seconds", "share"]]
    rows += [
        [term, *text.cells(f"{{pools.ttft_terms.{term}:s}}"), f"{seconds / pools['ttft_s']['value']:.0%}"]
        for term, seconds in terms.items() if seconds > 0
    ]  # fmt: skip
    return [
        text("prefill {pools.prefill_text}, {pools.prefill.busy_share:%} busy; decode {pools.decode_text}, "
             "{pools.decode.busy_share:%} busy"),
        text(
            "{pools.ttft_s.value:s} to the first token, {pools.tpot_s.value:s} for each further one, "
            "{pools.tokens_per_s_per_device.value:n} tokens/s of a device on {pools.num_devices:n} devices: " + against
        ),
        quiet(*text.cells(
            "neither pool waits with {pools.prefill_devices_per_decode_device:g} devices that prefill for each that decodes"
        )),
        DataTable("terms of a first token", rows),
        *map(quiet, pools["notes"]),
    ]  # fmt: skip


def _memory(text: PayloadText) -> Paragraph:
    return text(
        "{estimate.memory.weight_bytes:B} of weights, {estimate.memory.activation_bytes:B} of the largest pass, "
        "{estimate.memory.runtime_bytes:B} of the runtime, {estimate.memory.cache_bytes:B} of cache: "
        "{estimate.memory.cache_tokens:n} tokens in each copy of attention, {estimate.memory.largest_batch:n} such "
        "requests ({estimate.memory.verdict})"
    )


def _front(text: PayloadText) -> DataTable:
    return text.table(
        "layouts on the front", "TPOT | tokens/s of a device | TTFT | requests | layout", "front",
        "{tpot_s:s} | {tokens_per_s_per_device:n} | {ttft_s:s} | {concurrency:g} | {layout_text}", folded=True,
    )  # fmt: skip
