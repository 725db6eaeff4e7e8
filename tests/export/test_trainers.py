"""Launches of trainers on top of transformers: Axolotl and LLaMA-Factory, read by their own defaults and refused with reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.hardware import load_cluster
from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.frameworks.targets import READERS
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch, price_launch
from shardwise.layout import Layout
from shardwise.present.command_line import main
from shardwise.values import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8, chip="h100")
ONE = Machines(num_devices=1, devices_per_node=1, chip="h100")
# A fine-tuning as Axolotl's examples have them (llama-3, QLoRA), and one of LLaMA-Factory.
AXOLOTL = """base_model: NousResearch/Meta-Llama-3-8B
datasets: [{path: aaditya/alpaca_subset_1, type: alpaca}]
adapter: qlora
load_in_8bit: false
load_in_4bit: true
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: paged_adamw_32bit
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
max_steps: 100
"""
FULL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 8
optimizer: adamw_bnb_8bit
bf16: true
gradient_checkpointing: true
"""
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def read(text: str, machines: Machines = EIGHT, **files: str) -> ParsedLaunch:
    return parse_launch({"train.yaml": text, **files}, machines)


def test_a_qlora_of_axolotl() -> None:
    parsed = read(AXOLOTL)
    launch = parsed.launch
    assert (parsed.target.name, parsed.target.stack, launch.model.name) == ("axolotl", "accelerate", "llama-3-8b")
    assert (launch.model.lora_rank, launch.model.lora_targets) == (32, ("all-linear",))
    assert (launch.job.precision, launch.job.optimizer, launch.job.seq_len) == ("qlora_nf4", "adamw", 4096)
    assert launch.job.num_seqs == 2 * 4 * 8
    assert launch.job.tokens == 100 * 64 * 4096
    assert launch.layout == Layout.parse("dp=8 micro_batch_seqs=2 recompute=full")
    assert not parsed.unknown
    assert not parsed.not_priced


@pytest.mark.parametrize(
    ("lines", "layout", "precision", "stack"),
    [
        ("", "dp=8", "bf16_bf16_state", "accelerate"),  # DDP trains the 16-bit weights themselves
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", "fsdp=8 zero_stage=3", "bf16", "accelerate"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", "fsdp=8 zero_stage=2", "bf16",
         "accelerate"),
        ("fsdp_version: 2\nfsdp_config: {offload_params: false}\ndp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2",
         "dp=2 fsdp=2 tp=2 zero_stage=3 sequence_parallel=false", "bf16", "accelerate"),
        ("fsdp_version: 2\nfsdp_config: {state_dict_type: FULL_STATE_DICT}\ncontext_parallel_size: 4",
         "fsdp=2 cp=4 cp_variant=all_gather zero_stage=3", "bf16", "accelerate"),
        ("deepspeed: deepspeed_configs/zero2.json", "fsdp=8 zero_stage=2", "bf16", "deepspeed"),
        ("deepspeed: deepspeed_configs/zero3_bf16.json", "fsdp=8 zero_stage=3", "bf16", "deepspeed"),
        ("deepspeed: deepspeed_configs/zero1.json", "fsdp=8 zero_stage=1", "bf16", "deepspeed"),
    ],
)  # fmt: skip
def test_ways_of_sharding_in_axolotl(lines: str, layout: str, precision: str, stack: str) -> None:
    parsed = read(f"{FULL}{lines}\n")
    expected = Layout.parse(f"{layout} recompute=full")
    assert parsed.launch.layout == expected
    assert (parsed.launch.job.precision, parsed.target.stack) == (precision, stack)
    assert parsed.launch.job.optimizer == "adamw_8bit"
    assert parsed.launch.job.num_seqs == 8 * expected.num_replicas


def test_a_deepspeed_configuration_is_read_where_it_is_given() -> None:
    text = f"{FULL}deepspeed: configs/mine.json\n"
    with pytest.raises(
        InputError, match=r"deepspeed: refers to 'configs/mine.json', which is not given; give this file too"
    ):
        read(text)
    config = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    layout = parse_launch({"train.yaml": text, "mine.json": config}, EIGHT).launch.layout
    assert (layout.zero_stage, layout.offload) == (2, "optimizer")


