#!/bin/bash
deepspeed --num_gpus 8 train.py --deepspeed ds_config.json --bf16 --block_size 4096 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing
