"""The terms of a device's memory: how each is computed for the fullest device, and what it is."""

from __future__ import annotations

from shardwise.cost.stage_memory import Memory
from shardwise.cost.term import Rule, Rules, Setting

_ZERO = "Rajbhandari et al. 2020, ZeRO, section 5"


def _state(words: str, formula: str, column: str, *, goes_to_host: bool = False) -> Rule[Memory]:
    """Training state at rest, a column of `StateCost`."""

    def source(setting: Setting) -> str:
        return f"{_ZERO}; recipe {setting.precision.name}: {setting.precision.source}"

    return Rule(
        words, formula, source,
        lambda memory: memory.rests(column, offloaded=goes_to_host and memory.stage.host.optimizer),
        lambda read: read.state(column),
    )  # fmt: skip


MEMORY: Rules[Memory] = Rules("memory", "B", {
    "parameters": _state("weights as they rest", "Σ elements at rest · bytes of a weight", "parameters_bytes"),
    "gradients": _state(
        "gradients as they rest between micro-batches", "Σ elements · bytes of a gradient", "gradients_bytes"
    ),
    "master": _state(
        "the optimizer's copy of the weights", "Σ elements · bytes of the master copy", "master_bytes", goes_to_host=True
    ),
    "optimizer": _state(
        "the optimizer's moments", "Σ elements · Σ bytes of a moment", "optimizer_bytes", goes_to_host=True
    ),
    "activations": Rule(
        "tensors kept for the backward pass of every micro-batch in flight",
        "in flight · blocks · Σ saved elements · bytes; 2 · blocks where they wait on the host",
        "what the derived backward pass reads; in flight: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section "
        "4.2.3; Qi et al. 2023, Zero Bubble Pipeline Parallelism, appendix",
        lambda memory: memory.activations,
        lambda read: read.saved(),
    ),
    "workspace": Rule(
        "what one block needs while it runs backward, or the update of whole matrices where that is more",
        "what recompute rebuilds + half of a block's activations; for `train` the most that is alive beside what was saved, less "
        "what of that has gone",
        lambda setting: (
            "what is alive at each operation of the derived backward pass" if setting.loss.stepwise
            else "SimuMax's measured peaks on B200: a block in its backward pass holds 1.5 times its activations"
        ),
        lambda memory: memory.workspace,
    ),
    "gathered": Rule(
        "gathered weights and unscattered gradients of two neighbouring units (on a TPU of one)",
        "2 · elements in use · bytes",
        "PyTorch, FSDP2: a block at a time, the next one prefetched; of a TPU the peaks that XLA's compilers give",
        lambda memory: memory.gathered,
        lambda read: read.state("transient_bytes"),
    ),
    "logits": Rule(
        "the loss over the logits, by its kernel",
        "bytes of the loss for each · elements of the logits",
        lambda setting: setting.loss.source,
        lambda memory: memory.fullest.logits,
        lambda read: read.saved(logits=True),
    ),
    "buffers": Rule(
        "input and output of the largest collective on activations",
        "2 · largest payload; of `train` they are in the workspace",
        "torch.distributed: all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single take an input and an output",
        lambda memory: memory.buffers,
    ),
    "runtime": Rule(
        "context, libraries and fragmentation",
        "a constant of the chip",
        lambda setting: setting.rates.chip.sources.get("runtime_bytes", f"chip {setting.rates.chip.name}"),
        lambda memory: memory.runtime_bytes,
    ),
})  # fmt: skip
