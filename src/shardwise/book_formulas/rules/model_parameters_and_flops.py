"""Parameters and FLOPs of a transformer, by part; caches."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model import Architecture, parameters_and_flops
from shardwise.model.program import ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsByPart:
    """Parameters of a model's parts; they add up to `num_params`.

    `mlp` are MLPs or experts with their routers and shared experts, `attention` all that mixes tokens, recurrences as well,
    `vocabulary` embedding, head and learned positions.
    """

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
    """Parameters in MLPs, attention, vocabulary and norms, read off the model's program.

    All experts count, also those that a token does not meet.
    Formula: for a dense model without biases 3·L·D·F when gated, 2·L·D·(N + K)·H, 2·V·D untied. Unit: parameters.
    Source: the book, "Transformers".

    >>> import shardwise as sw
    >>> parts = params_by_part(sw.load_model("deepseek-v3"))
    >>> [f"{part / 1e9:.1f}e9" for part in (parts.mlp, parts.attention, parts.vocabulary, parts.total)]
    ['657.8e9', '11.4e9', '1.9e9', '671.0e9']
    """
    parts = parameters_and_flops.params_by_part(architecture)
    return ParamsByPart(
        mlp=parts[ModelPart.MLP], attention=parts[ModelPart.ATTENTION] + parts[ModelPart.RECURRENCE],
        vocabulary=parts[ModelPart.VOCABULARY], norms=parts[ModelPart.NORM],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlops:
    """FLOPs of one block in training, forward and backward; `scores` are the two products of attention.

    `mlp` are the products of the MLP, or of the router and of the experts that a token meets, `projections` those of attention
    or of a recurrence, whose scans are among the scores.
    """

    mlp: float
    projections: float
    scores: float


def block_training_flops(architecture: Architecture, seqs: float, seq_len: int, *, causal: bool = False) -> BlockFlops:
    """FLOPs of `seqs` sequences, read off the program of a block; the mean over the blocks of a model whose blocks differ.

    With `causal` only the half of the scores that is not masked counts, or what a sliding window leaves.
    Formula: for a dense model 6·B·T for each element of a matrix, and 12·B·T²·N·H for attention's scores over their whole square.
    Unit: FLOPs. Source: the book, "Transformers" (whole square); the note, 1.4 (causal half).
    Differs: see `model_flops_per_token`.
    """
    products, scores = parameters_and_flops.layer_training_flops(architecture, seq_len, causal=causal)
    projections = products[ModelPart.ATTENTION] + products[ModelPart.RECURRENCE]
    return BlockFlops(mlp=seqs * products[ModelPart.MLP], projections=seqs * projections, scores=seqs * scores)


def scores_equal_projections_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what its projections do.

    Formula: 2D. Unit: tokens. Assumes: multi-head attention, N·H = D, the whole square. Source: the book, "Transformers".
    """
    return 2.0 * d_model


def scores_equal_block_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what all of a block's matrices do.

    Formula: 8D. Unit: tokens. Assumes: a gated MLP with F = 4D, N·H = D, multi-head attention, the whole square.
    Source: the book, "Transformers".
    """
    return 8.0 * d_model


def kv_cache_bytes_per_token(num_layers: float, kv_width: float, bytes_per_element: float = 2.0) -> float:
    """Bytes of keys and values of every layer for one token.

    Formula: 2·L·K·H elements, L layers of K heads of width H. Unit: B/token. Source: the book, "Transformers".
    """
    return 2.0 * num_layers * kv_width * bytes_per_element