def test_weights_on_the_host_withhold_the_verdict() -> None:
    parsed = read(f"{FULL}deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n")
    assert parsed.launch.layout.offload == "optimizer"
    assert parsed.not_priced == {"deepspeed_config.zero_optimization.offload_param.device": "memory"}
    assert not parsed.memory_is_known


@pytest.mark.parametrize(
    ("lines", "targets"),
    [
        ("lora_target_modules: [q_proj, v_proj]", "q_proj v_proj"),
        ("lora_target_modules: [gate_proj, down_proj, up_proj]", "down_proj gate_proj up_proj"),
        (r"lora_target_modules: 'model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'",
         "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        (r"lora_target_modules: '.*\.self_attn\.(q|k)_proj'", "k_proj q_proj"),
        ("lora_target_modules: [q_proj, lm_head]", "q_proj"),
        ("", "q_proj v_proj"),  # PEFT's for Llama
    ],
)  # fmt: skip
def test_targets_of_adapters(lines: str, targets: str) -> None:
    model = read(f"{FULL}adapter: lora\nlora_r: 16\n{lines}\n").launch.model
    assert (model.lora_rank, sorted(model.structure.lora_targets)) == (16, targets.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{FULL}rl: dpo\n", "rl: found 'dpo': preference tuning and reinforcement learning run further models"),
        (f"{FULL}reward_model: true\n", "reward_model: found 'True'"),
        (f"{FULL}adapter: llama-adapter\n", "adapter: found 'llama-adapter'; lora, qlora or none"),
        (f"{FULL}adapter: lora\nlora_r: 8\nlora_target_modules: [qq]\n", "lora_target_modules: .*q_proj"),
        (f"{FULL}adapter: lora\nlora_r: 8\nlora_target_modules: '(.*)+x'\n", "names of modules, or a regular expression"),
        (f"{FULL}adapter: lora\nlora_r: 8\nlora_target_modules: '.*[z'\n", "no regular expression"),
        (FULL.replace("adamw_bnb_8bit", "came_pytorch"), "optimizer: .*came_pytorch"),
        (FULL.replace("meta-llama/Llama-3.1-8B", "me/mine"), "'me/mine', which the catalogue lacks; give --model"),
        (f"{FULL}fsdp_version: 2\ndp_shard_size: 3\n", "dp_shard_size: found 3, with the other degrees 3 devices of 8"),
        (f"{FULL}fsdp_version: 2\ntensor_parallel_size: 3\n", "tensor parallelism 3 .* do not divide 8 devices"),
        (FACTORY.replace("stage: sft", "stage: dpo"), "stage: found 'dpo': preference tuning"),
        (FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type: found 'oft'"),
        (f"{FACTORY}quantization_bit: 3\n", "quantization_bit: found 3 by 'bnb'; 4 or 8 by bnb"),
        (f"{FACTORY}use_kt: true\n", "use_kt: KTransformers"),
        (f"{FACTORY}use_galore: true\n", "use_galore: the state of this optimizer is not priced"),
        (f"{FACTORY}mixture_of_depths: convert\n", "mixture_of_depths: found 'convert', which makes the model another one"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("lines", "precision", "layout"),
    [
        ("", "bf16", "dp=8 recompute=full"),
        ("quantization_bit: 4\n", "qlora_nf4", "dp=8 recompute=full"),
        ("quantization_bit: 4\ndouble_quantization: false\n", "qlora_nf4_single", "dp=8 recompute=full"),
        ("quantization_bit: 8\n", "qlora_int8", "dp=8 recompute=full"),
        ("disable_gradient_checkpointing: true\n", "bf16", "dp=8 recompute=none"),
        ("deepspeed: examples/deepspeed/ds_z3_config.json\n", "bf16", "fsdp=8 zero_stage=3 recompute=full"),
        ("deepspeed: examples/deepspeed/ds_z2_offload_config.json\n", "bf16",
         "fsdp=8 zero_stage=2 recompute=full offload=optimizer"),
    ],
)  # fmt: skip
def test_launches_of_llama_factory(lines: str, precision: str, layout: str) -> None:
    parsed = read(f"{FACTORY}{lines}")
    launch = parsed.launch
    assert parsed.target.name == "llama-factory"
    assert (launch.model.lora_rank, launch.model.lora_targets) == (8, ("all-linear",))
    assert (launch.job.precision, launch.job.num_seqs, launch.job.seq_len) == (precision, 64, 2048)
    assert launch.layout == Layout.parse(layout)
    assert any("priced as full" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("bf16: true\n", "bf16_fp32_reduction"),  # trained weights are cast to fp32
        ("pure_bf16: true\n", "bf16_bf16_state"),
        ("bf16: true\ndeepspeed: ds_z2_config.json\n", "bf16"),
        ("bf16: true\nfsdp: full_shard auto_wrap\n", "bf16"),
    ],
)
def test_number_formats_of_a_whole_model_in_llama_factory(lines: str, precision: str) -> None:
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: full").replace("bf16: true\n", lines)
    launch = read(text).launch
    assert launch.model.lora_rank == 0
    assert launch.job.precision == precision


def test_one_device_shards_nothing_and_a_launch_is_priced() -> None:
    assert read(f"{FULL}fsdp_version: 2\n", ONE).launch.layout == Layout.parse("recompute=full")
    priced = price_launch({"train.yaml": AXOLOTL}, load_cluster("h100:1"))
    assert priced.better == ()
    assert 0 < priced.plan.estimate.memory["parameters"] < 7e9  # 8B parameters in 4 bits


def test_trainers_are_read_and_not_written() -> None:
    with pytest.raises(InputError, match="read, and not written"):
        READERS["axolotl"].write({}, read(AXOLOTL).launch)


def test_each_option_is_priced_or_in_a_list_of_what_it_changes() -> None:
    for name in ("axolotl", "llama-factory"):
        effects = {option.effect for option in READERS[name].options.values()}
        assert effects == {"priced", "none", "model", "memory", "time"}


def test_the_command_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qlora.yml"
    file.write_text(AXOLOTL)
    assert main(["read", str(file), "--cluster", "h100:8"]) == 0
    out = capsys.readouterr().out
    assert "Axolotl" in out
    assert "qlora_nf4" in out


OPENRLHF = """set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.max_len 4096 \\
   --train.batch_size 256 \\
   --train.micro_batch_size 2 \\
   --model.model_name_or_path meta-llama/Meta-Llama-3-8B \\
   --ds.zero_stage 3 \\
   --ds.param_dtype bf16 \\
   --ds.lora.rank 64 \\
   --ds.packing_samples \\
   --model.gradient_checkpointing_enable
EOF
    # --ds.adam_offload
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
VERL = """torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \\
     -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.prompt_dict_keys=['question'] \\
    +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 \\
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \\
    trainer.total_training_steps=10 $@ \\
    ulysses_sequence_parallel_size=2 \\
    model.lora_rank=32 \\
    model.target_modules=[q_proj,v_proj]
"""


def test_a_script_of_openrlhf() -> None:
    parsed = parse_launch({"train_sft.sh": OPENRLHF}, EIGHT)
    launch = parsed.launch
    assert (parsed.target.name, parsed.target.stack, launch.model.name) == ("openrlhf", "deepspeed", "llama-3-8b")
    assert (launch.model.lora_rank, launch.model.lora_targets) == (64, ("all-linear",))
    assert (launch.job.num_seqs, launch.job.seq_len, launch.job.precision) == (256, 4096, "bf16")
    expected = "fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=full"
    assert launch.layout == Layout.parse(expected)
    assert not parsed.unknown


def test_a_script_of_verl() -> None:
    """Defaults of sft_trainer.yaml: a batch of 256 sequences of 1,024 tokens, checkpointing, weights in fp32."""
    parsed = parse_launch({"run.sh": VERL}, EIGHT)
    launch = parsed.launch
    assert (parsed.target.name, launch.model.name) == ("verl", "qwen2.5-0.5b")
    assert (launch.model.lora_rank, sorted(launch.model.structure.lora_targets)) == (32, ["q_proj", "v_proj"])
    assert (launch.job.num_seqs, launch.job.seq_len, launch.job.precision) == (256, 1024, "bf16_fp32_reduction")
    assert launch.job.tokens == 10 * 256 * 1024
    expected = "fsdp=4 cp=2 cp_variant=ulysses zero_stage=3 micro_batch_seqs=4 recompute=full"
    assert launch.layout == Layout.parse(expected)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/QwQ-32B", "qwen2.5-32b"), ("Qwen/Qwen2-1.5B-Instruct", "qwen2.5-1.5b"),
        ("casperhansen/llama-3-70b-fp16", "llama-3-70b"), ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("mistralai/Devstral-Small-2507", "mistral-small-24b"), ("mistralai/Magistral-Small-2509", None),
        ("unsloth/Qwen3.5-27B-unsloth-bnb-4bit", "qwen3.5-27b"), ("allenai/Olmo-3-7B-Instruct-SFT", "olmo-3-7b"),
        ("axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16", "llama-4-scout"),
        ("google/gemma-4-31B-it", "gemma-4-31b"), ("TheBloke/Llama-2-7B-GPTQ", None),
    ],
)  # fmt: skip
def test_hub_names_map_to_models_of_the_same_sizes(name: str, model: str | None) -> None:
    hub_entry = hub_model(name)
    assert (hub_entry.name if hub_entry else None) == model


def test_the_language_model_of_one_with_towers_is_said() -> None:
    parsed = parse_launch({"sft.yaml": AXOLOTL.replace("NousResearch/Meta-Llama-3-8B", "google/gemma-4-31B-it")}, EIGHT)
    assert parsed.launch.model.name == "gemma-4-31b"
    assert any("the language model alone" in note and "vision tower" in note for note in parsed.notes)


TRL = (
    "accelerate launch --config_file config.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen2.5-7B "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 --gradient_checkpointing "
    "--use_peft --lora_r 32 --lora_target_modules q_proj v_proj"
)
RESHARDING = "fsdp_reshard_after_forward"


@pytest.mark.parametrize(
    ("config", "layout", "stack"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1, offload_optimizer_device: cpu}",
         "fsdp=8 zero_stage=1 offload=optimizer", "deepspeed"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, zero3_init_flag: true}", "fsdp=8 zero_stage=3",
         "deepspeed"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nparallelism_config: {parallelism_config_sp_size: 2}",
         "fsdp=4 cp=2 cp_variant=ulysses zero_stage=3", "deepspeed"),
        (f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 1, {RESHARDING}: FULL_SHARD}}", "fsdp=8 zero_stage=3",
         "accelerate"),
        (f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 1, {RESHARDING}: SHARD_GRAD_OP}}", "fsdp=8 zero_stage=2",
         "accelerate"),
        (f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {RESHARDING}: false}}", "fsdp=8 zero_stage=2", "accelerate"),
    ],
)  # fmt: skip
def test_a_script_of_trl_with_files_of_accelerate(config: str, layout: str, stack: str) -> None:
    """Forms of trl/examples/accelerate_configs: DeepSpeed within the file, FSDP1 with the names of FSDP2."""
    files = {"config.yaml": f"{config}\nmixed_precision: bf16\nnum_processes: 8\n", "sft.sh": TRL}
    parsed = parse_launch(files, EIGHT)
    launch = parsed.launch
    assert (parsed.target.name, parsed.target.stack, launch.model.name) == ("accelerate", stack, "qwen2.5-7b")
    assert (launch.model.lora_rank, launch.model.lora_targets) == (32, ("q_proj", "v_proj"))
    expected = Layout.parse(f"{layout} sequence_parallel=false micro_batch_seqs=2 recompute=full")
    assert launch.layout == expected
    assert launch.job.num_seqs == 16 * expected.num_replicas
    quantized = {**files, "sft.sh": f"{TRL} --load_in_4bit --use_bnb_nested_quant"}
    assert parse_launch(quantized, EIGHT).launch.job.precision == "qlora_nf4"
