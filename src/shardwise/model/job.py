"""A training job: tokens, batch, precision recipe (`values/precision.py`), and the convention for overlap.

The usual batch and sequence of a model are what a verb assumes, and says so, where a user gives none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.model.architecture import Architecture
from shardwise.model.optimizers.definition import DEFAULT_OPTIMIZER, OPTIMIZERS
from shardwise.model.parameters_and_flops import num_params
from shardwise.values import LOSS_KERNELS, PRECISIONS, did_you_mean, raise_problems
from shardwise.values.units import read_as_binary

OverlapConvention = Literal["per_axis", "sum", "max"]
# Attention whose scores stay on the chip, or are written to memory by kernels of their own.
AttentionKernel = Literal["fused", "unfused"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("fused", "unfused")
OVERLAP_CONVENTIONS: tuple[OverlapConvention, ...] = ("per_axis", "sum", "max")
DEFAULT_SEQ_LEN = 4096  # default tokens of a sequence, for verbs such as `memory` that need no job
MAX_BATCH_TOKENS = 10**15  # of one batch: far above any, and its products stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: the batch of an optimizer step and the length of a sequence in tokens, and what decides state and loss.

    `global_batch_tokens` is a multiple of `seq_len`; `tokens` is the length of the whole run. `precision` names a recipe
    (`values/precision.py`), `optimizer` one of `model/optimizers`, which decides the state of each weight. `overlap` is the
    convention by which a lower bound hides communication (`overlap_convention` where it is None); a job that names one is
    planned by that bound instead of a prediction. `loss` is the kind of cross-entropy, which decides the bytes of each logit
    (`values/engine_policies.py`); None: the one with the least memory that the stack has. `document_tokens`: length of the
    documents that a sequence is packed from, if attention stays within them; None: attention spans the sequence. `attention`:
    whether its scores are written to memory ("unfused") or stay on the chip; None: as the stack runs it. `dropout`: masks of
    dropout are saved for the backward pass, whatever the stack's default.

    Raises `InputError` for values out of range, unknown names, and a batch that is not a whole number of sequences.

    >>> job = Job(global_batch_tokens=4 * 2**20, seq_len=8192, precision="bf16")
    >>> job.num_seqs, job.overlap_convention, job.optimizer
    (512, 'per_axis', 'adamw')
    """

    global_batch_tokens: int
    seq_len: int
    tokens: float | None = None
    precision: str = "bf16"
    overlap: OverlapConvention | None = None
    loss: str | None = None
    document_tokens: int | None = None
    optimizer: str = DEFAULT_OPTIMIZER
    attention: AttentionKernel | None = None
    dropout: bool = False

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
                f"job: {name} has {len(str(getattr(self, name)))} digits; at most {MAX_BATCH_TOKENS:,} is planned for"
                for name in ("global_batch_tokens", "seq_len")
                if getattr(self, name) > MAX_BATCH_TOKENS
            ]
        if not problems and self.global_batch_tokens % self.seq_len:
            low = self.global_batch_tokens // self.seq_len * self.seq_len
            nearest = (
                f"the nearest batches are {low} and {low + self.seq_len}" if low else f"the smallest is {self.seq_len}"
            )
            problems.append(
                f"job: a batch of {self.global_batch_tokens} tokens is not a whole number of sequences of {self.seq_len}"
                f"{self._suggest_binary_sizes()}; {nearest} tokens"
            )
        if self.tokens is not None and not self.tokens > 0:
            problems.append(f"job: tokens is {self.tokens!r}; a positive number is required")
        choices: Mapping[str, Collection[str]] = {
            "precision": PRECISIONS, "overlap": OVERLAP_CONVENTIONS, "loss": LOSS_KERNELS, "optimizer": OPTIMIZERS,
            "attention": ATTENTION_KERNELS,
        }  # fmt: skip
        problems += [
            f"job: {name} is {value!r}{did_you_mean(value, allowed)}; one of {', '.join(allowed)} is required"
            for name, allowed in choices.items()
            if (value := getattr(self, name)) not in allowed
            and (value is not None or name in ("precision", "optimizer"))
        ]
        if self.document_tokens is not None and not (1 <= self.document_tokens <= self.seq_len):
            problems.append(
                f"job: document_tokens is {self.document_tokens!r}; a whole number of at least 1, at most seq_len, is required"
            )
        raise_problems(problems)

    def _suggest_binary_sizes(self) -> str:
        """Return a hint at binary sizes, where these divide and batch or sequence is written in decimal ones."""
        sizes = (self.global_batch_tokens, self.seq_len)
        batches, lengths = ([(size, ""), *filter(None, [read_as_binary(size)])] for size in sizes)
        suggestions = (
            (f"a batch of {batch_text}" * bool(batch_text), f"sequences of {text}" * bool(text))
            for batch, batch_text in batches
            for length, text in lengths
            if batch % length == 0
        )
        return next((f" (did you mean {' and '.join(filter(None, phrases))}?)" for phrases in suggestions), "")

    @property
    def overlap_convention(self) -> OverlapConvention:
        """The convention of overlap of a bound: `per_axis` where none is named."""
        return self.overlap or "per_axis"

    @property
    def attended_tokens(self) -> int:
        """Tokens that attend to one another: a sequence, or one of the documents that it is packed from."""
        return self.document_tokens or self.seq_len

    @property
    def num_seqs(self) -> int:
        """Sequences in one global batch."""
        return self.global_batch_tokens // self.seq_len


# Tokens of a global batch by the size of the model, of published pre-training runs: below 1B parameters 0.5M and below 5B 1M
# (Brown et al. 2020, GPT-3, table 2.1), 7B to 70B 4M (Touvron et al. 2023, Llama 2, section 2.2; Llama 3 begins there), 405B 16M
# (Grattafiori et al. 2024, Llama 3, section 3.4.1).
USUAL_BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (2e11, 2**22), (float("inf"), 2**24))


def usual_batch_tokens(architecture: Architecture) -> int:
    """Return the tokens of a global batch that is usual for a model of this size.

    >>> import shardwise as sw
    >>> [usual_batch_tokens(sw.load_model(name)) for name in ("gpt-2", "llama-3-8b", "llama-3.1-405b")]
    [524288, 4194304, 16777216]
    """
    parameters = num_params(architecture)
    return next(tokens for limit, tokens in USUAL_BATCH_TOKENS if parameters < limit)


def usual_whole_batch(architecture: Architecture, seq_len: int) -> int:
    """Return the tokens of the usual batch in whole sequences of `seq_len` tokens, of at least one.

    >>> import shardwise as sw
    >>> usual_whole_batch(sw.load_model("gpt-2"), 1000)
    524000
    """
    return max(usual_batch_tokens(architecture) // seq_len, 1) * seq_len


def default_seq_len(architecture: Architecture) -> int:
    """Return the default tokens of a sequence: `DEFAULT_SEQ_LEN`, or fewer if the model's position table is shorter."""
    return min(DEFAULT_SEQ_LEN, architecture.max_positions or DEFAULT_SEQ_LEN)
