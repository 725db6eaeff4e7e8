"""The books' rules and typical scales for one model, cluster and job, on a sheet: every number is computed by the functions that
plans, rules and the catalogue use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.book_formulas import rules
from shardwise.book_formulas.kv_cache import KvCache
from shardwise.book_formulas.rules.job_rules import BOOK, PLAYBOOK, book_rules
from shardwise.hardware import (
    Cluster,
    Cut,
    Pods,
    Switched,
    Torus,
    collective_report,
    get_catalog_entry,
    load_chip_units,
)
from shardwise.hardware.chip_units import flops_per_usd
from shardwise.hardware.network.switch_levels import LevelInventory, level_inventories
from shardwise.model import Architecture, Job, model_flops_per_token, num_active_params, num_params
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.values import (
    SECONDS_PER_DAY,
    Payload,
    bytes_per_element,
    format_bytes,
    format_count,
    format_percent,
    format_quantity,
    format_seconds,
    format_usd,
    get_precision,
)
from shardwise.values.dtypes import NUMBER_FORMATS

GIGABYTE = 1e9
PIPELINE = (8, 32)  # stages and micro-batches of the bubbles
ZERO_DEGREE = 64
RECIPES = ("bf16", "bf16_fp32_gradients", "bf16_no_master", "bf16_bf16_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetItem(Payload):
    """One number of the sheet, as text and value, with its formula or meaning in a line, and its source."""

    name: str
    text: str
    value: float | None
    unit: str
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetSection(Payload):
    """A topic of the sheet."""

    title: str
    items: Sequence[SheetItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheatSheet(Payload):
    """Rules and typical scales for a model on a cluster, by topic.

    >>> import shardwise as sw
    >>> sheet = sw.cheat_sheet("llama-3-70b", "h100:64")
    >>> [section.title for section in sheet.sections][:3]
    ['Chip: h100', 'Network: h100:64', 'Model: llama-3-70b']
    """

    SCHEMA = "shardwise.cheat-sheet/1"
    model_name: str
    cluster: str
    global_batch_tokens: int
    seq_len: int
    tokens: float
    precision: str
    sections: Sequence[SheetSection]


def make_cheat_sheet(architecture: Architecture, cluster: Cluster, job: Job, tokens: float) -> CheatSheet:
    """Return the sheet of a model, a cluster and a job; `tokens` are those of the whole run.

    Raises `MissingValueError` if the chip has no sourced peak of the job's precision.
    """
    sheet = _Sheet(architecture, cluster, job, tokens)
    topics: Mapping[str, Callable[[], Iterator[SheetItem]]] = {
        f"Chip: {cluster.chip.name}": sheet.chip, f"Network: {cluster.name}": sheet.network,
        f"Model: {architecture.name}": sheet.model, "Activations and cache": sheet.activations,
        "State of the optimizer": sheet.state, "Rules of parallelism": sheet.parallelism,
        "Collectives of 1 GB, all devices": sheet.collectives, "Pipelines": sheet.pipelines, "The run": sheet.run,
        "Number formats": sheet.formats,
    }  # fmt: skip
    sections = [SheetSection(title=title, items=list(items())) for title, items in topics.items()]
    return CheatSheet(
        model_name=architecture.name, cluster=cluster.name, global_batch_tokens=job.global_batch_tokens, seq_len=job.seq_len,
        tokens=tokens, precision=job.precision, sections=[section for section in sections if section.items],
    )  # fmt: skip


def _quantity(name: str, value: float, unit: str, formula: str, source: str) -> SheetItem:
    return SheetItem(
        name=name, text=format_quantity(value, unit), value=value, unit=unit, formula=formula, source=source
    )


def _number(name: str, value: float, unit: str, formula: str, source: str) -> SheetItem:
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return SheetItem(name=name, text=f"{text} {unit}".strip(), value=value, unit=unit, formula=formula, source=source)


def _written(name: str, text: str, value: float | None, unit: str, formula: str, source: str) -> SheetItem:
    return SheetItem(name=name, text=text, value=value, unit=unit, formula=formula, source=source)


class _Sheet:
    """Numbers of one sheet, a method for each topic."""

    def __init__(self, architecture: Architecture, cluster: Cluster, job: Job, tokens: float) -> None:
        self.architecture, self.cluster, self.job, self.tokens = architecture, cluster, job, tokens
        self.hardware = cluster.chip
        self.precision = get_precision(job.precision)
        self.peak = self.hardware.peak(self.precision.matmul_format)
        self.num_params, self.num_active = num_params(architecture), num_active_params(architecture)

    def chip(self) -> Iterator[SheetItem]:
        chip, sources = self.hardware, self.hardware.sources
        for dtype, peak in chip.peak_flops_per_s.items():
            if dtype in ("bf16", "fp8", "fp4", "int8", "fp32"):
                yield _quantity(f"peak, {dtype}", peak, "FLOP/s", "dense", sources.get("peak_flops_per_s", ""))
        yield _written(
            "memory", format_bytes(chip.capacity_bytes), chip.capacity_bytes, "B", "that programs see",
            sources.get("usable_bytes", sources.get("memory_bytes", "")),
        )  # fmt: skip
        bandwidth = chip.memory_bytes_per_s
        yield _quantity("memory bandwidth", bandwidth, "B/s", "HBM", sources.get("memory_bytes_per_s", ""))
        intensity = rules.critical_intensity(self.peak, bandwidth)
        yield _number("compute-bound from", intensity, "FLOPs/B", "C / memory bandwidth", BOOK)
        width = bytes_per_element(self.precision.weights) / 2
        yield _number(
            "rows of a product", intensity * width, "tokens", "batch from which products are compute-bound", BOOK
        )
        units = load_chip_units(chip.catalog_name)
        if units is not None:
            lanes = units.total("vector_lanes")
            detail = f", {lanes:,} fp32 lanes" if lanes else ""
            yield _written(
                "units",
                f"{units.count:,} {units.unit}",
                units.count,
                "",
                f"compute units{detail}",
                units.sources["count"],
            )
        dollars = flops_per_usd(chip).get("bf16")
        if dollars is not None:
            price = f"at {chip.price_usd_per_hour:g} USD/h, {chip.price_date}"
            yield _quantity("FLOPs per dollar", dollars, "FLOP", price, sources.get("price_usd_per_hour", ""))

    def network(self) -> Iterator[SheetItem]:
        topology = self.cluster.topology
        if isinstance(topology, Switched):
            for level in level_inventories(topology, self.cluster.levels):
                if level.size > 1:
                    yield from self.level(level)
        else:
            yield from self.torus(topology)
        alpha = rules.critical_intensity(self.peak, topology.axis_bytes_per_s())
        yield _number("FLOPs for a byte sent", alpha, "FLOPs/B", "alpha = C / W over the cluster", BOOK)

    def level(self, level: LevelInventory) -> Iterator[SheetItem]:
        source = f"{BOOK}, chapter 12"
        ratio = "" if level.oversubscription is None else f", 1/{level.oversubscription:.3g} of what is below"
        yield _quantity(
            f"{level.name}: link", level.link_bytes_per_s, "B/s", f"of each of {level.size:,} below{ratio}", source
        )
        if level.collective_bytes_per_s is not None:
            gathered = level.collective_bytes_per_s
            yield _quantity(f"{level.name}: gather", gathered, "B/s", "D·W / (D - 1), nominal", source)
        yield _quantity(
            f"{level.name}: bisection", level.bisection_bytes_per_s, "B/s", "of a unit, both directions", source
        )

    def torus(self, topology: Torus | Pods) -> Iterator[SheetItem]:
        torus = topology.torus if isinstance(topology, Pods) else topology
        links = get_catalog_entry(self.hardware.catalog_name)["sources"].get("torus", "")
        shape = "x".join(map(str, torus.shape))
        yield _quantity("link", torus.bytes_per_s, "B/s", f"one direction, torus {shape}", links)
        yield _quantity("axis", torus.axis_bytes_per_s(), "B/s", "W: a ring, both directions", BOOK)
        yield _written("hop", format_seconds(torus.hop_latency_s), torus.hop_latency_s, "s", "latency", links)
        message = torus.bytes_per_s * torus.hop_latency_s
        yield _written("latency-bound below", format_bytes(message), message, "B", "of a message: W · latency", BOOK)
        if isinstance(topology, Pods):
            yield _quantity("between pods", topology.bytes_per_s, "B/s", "egress of a chip", BOOK)

    def model(self) -> Iterator[SheetItem]:
        model = self.architecture
        counted = "counted from the program"
        yield _written("parameters", format_count(self.num_params), self.num_params, "", "P", counted)
        if self.num_active != self.num_params:
            experts = f"{model.experts_per_token} of {model.num_experts} experts"
            yield _written("that a token meets", format_count(self.num_active), self.num_active, "", experts, counted)
        parts = rules.params_by_part(model)
        for name in ("attention", "mlp", "vocabulary"):
            value = getattr(parts, name)
            yield _written(name, format_count(value), value, "", f"{format_percent(value / parts.total)} of P", counted)
        sizes = f"D = {model.d_model:,}, F = {model.d_ff:,}, L = {model.num_layers}"
        weights = self.num_params * bytes_per_element(self.precision.weights)
        yield _written("weights", format_bytes(weights), weights, "B", f"in {self.precision.weights}; {sizes}", counted)
        flops = model_flops_per_token(model, self.job.seq_len)
        yield _quantity("FLOPs of a token", flops, "FLOP", f"training, causal, T = {self.job.seq_len:,}", counted)
        share = 6.0 * self.num_active / flops
        yield _number("6·P over that", share, "", "attention and embedding left out", BOOK)

    def activations(self) -> Iterator[SheetItem]:
        model, seq_len = self.architecture, self.job.seq_len
        hidden = seq_len * model.d_model * 2.0
        yield _written(
            "hidden state", format_bytes(hidden), hidden, "B", "T·D in bf16, one sequence", f"{PLAYBOOK}, A2"
        )
        with_scores = rules.layer_activation_bytes(seq_len, model.d_model, num_heads=model.num_heads, seq_len=seq_len)
        fused = rules.layer_activation_bytes(seq_len, model.d_model, fused_attention=True)
        yield _written(
            "layer, scores kept", format_bytes(with_scores), with_scores, "B", "T·D·(34 + 5·N·T/D)", PLAYBOOK
        )
        yield _written("layer, fused attention", format_bytes(fused), fused, "B", "34·T·D, as of GPT", PLAYBOOK)
        full = model.num_layers * hidden
        yield _written(
            "full recomputation", format_bytes(full), full, "B", "L·T·D in bf16, a third more FLOPs", PLAYBOOK
        )
        cache = KvCache(architecture=model).sequence_bytes(seq_len)
        yield _written("key-value cache", format_bytes(cache), cache, "B", f"{seq_len:,} tokens in bf16", BOOK)

    def state(self) -> Iterator[SheetItem]:
        for name in RECIPES:
            recipe = get_precision(name)
            size = bytes_per_parameter(recipe)
            total = size * self.num_params
            yield _written(
                name,
                f"{size:g} B",
                size,
                "B",
                f"of a parameter with Adam; {format_bytes(total)} of the model",
                recipe.source,
            )
        for stage in (1, 2, 3):
            size = rules.zero_state_bytes(self.num_params, stage, ZERO_DEGREE).total
            yield _written(
                f"ZeRO-{stage}", format_bytes(size), size, "B", f"bf16, on each of {ZERO_DEGREE}", f"{PLAYBOOK}, ZeRO"
            )
        least = rules.min_chips(bytes_per_parameter(self.precision) * self.num_params, self.hardware.capacity_bytes)
        yield _number("devices for the state", least, "", f"{self.precision.name}, nothing else", BOOK)

    def parallelism(self) -> Iterator[SheetItem]:
        for rule in book_rules(self.architecture, self.cluster, self.job):
            if rule.name not in ("critical_intensity", "train_days_at_40_mfu"):
                formula = rule.formula.partition(" with ")[0].partition(":")[0]
                yield _number(rule.name.replace("_", " "), rule.value, rule.unit, formula, rule.source)
        yield from self.across_nodes()

    def across_nodes(self) -> Iterator[SheetItem]:
        """Yield the rules across nodes, where there are several."""
        topology, model = self.cluster.topology, self.architecture
        if not isinstance(topology, Switched) or len(topology.tiers) < 2 or topology.tiers[1].size < 2:
            return
        node, rate = topology.tiers[0].size, topology.tiers[0].bytes_per_s
        node_rate = node * topology.tiers[1].bytes_per_s
        source = f"{BOOK}, chapter 12"
        if not model.num_experts and not model.layer_pattern:
            width = rules.tp_min_d_ff_across_nodes(self.peak, 2 * node, node, node_rate, rate)
            has = f"{'≤' if width <= model.d_ff else '>'} F = {model.d_ff:,}"
            yield _number(f"width for tp = {2 * node}", width, "", f"compute-bound over two nodes; {has}", source)
        spread = rules.dp_min_tokens_across_nodes(self.peak, math.inf, 8 * node, node, node_rate, rate)
        yield _number("replicas of 8 nodes", spread, "tokens/chip", "dp compute-bound: C / (8·W)", source)
        if model.num_experts:
            degree = min(64, model.num_experts) if node < 64 else 2 * node
            width = rules.ep_min_d_ff_across_nodes(self.peak, degree, model.experts_per_token, node, node_rate)
            yield _number(f"width for ep = {degree}", width, "", "of an expert, compute-bound", source)

    def collectives(self) -> Iterator[SheetItem]:
        topology = self.cluster.topology
        cuts = [Cut(size, 1) for size in topology.levels]
        if self.cluster.num_devices < 2:
            return
        for name in ("all_gather", "all_reduce", "all_to_all"):
            report = collective_report(name, GIGABYTE, topology, cuts)
            hops = f"{report.hops} hop{'s' * (report.hops > 1)}"
            formula = f"{report.algorithm}, {hops}; latency-bound below {format_bytes(report.crossover_bytes)}"
            yield _written(
                name.replace("_", "-"), format_seconds(report.time_s), report.time_s, "s", formula,
                f"nccl-tests, doc/PERFORMANCE.md; {BOOK}, sharding",
            )  # fmt: skip

    def pipelines(self) -> Iterator[SheetItem]:
        stages, micro_batches = PIPELINE
        about = f"{stages} stages, {micro_batches} micro-batches"
        for name, virtual in (("1F1B", 1), ("interleaved, v = 2", 2), ("interleaved, v = 4", 4)):
            ratio = rules.pipeline_times(stages, micro_batches, 1.0, 2.0, virtual).bubble_ratio
            formula = f"(p - 1)/m, {about}" if virtual == 1 else "(p - 1)/(v·m)"
            yield _written(f"bubble, {name}", f"{ratio:.1%}", ratio, "", formula, f"{PLAYBOOK}, pipelines")
        plain_s = rules.pipeline_bubble_s("1f1b", stages, 1.0, 2.0)
        for name in ("zb_h1", "dualpipe"):
            share = rules.pipeline_bubble_s(name, stages, 1.0, 2.0, 1.0, 3.0) / plain_s
            yield _written(f"bubble, {name}", f"{share:.0%}", share, "", "of 1F1B's, f = 1, b = 2, w = 1", PLAYBOOK)

    def run(self) -> Iterator[SheetItem]:
        count = self.cluster.num_devices
        flops = 6.0 * self.num_active * self.tokens
        yield _written("FLOPs", f"{flops:.3g}", flops, "FLOP", f"6·P·T, {format_count(self.tokens)} tokens", BOOK)
        for mfu in (0.3, 0.4, 0.5):
            seconds = rules.training_seconds(self.num_active, self.tokens, count, self.peak, mfu)
            hours = seconds / 3600 * count
            price = self.hardware.price_usd_per_hour
            cost = "" if price is None else f", {format_usd(hours * price)}"
            days = seconds / SECONDS_PER_DAY
            yield _written(
                f"at {mfu:.0%} of the peak", f"{days:,.1f} days", days, "days", f"{hours:,.0f} device hours{cost}", BOOK
            )
        step = 6.0 * self.num_active * self.job.global_batch_tokens / (count * self.peak * 0.4)
        yield _written("step at 40%", format_seconds(step), step, "s", f"{self.job.global_batch_tokens:,} tokens", BOOK)

    def formats(self) -> Iterator[SheetItem]:
        for name in ("bf16", "fp16", "e4m3", "e5m2"):
            number_format = NUMBER_FORMATS[name]
            epsilon = 2.0**-number_format.mantissa_bits
            yield _written(
                name, f"{number_format.max:.4g}", number_format.max, "",
                f"largest; step at 1: {epsilon:.3g}; smallest {number_format.min_subnormal:.2g}", number_format.source,
            )  # fmt: skip
