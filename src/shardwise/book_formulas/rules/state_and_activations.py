"""State and activations in memory; what ZeRO saves and moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from shardwise.values import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of training state on one device."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def zero_state_bytes(
    num_params: float, zero_stage: int = 0, degree: float = 1, *, weight_bytes: float = 2.0,
    gradient_bytes: float = 2.0, optimizer_bytes: float = 12.0,
) -> StateBytes:  # fmt: skip
    """State of `num_params` parameters on each of `degree` devices under a stage of ZeRO.

    `optimizer_bytes` k is 12 with a master copy in fp32, 8 without; fp32 gradients beside the bf16 ones take 6.
    Formula: 2P + 2P + kP; stage 1 divides the optimizer's part by the degree, stage 2 the gradients' too, stage 3 all. Unit: B.
    Source: the playbook, "ZeRO". Differs: the book leaves gradients out (2 + 8 = 10 bytes).
    """
    _require_stage(zero_stage)
    shard = num_params / degree
    return StateBytes(
        weights=weight_bytes * (shard if zero_stage >= 3 else num_params),
        gradients=gradient_bytes * (shard if zero_stage >= 2 else num_params),
        optimizer=optimizer_bytes * (shard if zero_stage >= 1 else num_params),
    )


def _require_stage(zero_stage: int) -> None:
    if zero_stage not in (0, 1, 2, 3):
        raise InputError(f"zero_stage: found {zero_stage!r}; one of 0, 1, 2, 3 is required")


def zero_memory_reduction(
    zero_stage: int, degree: float = math.inf, *, weight_bytes: float = 2.0, gradient_bytes: float = 2.0,
    optimizer_bytes: float = 12.0,
) -> float:  # fmt: skip
    """How many times less state a stage of ZeRO keeps than none does; 4 for stage 1 and 8 for stage 2 in the limit.

    Formula: the total of `zero_state_bytes` at stage 0 over that at this stage. Source: the playbook, "ZeRO".
    """
    state = partial(
        zero_state_bytes, 1.0, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes
    )
    return state().total / state(zero_stage, degree).total


def zero_traffic_per_param(zero_stage: int, num_micro_batches: int = 1) -> int:
    """Elements that each device sends per parameter and step.

    Formula: 2, 2, a + 1, 3a for stages 0 to 3 and a micro-batches. Unit: elements/parameter. Assumes: (n - 1)/n taken as 1.
    Source: the playbook, "ZeRO", for one micro-batch. Differs: the book counts all stages alike, taking the
    forward gather to be hidden.
    """
    _require_stage(zero_stage)
    return (2, 2, num_micro_batches + 1, 3 * num_micro_batches)[zero_stage]


def zero3_extra_all_gathers(num_layers: int) -> int:
    """AllGathers of a step that ZeRO-3 has beyond ZeRO-2, as the last layer stays gathered.

    Formula: 2L - 1. Unit: AllGathers. Source: the playbook, "ZeRO".
    """
    return 2 * num_layers - 1


def max_params_per_device(memory_bytes: float, bytes_per_param: float) -> float:
    """Parameters whose replicated state fills a device, activations left out.

    Formula: bytes of memory / bytes per parameter. Unit: parameters. Source: the book, "Training", DP.
    """
    return memory_bytes / bytes_per_param


def checkpoint_bytes(
    tokens: float, num_layers: float, d_model: float, *, num_d_model: float = 1, d_ff: float = 0, num_d_ff: float = 0,
    bytes_per_element: float = 2.0,
) -> float:  # fmt: skip
    """Bytes of activations kept for a batch: per token and layer `num_d_model` arrays of D and `num_d_ff` of F.

    Formula: e·T·L·(a·D + b·F), e bytes an element, a and b arrays of each width. Assumes: nothing else is kept.
    Source: the book, "Transformers", gradient checkpointing.
    """
    return bytes_per_element * tokens * num_layers * (num_d_model * d_model + num_d_ff * d_ff)


def layer_activation_bytes(
    tokens: float, d_model: float, *, num_heads: float = 0, seq_len: float = 0, tp: float = 1, sequence_parallel: bool = False,
    fused_attention: bool = False, dropout: bool = True,
) -> float:  # fmt: skip
    """Activations that a layer of GPT saves for the backward pass in bf16.

    Formula: T·D·(10 + 24/`tp` + 5·`num_heads`·`seq_len`/(D·`tp`)), 10/`tp` with sequence parallelism. Unit: B.
    Assumes: an MLP of 4·D with GELU; each score of attention takes 5 bytes: softmax and dropout (2 each) and a mask (1); none
    where attention is fused; without dropout 2 a score, and 2 bytes of T·D less for the masks behind attention and MLP.
    Source: the playbook, "Memory for activations": 34 + 5·a·s/h bytes a token and width, after Korthikanti et al. 2022, 4.1.
    """
    plain = (10.0 if dropout else 8.0) / (tp if sequence_parallel else 1)
    scores = 0.0 if fused_attention or not d_model else (5.0 if dropout else 2.0) * num_heads * seq_len / d_model
    return tokens * d_model * (plain + (24.0 + scores) / tp)


def bytes_per_chip(
    num_params: float, bytes_per_param: float, activation_bytes: float, num_chips: float
) -> float:  # fmt: skip
    """State and activations shared evenly by all chips.

    Formula: (P·bytes per parameter + activations) / N. Unit: B. Source: the book, "Training Llama 3".
    """
    return (num_params * bytes_per_param + activation_bytes) / num_chips


def min_chips(total_bytes: float, memory_bytes: float) -> int:
    """Chips whose memory holds so many bytes.

    Formula: bytes / memory of a chip, rounded up. Unit: chips. Source: the book, "Training Llama 3".
    """
    return math.ceil(total_bytes / memory_bytes)
