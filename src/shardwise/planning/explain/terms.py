"""One term of an estimate: its formula in words and in symbols, its inputs, and the expressions it was read off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import Estimate
from shardwise.cost.formats import Saved
from shardwise.cost.rates import loss_of, rates_of
from shardwise.cost.unit import UnitPricer, unit_values
from shardwise.derive.shardings import optimizer_rest, weight_rest, weight_shard, weight_use
from shardwise.errors import InputError
from shardwise.job import precision_named
from shardwise.layout.family import Family, atomic_degrees, family_of
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.lowering.traffic import Traffic
from shardwise.model.decoder import LAYERS, unit_counts
from shardwise.model.program import Role
from shardwise.names import unknown
from shardwise.planning.plan import Plan
from shardwise.schedule.schedule import schedule_of
from shardwise.sharding.spec import Spec
from shardwise.symbolic import ZERO, Local, Polynomial, Symbol, Values
from shardwise.terms import MEMORY_TERMS, TIME_TERMS


class Formula(NamedTuple):
    """What a term is. m micro-batches, p stages, v virtual stages; `blocks` are those of the stage."""

    words: str
    symbols: str


_TRAFFIC = "collectives, each its bytes over the links of its axes; what compute does not hide"
FORMULAS: Mapping[str, Formula] = {
    "time.forward": Formula(
        "forward compute of the slowest stage", "m · blocks · Σ max(FLOPs / matmul rate, bytes / memory rate)"
    ),
    "time.backward": Formula(
        "backward compute of the slowest stage", "m · blocks · Σ max(FLOPs / matmul rate, bytes / memory rate)"
    ),
    "time.recompute": Formula(
        "forward slices run again for the backward pass",
        "m · blocks · Σ max(FLOPs / matmul rate, bytes / memory rate)",
    ),
    "time.tp": Formula(f"tensor-parallel {_TRAFFIC}", "m · blocks · Σ bytes · s/byte"),
    "time.cp": Formula(f"context-parallel {_TRAFFIC}", "m · blocks · Σ bytes · s/byte"),
    "time.ep": Formula(f"tokens to their experts and back: {_TRAFFIC}", "m · blocks · Σ bytes · s/byte"),
    "time.pp": Formula("activations and their gradients to the next stage", "m · v · Σ bytes · s/byte"),
    "time.fsdp": Formula(f"weights and gradients of ZeRO: {_TRAFFIC}", "Σ max(traffic - compute, 0)"),
    "time.dp": Formula(f"gradients of the replicas, once per step: {_TRAFFIC}", "max(traffic - compute, 0)"),
    "time.control": Formula("the loss, summed once per step", "latency and 4 bytes"),
    "time.bubble": Formula("stages that wait for the first and the last micro-batch", "(p - 1) · (F + B) / v"),
    "time.host": Formula(
        "activations to the host and back, beside each pass, and the optimizer's state through the device, beside the update",
        "m · Σ max(bytes / PCIe rate - pass, 0) + max(bytes of state / PCIe rate - update, 0)",
    ),
    "time.optimizer": Formula("the update streams the optimizer's state", "bytes of state / memory rate"),
    "memory.parameters": Formula("weights as they rest", "Σ elements at rest · bytes of a weight"),
    "memory.gradients": Formula("gradients as they rest between micro-batches", "Σ elements · bytes of a gradient"),
    "memory.master": Formula("the optimizer's copy of the weights", "Σ elements · bytes of the master copy"),
    "memory.optimizer": Formula("the optimizer's moments", "Σ elements · Σ bytes of a moment"),
    "memory.activations": Formula(
        "tensors kept for the backward pass of every micro-batch in flight",
        "in flight · blocks · Σ saved elements · bytes; 2 · blocks where they wait on the host",
    ),
    "memory.workspace": Formula(
        "what one block needs while it runs backward",
        "what recompute rebuilds + half of a block's activations; for `train` the most that is alive beside what was saved",
    ),
    "memory.gathered": Formula(
        "gathered weights and unscattered gradients of two neighbouring units (on a TPU of one)",
        "2 · elements in use · bytes",
    ),
    "memory.logits": Formula(
        "the loss over the logits, by its kernel", "bytes of the loss for each · elements of the logits"
    ),
    "memory.buffers": Formula("input and output of the largest collective on activations", "2 · largest payload"),
    "memory.runtime": Formula("context, libraries and fragments", "a constant of the chip"),
}
# With a calibration (`cost.rates`, `cost.overlap`); those that are not here are as above.
PREDICTED: Mapping[str, str] = {
    **dict.fromkeys(
        ("time.forward", "time.backward", "time.recompute"),
        "m · blocks · (device + kernels · launch_s): device = Σ max(FLOPs / rate · shape, bytes / memory rate), elementwise "
        "bytes several times; with experts √(device² + host²), the host several launches a kernel",
    ),
    **dict.fromkeys(
        (f"time.{axis}" for axis in ("tp", "cp", "ep", "pp", "fsdp", "dp", "control")),
        "its part of max(traffic - compute, exposed · traffic), the traffic of all axes",
    ),
    "time.optimizer": "elementwise · bytes of state / memory rate",
}
MEANINGS: Mapping[str, str] = {
    "B": "sequences of a micro-batch", "T": "tokens of a sequence", "D": "model width", "F": "hidden width",
    "K": "key-value heads", "G": "query heads of a key-value head", "H": "width of a head", "V": "vocabulary",
    "E": "experts", "k": "experts that a token takes", "M": "hidden width of an expert",
    "S": "hidden width of the shared expert", "Q": "width of the queries' latent", "C": "width of the keys' and values' latent",
    "I": "plain part of a head", "R": "rotary part of a head", "U": "width of a value", "J": "two hidden states",
    "ep": "part of expert parallelism that is borrowed from fsdp",
    "P": "rows of a table of positions", "span": "share of the square of scores that is computed", "m": "micro-batches",
    "p": "pipeline stages", "v": "virtual stages of a stage", "r": "rank of an adapter",
    **dict.fromkeys(("dp", "fsdp", "cp", "tp", "pp"), "degree of the axis"),
    "tp_kv": "part of tp that splits key-value heads", "tp_rep": "part of tp that shares a key-value head",
}  # fmt: skip


FULLEST = "share of the fullest device"  # of a dim that axes split: its symbol has both


def symbols_of(name: str, layout: Layout, cluster: Cluster) -> str:
    """A term's formula in symbols; that of the bubble is the schedule's, and a prediction has some of its own.

    F, B and W of a bubble: seconds of a micro-batch's forward and backward pass, and of the part of the latter for the weights'
    gradients.
    """
    own = schedule_of(layout.schedule).bubble if name == "time.bubble" else None
    predicted = PREDICTED.get(name) if cluster.calibration else None
    return own or predicted or FORMULAS[name].symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A symbol, what it stands for, and its value."""

    symbol: str
    meaning: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """An expression that came out of the derivation: elements (or FLOPs) of one unit on one device, once."""

    what: str
    expression: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of one layout. `unit` is "s" or "B"; `hidden_s` is traffic of the term that compute hides."""

    name: str
    layout: str
    value: float
    unit: str
    share: float
    hidden_s: float
    words: str
    formula: str
    inputs: tuple[Input, ...]
    derived: tuple[Derived, ...]


class _Read(NamedTuple):
    what: str
    expression: Polynomial


def term(plan: Plan, layout: Layout, priced: Estimate, name: str) -> Term:
    """One term, such as memory.activations or time.tp. Raises `InputError` that lists the names there are."""
    known = [f"time.{t}" for t in TIME_TERMS] + [f"memory.{t}" for t in MEMORY_TERMS]
    if name not in known:
        raise InputError(f"--term: {unknown(name, known)}")
    tree, _, own = name.partition(".")
    terms, hidden = (priced.time, priced.hidden) if tree == "time" else (priced.memory, {})
    values = _values(plan, layout)
    found = [read for read in _Reader(plan, layout).read(name) if read.expression]
    return Term(
        name=name, layout=str(layout), value=terms[own], unit="s" if tree == "time" else "B",
        share=terms[own] / sum(terms.values()), hidden_s=hidden.get(own, 0.0),
        words=FORMULAS[name].words, formula=symbols_of(name, layout, plan.cluster),
        inputs=_inputs(plan, layout, found, values),
        derived=tuple(
            Derived(what=r.what, expression=str(r.expression), value=float(r.expression.evaluate(values))) for r in found
        ),
    )  # fmt: skip


def _values(plan: Plan, layout: Layout) -> Values:
    return unit_values(
        plan.model, plan.job.seq_len, _degrees(plan, layout), layout.cp_variant, plan.job.attended_tokens
    )


def _degrees(plan: Plan, layout: Layout) -> Mapping[str, int]:
    return atomic_degrees(plan.model, degrees_of(layout))


def _inputs(plan: Plan, layout: Layout, found: Iterable[_Read], values: Values) -> tuple[Input, ...]:
    """Every symbol of the expressions, and the counts that the formulas multiply them by."""
    symbols: dict[str, float] = {}
    for read in found:
        for symbol in (s for monomial in read.expression.monomials for s, _ in monomial.factors):
            symbols |= {name: values[name] for name in _parts(symbol)} | {str(symbol): values[symbol]}
    symbols |= {"m": num_micro_batches(plan.job, degrees_of(layout)), "p": layout.pp, "v": layout.num_virtual_stages}
    return tuple(
        Input(symbol=name, meaning=FULLEST if name.startswith("(") else MEANINGS[name], value=float(value))
        for name, value in sorted(symbols.items())
    )


def _parts(symbol: Symbol) -> tuple[str, ...]:
    return (symbol.dim, *symbol.axes) if isinstance(symbol, Local) else (symbol,)


class _Reader:
    """Reads a term's expressions off the derivation of a layout's family."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        rates = rates_of(plan.cluster.chip, plan.cluster.calibration)
        precision, loss = precision_named(plan.job.precision), loss_of(plan.cluster, plan.job)
        self.pricer = UnitPricer(plan.model, rates, precision, loss, plan.job.optimizer)
        self.family = self.pricer.of_structure(family_of(layout))
        self.degrees, self.layout = _degrees(plan, layout), layout
        self.units = tuple(unit_counts(plan.model))

    def read(self, name: str) -> Iterator[_Read]:
        """What there is to read; nothing for terms that are a constant or follow from others."""
        tree, _, own = name.partition(".")
        if own in ("forward", "backward", "recompute"):
            yield from self.flops(own)
        elif name == "time.host":
            yield from self.saved(logits=False) if self.layout.offloads_activations else ()
            yield from self.state("optimizer") if self.layout.offloads_optimizer else ()
        elif tree == "time":
            yield from self.collectives(own)
        elif own in ("activations", "logits"):
            yield from self.saved(logits=own == "logits")
        else:
            yield from self.state(own)

    def flops(self, phase: str) -> Iterator[_Read]:
        for unit in self.units:
            kernels = self.pricer.parts(self.family, unit).kernels
            yield _Read(f"FLOPs of the {unit}", sum((k.flops for k in kernels if k.phase == phase), start=ZERO))

    def collectives(self, axis: str) -> Iterator[_Read]:
        for unit in (*self.units, "carry"):
            for one in self.pricer.parts(self.family, unit).collectives:
                if _charged(one) == axis and math.prod(self.degrees[a] for a in one.axes) > 1:
                    over = "·".join(a for a in one.axes if self.degrees[a] > 1)
                    yield _Read(f"{unit}, {one.phase}: {one.kind} over {over}, elements", one.elements)

    def saved(self, *, logits: bool) -> Iterator[_Read]:
        for name, family in self.kept():
            found: dict[str, Polynomial] = {}
            for one in self.pricer.parts(family, name.split()[0]).products.saved:
                if (one.role is Role.LOGITS) is logits:
                    what = f"{name}, elements kept as {one.role.name.lower()}{self.cast(one)}"
                    found[what] = found.get(what, ZERO) + one.elements
            yield from (_Read(what, expression) for what, expression in found.items())

    def kept(self) -> Iterator[tuple[str, Family]]:
        """Units whose activations are kept, with the family that says which."""
        for unit in self.units:
            yield unit, self.family
            if unit in LAYERS and self.layout.recompute_layers is not None:
                yield f"{unit} without recomputation", replace(self.family, recompute="none")

    def cast(self, one: Saved) -> str:
        """In which format it is kept, where that is not its own."""
        recipe = self.pricer.precision
        if not (recipe.matmul and recipe.saves_casts and one.num_orders):
            return ""
        return f" in {recipe.matmul}{' and as it is' if one.also_read else ''}"

    def state(self, own: str) -> Iterator[_Read]:
        resting = self.resting(own)
        if resting is None:
            return
        for name in self.units:
            unit = self.pricer.parts(self.family, name).unit
            dims = (unit.weights if own in ("parameters", "gathered") else unit.trained).values()
            yield _Read(f"elements of the {name}", sum((resting(d).local_elements() for d in dims), start=ZERO))

    def resting(self, own: str) -> Callable[[tuple[str, ...]], Spec] | None:
        """Where the weights of a term of state lie."""
        family = self.family
        optimizer = partial(optimizer_rest, family)
        lying: dict[str, Callable[[tuple[str, ...]], Spec]] = {
            "parameters": partial(weight_rest, family),
            "gradients": partial(weight_shard, family) if family.zero_stage >= 2 else partial(weight_use, family),
            "master": optimizer,
            "optimizer": optimizer,
        }
        if family.zero_stage >= 2:
            lying["gathered"] = partial(weight_use, family)
        return lying.get(own)


def _charged(one: Traffic) -> str:
    """The time term that a collective counts in: all gathers of weights and scatters of gradients are ZeRO's."""
    if not one.carries_weights or (one.phase == "update" and one.group == "dp"):
        return one.group
    return "fsdp"
