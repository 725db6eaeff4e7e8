"""Parameters and FLOPs of a transformer, by part; caches."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model.architecture import Architecture
from shardwise.model.counts import num_params
from shardwise.schedule.closed_form import bubble_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsByPart:
    """Parameters of a model's parts; they add up to `num_params`."""

    mlp: int
    attention: int
    vocabulary: int
    norms: int

    @property
    def total(self) -> int:
        return self.mlp + self.attention + self.vocabulary + self.norms

    @property
    def mlp_share(self) -> float:
        return self.mlp / self.total

    @property
    def attention_share_of_blocks(self) -> float:
        """Attention's part of the matrices of the blocks."""
        return self.attention / (self.mlp + self.attention)


def params_by_part(architecture: Architecture) -> ParamsByPart:
    """Parameters in MLPs (3·L·D·F when gated), attention (2·L·D·(N + K)·H), vocabulary (2·V·D untied) and norms."""
    a = architecture
    mlp = a.num_layers * (3 if a.structure.gated else 2) * a.d_model * a.d_ff
    attention = 2 * a.num_layers * a.d_model * (a.num_heads + a.num_kv_heads) * a.head_dim
    vocabulary = (1 if a.tied_embeddings else 2) * a.vocab_size * a.d_model
    return ParamsByPart(
        mlp=mlp, attention=attention, vocabulary=vocabulary, norms=num_params(a) - mlp - attention - vocabulary
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlops:
    """FLOPs of one block in training, forward and backward; `scores` are the two products of attention."""

    mlp: float
    projections: float
    scores: float


def block_training_flops(
    architecture: Architecture, seqs: float, seq_len: float, *, causal: bool = False
) -> BlockFlops:
    """6·B·T FLOPs per matrix element, and 12·B·T²·N·H for attention's scores, half of it when `causal`.

    Source: the book, "Transformers" (whole square); the note, 1.4 (causal half). Differs: see `model_flops_per_token`.
    """
    parts, a, tokens = params_by_part(architecture), architecture, seqs * seq_len
    scores = 12.0 * tokens * seq_len * a.num_heads * a.head_dim
    return BlockFlops(
        mlp=6.0 * tokens * parts.mlp / a.num_layers,
        projections=6.0 * tokens * parts.attention / a.num_layers,
        scores=scores / 2.0 if causal else scores,
    )


def scores_equal_projections_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what its projections do: 2D (multi-head, whole square)."""
    return 2.0 * d_model


def scores_equal_block_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what all of a block's matrices do: 8D.

    Assumes: a gated MLP with F = 4D, N·H = D, multi-head attention, the whole square. Source: the book, "Transformers".
    """
    return 8.0 * d_model


def kv_cache_bytes_per_token(num_layers: float, kv_width: float, bytes_per_element: float = 2.0) -> float:
    """2·L·K·H elements: keys and values of every layer. Source: the book, "Transformers"."""
    return 2.0 * num_layers * kv_width * bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A pipeline's step: bubble over ideal time, its length, and the idle part of that."""

    bubble_ratio: float
    makespan_s: float
    idle_fraction: float


def pipeline_times(
    pp: int, num_micro_batches: int, forward_s: float, backward_s: float, num_virtual_stages: int = 1
) -> PipelineTimes:
    """A step of AFAB, 1F1B or interleaved 1F1B whose stages take the same time for each micro-batch.

    Formula: m·(f + b)·(1 + r) with r of `bubble_ratio`; idle r / (1 + r). Source: the playbook, "Pipeline parallelism".
    """
    ratio = float(bubble_ratio(pp, num_micro_batches, num_virtual_stages))
    ideal = num_micro_batches * (forward_s + backward_s)
    return PipelineTimes(bubble_ratio=ratio, makespan_s=ideal * (1 + ratio), idle_fraction=ratio / (1 + ratio))
