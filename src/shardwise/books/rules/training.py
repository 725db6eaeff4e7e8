"""A whole run: pipelines, FLOPs, days, utilisation."""

from __future__ import annotations


def training_flops(num_params: float, tokens: float, *, recompute: bool = False) -> float:
    """6·P·T FLOPs (2 forward, 4 backward); 8·P·T when every block runs forward again.

    Assumes: attention left out, every parameter in a matrix product. Differs: the note takes the input embedding's V·D
    parameters off and adds causal attention. Source: the book, "Transformers".
    """
    return (8.0 if recompute else 6.0) * num_params * tokens


def training_seconds(num_params: float, tokens: float, num_chips: float, flops_per_s: float, mfu: float = 1.0) -> float:
    """6·P·T / (N·C·MFU) seconds: 44.3 days for 70e9 parameters, 15e12 tokens and 8960 v5p at 0.40. Source: the book."""
    return training_flops(num_params, tokens) / (num_chips * flops_per_s * mfu)


def rescaled_seconds(seconds: float, num_chips: float, target_chips: float) -> float:
    """The time on another number of chips at the same utilisation: t·N / N'."""
    return seconds * num_chips / target_chips


def flops_utilisation(
    num_params: float, tokens: float, seconds: float, num_chips: float, flops_per_s: float, *, recompute: bool = False
) -> float:
    """MFU of 6·P·T FLOPs in a measured time, or HFU where `recompute` counts the forward pass run again (8·P·T).

    Differs: `Estimate.mfu` counts causal attention too. Source: the playbook, "Activation recomputation".
    """
    return training_flops(num_params, tokens, recompute=recompute) / (seconds * num_chips * flops_per_s)
