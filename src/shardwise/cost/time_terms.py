"""The terms of a step: how each is computed for the slowest stage, and what it is."""

from __future__ import annotations

from shardwise.cost import communication
from shardwise.cost.overlap import exposed_formula
from shardwise.cost.step import Step
from shardwise.cost.term import Rule, Rules, Setting
from shardwise.schedule.schedule import schedule_of

_COLLECTIVES = "collectives, each its bytes over the links of its axes; what compute does not hide"
_BESIDE = ("spans", "host_s", "stream_s", "update_s")  # the concurrent spans
_EACH_PASS = "m · blocks · Σ bytes · s/byte"


def _kernels(words: str, phase: str) -> Rule[Step]:
    """A phase over all micro-batches."""
    return Rule(
        words,
        lambda setting: f"m · blocks · {setting.rates.formula.kernels}",
        lambda setting: setting.rates.formula.source,
        lambda step: step.stage.pipeline.rounds * getattr(step, f"{phase}_s"),
        lambda read: read.flops(phase),
    )


def _traffic(words: str, axis: str, own: str) -> Rule[Step]:
    """The exposed communication of an axis; `own`: in symbols, where the convention charges each axis its own."""

    def formula(setting: Setting) -> str:
        return exposed_formula(setting.overlap, axis, own, measured=setting.rates.exposed is not None)

    return Rule(
        words, formula, communication.SOURCE, lambda step: step.traffic.exposed_s[axis],
        lambda read: read.collectives(axis), _BESIDE,
    )  # fmt: skip


TIME: Rules[Step] = Rules("time", "s", {
    "forward": _kernels("forward compute of the slowest stage", "forward"),
    "backward": _kernels("backward compute of the slowest stage", "backward"),
    "recompute": _kernels("forward slices run again for the backward pass", "recompute"),
    "tp": _traffic(f"tensor-parallel {_COLLECTIVES}", "tp", _EACH_PASS),
    "cp": _traffic(f"context-parallel {_COLLECTIVES}", "cp", _EACH_PASS),
    "ep": _traffic(f"tokens to their experts and back: {_COLLECTIVES}", "ep", _EACH_PASS),
    "pp": _traffic("activations and their gradients to the next stage", "pp", "m · v · Σ bytes · s/byte"),
    "fsdp": _traffic(f"weights and gradients of ZeRO: {_COLLECTIVES}", "fsdp", "Σ max(traffic - compute, 0)"),
    "dp": _traffic(f"gradients of the replicas, once per step: {_COLLECTIVES}", "dp", "max(traffic - compute, 0)"),
    "control": _traffic("the loss, summed once per step", "control", "latency and 4 bytes"),
    "host": Rule(
        "activations to the host and back, beside each pass, and the optimizer's state through the device, beside the update",
        "m · Σ max(bytes / PCIe rate - pass, 0) + max(bytes of state / PCIe rate - update, 0)",
        "Transformer Engine, get_cpu_offload_context; Megatron-Core, cpu_offloading; MaxText, optimizer_memory_host_offload",
        lambda step: step.traffic.exposed_s["host"],
        lambda read: read.offloaded(),
        _BESIDE,
    ),
    "bubble": Rule(
        "stages that wait for the first and the last micro-batch",
        lambda setting: schedule_of(setting.schedule).bubble,
        "Narayanan et al. 2021, section 2.2; Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2; DeepSeek-AI 2024, "
        "DeepSeek-V3 Technical Report, table 2",
        lambda step: step.bubble_s,
        given=("steady",),
    ),
    "optimizer": Rule(
        "the update streams the optimizer's state",
        lambda setting: setting.rates.formula.update,
        lambda setting: setting.rates.formula.source,
        lambda step: step.update_s,
    ),
})  # fmt: skip
