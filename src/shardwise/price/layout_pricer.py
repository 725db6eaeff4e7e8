"""Pricing of one layout in plain Python: its stages, its slowest step, its fullest device, and their terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from shardwise.hardware import Cluster, GroupLinks, Topology
from shardwise.layout import (
    Layout,
    ShardingScheme,
    atomic_degrees,
    cuts_by_axis,
    default_placement,
    layers_by_virtual_stage,
    layout_degrees,
    make_sharding_scheme,
    missing_share,
    num_micro_batches,
    stage_placement,
)
from shardwise.layout.layers_per_stage import count_kinds, layer_ranges
from shardwise.model import Job, is_layer, unit_counts
from shardwise.model.parameters_and_flops import unit_training_flops
from shardwise.pipeline.uneven_stage_costs import uneven_bubble, uneven_in_flight
from shardwise.price.device_memory import DeviceMemory, price_device_memory
from shardwise.price.estimate_terms import MEMORY, TIME, Term, TermContext
from shardwise.price.problem import Problem
from shardwise.price.roofline import Rates, chip_rates, loss_kind, runs_short_micro_batches
from shardwise.price.stage_contents import (
    NO_RECOMPUTE,
    ModelEnds,
    Pipeline,
    StageCosts,
    StageCounts,
    host_offload,
    stage_counts,
)
from shardwise.price.stage_step_time import StageStep
from shardwise.price.term_inputs import Expressions, TermInput, read_numbers
from shardwise.price.unit_cost import ActivationCost, StateCost, UnitPricer
from shardwise.price.unit_values import UnitValues, unit_values
from shardwise.values import IssuePolicy, SymbolValues, Value, get_loss_kernel, get_precision, maximum
from shardwise.values.symbolic import RepricedSymbolValues

TERM_NAMES = tuple(f"{rules.tree}.{name}" for rules in (TIME, MEMORY) for name in rules.by_name)
UnitCosts = tuple[Mapping[str, ActivationCost], Mapping[str, StateCost]]  # of each unit


class Pricing:
    """Cost of one layout, at the rates and links of its cluster."""

    def __init__(self, problem: Problem, layout: Layout, policy: IssuePolicy | None = None) -> None:
        """Prepare the prices; `policy`: what is issued, if not what the cluster's stack issues."""
        architecture, cluster, job = problem.architecture, problem.cluster, problem.job
        self.architecture, self.cluster, self.job, self.layout = architecture, cluster, job, layout
        self.topology, precision = cluster.sustained_topology, get_precision(job.precision)
        degrees = layout_degrees(layout)
        self.degrees = atomic_degrees(architecture, degrees)
        self.num_micro_batches = num_micro_batches(job, degrees)
        self.missing_share = missing_share(job, degrees) if runs_short_micro_batches(cluster) else 0.0
        self.layers = layers_by_virtual_stage(architecture, layout)
        self.layer_ranges = layer_ranges(self.layers)
        self.placement = stage_placement(layout)
        self.units = tuple(unit_counts(architecture))
        self.scheme = make_sharding_scheme(
            layout, architecture.structure, optimizer=job.optimizer, shares_amax=precision.shares_amax
        )
        self.unit_values = UnitValues(architecture, lambda unit: RepricedSymbolValues(self._values(unit)))
        rates = chip_rates(cluster.chip, cluster.calibration, architecture.name)
        self.host = host_offload(layout.offload, cluster.chip, updates=rates.updates_on_host)
        self.pricer = UnitPricer(
            rates if policy is None else replace(rates, policy=policy), precision, loss_kind(cluster, job), job.optimizer,
            attention=job.attention, dropout=job.dropout,
        )  # fmt: skip

    def _values(self, unit: str) -> SymbolValues:
        job, variant = self.job, self.layout.cp_variant
        return unit_values(self.architecture, job.seq_len, self.degrees, variant, job.attended_tokens, unit=unit)

    @property
    def values(self) -> SymbolValues:
        """Values of the symbols of the base layer, and of all units that are no kind of layer; `unit_values` has all."""
        return self.unit_values.base

    # Cached properties: uneven stages are played, which callers that ask for FLOPs or instructions do not need.
    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline: how micro-batches go through the stages."""
        layout, num_micro_batches = self.layout, self.num_micro_batches
        uneven = uneven_bubble(layout.schedule, self.layers, layout.pp).for_micro_batches(num_micro_batches)
        return Pipeline(
            layout.schedule, layout.pp, layout.num_virtual_stages, num_micro_batches, uneven, self.missing_share
        )

    @cached_property
    def in_flight_scale(self) -> tuple[float, ...]:
        """Layers of micro-batches that each stage holds, over those of the schedule's closed form."""
        return uneven_in_flight(self.layout.schedule, self.layers, self.layout.pp)

    def stages(self, costs: UnitCosts | None = None) -> list[StageCosts]:
        """Return every stage; `costs` replace the costs of its units."""
        costs = costs or self.unit_costs()
        return [self.stage(self.counts(n), costs) for n in range(self.layout.pp)]

    def stage(self, counts: StageCounts, costs: UnitCosts) -> StageCosts:
        """Return a stage with given contents."""
        return StageCosts(counts=counts, activation=costs[0], state=costs[1], pipeline=self.pipeline, host=self.host)

    def step(self, stage: StageCosts) -> StageStep:
        """Return the step of a stage."""
        return StageStep(stage=stage, overlap=self.job.overlap_convention, share=self.pricer.rates.exposed)

    def memories(self, stages: Sequence[StageCosts]) -> list[DeviceMemory]:
        """Return the memory of a device of each stage."""
        return [self.memory(stage, number) for number, stage in enumerate(stages)]

    def memory(self, stage: StageCosts, number: int) -> DeviceMemory:
        """Return the memory of a device of stage `number`."""
        return price_device_memory(
            stage, number, self.cluster.chip, holding=self.in_flight_scale[number], stepwise=self.pricer.loss.stepwise
        )

    def slowest_step(self, stages: Sequence[StageCosts]) -> StageStep:
        """Return the slowest step."""
        return max(map(self.step, _distinct_stages(stages)), key=lambda step: step.total_s)

    def fullest_device(self, stages: Sequence[StageCosts]) -> tuple[DeviceMemory, dict[str, float]]:
        """Return the memory of the fullest device, and its terms."""
        priced = [(memory, MEMORY.values(memory)) for memory in self.memories(stages)]
        return max(priced, key=lambda pair: sum(pair[1].values()))

    def term(self, name: str) -> Term:
        """Return a term of the slowest stage or the fullest device by its name, such as time.tp or memory.activations."""
        tree, _, rule_name = name.partition(".")
        if tree == TIME.tree:
            return TIME.explain(rule_name, self.slowest_step(self.stages()), self.term_context, self.expressions)
        return MEMORY.explain(rule_name, self.fullest_device(self.stages())[0], self.term_context, self.expressions)

    @property
    def term_context(self) -> TermContext:
        """Facts that the wording of the terms depends on."""
        return term_context(self.cluster, self.job, self.layout)

    @property
    def pipeline_inputs(self) -> tuple[TermInput, ...]:
        """Numbers of micro-batches, stages and virtual stages, by which what is derived for a micro-batch is repeated."""
        return read_numbers(self.pipeline)

    @property
    def expressions(self) -> Expressions:
        """Expressions that the costs of units are evaluated from."""
        mixed = self.layout.recompute_layers is not None
        return Expressions(self.pricer, self.scheme, self.units, self.unit_values, self.host, mixed=mixed)

    def at(self, rates: Rates, topology: Topology) -> Pricing:
        """Return the same layout at other rates and links, whose constants may be arrays."""
        repriced = copy(self)
        repriced.pricer, repriced.topology = self.pricer.at(rates), topology
        repriced.host = host_offload(self.layout.offload, self.cluster.chip, updates=rates.updates_on_host)
        return repriced

    def with_recompute_layers(self, num_layers: int) -> Pricing:
        """Return the layout with so many recomputed layers in each stage; units cost the same. It must recompute a part
        already."""
        recomputing = copy(self)
        recomputing.layout = replace(self.layout, recompute_layers=num_layers)
        return recomputing

    def slowest_s(self) -> Value:
        """Return the seconds of the step on the slowest stage."""
        return maximum(*(self.step(stage).total_s for stage in _distinct_stages(self.stages())), 0.0)

    @property
    def links(self) -> GroupLinks:
        """Links of the axes."""
        placement = self.layout.placement or default_placement(self.topology)
        return GroupLinks(self.topology, cuts_by_axis(self.topology, placement, self.degrees))

    def unit_costs(self) -> tuple[dict[str, ActivationCost], dict[str, StateCost]]:
        links, values = self.links, self.unit_values
        activation = {u: self.pricer.activation(u, self.scheme, values.of(u), links) for u in (*self.units, "carry")}
        if self.layout.recompute_layers is not None:
            plain = self.scheme.with_recompute("none")
            layers = filter(is_layer, self.units)
            activation |= {NO_RECOMPUTE + u: self.pricer.activation(u, plain, values.of(u), links) for u in layers}
        stateful_units = (*self.units, *ModelEnds.of(self.architecture).units_without_passes)
        return activation, {u: self.pricer.state(u, self.scheme, values.of(u), links) for u in stateful_units}

    def hardware_ratio(self) -> float:
        """Return the FLOPs that devices run over those that the model needs: recomputation, and flash attention's
        second scores."""
        run_flops = model_flops = 0.0
        job = self.job  # without the variant of cp: all devices count, not the last of a ring
        values = UnitValues(
            self.architecture,
            lambda unit: unit_values(
                self.architecture, job.seq_len, self.degrees, attended_tokens=job.attended_tokens, unit=unit
            ),
        )
        for unit, times, scheme in self.units_by_scheme():
            flops = self.pricer.flops(unit, scheme, values.of(unit))
            run_flops += times * sum(flops.values())
            forward, backward = unit_training_flops(self.architecture, unit, self.job.seq_len)
            model_flops += times * flops["forward"] * (1.0 + backward / (forward or 1.0))
        return run_flops / model_flops

    def units_by_scheme(self) -> Iterator[tuple[str, int, ShardingScheme]]:
        """Yield each unit as often as the model has it, layers with and without recomputation apart."""
        plain = self.scheme.with_recompute("none")
        unrecomputed = [self.counts(stage).kept for stage in range(self.layout.pp)]
        for unit, times in unit_counts(self.architecture).items():
            # with micro-batches from both ends each stage is held twice
            without = sum(device.get(unit, 0) for device in unrecomputed) // (2 if self.placement.bidirectional else 1)
            yield unit, times - without, self.scheme
            if without:
                yield unit, without, plain

    def counts(self, rank: int) -> StageCounts:
        """Return the contents of a device of a rank: its virtual stages, in a bidirectional pipeline its mirror's too."""
        return self.counts_with(rank, [self.layer_ranges[stage] for stage in self.placement.stages_of_rank(rank)])

    def counts_with(self, rank: int, layers: Iterable[range]) -> StageCounts:
        """Return its contents with these layers on its stages."""
        stages, layer_ranges, num_recomputed = (
            self.placement.stages_of_rank(rank),
            [*layers],
            self.layout.recompute_layers,
        )
        return stage_counts(
            count_kinds(self.architecture, layer_ranges), ModelEnds.of(self.architecture),
            first=0 in stages, last=len(self.layers) - 1 in stages, carries=len(stages) if self.layout.pp > 1 else 0,
            recomputed=None if num_recomputed is None else count_kinds(self.architecture, layer_ranges, num_recomputed),
        )  # fmt: skip


def _distinct_stages(stages: Sequence[StageCosts]) -> list[StageCosts]:
    """Return the first of the stages with equal contents, which take equally long."""
    distinct: list[StageCosts] = []
    for stage in stages:
        distinct += [] if any(stage.counts == earlier.counts for earlier in distinct) else [stage]
    return distinct


def term_context(cluster: Cluster, job: Job, layout: Layout) -> TermContext:
    """Return the facts that the wording of a layout's terms depends on."""
    return TermContext(
        chip_rates(cluster.chip, cluster.calibration), get_precision(job.precision), get_loss_kernel(loss_kind(cluster, job)),
        layout.schedule, job.overlap_convention,
    )  # fmt: skip
