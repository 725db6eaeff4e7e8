#!/bin/bash
# Starts on each node; MEGATRON is a checkout of Megatron-LM.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=32

ARGS=(
  --num-layers 32
  --hidden-size 4096
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --ffn-hidden-size 14336
  --swiglu
  --disable-bias-linear
  --normalization RMSNorm
  --position-embedding-type rope
  --max-position-embeddings 8192
  --rotary-base 500000
  --untie-embeddings-and-output-weights
  --vocab-size 128256
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --seq-length 8192
  --micro-batch-size 1
  --global-batch-size 128
  --bf16
  --grad-reduce-in-bf16
  --cross-entropy-loss-fusion
  --data-path "${DATA_PATH:?a prefix of indexed data}"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "${TOKENIZER:?a tokenizer}"
  --lr "${LR:?a learning rate}"
)

torchrun --nnodes 8 --nproc-per-node 8 --rdzv-id "${JOB_ID:-shardwise}" --rdzv-backend c10d --rdzv-endpoint "${HEAD_NODE:?the first node}:29500" "${MEGATRON:?}/pretrain_gpt.py" "${ARGS[@]}"
