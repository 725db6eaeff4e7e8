"""What is to be trained: tokens, batch, precision recipe, and the convention for overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.dtypes import bytes_per_element
from shardwise.errors import InputError, require

Overlap = Literal["per_axis", "sum", "max"]
OVERLAPS: tuple[Overlap, ...] = ("per_axis", "sum", "max")
MOST_TOKENS = 10**15  # of one batch: far above any, and its products stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Number formats of a training run; their widths give the bytes of state per parameter.

    `moments` are AdamW's two; `accumulated_gradients` is a second copy of the gradients in another format, into which
    micro-batches are added. A format of None means that no such copy is kept.
    """

    name: str
    weights: str
    gradients: str
    master: str | None
    moments: str
    accumulated_gradients: str | None = None
    activations: str = "bf16"
    gradient_reduction: str = "bf16"
    source: str = ""

    @property
    def bytes_per_parameter(self) -> float:
        """Weights, gradients, master copy and two moments, in bytes."""
        master = bytes_per_element(self.master) if self.master else 0.0
        return bytes_per_element(self.weights) + self.gradient_bytes + master + 2 * bytes_per_element(self.moments)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a parameter's gradient, with the copy that it is accumulated in."""
        copy = bytes_per_element(self.accumulated_gradients) if self.accumulated_gradients else 0.0
        return bytes_per_element(self.gradients) + copy


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="bf16", weights="bf16", gradients="bf16", master="fp32", moments="fp32",
                  source="S1, memory: 2 + 2 + 4 + 8 = 16 bytes per parameter"),
        Precision(name="bf16_fp32_gradients", weights="bf16", gradients="bf16", accumulated_gradients="fp32", master="fp32",
                  moments="fp32", gradient_reduction="fp32",
                  source="S1, memory: gradients are also accumulated in fp32, 2 + 2 + 4 + 4 + 8 = 20 bytes per parameter"),
        Precision(name="bf16_fp32_main_gradients", weights="bf16", gradients="fp32", master="fp32", moments="fp32",
                  gradient_reduction="fp32",
                  source="Megatron-LM, distributed optimizer: bf16 parameters, gradients in fp32 alone, 18 bytes per parameter"),
        Precision(name="bf16_no_master", weights="bf16", gradients="bf16", master=None, moments="fp32",
                  source="S0, section 5: bf16 weights and fp32 moments, 10 bytes; 12 with the gradients that S0 leaves out"),
        Precision(name="fp32", weights="fp32", gradients="fp32", master=None, moments="fp32", activations="fp32",
                  gradient_reduction="fp32", source="S1, memory: 4 + 4 + 8 = 16 bytes per parameter"),
    )
}  # fmt: skip


def precision_named(name: str) -> Precision:
    """A recipe by name. Raises `InputError` that lists the names."""
    if name not in PRECISIONS:
        raise InputError(f"precision: found {name!r}; one of {', '.join(PRECISIONS)} is required")
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. `global_batch_tokens` is a multiple of `seq_len`; `tokens` is the length of the whole run."""

    global_batch_tokens: int
    seq_len: int
    tokens: float | None = None
    precision: str = "bf16"
    overlap: Overlap = "per_axis"

    def __post_init__(self) -> None:
        problems = [
            f"job: {name} is {getattr(self, name)!r}; a whole number of at least 1 is required"
            for name in ("global_batch_tokens", "seq_len")
            if not isinstance(getattr(self, name), int)
            or isinstance(getattr(self, name), bool)
            or getattr(self, name) < 1
        ]
        if not problems:
            problems = [
                f"job: {name} has {len(str(getattr(self, name)))} digits; at most {MOST_TOKENS:,} is planned for"
                for name in ("global_batch_tokens", "seq_len")
                if getattr(self, name) > MOST_TOKENS
            ]
        if not problems and self.global_batch_tokens % self.seq_len:
            low = self.global_batch_tokens // self.seq_len * self.seq_len
            nearest = (
                f"the nearest batches are {low} and {low + self.seq_len}" if low else f"the smallest is {self.seq_len}"
            )
            problems.append(
                f"job: a batch of {self.global_batch_tokens} tokens is no whole number of sequences of {self.seq_len}; "
                f"{nearest} tokens"
            )
        if self.tokens is not None and not self.tokens > 0:
            problems.append(f"job: tokens is {self.tokens!r}; a positive number is required")
        if self.precision not in PRECISIONS:
            problems.append(f"job: precision is {self.precision!r}; one of {', '.join(PRECISIONS)} is required")
        if self.overlap not in OVERLAPS:
            problems.append(f"job: overlap is {self.overlap!r}; one of {', '.join(OVERLAPS)} is required")
        require(problems)

    @property
    def num_seqs(self) -> int:
        """Sequences in one global batch."""
        return self.global_batch_tokens // self.seq_len
