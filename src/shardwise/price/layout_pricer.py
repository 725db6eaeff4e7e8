"""The scalar path: the stages of one layout priced in plain Python, and the terms of the worst of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.topology import Links, Topology
from shardwise.layout.degrees import atomic_degrees, degrees_of, num_micro_batches
from shardwise.layout.layers_per_stage import dense_layers, stages_on_ranks, virtual_stages
from shardwise.layout.layout import Layout
from shardwise.layout.placement import cut_levels, default_placement
from shardwise.layout.sharding_scheme import Family, family_of
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, unit_counts
from shardwise.model.job import Job
from shardwise.model.parameters_and_flops import unit_training_flops
from shardwise.pipeline.uneven_stages import holding, waiting
from shardwise.price.device_memory import Memory, memory_of
from shardwise.price.estimate_terms import MEMORY, TIME, Setting, Term
from shardwise.price.roofline import Rates, loss_of, rates_of
from shardwise.price.stage_contents import KEPT, Counts, Model, Pipeline, Stage, host_of, stage_counts
from shardwise.price.step_time import Step
from shardwise.price.term_inputs import Expressions, Input, numbers
from shardwise.price.unit_cost import ActivationCost, StateCost, UnitPricer, unit_values
from shardwise.values.elementwise import Value, maximum
from shardwise.values.issue_policy import IssuePolicy
from shardwise.values.loss_kernels import loss_named
from shardwise.values.precision import precision_named
from shardwise.values.symbolic import RepricedValues

TERMS = tuple(f"{rules.tree}.{name}" for rules in (TIME, MEMORY) for name in rules.by_name)
Costs = tuple[Mapping[str, ActivationCost], Mapping[str, StateCost]]  # of each unit


class Pricing:
    """The cost of one layout, at the rates and links of its cluster."""

    def __init__(
        self, architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, policy: IssuePolicy | None = None
    ) -> None:
        """`policy`: what is issued, where it is not what the cluster's stack issues."""
        self.architecture, self.cluster, self.job, self.layout = architecture, cluster, job, layout
        self.topology = cluster.reached
        degrees = degrees_of(layout)
        self.degrees = atomic_degrees(architecture, degrees)
        self.num_micro_batches = num_micro_batches(job, degrees)
        self.layers = virtual_stages(architecture, layout)
        self.dense = dense_layers(architecture, self.layers)
        self.placement = stages_on_ranks(layout)
        uneven = waiting(layout.schedule, self.layers, layout.pp).in_step(self.num_micro_batches)
        self.pipeline = Pipeline(layout.schedule, layout.pp, layout.num_virtual_stages, self.num_micro_batches, uneven)
        self.holding = holding(layout.schedule, self.layers, layout.pp)
        self.units = tuple(unit_counts(architecture))
        self.host = host_of(layout.offload, cluster.chip)
        self.family = family_of(layout)
        self.values = RepricedValues(
            unit_values(architecture, job.seq_len, self.degrees, layout.cp_variant, job.attended_tokens)
        )
        rates = rates_of(cluster.chip, cluster.calibration)
        self.pricer = UnitPricer(
            architecture,
            rates if policy is None else replace(rates, policy=policy),
            precision_named(job.precision),
            loss_of(cluster, job),
            job.optimizer,
        )

    def stages(self, costs: Costs | None = None) -> list[Stage]:
        """Every stage; `costs` replace the costs of its units."""
        costs = costs or self.unit_costs()
        return [self.stage(self.counts(n), costs) for n in range(self.layout.pp)]

    def stage(self, counts: Counts, costs: Costs) -> Stage:
        """A stage with given contents."""
        return Stage(counts=counts, activation=costs[0], state=costs[1], pipeline=self.pipeline, host=self.host)

    def step(self, stage: Stage) -> Step:
        """The step of a stage."""
        return Step(stage=stage, overlap=self.job.convention, share=self.pricer.rates.exposed)

    def memories(self, stages: Sequence[Stage]) -> list[Memory]:
        """The memory of a device of each stage."""
        return [self.memory(stage, number) for number, stage in enumerate(stages)]

    def memory(self, stage: Stage, number: int) -> Memory:
        """That of one stage, by its index."""
        return memory_of(
            stage, number, self.cluster.chip, holding=self.holding[number], stepwise=self.pricer.loss.stepwise
        )

    def slowest(self, stages: Sequence[Stage]) -> Step:
        """The slowest step."""
        return max(map(self.step, _different(stages)), key=lambda step: step.total_s)

    def fullest(self, stages: Sequence[Stage]) -> tuple[Memory, dict[str, float]]:
        """The memory of the fullest device, and its terms."""
        every = [(memory, MEMORY.values(memory)) for memory in self.memories(stages)]
        return max(every, key=lambda one: sum(one[1].values()))

    def term(self, name: str) -> Term:
        """A term of the slowest stage or the fullest device by its name, such as time.tp or memory.activations."""
        tree, _, own = name.partition(".")
        if tree == TIME.tree:
            return TIME.explained(own, self.slowest(self.stages()), self.setting, self.expressions)
        return MEMORY.explained(own, self.fullest(self.stages())[0], self.setting, self.expressions)

    @property
    def setting(self) -> Setting:
        """The facts that the wording of the terms depends on."""
        return setting_of(self.cluster, self.job, self.layout)

    @property
    def counted(self) -> tuple[Input, ...]:
        """How often things derived for one micro-batch run: micro-batches, stages, virtual stages."""
        return numbers(self.pipeline)

    @property
    def expressions(self) -> Expressions:
        """The expressions that the costs of units are evaluated from."""
        mixed = self.layout.recompute_layers is not None
        return Expressions(self.pricer, self.family, self.units, self.values, self.host, mixed=mixed)

    def at(self, rates: Rates, topology: Topology) -> Pricing:
        """The same layout at other rates and links, whose constants may be arrays."""
        other = copy(self)
        other.pricer, other.topology = self.pricer.at(rates), topology
        return other

    def recomputing(self, num_layers: int) -> Pricing:
        """The same layout, which recomputes a part of its layers, with so many of each stage: units cost what they cost here."""
        other = copy(self)
        other.layout = replace(self.layout, recompute_layers=num_layers)
        return other

    def slowest_s(self) -> Value:
        """Seconds of the step on the slowest stage."""
        return maximum(*(self.step(stage).total_s for stage in _different(self.stages())), 0.0)

    @property
    def links(self) -> Links:
        """The links of the axes."""
        placement = self.layout.placement or default_placement(self.topology)
        return Links(self.topology, cut_levels(self.topology, placement, self.degrees))

    def unit_costs(self) -> tuple[dict[str, ActivationCost], dict[str, StateCost]]:
        links = self.links
        activation = {u: self.pricer.activation(u, self.family, self.values, links) for u in (*self.units, "carry")}
        if self.layout.recompute_layers is not None:
            plain = replace(self.family, recompute="none")
            kept = [unit for unit in self.units if unit in LAYERS]
            activation |= {KEPT + u: self.pricer.activation(u, plain, self.values, links) for u in kept}
        held = (*self.units, *Model.of(self.architecture).held_apart)
        return activation, {u: self.pricer.state(u, self.family, self.values, links) for u in held}

    def hardware_ratio(self) -> float:
        """FLOPs that the devices run over those that the model needs: with recomputation and flash attention's second scores."""
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
        """Each unit as often as the model has it: layers with and without recomputation."""
        plain = replace(self.family, recompute="none")
        kept = [self.counts(stage).kept for stage in range(self.layout.pp)]
        for unit, times in unit_counts(self.architecture).items():
            # with micro-batches from both ends each stage is held twice
            without = sum(device.get(unit, 0) for device in kept) // self.pipeline.ends
            yield unit, times - without, self.family
            if without:
                yield unit, without, plain

    def counts(self, rank: int) -> Counts:
        """Contents of a device of a rank: its virtual stages, and its mirror image where micro-batches come from both ends."""
        held = self.placement.held(rank)
        return self.counts_with(rank, sum(self.layers[one] for one in held), sum(self.dense[one] for one in held))

    def counts_with(self, rank: int, num_layers: int, num_dense: int) -> Counts:
        """Its contents with so many layers, of which some are leading dense ones."""
        held = self.placement.held(rank)
        return stage_counts(
            {"dense_block": num_dense, "block": num_layers - num_dense}, Model.of(self.architecture),
            first=0 in held, last=len(self.layers) - 1 in held, carries=len(held) if self.layout.pp > 1 else 0,
            recompute_layers=self.layout.recompute_layers,
        )  # fmt: skip


def _different(stages: Sequence[Stage]) -> list[Stage]:
    """The first of the stages with equal contents, which take equally long."""
    found: list[Stage] = []
    for stage in stages:
        found += [] if any(stage.counts == other.counts for other in found) else [stage]
    return found


def setting_of(cluster: Cluster, job: Job, layout: Layout) -> Setting:
    """The facts that the wording of a layout's terms depends on."""
    return Setting(
        rates_of(cluster.chip, cluster.calibration), precision_named(job.precision), loss_named(loss_of(cluster, job)),
        layout.schedule, job.convention,
    )  # fmt: skip
