"""A whole run: FLOPs, seconds, utilisation."""

from __future__ import annotations


def training_flops(num_params: float, tokens: float, *, recompute: bool = False) -> float:
    """FLOPs of a run: 2 forward and 4 backward for each parameter and token, and 2 more when every block runs forward again.

    Formula: 6·P·T; 8·P·T with `recompute`. Unit: FLOPs. Assumes: attention left out, every parameter in a matrix product.
    Source: the book, "Transformers". Differs: the note takes the input embedding's V·D parameters off and adds causal attention.
    """
    return (8.0 if recompute else 6.0) * num_params * tokens


def training_seconds(num_params: float, tokens: float, num_chips: float, flops_per_s: float, mfu: float = 1.0) -> float:
    """Seconds of a run: 44.3 days for 70e9 parameters, 15e12 tokens and 8960 v5p at 0.40.

    Formula: 6·P·T / (N·C·MFU). Source: the book, "Training Llama 3".
    """
    return training_flops(num_params, tokens) / (num_chips * flops_per_s * mfu)


def rescaled_seconds(seconds: float, num_chips: float, target_chips: float) -> float:
    """The time on another number of chips at the same utilisation.

    Formula: t·N / N'. Source: the book, "Training Llama 3".
    """
    return seconds * num_chips / target_chips


def flops_utilisation(
    num_params: float, tokens: float, seconds: float, num_chips: float, flops_per_s: float, *, recompute: bool = False
) -> float:
    """MFU in a measured time, or HFU where `recompute` counts the forward pass run again.

    Formula: 6·P·T, or 8·P·T with `recompute`, / (t·N·C). Source: the playbook, "Activation recomputation".
    Differs: `Estimate.mfu` counts causal attention too.
    """
    return training_flops(num_params, tokens, recompute=recompute) / (seconds * num_chips * flops_per_s)


def tokens_per_param_optimal() -> float:
    """Tokens for each parameter that spend a compute budget best.

    Formula: about 20. Unit: tokens/parameter. Source: Hoffmann et al. 2022, table 3.
    """
    return 20.0
