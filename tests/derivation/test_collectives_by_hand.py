"""Every collective of a unit, derived by hand for schemes and layouts in which several rules meet: kind, axes, count, bytes.

A row is (pass, kind, axes, count, bytes): what one device issues in a pass of one unit for one micro-batch ("update": for one
step), and the bytes of all of it together. Bytes are payloads: the gathered array of an AllGather, the summand of a ReduceScatter
or AllReduce, the local shard of an AllToAll or a send. Axes of one device are left out. Everything is bf16, 2 bytes, but for the
statistics of the loss, 4. Weights, or gradients, of a unit that move alike over the same axes move as one (an FSDP unit).

The rules by which rows are derived:

- ZeRO-3 (Rajbhandari et al. 2020, section 5): all weights of a unit gathered before its forward and its backward pass, all
  gradients scattered behind it. ZeRO-1: gradients scattered and weights gathered once a step. ZeRO-2: gradients as in 3.
- Tensor parallelism (Shoeybi et al. 2020, f and g): an AllReduce of [B, T, D] for attention and MLP, and one for the gradient of
  what each reads. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) an AllGather and a ReduceScatter each, and
  the backward pass gathers once more what the forward pass had gathered.
- Context parallelism gathers keys and values, and scatters their gradients (Llama Team 2024, section 3.3.2).
- Experts (Lepikhin et al. 2021): k rows of each token go to their experts and back, in both passes.
- What is replicated over an axis along which tokens are split has a partial gradient over it, reduced once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.layout.sharding_scheme import atomic_degrees, layout_degrees, make_sharding_scheme
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.program import Role
from shardwise.price.tensor_formats import TensorFormats
from shardwise.price.unit_inputs import unit_cost_inputs
from shardwise.price.unit_values import unit_values
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.precision import PRECISIONS

Row = tuple[str, str, str, int, float]
AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep", "pp")

# Sizes: sequences of a micro-batch, positions, D, F, query heads, key-value heads, H, V; experts, of them for a token, their
# width, the shared one's; the latents of queries and keys, the rotary part of a head, a value; rank of adapters.
B, T, D, F, N, K, H, V = 3, 240, 480, 640, 8, 2, 16, 1600
E, k, M, S = 4, 2, 56, 72
Q, C, R, U = 120, 96, 6, 14
r = 4
DENSE = Architecture(
    name="dense", num_layers=4, d_model=D, d_ff=F, num_heads=N, num_kv_heads=K, head_dim=H, vocab_size=V
)
EXPERTS = replace(DENSE, name="experts", d_ff=M, num_experts=E, experts_per_token=k)
SHARED = replace(EXPERTS, name="shared", shared_expert_width=S)
LATENT = replace(
    DENSE, name="latent", num_kv_heads=N, q_lora_rank=Q, kv_lora_rank=C, rope_head_dim=R, v_head_dim=U
)  # fmt: skip
PARALLEL = replace(DENSE, name="parallel", parallel=True)
BIASED = replace(PARALLEL, name="biased", bias=("attention_out", "mlp"))
PREDICT = replace(DENSE, name="predict", num_predict_layers=1)
ADAPTED = replace(DENSE, name="adapted", lora_rank=r, lora_targets=("qkv",))

# Elements of a block's weights.
WQ_WO, WK_WV, MLP, NORMS = 2 * N * H * D, 2 * K * H * D, 3 * F * D, 2 * D
BLOCK = WQ_WO + WK_WV + MLP + NORMS
ROUTER = D * E
COUNTS = 4 * E  # how many rows a rank sends for each expert in fp32, told before the rows are sent
# Bytes of the hidden states of a micro-batch, of keys (or values), and of a number for each token.
HIDDEN, KEYS, STATISTIC = 2 * B * T * D, 2 * B * T * K * H, 4 * B * T


@dataclass(frozen=True)
class Case:
    """A model, a layout in the words of `Layout.parse`, and the rows of some units."""

    model: Architecture
    layout: str
    rows: Mapping[str, tuple[Row, ...]]


CASES: dict[str, Case] = {
    # Gradients alone, once a step; the loss (one number, 4 bytes) with the head's.
    "replicas": Case(DENSE, "dp=4", {
        "embedding": (("update", "all_reduce", "dp", 1, 2 * V * D),),
        "block": (("update", "all_reduce", "dp", 1, 2 * BLOCK),),
        "head": (("update", "all_reduce", "dp", 2, 2 * (V * D + D) + 4),),
    }),
    # Hybrid: scattered over fsdp = 4, and a quarter of it reduced over dp.
    "hybrid, ZeRO-1": Case(DENSE, "dp=2 fsdp=4 zero_stage=1", {
        "block": (
            ("update", "reduce_scatter", "fsdp", 1, 2 * BLOCK),
            ("update", "all_reduce", "dp", 1, 2 * BLOCK / 4),
            ("update", "all_gather", "fsdp", 1, 2 * BLOCK),
        ),
    }),
    "hybrid, ZeRO-2": Case(DENSE, "dp=2 fsdp=4 zero_stage=2", {
        "block": (
            ("backward", "reduce_scatter", "fsdp", 1, 2 * BLOCK),
            ("update", "all_reduce", "dp", 1, 2 * BLOCK / 4),
            ("update", "all_gather", "fsdp", 1, 2 * BLOCK),
        ),
    }),
    # ZeRO shards over fsdp and cp, 4·3 = 12; keys and values of 1/3 of the positions are gathered, their gradients scattered.
    # The head runs backward at once with the weights that it gathered: it gathers them once.
    "hybrid, ZeRO-3, cp": Case(DENSE, "dp=2 fsdp=4 cp=3 zero_stage=3", {
        "embedding": (
            ("forward", "all_gather", "fsdp cp", 1, 2 * V * D),
            ("backward", "reduce_scatter", "fsdp cp", 1, 2 * V * D),
            ("update", "all_reduce", "dp", 1, 2 * V * D / 12),
        ),
        "block": (
            ("forward", "all_gather", "fsdp cp", 1, 2 * BLOCK),
            ("forward", "all_gather", "cp", 2, 2 * KEYS),
            ("backward", "all_gather", "fsdp cp", 1, 2 * BLOCK),
            ("backward", "all_gather", "cp", 2, 2 * KEYS),
            ("backward", "reduce_scatter", "cp", 2, 2 * KEYS),
            ("backward", "reduce_scatter", "fsdp cp", 1, 2 * BLOCK),
            ("update", "all_reduce", "dp", 1, 2 * BLOCK / 12),
        ),
        "head": (
            ("forward", "all_gather", "fsdp cp", 1, 2 * (V * D + D)),
            ("backward", "reduce_scatter", "fsdp cp", 1, 2 * (V * D + D)),
            ("update", "all_reduce", "dp", 1, 2 * (V * D + D) / 12),
            ("update", "all_reduce", "dp fsdp cp", 1, 4),  # the loss
            ("update", "all_reduce", "fsdp cp", 1, 4),  # the norm
        ),
    }),
    # f and f*: every rank sees the same tokens, so no gradient of a weight is partial. Of the head three numbers for each token:
    # the largest logit, the sum of the exponentials, the target's logit.
    "tp": Case(DENSE, "tp=2 sequence_parallel=false", {
        "embedding": (("forward", "all_reduce", "tp_kv", 1, HIDDEN),),
        "block": (
            ("forward", "all_reduce", "tp_kv", 2, 2 * HIDDEN),
            ("backward", "all_reduce", "tp_kv", 2, 2 * HIDDEN),
        ),
        "head": (
            ("forward", "all_reduce", "tp_kv", 3, 3 * STATISTIC),
            ("backward", "all_reduce", "tp_kv", 1, HIDDEN),
            ("update", "all_reduce", "tp_kv", 1, 4),  # the norm
        ),
    }),
    # Both results are added before they are reduced, and so are the gradients of the norm that both read: one AllReduce in each
    # pass (Black et al. 2022, GPT-NeoX-20B, section 2.1; Pope et al. 2023, section 3.5). Biases come behind the sum.
    "tp, parallel block": Case(PARALLEL, "tp=2 sequence_parallel=false", {
        "block": (
            ("forward", "all_reduce", "tp_kv", 1, HIDDEN),
            ("backward", "all_reduce", "tp_kv", 1, HIDDEN),
        ),
    }),
    # Both biases are on every rank, which has its own tokens: 3 vectors of D are partial with the norm's weight.
    "sp, parallel block with biases": Case(BIASED, "tp=2 sequence_parallel=true", {
        "block": (
            ("forward", "all_gather", "tp_kv", 1, HIDDEN),
            ("forward", "reduce_scatter", "tp_kv", 1, HIDDEN),
            ("backward", "all_gather", "tp_kv", 2, 2 * HIDDEN),
            ("backward", "reduce_scatter", "tp_kv", 1, HIDDEN),
            ("update", "all_reduce", "tp_kv", 1, 2 * 3 * D),
        ),
    }),
    # tp = 8 = tp_kv 2 · tp_rep 4. Tokens are split over both between products: what is whole on each rank (norms) has a gradient
    # that is partial over both, keys' and values' weights, each on 4 ranks, one that is partial over tp_rep.
    "sp, fewer key-value heads than tp": Case(DENSE, "tp=8 sequence_parallel=true", {
        "embedding": (
            ("forward", "reduce_scatter", "tp_kv tp_rep", 1, HIDDEN),
            ("backward", "all_gather", "tp_kv tp_rep", 1, HIDDEN),
        ),
        "block": (
            ("forward", "all_gather", "tp_kv tp_rep", 2, 2 * HIDDEN),
            ("forward", "reduce_scatter", "tp_kv tp_rep", 2, 2 * HIDDEN),
            ("backward", "all_gather", "tp_kv tp_rep", 4, 4 * HIDDEN),  # of both what was read, and the gradient
            ("backward", "reduce_scatter", "tp_kv tp_rep", 2, 2 * HIDDEN),
            ("update", "all_reduce", "tp_rep", 1, 2 * WK_WV / 2),
            ("update", "all_reduce", "tp_kv tp_rep", 1, 2 * NORMS),
        ),
        "head": (
            ("forward", "all_gather", "tp_kv tp_rep", 1, HIDDEN),
            ("forward", "all_reduce", "tp_kv tp_rep", 3, 3 * STATISTIC),
            ("backward", "all_gather", "tp_kv tp_rep", 1, HIDDEN),
            ("backward", "reduce_scatter", "tp_kv tp_rep", 1, HIDDEN),
            ("update", "all_reduce", "tp_kv tp_rep", 2, 2 * D + 4),  # of the norm's weight, and the norm
        ),
    }),
    # Attention's input and the MLP's are gathered once for what runs again and the backward pass both, beside two gradients;
    # attention's result is scattered again, for the MLP to run on; the MLP's is needed by nobody.
    "sp, full recompute": Case(DENSE, "tp=8 sequence_parallel=true recompute=full", {
        "block": (
            ("forward", "all_gather", "tp_kv tp_rep", 2, 2 * HIDDEN),
            ("forward", "reduce_scatter", "tp_kv tp_rep", 2, 2 * HIDDEN),
            ("backward", "all_gather", "tp_kv tp_rep", 4, 4 * HIDDEN),
            ("backward", "reduce_scatter", "tp_kv tp_rep", 3, 3 * HIDDEN),
            ("update", "all_reduce", "tp_rep", 1, 2 * WK_WV / 2),
            ("update", "all_reduce", "tp_kv tp_rep", 1, 2 * NORMS),
        ),
    }),
    # All of it at once. Of a rank: 1/8 of wq, wo and the MLP, 1/2 of wk and wv, all of the norms; 1/3 of the positions between
    # attentions; 1 of 2 key-value heads; 1/12 of each weight between uses.
    "hybrid, ZeRO-3, cp, sp, fewer key-value heads": Case(DENSE, "dp=2 fsdp=4 cp=3 tp=8 zero_stage=3 sequence_parallel=true", {
        "block": (
            ("forward", "all_gather", "fsdp cp", 1, 2 * ((WQ_WO + MLP) / 8 + WK_WV / 2 + NORMS)),
            ("forward", "all_gather", "tp_kv tp_rep", 2, 2 * HIDDEN / 3),
            ("forward", "all_gather", "cp", 2, 2 * KEYS / 2),
            ("forward", "reduce_scatter", "tp_kv tp_rep", 2, 2 * HIDDEN / 3),
            ("backward", "all_gather", "fsdp cp", 1, 2 * ((WQ_WO + MLP) / 8 + WK_WV / 2 + NORMS)),
            ("backward", "all_gather", "tp_kv tp_rep", 4, 4 * HIDDEN / 3),
            ("backward", "all_gather", "cp", 2, 2 * KEYS / 2),
            ("backward", "reduce_scatter", "cp", 2, 2 * KEYS / 2),
            ("backward", "reduce_scatter", "tp_kv tp_rep", 2, 2 * HIDDEN / 3),
            ("backward", "reduce_scatter", "fsdp cp", 1, 2 * ((WQ_WO + MLP) / 8 + WK_WV / 2 + NORMS)),
            ("update", "all_reduce", "dp", 1, 2 * (WQ_WO + MLP) / 8 / 12),
            ("update", "all_reduce", "dp tp_rep", 1, 2 * WK_WV / 2 / 12),
            ("update", "all_reduce", "dp tp_kv tp_rep", 1, 2 * NORMS / 12),
        ),
    }),
    # fsdp = 4 is fsdp 2 · ep 2. Experts' weights, 2 of 4 on a rank, rest on the 2·3 ranks of fsdp and cp; all else, the router
    # included, on the 2·2·3 of fsdp, ep and cp. k rows for each of the rank's T/3 positions are exchanged, there and back.
    "experts, cp, ZeRO-3": Case(EXPERTS, "fsdp=4 cp=3 ep=2 zero_stage=3", {
        "block": (
            ("forward", "all_gather", "fsdp ep cp", 1, 2 * (WQ_WO + WK_WV + NORMS + ROUTER)),
            ("forward", "all_gather", "fsdp cp", 1, 2 * 3 * E / 2 * M * D),
            ("forward", "all_gather", "cp", 2, 2 * KEYS),
            ("forward", "all_to_all", "ep", 3, 2 * k * HIDDEN / 3 + COUNTS),
            ("backward", "all_gather", "fsdp ep cp", 1, 2 * (WQ_WO + WK_WV + NORMS + ROUTER)),
            ("backward", "all_gather", "fsdp cp", 1, 2 * 3 * E / 2 * M * D),
            ("backward", "all_gather", "cp", 2, 2 * KEYS),
            ("backward", "all_to_all", "ep", 2, 2 * k * HIDDEN / 3),
            ("backward", "reduce_scatter", "cp", 2, 2 * KEYS),
            ("backward", "reduce_scatter", "fsdp cp", 1, 2 * 3 * E / 2 * M * D),
            ("backward", "reduce_scatter", "fsdp ep cp", 1, 2 * (WQ_WO + WK_WV + NORMS + ROUTER)),
        ),
    }),
    # fsdp = 2 is ep alone. Experts' matrices are split over tp = 2 as the MLP of a dense model: their rows are gathered and
    # scattered over tp beside the exchange. Of what the MLP's norm gives, the gradients of the shared expert's two matrices are
    # added before they are scattered: they lie alike, those of dispatch and router lie otherwise.
    "shared expert, experts split over tp": Case(SHARED, "fsdp=2 tp=2 ep=2 zero_stage=3 sequence_parallel=true", {
        "block": (
            ("forward", "all_gather", "ep", 1, 2 * ((WQ_WO + WK_WV + 3 * S * D) / 2 + NORMS + ROUTER)),
            ("forward", "all_gather", "tp_kv", 4, (2 + k) * HIDDEN + COUNTS),  # attention, shared, rows; E/2 of two ranks
            ("forward", "all_to_all", "ep", 3, 2 * k * HIDDEN / 2 + COUNTS),
            ("forward", "reduce_scatter", "tp_kv", 3, (2 + k) * HIDDEN),
            ("backward", "all_gather", "ep", 1, 2 * ((WQ_WO + WK_WV + 3 * S * D) / 2 + NORMS + ROUTER)),
            ("backward", "all_gather", "tp_kv", 6, 2 * (2 + k) * HIDDEN),  # of each what was read, and the gradient
            ("backward", "all_to_all", "ep", 2, 2 * k * HIDDEN / 2),
            ("backward", "reduce_scatter", "tp_kv", 3, (2 + k) * HIDDEN),
            ("backward", "reduce_scatter", "ep", 1, 2 * ((WQ_WO + WK_WV + 3 * S * D) / 2 + NORMS + ROUTER)),
            ("update", "all_reduce", "tp_kv", 1, 2 * (NORMS + ROUTER) / 2),
        ),
    }),
    # fsdp = 4 is fsdp 2 · ep 2; whole experts are split over ep and tp, 1 of 4 on a rank. Rows go from T/2 positions to their
    # expert's rank in one exchange over both, and nothing of the MLP is gathered over tp.
    "whole experts": Case(EXPERTS, "fsdp=4 tp=2 ep=4 etp=1 zero_stage=3 sequence_parallel=true", {
        "block": (
            ("forward", "all_gather", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
            ("forward", "all_gather", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("forward", "all_gather", "tp_kv", 1, HIDDEN),
            ("forward", "reduce_scatter", "tp_kv", 1, HIDDEN),
            ("forward", "all_to_all", "ep tp_kv", 3, 2 * k * HIDDEN / 2 + COUNTS),
            ("backward", "all_gather", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
            ("backward", "all_gather", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("backward", "all_gather", "tp_kv", 2, 2 * HIDDEN),
            ("backward", "all_to_all", "ep tp_kv", 2, 2 * k * HIDDEN / 2),
            ("backward", "reduce_scatter", "tp_kv", 1, HIDDEN),
            ("backward", "reduce_scatter", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("backward", "reduce_scatter", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
            ("update", "all_reduce", "tp_kv", 1, 2 * (NORMS + ROUTER) / 4),
        ),
    }),
    # The same without sequence parallelism: every rank of tp has all rows. Each keeps those of its own experts and exchanges them
    # over ep, and only the results are gathered over tp. The gradient of what was sent is partial over tp: it is added up as
    # hidden states, as attention's is.
    "whole experts, without sp": Case(EXPERTS, "fsdp=4 tp=2 ep=4 etp=1 zero_stage=3 sequence_parallel=false", {
        "block": (
            ("forward", "all_gather", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
            ("forward", "all_gather", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("forward", "all_reduce", "tp_kv", 1, HIDDEN),
            ("forward", "all_to_all", "ep", 3, 2 * k * HIDDEN / 2 + COUNTS / 2),  # of the rank's half
            ("forward", "all_gather", "tp_kv", 1, k * HIDDEN),
            ("backward", "all_gather", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
            ("backward", "all_gather", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("backward", "all_to_all", "ep", 2, 2 * k * HIDDEN / 2),
            ("backward", "all_reduce", "tp_kv", 2, 2 * HIDDEN),
            ("backward", "reduce_scatter", "fsdp", 1, 2 * 3 * E / 4 * M * D),
            ("backward", "reduce_scatter", "fsdp ep", 1, 2 * ((WQ_WO + WK_WV) / 2 + NORMS + ROUTER)),
        ),
    }),
    # The projections down to the latents have no heads: they work on the rank's own tokens, and the narrow results are gathered
    # (the queries' latent, the keys', the keys' rotary part), not the hidden states. All that is whole on a rank has a partial
    # gradient: projections down, their norms, the rotary keys' weight, the block's norms. The joined keys are kept as gathered.
    "latent, sp": Case(LATENT, "tp=2 sequence_parallel=true", {
        "block": (
            ("forward", "all_gather", "tp_kv", 4, 2 * B * T * (Q + C + R) + HIDDEN),
            ("forward", "reduce_scatter", "tp_kv", 2, 2 * HIDDEN),
            ("backward", "all_gather", "tp_kv", 5, 2 * B * T * (Q + C) + 3 * HIDDEN),
            ("backward", "reduce_scatter", "tp_kv", 4, 2 * B * T * (Q + C + R) + HIDDEN),
            ("update", "all_reduce", "tp_kv", 1, 2 * (Q * D + Q + C * D + C + R * D + NORMS)),
        ),
    }),
    # Only adapters have gradients; all weights are gathered, for the gradient of what each reads.
    "adapters": Case(ADAPTED, "dp=2 fsdp=4 zero_stage=3", {
        "block": (
            ("forward", "all_gather", "fsdp", 1, 2 * (BLOCK + r * (3 * D + N * H + 2 * K * H))),
            ("backward", "all_gather", "fsdp", 1, 2 * (BLOCK + r * (3 * D + N * H + 2 * K * H))),
            ("backward", "reduce_scatter", "fsdp", 1, 2 * r * (3 * D + N * H + 2 * K * H)),
            ("update", "all_reduce", "dp", 1, 2 * r * (3 * D + N * H + 2 * K * H) / 4),
        ),
    }),
    # A module of multi-token prediction has a projection [D, 2D], a block and three norms of its own. It gathers embedding and
    # head too, the backward pass only the head; their gradients stay as they are for the units that own them.
    "multi-token prediction": Case(PREDICT, "fsdp=4 zero_stage=3", {
        "predict": (
            ("forward", "all_gather", "fsdp", 1, 2 * (BLOCK + 2 * D * D + 3 * D + 2 * V * D)),
            ("backward", "all_gather", "fsdp", 1, 2 * (BLOCK + 2 * D * D + 3 * D + V * D)),
            ("backward", "reduce_scatter", "fsdp", 1, 2 * (BLOCK + 2 * D * D + 3 * D)),
            ("update", "all_reduce", "fsdp", 1, 4),
        ),
    }),
    # Heads for the sequence: queries, keys, values and the result, each half of its heads or of its positions, and back.
    # Differs: DeepSpeed-Ulysses (Jacobs et al. 2023, section 3.1) has four exchanges in each pass and keeps the result
    # both ways. Here it is kept once, its positions split as wo reads it, and exchanged once more for the gradient of attention.
    "ulysses": Case(DENSE, "cp=2 cp_variant=ulysses zero_stage=1", {
        "block": (
            ("forward", "all_to_all", "cp", 4, (2 * 2 * B * T * N * H + 2 * KEYS) / 2),
            ("backward", "all_to_all", "cp", 5, (3 * 2 * B * T * N * H + 2 * KEYS) / 2),
            ("update", "reduce_scatter", "cp", 1, 2 * BLOCK),
            ("update", "all_gather", "cp", 1, 2 * BLOCK),
        ),
    }),
    # To the next stage and back, each rank its own part of the hidden states.
    "stages": Case(DENSE, "cp=3 tp=8 pp=2 zero_stage=1 sequence_parallel=true", {
        "carry": (("forward", "send_recv", "pp", 1, HIDDEN / 24), ("backward", "send_recv", "pp", 1, HIDDEN / 24)),
    }),
}  # fmt: skip


def sum_collectives(model: Architecture, layout: Layout, unit: str) -> dict[tuple[str, str, str], tuple[int, float]]:
    """What the derivation says: count and bytes by pass, kind and axes of several devices.

    Of weights, and of gradients, what moves over the same axes counts as one, in however many flat arrays it travels.
    """
    degrees = {**atomic_degrees(model, layout_degrees(layout)), "micro_batch_seqs": B}
    values = unit_values(model, T, degrees)
    scheme = make_sharding_scheme(layout, model.structure, optimizer="adamw", shares_amax=False)
    parts, formats = (
        unit_cost_inputs(scheme, unit, IssuePolicy(bucket_bytes=math.inf)),
        TensorFormats(PRECISIONS["bf16"]),
    )
    totals: dict[tuple[str, str, str], tuple[int, float]] = {}
    joined: set[tuple[Role, tuple[str, str, str]]] = set()
    for collective in parts.collectives:
        axes = " ".join(axis for axis in AXES if axis in collective.axes and values[axis] > 1)
        key = "backward" if collective.phase == "recompute" else collective.phase, str(collective.kind), axes
        count, num_bytes = totals.get(key, (0, 0.0))
        together = collective.moves_weights and (collective.role, key) in joined
        joined.add((collective.role, key))
        if axes:
            moved = collective.elements.evaluate(values) * formats.collective_width(collective, parts.products)
            totals[key] = count + (not together), num_bytes + float(moved)
    return totals


def as_table(rows: Iterable[Row]) -> Any:
    return {(phase, kind, axes): (count, pytest.approx(size, rel=1e-12)) for phase, kind, axes, count, size in rows}


@pytest.mark.parametrize(
    ("name", "unit"), [(name, unit) for name, case in CASES.items() for unit in case.rows], ids=lambda value: value
)
def test_collectives_are_those_that_a_hand_derives(name: str, unit: str) -> None:
    case = CASES[name]
    layout = replace(Layout.parse(case.layout), micro_batch_seqs=B)
    job = Job(global_batch_tokens=layout.num_replicas * B * T * max(layout.pp, 1), seq_len=T)
    assert not violations(case.model, job, layout.num_devices, layout)
    assert sum_collectives(case.model, layout, unit) == as_table(case.rows[unit])
