"""Nodes behind switches: bandwidth of levels, and when parallelism over nodes is bound by compute.

Letters: C FLOP/s of a chip (flops_per_s); W bytes/s out of a node, or of one unit's links (node_bytes_per_s, link_bytes_per_s,
bytes_per_s); w bytes/s out of a chip inside its node (chip_bytes_per_s); n chips of a node (chips_per_node); Y degree of tp, or
chips of a replica that model parallelism splits (tp, model_parallel_chips); X data-parallel degree (dp); Z degree of ep (ep);
k experts of a token (experts_per_token); D units that a level joins, or model width (degree, d_model); B tokens of a global batch
(global_batch_tokens); m micro-batches (num_micro_batches); p pipeline stages (pp); e bytes of an element (bytes_per_element);
r replicas in a node; M nodes.
"""

from __future__ import annotations

import math


def level_collective_bytes_per_s(degree: float, link_bytes_per_s: float) -> float:
    """Bytes/s at which all devices below a level gather or scatter an array over it, when its units fill their links.

    Formula: D·W / (D - 1). Unit: B/s. Source: the book, "GPUs" (chapter 12), cross-node collectives.
    """
    return degree * link_bytes_per_s / (degree - 1.0)


def tp_min_d_ff_across_nodes(
    flops_per_s: float, tp: float, chips_per_node: float, node_bytes_per_s: float, chip_bytes_per_s: float
) -> float:
    """Hidden width from which tensor parallelism over whole nodes is compute-bound, in bf16.

    Of two nodes and more the slower level counts: between nodes (M - 1)/M of the activations leave each, inside each chip passes
    (n - 1)/n of them.
    Formula: C·max((Y - n)/W, Y·(n - 1)/(n·w)). Unit: elements. Assumes: communication behind compute, whole nodes.
    Source: the book, "GPUs" (chapter 12), tensor parallelism. Differs: it has the first term alone, F > alpha·(Y - 8), though
    the second is the larger up to 40 ways on H100.
    """
    between = (tp - chips_per_node) / node_bytes_per_s
    inside = tp * (chips_per_node - 1.0) / (chips_per_node * chip_bytes_per_s)
    return flops_per_s * max(between, inside)


def dp_min_tokens_across_nodes(
    flops_per_s: float, dp: float, model_parallel_chips: float, chips_per_node: float, node_bytes_per_s: float,
    chip_bytes_per_s: float,
) -> float:  # fmt: skip
    """Tokens per chip from which data parallelism over nodes is compute-bound, beside model parallelism of the inner chips.

    A replica that pipelines or experts spread over several nodes has the cards of all of them: its gradients leave over Y/n nodes
    at once. r = max(1, n/Y) replicas share a node. With experts it is E/k times as many.
    Formula: C·max((1 - r/X)·n / (W·max(n, Y)), (r - 1) / (r·w·Y)). Unit: tokens/chip.
    Assumes: gradients in bf16 behind the backward pass, replicas of whole nodes or whole replicas in a node, full bisection.
    Source: the book, "GPUs" (chapter 12), data parallelism and examples. Differs: it leaves the second term out.
    """
    replicas = max(1.0, chips_per_node / model_parallel_chips)
    between = (1.0 - replicas / dp) * chips_per_node / (node_bytes_per_s * max(chips_per_node, model_parallel_chips))
    inside = (replicas - 1.0) / (replicas * chip_bytes_per_s * model_parallel_chips)
    return flops_per_s * max(between, inside)


def ep_min_d_ff_across_nodes(
    flops_per_s: float, ep: float, experts_per_token: float, chips_per_node: float, node_bytes_per_s: float
) -> float:
    """Hidden width of an expert from which expert parallelism over whole nodes is compute-bound, in bf16.

    A token goes to each node that has any of its experts once, and is passed on inside. Of M = Z/n nodes it is expected to need
    M·(1 - (1 - 1/M)^k).
    Formula: C/W · (Z - n)/k · (1 - (1 - 1/M)^k). Unit: elements.
    Assumes: experts chosen independently, ungated (two matrices), communication behind compute.
    Source: the book, "GPUs" (chapter 12), expert parallelism. Differs: it bounds the last factor by min(n·k/Z, 1), so
    F > 8·alpha for large Z.
    """
    nodes = ep / chips_per_node
    reached = 1.0 - math.pow(1.0 - 1.0 / nodes, experts_per_token)
    return flops_per_s / node_bytes_per_s * (ep - chips_per_node) / experts_per_token * reached


def pp_transfer_s(
    global_batch_tokens: float, d_model: float, pp: float, num_micro_batches: float, bytes_per_s: float,
    bytes_per_element: float = 2.0,
) -> float:  # fmt: skip
    """Seconds of the messages between stages of a pipeline's forward pass, one after the other, warm-up included.

    The first micro-batch takes p - 1 hops to the last stage, and each of the others arrives a hop later.
    Formula: e·B·D / (W·m) · (m + p - 2). Source: the book, "GPUs" (chapter 12), pipeline parallelism.
    """
    hop_s = bytes_per_element * global_batch_tokens * d_model / (bytes_per_s * num_micro_batches)
    return hop_s * (num_micro_batches + pp - 2.0)
