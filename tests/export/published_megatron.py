"""Launches that Megatron-LM's own repository publishes (d98e8a64), as the options that they come to; facts only, written anew.

Measured tokens per second and GPU: examples/llama/README.md, "FP8 Performance" (H100).
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """`options` as on a command line; `model` where the launch does not say its vocabulary; `layout` as it is to be read."""

    source: str
    options: str
    cluster: str
    layout: str
    precision: str
    model: str | None = None
    tokens_per_s_and_gpu: float | None = None


_LLAMA = (
    "--num-layers {} --hidden-size {} --ffn-hidden-size {} --num-attention-heads {} --group-query-attention --num-query-groups 8 "
    "--kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 "
    "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256 "
    "--micro-batch-size 1 --global-batch-size {} --bf16 --cross-entropy-loss-fusion --fp8-format hybrid --fp8-param-gather "
    "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer --sequence-parallel --train-samples 1953125000 "
)
_8B, _70B, _405B = (32, 4096, 14336, 32, 128), (80, 8192, 28672, 64, 128), (126, 16384, 53248, 128, 512)

PUBLISHED = {
    "gpt-3-175b": Published(
        "examples/gpt3/train_gpt3_175b_distributed.sh",
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
        "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --fp16 "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16",
        "a100-80gb:1024", "dp=8 tp=8 pp=16 sequence_parallel=false", "fp16_fp32_update",
        model="gpt-3-175b",
    ),
    "llama-3-8b": Published(
        "examples/llama/train_llama3_8b_h100_fp8.sh",
        _LLAMA.format(*_8B) + "--tensor-model-parallel-size 1 --grad-reduce-in-bf16", "h100:8",
        "fsdp=8 zero_stage=1", "fp8_delayed",
    ),
    "llama-3-8b with cp": Published(
        "examples/llama/README.md", _LLAMA.format(*_8B) + "--context-parallel-size 2 --grad-reduce-in-bf16", "h100:8",
        "fsdp=4 cp=2 zero_stage=1 cp_variant=zigzag", "fp8_delayed", None, 13812,
    ),
    "llama-3-70b": Published(
        "examples/llama/README.md",
        _LLAMA.format(*_70B) + "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --grad-reduce-in-bf16 "
        "--num-layers-per-virtual-pipeline-stage 2 --tp-comm-overlap",
        "h100:64",
        "fsdp=2 tp=4 pp=8 num_virtual_stages=5 zero_stage=1 sequence_parallel=true async_tp=true",
        "fp8_delayed", None, 1621,
    ),
    "llama-3-405b": Published(
        "examples/llama/README.md",
        _LLAMA.format(*_405B) + "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --context-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--tp-comm-overlap --grad-reduce-in-bf16",
        "h100:1024",
        "fsdp=8 tp=8 cp=2 pp=8 num_virtual_stages=8 zero_stage=1 sequence_parallel=true cp_variant=zigzag async_tp=true",
        "fp8_delayed", None, 315,
    ),
    "llama-3-8b by Megatron-FSDP": Published(
        "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh",
        _LLAMA.format(*_8B) + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion --calculate-per-token-loss --init-model-with-meta-device "
        "--fsdp-double-buffer",
        "h100:8", "fsdp=8 zero_stage=3", "fp8_delayed",
    ),
    "mixtral-8x7b": Published(
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        "--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 "
        "--ffn-hidden-size 14336 --num-attention-heads 32 --normalization RMSNorm --position-embedding-type rope --swiglu "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --rotary-base 1000000 "
        "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather "
        "--overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --train-iters 500000 --bf16 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --sequence-parallel",
        "h100:64", "fsdp=16 pp=4 ep=8 zero_stage=1", "bf16_fp32_main_gradients",
        model="mixtral-8x7b",
    ),
    "deepseek-v3 by Megatron-FSDP": Published(
        "examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        "--tensor-model-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --context-parallel-size 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel --disable-bias-linear "
        "--micro-batch-size 4 --global-batch-size 2048 --train-samples 585937500 --recompute-granularity selective "
        "--recompute-modules mlp moe mla_up_proj layernorm --seq-length 4096 --num-layers 61 --hidden-size 7168 "
        "--ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096 "
        "--position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --multi-latent-attention "
        "--untie-embeddings-and-output-weights --qk-layernorm --num-experts 256 --moe-layer-freq [0]*3+[1]*58 "
        "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
        "--moe-token-dispatcher-type flex --moe-grouped-gemm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --mtp-num-layers 1 --bf16 --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
        "h100:256", "fsdp=256 ep=8 zero_stage=3 micro_batch_seqs=4 recompute=layernorm+mla_up_proj+mlp+moe",
        "bf16_fp32_main_gradients", model="deepseek-v3",
    ),
}  # fmt: skip
