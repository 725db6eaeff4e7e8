"""Scripts of ms-swift: read with the defaults of its parsers, whole numbers of `expr` worked out, other commands refused."""

from __future__ import annotations

import pytest

from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout import Layout
from shardwise.values import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8, chip="h100")
# The options that scripts of examples/train have in common.
SCRIPT = """nproc_per_node=8
# swift infer --model Qwen/Qwen2.5-7B-Instruct --stream true
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'swift/self-cognition#1000' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node) \\
    --max_length 2048 \\
    --model_author swift \\
    --model_name swift-robot """


def read(script: str) -> ParsedLaunch:
    return parse_launch({"train.sh": script}, EIGHT)


def test_a_script_may_do_more_than_train() -> None:
    assert read(f"{SCRIPT}\n\nswift infer --adapters output --stream true").launch.job.num_seqs == 32
    assert read(SCRIPT.replace("swift sft", "torchrun --nproc_per_node 8 swift/cli/sft.py")).target.name == "ms-swift"


def test_defaults_are_those_of_its_parsers() -> None:
    """LoRA of rank 8 on all linear layers, checkpointing; the model is `--model`, not the name that it is taught."""
    parsed = read(SCRIPT)
    launch = parsed.launch
    assert (parsed.target.name, parsed.target.stack, launch.model.name) == ("ms-swift", "accelerate", "qwen2.5-7b")
    assert (launch.model.lora_rank, launch.model.lora_targets) == (8, ("all-linear",))
    assert launch.layout == Layout.parse("dp=8 micro_batch_seqs=1 recompute=full")
    assert (launch.job.num_seqs, launch.job.seq_len, launch.job.precision) == (32, 2048, "bf16")
    assert not parsed.unknown
    without_steps = SCRIPT.replace("--gradient_accumulation_steps $(expr 32 / $nproc_per_node)", "")
    assert read(without_steps).launch.job.num_seqs == 16


@pytest.mark.parametrize(
    ("words", "layout", "precision", "stack"),
    [("--tuner_type full", "dp=8", "bf16_bf16_state", "accelerate"),
     ("--train_type full --deepspeed zero3", "fsdp=8 zero_stage=3", "bf16", "deepspeed"),
     ("--deepspeed zero2_offload", "fsdp=8 zero_stage=2 offload=optimizer", "bf16", "deepspeed"),
     ("--fsdp fsdp2 --gradient_checkpointing false", "fsdp=8 zero_stage=3 recompute=none", "bf16", "accelerate"),
     ("--quant_bits 4 --quant_method bnb", "dp=8", "qlora_nf4", "accelerate"),
     ("--sequence_parallel_size 4 --deepspeed zero1", "fsdp=2 cp=4 cp_variant=ulysses zero_stage=1", "bf16", "deepspeed")],
)  # fmt: skip
def test_options_of_the_job(words: str, layout: str, precision: str, stack: str) -> None:
    parsed = read(SCRIPT + words)
    recompute = "" if "recompute" in layout else " recompute=full"
    assert parsed.launch.layout == Layout.parse(f"{layout} micro_batch_seqs=1{recompute}")
    assert (parsed.launch.job.precision, parsed.target.stack) == (precision, stack)


@pytest.mark.parametrize(
    ("script", "problem"),
    [(SCRIPT.replace("swift sft", "megatron sft"), "found `megatron sft` of ms-swift"),
     (SCRIPT.replace("swift sft", "swift rlhf"), "found `swift rlhf` of ms-swift"),
     ("swift deploy --model Qwen/Qwen2.5-7B-Instruct --infer_backend vllm", "found `swift deploy` of ms-swift"),
     (SCRIPT.replace("swift sft", "accelerate launch --config_file f.json swift/cli/sft.py"), "found `accelerate launch`"),
     (SCRIPT + "--tuner_type reft", "tuner_type: found 'reft'"),
     (SCRIPT + "--quant_bits 2", "quant_bits: found '2' by 'bnb'"),
     (SCRIPT + "--fsdp my.json", "fsdp: found 'my.json'"),
     (SCRIPT + "--deepspeed my.json", "refers to 'my.json', which is not given; give this file too"),
     (SCRIPT + "--task_type seq_cls", "task_type: found 'seq_cls', which makes the model another one")],
)  # fmt: skip
def test_what_is_no_supervised_training_of_a_decoder_is_refused(script: str, problem: str) -> None:
    with pytest.raises(InputError) as refusal:
        read(script)
    assert problem in str(refusal.value)
