"""Named terms of a step's time and of a device's memory: value, formula as text, inputs, and source.

A rule computes its term from a record: a stage's step (`stage_step_time.py`) or a device's memory (`device_memory.py`), of
one layout or, with arrays for numbers, of many. Text and inputs are made only where a term is explained. `TIME` and
`MEMORY` have the rules, in the order in which terms are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shardwise.hardware.network import topology
from shardwise.model import OverlapConvention
from shardwise.pipeline import get_schedule
from shardwise.price.device_memory import DeviceMemory
from shardwise.price.overlap import exposed_formula
from shardwise.price.roofline import Rates
from shardwise.price.stage_step_time import StageStep
from shardwise.price.term_inputs import Expressions, InputRecorder, TermInput, UnitExpression
from shardwise.values import Precision, Value
from shardwise.values.engine_policies import LossKernel


class TermContext(NamedTuple):
    """Facts that the wording of a term depends on, apart from numbers."""

    rates: Rates
    precision: Precision
    loss: LossKernel
    schedule: str
    overlap: OverlapConvention


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedExpression:
    """An expression from the derivation: elements (or FLOPs) of one unit on one device, counted once."""

    what: str
    expression: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of one layout, in `unit` "s" or "B". Its rule makes the same value of the same `inputs` again; `derived` are the
    expressions that the costs of units among these rest on, and `symbols` what those stand for."""

    name: str
    value: float
    unit: str
    words: str
    formula: str
    source: str
    inputs: tuple[TermInput, ...]
    derived: tuple[DerivedExpression, ...]
    symbols: tuple[TermInput, ...]


Record = TypeVar("Record")
ContextText = str | Callable[[TermContext], str]
ReadExpressions = Callable[[Expressions], Iterable[UnitExpression]]


class TermRule(NamedTuple, Generic[Record]):
    """Rule of a term: its description, its source, and how it is computed from a record.

    `derived` yields the expressions behind the costs of units. `input_properties`: cached properties of the record that
    appear in the formula as inputs; their own inputs are then not the term's.
    """

    description: str
    formula: ContextText
    source: ContextText
    value: Callable[[Record], Value]
    derived: ReadExpressions = lambda _: ()
    input_properties: tuple[str, ...] = ()


class TermRules(Generic[Record]):
    """The rules of one tree of terms, `time` or `memory`, in the order in which terms are shown and added up."""

    def __init__(self, tree: str, unit: str, by_name: Mapping[str, TermRule[Record]]) -> None:
        self.tree, self.unit, self.by_name = tree, unit, by_name

    def values(self, record: Record) -> dict[str, Value]:
        """Return every term of a record."""
        return {name: rule.value(record) for name, rule in self.by_name.items()}

    def formula(self, name: str, context: TermContext) -> str:
        """Return the formula of a term as text."""
        return _resolve_text(self.by_name[name].formula, context)

    def explain(self, name: str, record: Record, context: TermContext, expressions: Expressions) -> Term:
        """Return one term of one layout, with text, inputs and expressions."""
        rule, recorder = self.by_name[name], InputRecorder()
        value = float(rule.value(recorder.copy(record, input_properties=rule.input_properties)))
        reads = [read for read in rule.derived(expressions) if read.polynomial]
        return Term(
            name=f"{self.tree}.{name}", value=value, unit=self.unit, words=rule.description,
            formula=_resolve_text(rule.formula, context), source=_resolve_text(rule.source, context),
            inputs=tuple(recorder.inputs.values()),
            derived=tuple(
                DerivedExpression(what=r.meaning, expression=str(r.polynomial), value=expressions.value(r))
                for r in reads
            ),
            symbols=expressions.symbols(reads),
        )  # fmt: skip


def _resolve_text(text: ContextText, context: TermContext) -> str:
    return text if isinstance(text, str) else text(context)


_COLLECTIVES = "collectives, each its bytes over the links of its axes; what compute does not hide"
_CONCURRENT_INPUTS = ("spans", "host_s", "stream_s", "update_s")  # the concurrent spans
_EACH_PASS = "m · blocks · Σ bytes · s/byte"


def _phase_rule(description: str, phase: str) -> TermRule[StageStep]:
    """Return the rule of a phase over all micro-batches."""
    return TermRule(
        description,
        lambda context: f"m · blocks · {context.rates.formula.kernels}",
        lambda context: context.rates.formula.source,
        lambda step: step.stage.pipeline.rounds * getattr(step, f"{phase}_s"),
        lambda read: read.flops(phase),
    )


def _axis_rule(description: str, axis: str, per_axis_formula: str) -> TermRule[StageStep]:
    """Return the rule of the exposed communication of an axis; `per_axis_formula`: where each axis is charged its own."""

    def formula(context: TermContext) -> str:
        return exposed_formula(context.overlap, axis, per_axis_formula, measured=context.rates.exposed is not None)

    return TermRule(
        description, formula, topology.LINK_SECONDS_SOURCE, lambda step: step.communication.exposed_s[axis],
        lambda read: read.collectives(axis), _CONCURRENT_INPUTS,
    )  # fmt: skip


