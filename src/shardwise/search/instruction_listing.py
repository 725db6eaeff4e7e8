"""Instruction list of a plan's step with prices: kernels and collectives of each pass, by stream, with the reason for each.

Seconds are each instruction's own, as in the estimate; overlap is not subtracted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.layout import LayoutFacts
from shardwise.model import MTP_UNITS, ModelFacts, is_layer
from shardwise.price import NO_RECOMPUTE, Pricing
from shardwise.price.instruction_prices import InstructionPricer, PricedInstruction
from shardwise.search.plan import Plan
from shardwise.search.plan_file import layout_of_plan
from shardwise.step import unroll_rings
from shardwise.step.unit_instructions import PHASES_OF_PASS
from shardwise.values import InputError, Payload, argument_label, lookup, printed

CARRY = "carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Payload):
    """A pass of a unit: the same instructions for each of its `layers`, in each of `micro_batches`."""

    unit: str
    name: str
    layers: int
    micro_batches: int
    recompute: str
    instructions: tuple[PricedInstruction, ...]

    @property
    @printed
    def seconds_by_stream(self) -> Mapping[str, float]:
        """Seconds of a step by stream, if its instructions run one after the other."""
        total: dict[str, float] = {}
        for instruction in self.instructions:
            if instruction.seconds is not None:
                total[instruction.stream] = (
                    total.get(instruction.stream, 0.0) + instruction.seconds * self.layers * self.micro_batches
                )
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionListing:
    """The instructions of a pipeline stage of a plan. `shows_all`: the report has what is sliced and freed too.

    >>> import shardwise as sw
    >>> listing = sw.instructions(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024), passes=["update"])
    >>> {segment.name for segment in listing.segments}
    {'update'}
    """

    plan: Plan
    stage: int
    segments: tuple[Segment, ...]
    shows_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionsRecord(Payload):
    """The instruction list of a pipeline stage, by unit and pass."""

    SCHEMA = "shardwise.instructions/2"
    model: ModelFacts
    layout: LayoutFacts
    stage: int
    segments: Sequence[Segment]

    @classmethod
    def of(cls, listing: InstructionListing) -> InstructionsRecord:
        """Return the record of a listing."""
        plan = listing.plan
        return cls.from_attributes(listing, model=ModelFacts.of(plan.model), layout=layout_of_plan(plan))


def list_instructions(
    plan: Plan, *, stage: int = 0, passes: Sequence[str] = tuple(PHASES_OF_PASS), unit: str | None = None
) -> tuple[Segment, ...]:
    """Return the instructions of a pipeline stage, from the forward pass of its first unit to the update.

    A unit is an embedding, a block or a head of the model. Raises `InputError` for a stage, a pass or a unit that the plan does
    not have."""
    if not 0 <= stage < plan.layout.pp:
        raise InputError(f"{argument_label('stage')}: found {stage}; a stage of 0 to {plan.layout.pp - 1} is required")
    pricing = Pricing(plan.problem, plan.layout)
    contents = pricing.counts(stage)
    for name in passes:
        lookup(PHASES_OF_PASS, name, "pass")
    counts = {name: count for name, count in {**contents.units, CARRY: contents.carries}.items() if count}
    kinds = (*plan.model.layer_counts, *(NO_RECOMPUTE + kind for kind in plan.model.layer_counts))
    # The order in which a stage runs its units forward; backward is the other way round.
    order = sorted(counts, key=("embedding", *kinds, *MTP_UNITS, CARRY, "head").index)
    pricers = {name: InstructionPricer(pricing, name) for name in order}
    if unit is not None:
        lookup(dict.fromkeys(order), unit, "unit")
    segments = []
    for name in passes:
        for unit_name in order if name == "forward" else reversed(order):
            pricer = pricers[unit_name]
            instructions = pricer.unit_instructions.passes[name] if unit in (None, unit_name) else ()
            if not instructions:
                continue
            segments.append(
                Segment(
                    unit=unit_name, name=name, layers=int(counts[unit_name]),
                    recompute=pricer.scheme.recompute if is_layer(pricer.unit) else "none",
                    micro_batches=1 if name == "update" else pricing.num_micro_batches,
                    instructions=tuple(
                        pricer.price_instruction(instruction) for instruction in unroll_rings(instructions)
                    ),
                )
            )  # fmt: skip
    return tuple(segments)
