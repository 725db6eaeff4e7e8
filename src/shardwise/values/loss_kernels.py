"""Bytes that the loss holds per logit at its peak, by kind of cross-entropy kernel; jobs, prices and published runs read this
table."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.values.errors import lookup


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
