"""Configurations of torchtune: names of its builders, sharding and dtypes of its recipes, and what is no fine-tuning."""

from __future__ import annotations

import pytest

from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout import Layout
from shardwise.values import InputError

# The options that recipes/configs have in common.
CONFIG = """tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/t.model, max_seq_len: {length}}}
dataset: {{_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}}
model:
  _component_: torchtune.models.{builder}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/model, model_type: LLAMA3}}
batch_size: 2
epochs: 1
optimizer: {{_component_: {optimizer}, lr: 2e-5}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
gradient_accumulation_steps: 4
compile: false
enable_activation_checkpointing: true
enable_activation_offloading: false
dtype: bf16
device: cuda
"""
LORA = """  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 16
checkpointer"""


def read(
    builder: str = "llama3_1.llama3_1_8b", *, more: str = "", devices: int = 8, length: str = "8192",
    optimizer: str = "torch.optim.AdamW",
) -> ParsedLaunch:  # fmt: skip
    text = CONFIG.format(builder=builder, length=length, optimizer=optimizer)
    text = text.replace("checkpointer", LORA, 1) if "lora" in builder else text
    return parse_launch({"config.yaml": text + more}, Machines(num_devices=devices, devices_per_node=8, chip="h100"))


def test_a_full_recipe_is_sharded_by_fsdp_with_all_state_in_bf16() -> None:
    parsed = read()
    launch = parsed.launch
    assert (parsed.target.name, parsed.target.stack, launch.model.name) == (
        "torchtune",
        "torchtitan-eager",
        "llama-3.1-8b",
    )
    assert launch.layout == Layout.parse("fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=full")
    job = launch.job
    assert (job.num_seqs, job.seq_len, job.precision, job.loss) == (64, 8192, "bf16_bf16_state", "chunked")
    assert parsed.unknown == ()
    assert read(devices=1).launch.layout == Layout.parse("micro_batch_seqs=2 recompute=full")


@pytest.mark.parametrize(
    ("builder", "model"),
    [("llama2.llama2_7b", "llama-2-7b"), ("llama3_2.llama3_2_1b", "llama-3.2-1b"), ("qwen2_5.qwen2_5_0_5b", "qwen2.5-0.5b"),
     ("qwen3.qwen3_1_7b_instruct", "qwen3-1.7b"), ("gemma2.gemma2_9b", "gemma-2-9b"), ("mistral.mistral_7b", "mistral-7b"),
     ("phi3.phi3_mini", "phi-3-mini"), ("phi4.phi4_14b", "phi-4"), ("llama4.llama4_scout_17b_16e", "llama-4-scout")],
)  # fmt: skip
def test_builders_are_models_of_the_catalogue(builder: str, model: str) -> None:
    assert read(builder).launch.model.name == model


@pytest.mark.parametrize(
    ("builder", "precision"),
    [("qwen2_5.lora_qwen2_5_7b_instruct", "bf16"), ("llama3_1.qlora_llama3_1_8b", "qlora_nf4")],
)
def test_adapters_are_those_of_the_builder(builder: str, precision: str) -> None:
    launch = read(builder).launch
    assert launch.model.lora_rank == 16
    assert launch.model.lora_targets == ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert launch.job.precision == precision


@pytest.mark.parametrize(
    ("more", "layout"),
    [("tensor_parallel_dim: 2\n", "fsdp=4 tp=2 sequence_parallel=false"), ("data_parallel_replicate_dim: 2\n", "dp=2 fsdp=4"),
     ("fsdp_reshard_after_forward: false\n", "fsdp=8 zero_stage=2")],
)  # fmt: skip
def test_sizes_of_the_mesh(more: str, layout: str) -> None:
    assert read(more=more).launch.layout == Layout.parse(f"{layout} micro_batch_seqs=2 recompute=full")


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [({"more": "teacher_model: {_component_: torchtune.models.llama3.llama3_8b}\n"}, "has teacher_model"),
     ({"more": "quantizer: {groupsize: 256}\n"}, "has quantizer"),
     ({"builder": "clip.clip_text_encoder_large"}, "'clip-text-encoder-large', which the catalogue lacks"),
     ({"builder": "llama2.llama2"}, "a launch of torchtune does not say its model"),
     ({"builder": "llama3_1.llama3_1_9b"}, "'llama-3.1-9b', which the catalogue lacks"),
     ({"optimizer": "torch.optim.Rprop"}, "optimizer._component_: found 'torch.optim.Rprop'"),
     ({"more": "tensor_parallel_dim: 3\n"}, "do not divide 8 devices")],
)  # fmt: skip
def test_what_is_no_supervised_fine_tuning_is_refused(keywords: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError) as refusal:
        read(**keywords)
    assert problem in str(refusal.value)
