"""Bubbles and micro-batches in flight of pipelines in closed form, as the sources print them, for numbers or arrays.

Sources: S1, "pipeline parallelism"; Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3.
"""

from __future__ import annotations

from shardwise.symbolic import Value, minimum


def bubble_ratio(pp: Value, num_micro_batches: Value, num_virtual_stages: Value = 1) -> Value:
    """Idle time over ideal time, (p - 1) / (v m): AFAB and 1F1B with v = 1, interleaved 1F1B with v > 1."""
    return (pp - 1) / (num_virtual_stages * num_micro_batches)


def in_flight_1f1b(pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """Micro-batches whose activations stage `stage` (from 0) holds at once: min(m, p - stage)."""
    return minimum(num_micro_batches, pp - stage)


def in_flight_interleaved(pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value) -> Value:
    """The same for interleaved 1F1B, in units of a whole stage's activations.

    Warm-up runs 2 (p - stage - 1) + (v - 1) p virtual stages forward and one more is in the steady state, each 1/v of
    the stage: p (1 + (p - 1) / (p v)) on the first stage. Source: Megatron-LM's warm-up count; Korthikanti et al. 2022.
    """
    chunks = 2 * (pp - stage - 1) + (num_virtual_stages - 1) * pp + 1
    return minimum(num_micro_batches, chunks / num_virtual_stages)


def in_flight_afab(num_micro_batches: Value) -> Value:
    """All-forward-all-backward holds every micro-batch."""
    return num_micro_batches
