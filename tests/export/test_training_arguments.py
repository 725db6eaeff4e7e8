"""Files of a training script's arguments (TRL's recipes), and scripts on transformers' Trainer that torchrun starts."""

from __future__ import annotations

import pytest

from shardwise.hardware import load_cluster
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch, price_launch
from shardwise.layout import Layout
from shardwise.values import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8, chip="h100")
# The options that recipes of alignment-handbook and open-r1 have in common.
RECIPE = """model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_mixture: {datasets: [{id: HuggingFaceH4/ultrachat_200k, weight: 1.0}], seed: 0}
bf16: true
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
learning_rate: 2.0e-05
max_length: 2048
max_steps: -1
output_dir: data/run
per_device_train_batch_size: 4
report_to: [tensorboard]
"""
ZERO3 = """compute_environment: LOCAL_MACHINE
deepspeed_config: {offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: true, zero_stage: 3}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
LORA = "use_peft: true\nload_in_4bit: true\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\n"
ALPACA = """torchrun --nproc_per_node=8 --master_port=9999 train.py --model_name_or_path meta-llama/Llama-2-7b-hf \\
  --bf16 True --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --model_max_length 512 --tf32 True """


def read(*, script: str | None = None, **texts: str) -> ParsedLaunch:
    files = {f"{name}.yaml": text for name, text in texts.items()}
    return parse_launch({**files, **({"run.sh": script} if script else {})}, EIGHT)


def test_a_recipe_is_read_with_the_file_of_accelerate() -> None:
    parsed = read(recipe=RECIPE, zero3=ZERO3)
    assert parsed.target.name == "accelerate"
    assert parsed.target.stack == "deepspeed"
    assert parsed.unknown == ()
    assert parsed.launch.model.name == "mistral-7b"
    assert parsed.launch.layout == Layout.parse("fsdp=8 zero_stage=3 micro_batch_seqs=4 recompute=full")
    job = parsed.launch.job
    assert (job.num_seqs, job.seq_len, job.precision) == (64, 2048, "bf16")


@pytest.mark.parametrize(
    ("recipe", "layout", "precision"),
    [(RECIPE, "dp=8 micro_batch_seqs=4 recompute=full", "bf16_bf16_state"),
     (RECIPE.replace("torch_dtype: bfloat16\n", ""), "dp=8 micro_batch_seqs=4 recompute=full", "bf16_fp32_reduction"),
     (RECIPE + LORA, "dp=8 micro_batch_seqs=4 recompute=full", "qlora_nf4_single"),
     (RECIPE + "deepspeed: configs/ds_zero2.json\n", "fsdp=8 zero_stage=2 micro_batch_seqs=4 recompute=full", "bf16"),
     (RECIPE + "fsdp: [shard_grad_op, auto_wrap]\n", "fsdp=8 zero_stage=2 micro_batch_seqs=4 recompute=full", "bf16"),
     (RECIPE + "accelerate_config: zero1\n", "fsdp=8 zero_stage=1 micro_batch_seqs=4 recompute=full", "bf16")],
)  # fmt: skip
def test_a_recipe_alone_says_how_it_is_sharded(recipe: str, layout: str, precision: str) -> None:
    launch = read(recipe=recipe).launch
    assert launch.layout == Layout.parse(layout)
    assert launch.job.precision == precision
    assert launch.model.lora_rank == (16 if "use_peft" in recipe else 0)


def test_a_launch_on_deepspeed_is_changed_by_options_of_deepspeed() -> None:
    files = {"recipe.yaml": RECIPE, "zero3.yaml": ZERO3}
    changes = [change.options for change in price_launch(files, load_cluster("h100:8")).better]
    assert {"deepspeed_config.zero_stage": 2} in changes
    assert not [name for options in changes for name in options if name.startswith("fsdp_config")]


def test_what_a_recipe_leaves_out_is_what_trl_and_transformers_set() -> None:
    """SFTConfig: 1,024 tokens, bf16, checkpointing; TrainingArguments: 8 sequences of each device, no accumulation."""
    launch = read(recipe="model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-4\npacking: true\n").launch
    assert (launch.job.seq_len, launch.job.num_seqs) == (1024, 64)
    assert launch.layout == Layout.parse("dp=8 micro_batch_seqs=8 recompute=full")
    plain = read(recipe="model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-4\nblock_size: 4096\n").launch
    assert (plain.layout.recompute, plain.job.precision) == ("none", "fp32")


def test_words_of_the_command_count_before_the_file_of_arguments() -> None:
    script = (
        "accelerate launch --config_file zero3.yaml scripts/sft.py --config recipe.yaml --per_device_train_batch_size 1"
    )
    launch = read(recipe=RECIPE, zero3=ZERO3, script=script).launch
    assert launch.layout.micro_batch_seqs == 1
    with pytest.raises(InputError, match=r"'recipe.yaml', which is not given; give this file too"):
        read(zero3=ZERO3, script=script)


@pytest.mark.parametrize(
    ("words", "layout", "precision", "stack"),
    [("", "dp=8", "bf16_fp32_reduction", "accelerate"),
     ('--fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer', "fsdp=8", "bf16", "accelerate"),
     ("--fsdp shard_grad_op", "fsdp=8 zero_stage=2", "bf16", "accelerate"),
     ("--deepspeed scripts/zero2.json", "fsdp=8 zero_stage=2", "bf16", "deepspeed")],
)  # fmt: skip
def test_scripts_of_transformers_trainer_without_a_configuration(
    words: str, layout: str, precision: str, stack: str
) -> None:
    parsed = read(script=ALPACA + words)
    assert parsed.launch.layout == Layout.parse(f"{layout} micro_batch_seqs=4")
    assert (parsed.launch.job.precision, parsed.target.stack) == (precision, stack)
    assert (parsed.launch.job.num_seqs, parsed.launch.job.seq_len) == (256, 512)
    assert parsed.unknown == ()


@pytest.mark.parametrize(
    ("texts", "script", "problem"),
    [({"recipe": RECIPE + "beta: 0.1\n"}, None, "beta: found '0.1': preference tuning"),
     ({"recipe": RECIPE + "num_generations: 8\n"}, None, "num_generations: found '8': preference tuning"),
     ({"recipe": RECIPE}, "trl dpo --config recipe.yaml --bf16 true", "program: found 'dpo': preference tuning"),
     ({"recipe": RECIPE}, "accelerate launch scripts/grpo.py --config recipe.yaml", "program: found 'grpo'"),
     ({"recipe": RECIPE, "other": RECIPE}, None, "one file with the arguments of the training script is required"),
     ({"recipe": RECIPE + "accelerate_config: zero4\n"}, None, "accelerate_config: found 'zero4'")],
)  # fmt: skip
def test_what_is_no_supervised_launch_is_refused(texts: dict[str, str], script: str | None, problem: str) -> None:
    with pytest.raises(InputError) as refusal:
        read(script=script, **texts)
    assert problem in str(refusal.value)


def test_a_script_without_the_deepspeed_file_that_it_names_says_so() -> None:
    with pytest.raises(InputError) as refusal:
        read(script=f"{ALPACA} --deepspeed configs/default_offload_opt_param.json")
    assert "one ds_config.json, and the script that starts it, is required" in "\n".join(refusal.value.problems)
