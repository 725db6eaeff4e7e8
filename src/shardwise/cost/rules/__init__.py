"""The books' closed forms, as explanations beside a derived estimate: nothing is planned with them.

Letters as in the books: B tokens of a global batch, D model width, F hidden width, L layers, N chips, X and Y the
degrees of fsdp and tp on Mx and My axes of the torus, C FLOP/s of a chip, W bytes/s of one axis in both directions, and
alpha = C / W. Both books take an ungated MLP (two matrices) of bf16 for their bounds on communication.

Sources: "the book" is Austin et al., How to Scale Your Model, 2025; "the note" is Stratos, Compute-Bound Training,
2026; "the playbook" is Tazi et al., The Ultra-Scale Playbook, 2025.
"""

from shardwise.cost.rules.book import Rule, book_rules
from shardwise.cost.rules.bounds import (
    Split,
    critical_intensity,
    dcn_bytes_per_s_per_chip,
    dcn_min_tokens_per_pod,
    fsdp_min_tokens_per_chip,
    fsdp_optimal_degree,
    is_compute_bound,
    max_chips,
    min_batch_tokens,
    mixed_math_over_comms,
    mixed_min_tokens_per_chip,
    nearest_split,
    tokens_per_chip,
    tp_max_degree,
    tp_min_d_ff,
)
from shardwise.cost.rules.layer import LayerTimes, MlpLayerCost, mlp_layer_cost, mlp_layer_times
from shardwise.cost.rules.memory import (
    StateBytes,
    bytes_per_chip,
    checkpoint_bytes,
    max_params_per_device,
    min_chips,
    zero3_extra_all_gathers,
    zero_memory_reduction,
    zero_state_bytes,
    zero_traffic_per_param,
)
from shardwise.cost.rules.roofline import (
    Bounds,
    MatmulCost,
    attainable_flops_per_s,
    matmul_cost,
    matmul_critical_batch,
    time_bounds,
)
from shardwise.cost.rules.training import flops_utilisation, rescaled_seconds, training_flops, training_seconds
from shardwise.cost.rules.transformer import (
    BlockFlops,
    ParamsByPart,
    PipelineTimes,
    block_training_flops,
    kv_cache_bytes_per_token,
    params_by_part,
    pipeline_times,
    scores_equal_block_seq_len,
    scores_equal_projections_seq_len,
)

__all__ = [
    "BlockFlops",
    "Bounds",
    "LayerTimes",
    "MatmulCost",
    "MlpLayerCost",
    "ParamsByPart",
    "PipelineTimes",
    "Rule",
    "Split",
    "StateBytes",
    "attainable_flops_per_s",
    "block_training_flops",
    "book_rules",
    "bytes_per_chip",
    "checkpoint_bytes",
    "critical_intensity",
    "dcn_bytes_per_s_per_chip",
    "dcn_min_tokens_per_pod",
    "flops_utilisation",
    "fsdp_min_tokens_per_chip",
    "fsdp_optimal_degree",
    "is_compute_bound",
    "kv_cache_bytes_per_token",
    "matmul_cost",
    "matmul_critical_batch",
    "max_chips",
    "max_params_per_device",
    "min_batch_tokens",
    "min_chips",
    "mixed_math_over_comms",
    "mixed_min_tokens_per_chip",
    "mlp_layer_cost",
    "mlp_layer_times",
    "nearest_split",
    "params_by_part",
    "pipeline_times",
    "rescaled_seconds",
    "scores_equal_block_seq_len",
    "scores_equal_projections_seq_len",
    "time_bounds",
    "tokens_per_chip",
    "tp_max_degree",
    "tp_min_d_ff",
    "training_flops",
    "training_seconds",
    "zero3_extra_all_gathers",
    "zero_memory_reduction",
    "zero_state_bytes",
    "zero_traffic_per_param",
]
