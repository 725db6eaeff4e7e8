#!/bin/bash
# The launch of MaxText's src/maxtext/configs/tpu/v5p/128b.sh, a model of 2048 × 7168 scaled up 128 times, on 128 chips.
python3 -m maxtext.trainers.pre_train.train "${MAXTEXT_CONFIGS_DIR:-src/maxtext/configs}"/base.yml \
    steps=15 per_device_batch_size=1 enable_checkpointing=false \
    remat_policy=minimal global_parameter_scale=128 \
    ici_fsdp_parallelism=-1 ici_tensor_parallelism=8 \
    max_target_length=2048 base_output_directory=$OUTPUT_PATH \
    use_iota_embed=true reuse_example_batch=1 \
    dataset_type=synthetic gcs_metrics=true attention='flash' quantization=""
