"""The scalar path: one layout priced in plain Python, every stage, as a tree of named terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace

from shardwise.cluster.cluster import Cluster
from shardwise.cost.counts import KEPT, Counts, Model, both_ends_counts, stage_counts
from shardwise.cost.host import host_of
from shardwise.cost.overlap import exposed_by_axis
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.rates import Rates, loss_of, rates_of
from shardwise.cost.stage_memory import stage_memory
from shardwise.cost.step import StageCost, StepTime, spans, stage_cost, step_time
from shardwise.cost.unit import UnitPricer, unit_values
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.errors import InputError
from shardwise.job import Job, precision_named
from shardwise.layout.family import Family, atomic_degrees, family_of
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of, num_micro_batches, require_legal, seqs_per_replica
from shardwise.layout.placement import cut_levels, default_placement
from shardwise.layout.stages import held_dense_layers, held_layers
from shardwise.model.architecture import Architecture
from shardwise.model.counts import model_flops_per_token, unit_training_flops
from shardwise.model.decoder import LAYERS, unit_counts
from shardwise.network.placed import Links
from shardwise.network.topology import Pods, Topology
from shardwise.symbolic import Value, maximum
from shardwise.terms import TIME_TERMS
from shardwise.units import format_bytes, format_seconds

# Source: the 916 published runs with a prediction (docs/accuracy.md), each weighted 1/duplicates: the median of their step
# times over the bound is 1.49, the geometric mean 1.54; 4% of them are below it.
BOUND = (
    "a bound: kernels and links at the best that micro-benchmarks reach; published runs took about 1.5 times as long "
    "(--stack NAME predicts; see: show stacks)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout costs. `time` (seconds of the slowest stage, by term) adds up to `step_time_s`; `hidden` is traffic
    behind compute; `memory` (bytes of the fullest device, by term) adds up to `memory_bytes`."""

    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    bound: str
    memory_bytes: float
    memory_capacity_bytes: float
    margin: float
    fits: bool
    time: Mapping[str, float]
    hidden: Mapping[str, float]
    memory: Mapping[str, float]
    train_days: float | None
    interval90: tuple[float, float] | None = None
    waste: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        around = " to ".join(map(format_seconds, self.interval90)) if self.interval90 else ""
        step = f"{format_seconds(self.step_time_s)} ({f'90% prediction interval {around}' if around else 'a bound'})"
        fits = f"fits, {self.margin:.0%} free" if self.fits else f"DOES NOT FIT, {-self.margin:.0%} too much"
        return (
            f"Estimate: step {step}, {self.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {self.mfu:.1%}, bound by "
            f"{self.bound}\n  memory {format_bytes(self.memory_bytes)} of {format_bytes(self.memory_capacity_bytes)} ({fits})"
        )


def estimate(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> Estimate:
    """Price one layout. Raises `InputError` with every rule that the layout breaks.

    Assumes, of a cluster without a calibration: flash attention, elementwise operations fused with their neighbours, kernels at
    the best measured rate; of any: causal attention evenly split over cp.
    The slowest stage sets the time, the fullest one the memory. MFU counts causal attention once and no recomputation, and
    is measured against the peak of `mfu_format`.
    """
    require_legal(architecture, job, cluster.num_devices, layout)
    found = Pricing(architecture, cluster, job, layout).run()
    if not math.isfinite(found.step_time_s + found.memory_bytes):
        raise InputError(
            "estimate: the step's time or memory is no finite number; smaller sizes, or rates that a chip can have, are required"
        )
    return found


def mfu_format(job: Job) -> str:
    """The number format whose peak MFU and HFU are measured against: that of the activations, whatever products run in.

    So an MFU says how fast a step is whatever the recipe, and two recipes compare as their step times do; above 1 it is
    possible. Differs: NVIDIA's DGX Cloud benchmarks divide by the fp8 peak for fp8 runs, which halves their MFU.
    Source: DeepSeek (arXiv 2505.09343, table 4) gives the MFU of fp8 training against the bf16 peak, and so does torchtitan.
    """
    return precision_named(job.precision).activations


class Pricing:
    def __init__(self, architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> None:
        self.architecture, self.cluster, self.job, self.layout = architecture, cluster, job, layout
        self.topology = cluster.reached
        degrees = degrees_of(layout)
        self.degrees = atomic_degrees(architecture, degrees)
        self.num_micro_batches = num_micro_batches(job, degrees)
        self.pipeline = Pipeline(layout.schedule, layout.pp, layout.num_virtual_stages, self.num_micro_batches)
        self.layers, self.dense = held_layers(architecture, layout), held_dense_layers(architecture, layout)
        self.units = tuple(unit_counts(architecture))
        self.host = host_of(layout.offload, cluster.chip)
        self.family = family_of(layout)
        self.values = unit_values(architecture, job.seq_len, self.degrees, layout.cp_variant, job.attended_tokens)
        self.pricer = UnitPricer(
            architecture,
            rates_of(cluster.chip, cluster.calibration),
            precision_named(job.precision),
            loss_of(cluster, job),
            job.optimizer,
        )

    def run(self) -> Estimate:
        activation, state = self.unit_costs()
        counts = self.all_counts()
        costs = [self.stage(c, activation, state) for c in counts]
        totals = [self.step(cost) for cost in costs]
        slowest = max(range(len(totals)), key=lambda stage: totals[stage].total_s)
        memories = [self.memory(stage, c, activation, state) for stage, c in enumerate(counts)]
        fullest = max(memories, key=lambda memory: sum(memory.values()))
        time, hidden = self.terms(costs[slowest], totals[slowest].bubble_s)
        return self.summary(totals[slowest].total_s, time, hidden, fullest)

    def at(self, rates: Rates, topology: Topology) -> Pricing:
        """The same layout at other rates and links, whose constants may be arrays."""
        other = copy(self)
        other.pricer, other.topology = self.pricer.at(rates), topology
        return other

    def slowest_s(self) -> Value:
        """Seconds of the step on the slowest stage; of stages that hold the same one is priced."""
        activation, state = self.unit_costs()
        different: list[Counts] = []
        for counts in self.all_counts():
            different += [] if counts in different else [counts]
        return maximum(*(self.step(self.stage(counts, activation, state)).total_s for counts in different), 0.0)

    def all_counts(self) -> list[Counts]:
        return [self.counts(stage) for stage in range(self.layout.pp)]

    def stage(
        self, counts: Counts, activation: Mapping[str, ActivationCost], state: Mapping[str, StateCost]
    ) -> StageCost:
        return stage_cost(counts, activation, state, self.layout.schedule, self.host)

    def step(self, cost: StageCost) -> StepTime:
        return step_time(cost, self.pipeline, self.job.convention, self.pricer.rates.exposed)

    def unit_costs(self) -> tuple[dict[str, ActivationCost], dict[str, StateCost]]:
        topology = self.topology
        placement = self.layout.placement or default_placement(topology)
        links = Links(topology, cut_levels(topology, placement, self.degrees))
        activation = {u: self.pricer.activation(u, self.family, self.values, links) for u in (*self.units, "carry")}
        if self.layout.recompute_layers is not None:
            plain = replace(self.family, recompute="none")
            kept = [unit for unit in self.units if unit in LAYERS]
            activation |= {KEPT + u: self.pricer.activation(u, plain, self.values, links) for u in kept}
        return activation, {u: self.pricer.state(u, self.family, self.values, links) for u in self.units}

    def hardware_ratio(self) -> float:
        """FLOPs that the devices run over those that the model needs: recomputation and flash attention's second scores."""
        done = needed = 0.0
        values = unit_values(
            self.architecture, self.job.seq_len, self.degrees, attended_tokens=self.job.attended_tokens
        )  # all devices, not the last of a ring
        for unit, times, family in self.families():
            flops = self.pricer.flops(unit, family, values)
            done += times * sum(flops.values())
            forward, backward = unit_training_flops(self.architecture, unit, self.job.seq_len)
            needed += times * flops["forward"] * (1.0 + backward / (forward or 1.0))
        return done / needed

    def families(self) -> Iterator[tuple[str, int, Family]]:
        """Each unit as often as the model has it: layers that recompute and those that do not."""
        plain = replace(self.family, recompute="none")
        kept = [self.counts(stage).kept for stage in range(self.layout.pp)]
        for unit, times in unit_counts(self.architecture).items():
            # with micro-batches from both ends each stage is held twice
            without = sum(device.get(unit, 0) for device in kept) // self.pipeline.ends
            yield unit, times - without, self.family
            if without:
                yield unit, without, plain

    def counts(self, stage: int) -> Counts:
        """What the device of a stage holds; of its mirror image too where micro-batches come from both ends."""
        last = self.layout.pp - 1
        held = {stage, last - stage} if self.pipeline.ends > 1 else {stage}
        dense = sum(self.dense[one] for one in held)
        layers = {"dense_block": dense, "block": sum(self.layers[one] for one in held) - dense}
        model = Model(self.architecture.tied_embeddings, self.architecture.num_predict_layers)
        recomputed = self.layout.recompute_layers
        if self.pipeline.ends > 1:
            return both_ends_counts(layers, model, ends=stage in (0, last), recompute_layers=recomputed)
        return stage_counts(
            layers, model, first=stage == 0, last=stage == last,
            num_virtual_stages=self.layout.num_virtual_stages, recompute_layers=recomputed,
        )  # fmt: skip

    def memory(
        self, stage: int, counts: Counts, activation: Mapping[str, ActivationCost], state: Mapping[str, StateCost]
    ) -> dict[str, float]:
        return stage_memory(
            counts,
            activation,
            state,
            self.pipeline,
            stage,
            self.cluster.chip,
            self.host,
            stepwise=self.pricer.loss.stepwise,
        )

    def terms(self, cost: StageCost, bubble_s: float) -> tuple[dict[str, float], dict[str, float]]:
        """Exposed terms that add up to the step, and what of the traffic is hidden."""
        m = self.pipeline.rounds
        time = dict.fromkeys(TIME_TERMS, 0.0)
        time |= {"forward": m * cost.forward_s, "backward": m * cost.backward_s, "recompute": m * cost.recompute_s}
        time |= {"bubble": bubble_s, "optimizer": cost.update_s, "host": max(cost.stream_s - cost.update_s, 0.0)}
        hidden = {"host": cost.stream_s - time["host"]}
        for times, work, traffic, hideable in spans(cost, self.pipeline):
            exposed = exposed_by_axis(self.job.convention, work, traffic, hideable, self.pricer.rates.exposed)
            exposed["host"] = max(cost.host_s - work - sum(exposed.values()), 0.0)
            for axis, seconds in exposed.items():
                time[axis] += times * seconds
                hidden[axis] = hidden.get(axis, 0.0) + times * ({"host": cost.host_s, **traffic}[axis] - seconds)
        return time, {axis: seconds for axis, seconds in hidden.items() if seconds > 0}

    def summary(
        self, step_s: float, time: dict[str, float], hidden: dict[str, float], memory: Mapping[str, float]
    ) -> Estimate:
        tokens, devices = self.job.global_batch_tokens, self.cluster.num_devices
        peak = self.cluster.chip.peak(mfu_format(self.job))
        flops_s = model_flops_per_token(self.architecture, self.job.attended_tokens) * tokens / (devices * peak)
        total, capacity = sum(memory.values()), self.cluster.chip.memory_bytes
        return Estimate(
            step_time_s=step_s, tokens_per_s_per_device=tokens / step_s / devices, mfu=flops_s / step_s,
            hfu=flops_s / step_s * self.hardware_ratio(), bound=_bound(time),
            memory_bytes=total, memory_capacity_bytes=capacity, margin=1 - total / capacity, fits=total <= capacity,
            time=time, hidden=hidden, memory=dict(memory),
            train_days=self.job.tokens / tokens * step_s / 86400 if self.job.tokens else None,
            interval90=self.interval90(step_s), waste=self.waste(), notes=self.notes(),
        )  # fmt: skip

    def interval90(self, step_s: float) -> tuple[float, float] | None:
        """Between which nine of ten measured step times lie; None without a calibration, whose estimate is a bound."""
        calibration = self.cluster.calibration
        return calibration.interval(step_s, moe=bool(self.architecture.num_experts)) if calibration else None

    def notes(self) -> tuple[str, ...]:
        """Whether the estimate is a bound or a prediction, and what makes it so."""
        chip, calibration = self.cluster.chip, self.cluster.calibration
        rests_on = calibration.described(moe=bool(self.architecture.num_experts)) if calibration else ""
        found = [BOUND if calibration is None else f"a prediction for {calibration.stack}: {rests_on}"]
        if chip.matmul_fraction == 1.0 and calibration is None:
            found.append(
                f"{chip.name} has no measured matmul rate in the catalogue: compute is priced at the peak, a bound"
            )
        if isinstance(self.cluster.topology, Pods):
            found.append(
                "the latency of the data-centre network has no source: between pods only bandwidth is priced, a bound"
            )
        if self.layout.offload != "none":
            found.append("how much memory the hosts have is not known: what is offloaded is taken to fit there")
        return tuple(found)

    def waste(self) -> dict[str, float]:
        """Share of the step's work that only rounds up: sequences that not every replica has, uneven stages."""
        layout = self.layout
        most = seqs_per_replica(self.job, self.degrees)
        padded = self.num_micro_batches * layout.micro_batch_seqs
        idle = 1 - self.job.num_seqs / (padded * layout.num_replicas)
        found = {"sequences": idle} if idle > 0 else {}
        if idle > 0:
            found["nearest_full_batch_tokens"] = float(padded * layout.num_replicas * self.job.seq_len)
        if most and max(self.layers) != min(self.layers):
            found["stages"] = 1 - sum(self.layers) / (max(self.layers) * layout.pp)
        return found


def _bound(time: Mapping[str, float]) -> str:
    """What takes the most of the step: compute, the bubble, the optimizer, or the traffic of one axis."""
    groups = {"compute": time["forward"] + time["backward"] + time["recompute"]}
    groups |= {f"communication over {axis}": time[axis] for axis in ("tp", "cp", "ep", "pp", "fsdp", "dp")}
    groups |= {"pipeline bubble": time["bubble"], "optimizer": time["optimizer"], "the host's link": time["host"]}
    return max(groups, key=lambda name: groups[name])
