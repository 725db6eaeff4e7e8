"""DeepSpeed: its published configurations read and priced, its rules, and files that are no launch of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.deepspeed import CONFIG, PRECISIONS, SCRIPT, TARGET, UNPRICED
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.present.command_line import main
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

HF = "deepspeed --num_gpus 8 run_clm.py --deepspeed ds_config.json --block_size 2048 --per_device_train_batch_size 2 "
# Published configurations: what of them is asked for here, the script that starts them, devices, and what they say.
# 1 and 2: deepspeedai/DeepSpeedExamples, training/tensor_parallel/hf_integration and training/expert_parallel/configs;
# 3: claude_tutorials/model_configs/llama_7b_single_node.json there; 4: huggingface/transformers,
# tests/deepspeed/ds_config_zero2.json, without what it scales and logs.
PUBLISHED: tuple[tuple[dict[str, Any], str, str, str, str, int], ...] = (
    ({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
      "tensor_parallel": {"autotp_size": 4}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
      "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
     HF + "--bf16 --gradient_accumulation_steps 8", "llama-3-8b", "bf16",
     "fsdp=2 tp=4 zero_stage=2 sequence_parallel=false micro_batch_seqs=2", 32),
    ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
      "expert_parallel": {"enabled": True, "autoep_size": 8, "preset_model": "qwen3_5_moe", "load_balance_coeff": None},
      "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "steps_per_print": 10},
     "deepspeed main.py --deepspeed_config ds.json --seq_length 4096", "qwen3-30b-a3b", "bf16",
     "fsdp=8 ep=8 zero_stage=1 micro_batch_seqs=2", 16),
    ({"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
      "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000000}},
     "deepspeed finetune.py --max_length 2048 --gradient_checkpointing True", "llama-2-7b", "bf16",
     "fsdp=8 zero_stage=2 micro_batch_seqs=4 recompute=full", 128),
    ({"fp16": {"enabled": True, "loss_scale": 0}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
      "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, HF, "qwen2.5-7b", "fp16_fp32_update",
     "fsdp=8 zero_stage=2 micro_batch_seqs=2 offload=optimizer", 16),
)  # fmt: skip


def parse_files(
    config: object, script: str | None = None, *, devices: int = 8, model: str | None = "llama-3-8b", **beside: int
) -> ParsedLaunch:
    files = {CONFIG: config if isinstance(config, str) else json.dumps(config)} | ({"run.sh": script} if script else {})
    parts = {name.replace("__", "."): value for name, value in beside.items()}
    machines = Machines(num_devices=devices, devices_per_node=8)
    return parse_launch(
        files, machines, target="deepspeed", model=load_model(model) if model else None, user_fields=parts
    )


@pytest.mark.parametrize(("config", "script", "model", "precision", "layout", "batch"), PUBLISHED)
def test_published_configurations_are_read_and_priced(
    config: dict[str, Any], script: str, model: str, precision: str, layout: str, batch: int
) -> None:
    parsed = parse_files(config, script, model=model)
    launch = parsed.launch
    assert launch.layout == Layout.parse(layout)
    assert (launch.job.precision, launch.job.num_seqs) == (precision, batch)
    assert parsed.unknown == ()
    plan = plan_layout(launch.model, load_cluster("h100:8", stack="deepspeed"), launch.job, launch.layout)
    assert plan.estimate.step_time_s > 0.1


def test_a_configuration_alone_is_read_with_what_is_said_beside_it() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    assert "no length of sequences" in parse_files(config).notes[0]
    assert parse_files(config, job__seq_len=4096).launch.job == Job(global_batch_tokens=64 * 4096, seq_len=4096)
    with pytest.raises(InputError, match="--seq-len: found 4096, and the launch says 2048"):
        parse_files(config, "deepspeed t.py --block_size 2048", job__seq_len=4096)
    with pytest.raises(InputError, match="give --model"):
        parse_files(config, model=None, job__seq_len=4096)


def test_the_command_reads_a_configuration_without_a_script(tmp_path: Any, capsys: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    words = ["read", str(path), "--cluster", "h100:8", "--model", "llama-3-8b"]
    beside = ["--seq-len", "4Ki", "--batch-seqs", "32", "--micro-batch-seqs", "2"]
    assert main([*words, *beside]) == 0
    assert "131,072 tokens per batch, sequences of 4,096" in capsys.readouterr().out
    assert main(words) == 2
    assert "--batch-seqs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "seqs"), [({}, 16), ({"gradient_accumulation_steps": 3}, 48), ({"train_batch_size": 32}, 32)]
)
def test_missing_batch_sizes_are_derived(part: dict[str, int], seqs: int) -> None:
    assert parse_files({"train_micro_batch_size_per_gpu": 2, **part}, job__seq_len=2048).launch.job.num_seqs == seqs


def launch_with(
    layout: str, *, model: str = "llama-3-8b", precision: str = "bf16", cluster: str = "h100:16", seqs: int = 256
) -> Launch:
    job = Job(global_batch_tokens=seqs * 4096, seq_len=4096, precision=precision)
    return Launch(
        model=load_model(model), job=job, layout=Layout.parse(layout), machines=cluster_machines(load_cluster(cluster))
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fsdp=8 pp=2 zero_stage=1", "has no pp"),
        ("dp=2 fsdp=8", "ZeRO shards over all replicas"),
        ("fsdp=4 tp=2 cp=2 cp_variant=ulysses sequence_parallel=false", "exclude each other"),
        ("tp=16 sequence_parallel=false", "which are not copied"),
        ("dp=16 offload=optimizer", "a sharded one"),
        ("fsdp=16 offload=activations", "activations on the host are checkpoints"),
        ("fsdp=16 recompute=full recompute_layers=3", "layout.recompute_layers is 3"),
        ("fsdp=8 tp=2", "sequence parallelism"),
        ("fsdp=16 micro_batch_seqs=3", "does not divide"),
    ],
)
def test_layouts_that_deepspeed_lacks_are_refused(layout: str, words: str) -> None:
    assert any(words in reason for reason in refusals(launch_with(layout), TARGET))


def test_formats_of_gradients_go_with_the_stage() -> None:
    refused = {
        (name, stage): bool(refusals(launch_with(f"{'fsdp' if stage else 'dp'}=16 zero_stage={stage}", precision=name), TARGET))
        for name in PRECISIONS for stage in range(4)
    }  # fmt: skip
    assert {key for key, value in refused.items() if value} == {
        ("bf16_fp32_main_gradients", 0), *(("bf16_fp32_gradients", stage) for stage in (0, 2, 3)),
    }  # fmt: skip
    options = to_options(TARGET, launch_with("fsdp=16 zero_stage=1", precision="bf16_fp32_main_gradients"))
    assert options["bf16.immediate_grad_update"] is True


def test_experts_with_expert_parallelism_are_whole() -> None:
    assert (
        refusals(
            launch_with("fsdp=8 tp=2 ep=8 etp=1 zero_stage=2 sequence_parallel=false", model="mixtral-8x7b"), TARGET
        )
        == []
    )
    reasons = refusals(
        launch_with("fsdp=8 tp=2 ep=8 zero_stage=2 sequence_parallel=false", model="mixtral-8x7b"), TARGET
    )
    assert any("set etp=1" in reason for reason in reasons)
    ulysses = "fsdp=8 cp=2 cp_variant=ulysses ep=8 zero_stage=3"
    assert any(
        "expert parallelism with ZeRO-3" in reason
        for reason in refusals(launch_with(ulysses, model="mixtral-8x7b"), TARGET)
    )


def test_written_launch_keeps_the_batch_and_starts_every_node() -> None:
    launch = launch_with("fsdp=16 micro_batch_seqs=4")
    files = TARGET.write(to_options(TARGET, launch), launch)
    config = json.loads(files[CONFIG])
    assert (
        config["train_batch_size"]
        == 256
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 16
    )
    assert "--num_nodes 2" in files[SCRIPT]
    assert "--num_gpus 8" in files[SCRIPT]


@pytest.mark.parametrize("name", UNPRICED)
def test_options_that_no_plan_prices_are_refused(name: str) -> None:
    value: Any = {
        "zero_optimization.offload_param.device": "cpu",
        "zero_optimization.offload_optimizer.ratio": 0.5,
    }.get(name, True)
    value = 8 if name.endswith("_size") else value
    tree: Any = value
    for section in reversed(name.split(".")):
        tree = {section: tree}
    with pytest.raises(InputError, match=name):
        parse_files({"train_batch_size": 8, **tree}, job__seq_len=2048)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "is not JSON"),
        ("{'bf16': True}", "is not JSON"),
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"train_batch_size": NaN}', "finite"),
        ("[" * 100_000, "is not JSON: more than 64 arrays"),
        ("[1, 2]", "options by name"),
        ('{"a": ' * 60 + "1" + "}" * 60, "sections"),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, "2 × 2 × 8 = 32"),
        ({"train_batch_size": -8}, "whole number from 1"),
        ({"train_batch_size": "eight"}, "a value of type int"),
        ({"train_batch_size": 8, "bf16": True}, ""),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one format"),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "int8"}}, "grad_accum_dtype"),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
          "communication_data_type": "bf16", "zero_optimization": {"stage": 2}}, "no recipe has"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 7}}, "one of 0, 1, 2, 3 is required"),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 3}}, "do not divide 8"),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": [2]}}, "a value of type int is required"),
        ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, "OneBitAdam".lower()),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "none or cpu"),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2},
          "activation_checkpointing": {"partition_activations": True}}, "partition_activations"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused_or_named(config: object, words: str) -> None:
    if words:
        with pytest.raises(InputError, match=words.replace("(", r"\(")):
            parse_files(config, job__seq_len=2048)
    else:
        assert parse_files(config, job__seq_len=2048).unknown == ("bf16",)


def test_several_configurations_are_no_launch() -> None:
    with pytest.raises(InputError, match=r"one ds_config\.json"):
        parse_launch(
            {"a.json": "{}", "b.json": "{}"},
            Machines(num_devices=8, devices_per_node=8),
            target="deepspeed",
            model=load_model("llama-3-8b"),
        )
    with pytest.raises(InputError, match="one length"):
        parse_files({"train_batch_size": 8}, "deepspeed t.py --block_size 2048 --max_length 4096")


def test_a_typo_at_the_top_is_listed() -> None:
    assert parse_files({"train_batch_size": 8, "zero_optimisation": {"stage": 3}}, job__seq_len=2048).unknown == (
        "zero_optimisation.stage",
    )