TIME: TermRules[StageStep] = TermRules("time", "s", {
    "forward": _phase_rule("forward compute of the slowest stage", "forward"),
    "backward": _phase_rule("backward compute of the slowest stage", "backward"),
    "recompute": _phase_rule("forward slices run again for the backward pass", "recompute"),
    "tp": _axis_rule(f"tensor-parallel {_COLLECTIVES}", "tp", _EACH_PASS),
    "cp": _axis_rule(f"context-parallel {_COLLECTIVES}", "cp", _EACH_PASS),
    "ep": _axis_rule(f"tokens to their experts and back: {_COLLECTIVES}", "ep", _EACH_PASS),
    "pp": _axis_rule("activations and their gradients to the next stage", "pp", "m · v · Σ bytes · s/byte"),
    "fsdp": _axis_rule(f"weights and gradients of ZeRO: {_COLLECTIVES}", "fsdp", "Σ max(traffic - compute, 0)"),
    "dp": _axis_rule(f"gradients of the replicas, once per step: {_COLLECTIVES}", "dp", "max(traffic - compute, 0)"),
    "control": _axis_rule("the loss, summed once per step", "control", "latency and 4 bytes"),
    "host": TermRule(
        "activations to the host and back, beside each pass, and the optimizer's state through the device, beside the update",
        "m · Σ max(bytes / PCIe rate - pass, 0) + max(bytes of state / PCIe rate - update, 0)",
        "Transformer Engine, get_cpu_offload_context; Megatron-Core, cpu_offloading; MaxText, optimizer_memory_host_offload",
        lambda step: step.communication.exposed_s["host"],
        lambda read: read.offloaded(),
        _CONCURRENT_INPUTS,
    ),
    "bubble": TermRule(
        "stages that wait for the first and the last micro-batch",
        lambda context: get_schedule(context.schedule).bubble,
        "Narayanan et al. 2021, section 2.2; Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2; DeepSeek-AI 2024, "
        "DeepSeek-V3 Technical Report, table 2",
        lambda step: step.bubble_s,
        input_properties=("steady",),
    ),
    "optimizer": TermRule(
        "the update streams the optimizer's state",
        lambda context: context.rates.formula.update,
        lambda context: context.rates.formula.source,
        lambda step: step.update_s,
    ),
})  # fmt: skip

_ZERO_SOURCE = "Rajbhandari et al. 2020, ZeRO, section 5"


def _state_rule(description: str, formula: str, column: str, *, goes_to_host: bool = False) -> TermRule[DeviceMemory]:
    """Return the rule of training state at rest, a column of `StateCost`."""

    def source(context: TermContext) -> str:
        return f"{_ZERO_SOURCE}; recipe {context.precision.name}: {context.precision.source}"

    return TermRule(
        description, formula, source,
        lambda memory: memory.sum_state(column, offloaded=goes_to_host and memory.stage.host.optimizer),
        lambda read: read.state(column),
    )  # fmt: skip


MEMORY: TermRules[DeviceMemory] = TermRules("memory", "B", {
    "parameters": _state_rule("weights as they rest", "Σ elements at rest · bytes of a weight", "parameters_bytes"),
    "gradients": TermRule(
        "gradients as they rest between micro-batches", "Σ elements · bytes of a gradient",
        lambda context: f"{_ZERO_SOURCE}; recipe {context.precision.name}: {context.precision.source}",
        lambda memory: memory.gradients,
        lambda read: read.state("gradients_bytes"),
    ),
    "master": _state_rule(
        "the optimizer's copy of the weights", "Σ elements · bytes of the master copy", "master_bytes", goes_to_host=True
    ),
    "optimizer": _state_rule(
        "the optimizer's moments", "Σ elements · Σ bytes of a moment", "optimizer_bytes", goes_to_host=True
    ),
    "activations": TermRule(
        "tensors kept for the backward pass of every micro-batch in flight",
        "in flight · blocks · Σ saved elements · bytes; 2 · blocks where they wait on the host",
        "what the derived backward pass reads; in flight: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section "
        "4.2.3; Qi et al. 2023, Zero Bubble Pipeline Parallelism, appendix",
        lambda memory: memory.activations,
        lambda read: read.saved(),
    ),
    "workspace": TermRule(
        "what one block needs while it runs backward, or the update of whole matrices where that is more",
        "what recompute rebuilds + half of a block's activations; for `train` the most that is alive beside what was saved, less "
        "what of that has gone",
        lambda context: (
            "what is alive at each operation of the derived backward pass" if context.loss.stepwise
            else "SimuMax's measured peaks on B200: a block in its backward pass holds 1.5 times its activations"
        ),
        lambda memory: memory.workspace,
    ),
    "gathered": TermRule(
        "gathered weights and unscattered gradients of two neighbouring units (on a TPU of one)",
        "2 · elements in use · bytes",
        "PyTorch, FSDP2: a block at a time, the next one prefetched; of a TPU the peaks that XLA's compilers give",
        lambda memory: memory.gathered,
        lambda read: read.state("transient_bytes"),
    ),
    "logits": TermRule(
        "the loss over the logits, by its kernel",
        "bytes of the loss for each · elements of the logits",
        lambda context: context.loss.source,
        lambda memory: memory.peak.logits,
        lambda read: read.saved(logits=True),
    ),
    "buffers": TermRule(
        "input and output of the largest collective on activations",
        "2 · largest payload; of `train` they are in the workspace",
        "torch.distributed: all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single take an input and an output",
        lambda memory: memory.buffers,
    ),
    "runtime": TermRule(
        "context, libraries and fragmentation",
        "a constant of the chip",
        lambda context: context.rates.chip.sources.get("runtime_bytes", f"chip {context.rates.chip.name}"),
        lambda memory: memory.runtime_bytes,
    ),
})  # fmt: skip
