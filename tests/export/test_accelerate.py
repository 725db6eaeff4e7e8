"""Accelerate: its published configurations read and priced, its rules, and files that are no launch of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.accelerate import CONFIG, SCRIPT, TARGET
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

START = (
    "accelerate launch --config_file config.yaml train.py --block_size 8192 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 4"
)
BASE = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""


def fsdp2(checkpointing: bool, sizes: str, more: str = "") -> str:
    """The section that examples of FSDP2 have, with sizes of dp_replicate, dp_shard, cp and tp."""
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    parallel = "".join(
        f"  parallelism_config_{name}_size: {size}\n" for name, size in zip(names, sizes.split(), strict=True)
    )
    return (
        f"{BASE}fsdp_config:\n  fsdp_activation_checkpointing: {str(checkpointing).lower()}\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n"
        f"  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_version: 2\n{more}parallelism_config:\n{parallel}"
    )


# 1 to 3: huggingface/accelerate, examples/torch_native_parallelism/configs: nd.yaml, cp.yaml, tp_hsdp.yaml;
# 4: huggingface/trl, examples/accelerate_configs/context_parallel_8gpu.yaml; 5: huggingface/accelerate,
# examples/slurm/fsdp_config.yaml; 6: examples/config_yaml_templates/multi_gpu.yaml there, in bf16.
PUBLISHED = {
    "nd": (fsdp2(False, "1 2 4 1"), "fsdp=2 cp=4 zero_stage=3", "bf16"),
    "cp": (fsdp2(True, "1 1 8 1"), "cp=8 zero_stage=3 recompute=full", "bf16"),
    "tp_hsdp": (fsdp2(False, "2 2 1 2"), "dp=2 fsdp=2 tp=2 sequence_parallel=false", "bf16"),
    "trl": (fsdp2(True, "1 1 8 1", "  fsdp_activation_checkpointing_offload: true\n"),
            "cp=8 zero_stage=3 recompute=full offload=activations", "bf16"),
    "fsdp1": ("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_activation_checkpointing: false\n"
              "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
              "  fsdp_offload_params: false\n  fsdp_sharding_strategy: FULL_SHARD\n", "fsdp=8", "bf16"),
    "ddp": ("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n", "dp=8", "bf16_fp32_reduction"),
}  # fmt: skip


def parse_files(
    text: str, script: str | None = START, *, devices: int = 8, per_node: int = 8, **beside: int
) -> ParsedLaunch:
    files = {CONFIG: text} | ({"run.sh": script} if script else {})
    parts = {name.replace("__", "."): value for name, value in beside.items()}
    machines = Machines(num_devices=devices, devices_per_node=per_node)
    return parse_launch(files, machines, target="accelerate", model=load_model("llama-3-8b"), user_fields=parts)


@pytest.mark.parametrize(("text", "layout", "precision"), PUBLISHED.values(), ids=list(PUBLISHED))
def test_published_configurations_are_read_and_priced(text: str, layout: str, precision: str) -> None:
    parsed = parse_files(text)
    launch = parsed.launch
    assert launch.layout == Layout.parse(layout)
    assert launch.job.precision == precision
    assert launch.job.num_seqs == 4 * launch.layout.num_replicas
    assert parsed.unknown == ()
    plan = plan_layout(launch.model, load_cluster("h100:8", stack="accelerate"), launch.job, launch.layout)
    assert plan.estimate.step_time_s > 0.1


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("SHARD_GRAD_OP", "fsdp=16 zero_stage=2"), ("2", "fsdp=16 zero_stage=2"), ("NO_SHARD", "dp=16"),
     ("HYBRID_SHARD", "dp=2 fsdp=8"), ("HYBRID_SHARD_ZERO2", "dp=2 fsdp=8 zero_stage=2")],
)  # fmt: skip
def test_strategies_of_the_first_fsdp(strategy: str, layout: str) -> None:
    text = f"distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
    assert parse_files(text, devices=16).launch.layout == Layout.parse(layout)


def test_words_of_the_command_take_the_place_of_the_file() -> None:
    script = START.replace("train.py", "--fsdp_reshard_after_forward false --mixed_precision no train.py")
    parsed_launch = parse_files(fsdp2(False, "1 8 1 1"), script).launch
    assert (parsed_launch.layout.zero_stage, parsed_launch.job.precision) == (2, "fp32")
    command_line = "accelerate launch --use_fsdp --fsdp_version 2 --mixed_precision bf16 t.py --max_length 4096 "
    command_line += "--per_device_train_batch_size 2"
    read_alone = parse_launch(
        {"run.sh": command_line}, Machines(num_devices=8, devices_per_node=8), model=load_model("llama-3-8b")
    )
    assert read_alone.target is TARGET
    assert read_alone.launch.layout == Layout.parse("fsdp=8 micro_batch_seqs=2")


def test_a_configuration_alone_is_read_with_what_is_said_beside_it() -> None:
    text = fsdp2(False, "1 8 1 1")
    with pytest.raises(InputError, match="--seq-len") as raised:
        parse_files(text, None)
    assert len(raised.value.problems) == 3
    parsed_launch = parse_files(
        text, None, job__seq_len=4096, layout__micro_batch_seqs=2, job__global_batch_seqs=64
    ).launch
    assert (parsed_launch.job.num_seqs, parsed_launch.layout.micro_batch_seqs) == (64, 2)


def launch_with(layout: str, *, precision: str = "bf16") -> Launch:
    job = Job(global_batch_tokens=2**20, seq_len=4096, precision=precision)
    return Launch(
        model=load_model("llama-3-8b"),
        job=job,
        layout=Layout.parse(layout),
        machines=cluster_machines(load_cluster("h100:16")),
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fsdp=16 zero_stage=1", "no ZeRO-1"),
        ("fsdp=8 pp=2", "no pp"),
        ("dp=8 tp=2 sequence_parallel=false", "not with replicas alone"),
        ("dp=8 cp=2", "no plain replicas with context parallelism; a zero_stage of 2, 3 is required"),
        ("fsdp=8 cp=2 cp_variant=ulysses", "cp_variant=ulysses"),
        ("fsdp=16 offload=activations", "activations on the host are checkpoints"),
        ("fsdp=8 tp=2", "sequence parallelism"),
        ("fsdp=16 micro_batch_seqs=3", "does not divide"),
        ("dp=16", "precision bf16 only with ZeRO; set another zero_stage than 0"),
        ("fsdp=16 offload=optimizer", "no offload=optimizer"),
    ],
)
def test_layouts_that_accelerate_lacks_are_refused(layout: str, words: str) -> None:
    assert any(words in reason for reason in refusals(launch_with(layout), TARGET))


def test_written_launch_has_every_size_and_starts_every_node() -> None:
    launch = launch_with("dp=2 fsdp=4 cp=2 cp_variant=zigzag recompute=full", precision="fp8_torchao")
    files = TARGET.write(to_options(TARGET, launch), launch)
    for line in ("num_processes: 16", "num_machines: 2", "parallelism_config_dp_replicate_size: 2", "fsdp_version: 2",
                 "parallelism_config_cp_comm_strategy: alltoall", "mixed_precision: fp8", "fp8_backend: ao"):  # fmt: skip
        assert line in files[CONFIG], line
    assert "--machine_rank" in files[SCRIPT]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "options by name"),
        ("- a\n- b\n", "options by name"),
        ("a: [", "YAML: "),
        ("a: !!python/object/apply:os.system ['true']\n", "YAML: "),
        ("a: &x [1]\nb: *x\n", "distributed_type: found none"),
        ("a: &a [*a]\n", "unconstructable recursive node"),
        ("num_processes: 8\nnum_processes: 16\n", "given twice"),
        ("a: " + "[" * 5000 + "]" * 5000, ""),
        ("a: 1\n" + "# " + "x" * 300_000, "characters"),
        ("num_processes: 8\n", "distributed_type"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", "give this file too"),
        (fsdp2(False, "1 4 1 1"), "product"),
        (fsdp2(False, "0 8 1 1"), "whole number from 1"),
        (fsdp2(False, "x 8 1 1"), "a value of type int"),
        (fsdp2(False, "8 1 1 1"), "nothing to shard over"),
        (fsdp2(False, "1 1 8 1", "  fsdp_offload_params: true\n").replace("  fsdp_offload_params: false\n", ""), "on the host"),
        (fsdp2(False, "1 1 8 1") + "  parallelism_config_cp_comm_strategy: ring\n", "cp_comm_strategy"),
        (fsdp2(False, "1 1 1 1") + "  parallelism_config_sp_size: 8\n", "DeepSpeed's"),
        (BASE.replace("num_processes: 8", "num_processes: 6"), "give the cluster of the launch"),
        (BASE.replace("bf16\n", "fp8\n", 1), "mixed_precision"),
        (BASE + "fsdp_config:\n  fsdp_sharding_strategy: FULL\n", "fsdp_sharding_strategy"),
        (BASE + "fsdp_config:\n  fsdp_version: [2]\n  fsdp_sharding_strategy: {}\n", "fsdp_version: found"),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_invalid_configurations_are_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_files(text)
    assert words.lower() in str(raised.value).lower()
    assert all(len(problem) < 500 and "\n" not in problem for problem in raised.value.problems)


def test_a_section_may_leave_out_the_beginning_of_its_options() -> None:
    text = BASE + "fsdp_config:\n  version: 2\n  reshard_after_forward: false\n"
    parsed = parse_files(text)
    assert parsed.launch.layout.zero_stage == 2
    assert parsed.unknown == ()


def test_known_optimizers_are_read_and_others_refused() -> None:
    with pytest.raises(InputError, match="--optim"):
        parse_files(BASE, f"{START} --optim apollo_adamw")
    assert parse_files(BASE, f"{START} --optim lion_32bit").launch.job.optimizer == "lion"
    for theirs in ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit"):
        assert parse_files(BASE, f"{START} --optim {theirs}").launch.job.optimizer == "adamw_8bit"


def test_reading_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(InputError):
        parse_files(f"distributed_type: FSDP\na: !!python/object/apply:pathlib.Path.touch ['{marker}']\n")
    parse_files(BASE, f"{START} --output_dir $(touch {marker})")
    assert not marker.exists()
