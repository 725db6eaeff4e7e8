"""Policies of an engine beyond the layout: the collectives that it issues, and the bytes that its loss holds per logit.

A stack has a default of both, and a run's recipe sets the first. Jobs, prices and published runs read the table of losses.
Imports nothing heavy: command-line flags take their choices from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwise.values.errors import lookup, raise_problems

# When gradients that are not sharded are reduced: S1, data parallelism.
GradientReduction = Literal["after", "per_parameter", "bucketed"]
GRADIENT_REDUCTIONS: tuple[GradientReduction, ...] = get_args(GradientReduction)
# How often router statistics are summed over the ranks that share a micro-batch: in each micro-batch for a loss, which is then
# summed over the stages of a pipeline.
RouterStatistics = Literal["micro_batch", "step", "never"]
ROUTER_STATISTICS: Mapping[str, int] = {"micro_batch": 2, "step": 1, "never": 0}  # numbers for each expert
# Source: S1, data parallelism, second optimization; PyTorch's DistributedDataParallel has MiB.
BUCKET_BYTES = 25_000_000
# Where operands of low-precision matmuls are cast: `everywhere`, as a recipe says (saved for the backward pass and moved as
# casts), `in_products` alone, or `in_producers`, as Shardwise's own engine does: norms and gated activations write what products
# read of them where scales allow (`derive.producer_casts`), which is then saved, and all else is cast in products.
Casts = Literal["everywhere", "in_products", "in_producers"]
CASTS: tuple[Casts, ...] = get_args(Casts)
# How often weights are cast for those matmuls where they rest whole: for `each_use`, or once in `each_step` into copies in both
# orders of dims, which are kept for its micro-batches, as Shardwise's own engine does.
WeightCasts = Literal["each_use", "each_step"]
WEIGHT_CASTS: tuple[WeightCasts, ...] = get_args(WeightCasts)
# What the router's weights multiply: the `results` of experts, as Shardwise's own engine does, which are saved for the weights'
# gradients, or the `activations` before an expert's last product or the tokens before its first (torchtitan), after which
# nothing of the results is saved.
# Source: Megatron-Core 0.12, transformer/moe/experts.py (weighted_bias_swiglu_impl); torchtitan v0.2.2, models/moe.py
# (MoEArgs.score_before_experts, True by default).
RouterWeights = Literal["results", "activations"]
ROUTER_WEIGHTS: tuple[RouterWeights, ...] = get_args(RouterWeights)
# When gradients that ZeRO-2 and -3 scatter stay whole until a step's last micro-batch, in the format of their reduction: `never`,
# as Shardwise's own engine has it, `in_pipelines` or `always` (PyTorch, FSDPModule.set_requires_gradient_sync).
WholeGradients = Literal["never", "in_pipelines", "always"]
WHOLE_GRADIENTS: tuple[WholeGradients, ...] = get_args(WholeGradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuePolicy:
    """Policy of the collectives that an engine issues for a layout.

    `reduction`: when gradients that rest whole (ZeRO-0 and -1) are reduced: `after` the backward pass, `per_parameter` as each is
    ready, or `bucketed`, as soon as `bucket_bytes` of them are. A bucket ends with its unit, however few bytes it holds.
    `reduce_each_micro_batch`: in every micro-batch, not in a step's last only. `statistics`: how often the routers' are summed.
    `noise_scale`: the norm of each micro-batch's gradient is taken, from which the gradient noise scale follows. `casts`: where
    the operands of narrow products are cast, and so what is moved and kept of them. `router_weights`: what they multiply.
    `dropout`: its masks are saved for the backward pass. `whole_gradients`: when those that ZeRO-2 and -3 scatter stay whole over
    the micro-batches of a step. `weight_casts`: how often weights that rest whole are cast.
    Raises `InputError` for a choice that does not exist and for buckets without room.

    >>> IssuePolicy(reduction="per_parameter").max_bucket_bytes
    0.0
    """

    reduction: GradientReduction = "bucketed"
    bucket_bytes: float = BUCKET_BYTES
    reduce_each_micro_batch: bool = False
    statistics: RouterStatistics = "never"
    noise_scale: bool = False
    casts: Casts = "everywhere"
    router_weights: RouterWeights = "results"
    dropout: bool = False
    whole_gradients: WholeGradients = "never"
    weight_casts: WeightCasts = "each_use"

    def __post_init__(self) -> None:
        lookup(dict.fromkeys(GRADIENT_REDUCTIONS), self.reduction, "reduction")
        lookup(ROUTER_STATISTICS, self.statistics, "statistics")
        lookup(dict.fromkeys(CASTS), self.casts, "casts")
        lookup(dict.fromkeys(ROUTER_WEIGHTS), self.router_weights, "router_weights")
        lookup(dict.fromkeys(WHOLE_GRADIENTS), self.whole_gradients, "whole_gradients")
        lookup(dict.fromkeys(WEIGHT_CASTS), self.weight_casts, "weight_casts")
        raise_problems(
            [] if self.bucket_bytes > 0 else [f"bucket_bytes is {self.bucket_bytes}; more than 0 is required"]
        )

    @property
    def max_bucket_bytes(self) -> float:
        """Most bytes of a bucket, unless it is a single larger parameter."""
        return 0.0 if self.reduction == "per_parameter" else self.bucket_bytes

    @property
    def numbers_per_expert(self) -> int:
        """Numbers summed for each expert of a layer: rows and, for a loss in each micro-batch, probabilities."""
        return lookup(ROUTER_STATISTICS, self.statistics, "statistics")


class LossKernel(NamedTuple):
    """Kind of cross-entropy kernel: peak bytes per logit, for bf16 logits.

    `in_logits_format`: all these bytes are in the logits' own format, so that they double in fp32. `stepwise`: the engine runs
    the derived operations one by one, so that memory over time follows from them (`step/liveness.py`); for other kernels it
    is a share of the activations (`price.unit_inputs`).
    """

    bytes_per_logit: float
    source: str
    in_logits_format: bool = False
    stepwise: bool = False

    def bytes_per_logit_at(self, width: float) -> float:
        """Return the peak bytes per logit for logits of `width` bytes."""
        return self.bytes_per_logit * (width / 2.0 if self.in_logits_format else 1.0)


LOSS_KERNELS: dict[str, LossKernel] = {
    "unfused": LossKernel(
        14.0,
        "bf16 logits (2), their fp32 copy (4), log-probabilities (4), their gradient (4): torch.nn.functional.cross_entropy on "
        "float32 logits keeps log_softmax's output and makes one gradient of it",
    ),
    "unfused_parallel": LossKernel(
        16.0,
        "over a split vocabulary with operations of their own: log-probabilities, the zeros that their gradient starts from, the "
        "softmax and the sum of these two, all in fp32: PyTorch, torch/distributed/tensor/parallel/loss.py (loss_parallel)",
    ),
    "fused": LossKernel(
        8.0,
        "bf16 logits (2), an fp32 copy that becomes the softmax and its gradient in place (4), the gradient in bf16 (2): "
        "Megatron-Core, fusions/fused_cross_entropy.py; Transformer Engine's parallel cross-entropy needs no more",
    ),
    "streamed": LossKernel(
        4.0,
        "bf16 logits (2) and their bf16 gradient (2), with fp32 in registers only: flash-attn's losses/cross_entropy.py; so XLA "
        "fuses the loss, by the peaks that its compilers give (tests/crosscheck/golden)",
    ),
    "in_place": LossKernel(
        2.0,
        "the gradient written over the logits as soon as there is a loss, with fp32 for a part of the tokens at a time: "
        "run/kernels/cross_entropy.py, which `train` runs; flash-attn's losses/cross_entropy.py, inplace_backward",
        in_logits_format=True,
        stepwise=True,
    ),
    "chunked": LossKernel(
        1.0,
        "the head and the loss for a part of the tokens at a time, with the gradients of the hidden state kept: Liger-Kernel, "
        "fused_linear_cross_entropy.py",
    ),
}


def get_loss_kernel(name: str) -> LossKernel:
    """Return a kind of cross-entropy kernel by name. Raises `InputError` that lists the names.

    >>> get_loss_kernel("fused").bytes_per_logit_at(2.0)
    8.0
    """
    return lookup(LOSS_KERNELS, name, "loss")
