"""torchtitan up to 0.2.2: TOML files, those that it published with what its authors measured, and those that are none."""

from __future__ import annotations

import pytest
from export.test_torchtitan import launch, write_launch

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.text_formats.config_trees import format_toml_options, parse_toml_options
from shardwise.layout.layout import Layout
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.values.errors import InputError

TITAN = get_target("torchtitan-toml")
WITHIN = 0.25  # of what was measured, on H100 with 96 GB of slower memory and 500 W


def file_of(
    model: str,
    *,
    flavor: str,
    parallelism: str = "",
    training: str = "",
    recompute: str = 'mode = "none"',
    more: str = "",
) -> str:
    return f"""
[model]
name = "{model}"
flavor = "{flavor}"
{more}
[training]
{training}
[parallelism]
{parallelism}
[activation_checkpoint]
{recompute}
[compile]
enable = true
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""


def parse_text(text: str, devices: int = 64, **more: str) -> ParsedLaunch:
    return parse_launch({"run.toml": text, **more}, Machines(num_devices=devices, devices_per_node=8))


OP = 'mode = "selective"\nselective_ac_option = "op"'
FULL = 'mode = "full"'
FLOAT8 = 'converters = ["float8"]'
TP8 = "tensor_parallel_degree = 8"
ASYNC = f"{TP8}\nenable_async_tensor_parallel = true"


# Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 5) and asyncTP_llama3_h100_2025-06_torchtitan.md:
# tokens/s/GPU as their authors measured them with these settings.
@pytest.mark.parametrize(
    ("devices", "flavor", "seq_len", "local", "parallelism", "recompute", "more", "layout", "measured"),
    [
        (8, "8B", 8192, 2, "", OP, "", "fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=alternate", 6667),
        (128, "8B", 8192, 2, "", OP, "", "fsdp=128 zero_stage=3 micro_batch_seqs=2 recompute=alternate", 6514),
        (8, "8B", 8192, 2, "", OP, FLOAT8, "fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=alternate", 8532),
        (8, "8B", 131072, 1, "context_parallel_degree = 4", FULL, FLOAT8,
         "fsdp=2 cp=4 zero_stage=3 cp_variant=all_gather micro_batch_seqs=1 recompute=full", 1071),
        (256, "70B", 8192, 16, TP8, FULL, "",
         "fsdp=32 tp=8 zero_stage=3 sequence_parallel=true micro_batch_seqs=16 recompute=full", 597.3),
        (256, "70B", 8192, 16, ASYNC, FULL, "",
         "fsdp=32 tp=8 zero_stage=3 sequence_parallel=true async_tp=true micro_batch_seqs=16 recompute=full", 652.4),
        (64, "8B", 8192, 12, TP8, OP, "",
         "fsdp=8 tp=8 zero_stage=3 sequence_parallel=true micro_batch_seqs=12 recompute=alternate", 4378),
        (512, "405B", 8192, 32, f"{ASYNC}\npipeline_parallel_degree = 8", FULL, FLOAT8,
         "fsdp=8 tp=8 pp=8 zero_stage=2 sequence_parallel=true async_tp=true micro_batch_seqs=1 recompute=full", 100),
    ],
)  # fmt: skip
def test_published_runs_are_read_and_priced(
    devices: int,
    flavor: str,
    seq_len: int,
    local: int,
    parallelism: str,
    recompute: str,
    more: str,
    layout: str,
    measured: float,
) -> None:
    cluster = load_cluster(f"h100:{devices}")
    training = f"seq_len = {seq_len}\nlocal_batch_size = {local}"
    text = file_of("llama3", flavor=flavor, parallelism=parallelism, training=training, recompute=recompute, more=more)
    parsed = parse_launch({"run.toml": text}, cluster_machines(cluster))
    parsed_launch = parsed.launch
    assert parsed.target.name == "torchtitan-toml"
    assert str(parsed_launch.layout) == str(Layout.parse(layout))
    assert parsed_launch.job.precision == ("fp8_torchao" if more else "bf16_fp32_reduction")
    step = estimate(
        Problem(parsed_launch.model, with_published_constants(cluster, get_stack("torchtitan")), parsed_launch.job),
        parsed_launch.layout,
    ).step_time_s
    assert parsed_launch.job.global_batch_tokens / step / devices == pytest.approx(measured, rel=WITHIN)


def test_flags_of_the_command_override_the_file() -> None:
    text = file_of("llama3", flavor="8B", training="seq_len = 4096\nlocal_batch_size = 1")
    script = (
        'CONFIG_FILE="./run.toml" ./run_train.sh --training.local_batch_size 4 --parallelism.tensor-parallel-degree=2'
    )
    parsed = parse_text(text, **{"start.sh": script})
    assert (parsed.launch.layout.tp, parsed.launch.layout.fsdp, parsed.launch.layout.micro_batch_seqs) == (2, 32, 4)


def test_every_other_layer_runs_again_by_default() -> None:
    layout = parse_text(file_of("llama3", flavor="8B", recompute="")).launch.layout
    assert (layout.recompute, layout.recompute_layers) == ("full", 16)
    text = write_launch(launch("fsdp=64 recompute=full recompute_layers=8"), TITAN)["run.toml"]
    assert 'mode = "selective"\nselective_ac_option = "4"' in text


def test_rings_and_expert_degrees_are_written() -> None:
    text = write_launch(launch("fsdp=8 cp=8 cp_variant=zigzag"), TITAN)["run.toml"]
    assert 'context_parallel_rotate_method = "alltoall"' in text
    split = write_launch(launch("fsdp=16 tp=4 ep=8", model="qwen3-30b-a3b"), TITAN)["run.toml"]
    assert "expert_tensor_parallel_degree = 4" in split


@pytest.mark.parametrize(
    ("refused_launch", "reason"),
    [
        (launch("fsdp=32 pp=2", model="qwen3-30b-a3b"), "has no pipeline of qwen3-30b-a3b"),
        (launch("fsdp=32 cp=2", model="gpt-oss-20b"), "has no context parallelism of gpt-oss-20b"),
        (launch("dp=32 tp=2 zero_stage=0"), "under tensor and pipeline parallelism with FSDP alone"),
        (launch("fsdp=64", model="deepseek-v3"), "no multi-token prediction"),
        (launch("fsdp=32 tp=2 sequence_parallel=false"), "layout.sequence_parallel is false"),
        (launch("fsdp=64 recompute=full recompute_layers=20"), "layout.recompute is full"),
        (launch("fsdp=64 ep=8", model="qwen3-30b-a3b", precision="fp8_torchao"), "job.precision is fp8_torchao"),
        (launch("fsdp=64", model="mixtral-8x7b"), "has not the sizes of any model"),
    ],
)
def test_layouts_that_torchtitan_lacks_are_refused(refused_launch: Launch, reason: str) -> None:
    assert any(reason in text for text in refusals(refused_launch, TITAN)), refusals(refused_launch, TITAN)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[model", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        (file_of("llama9", flavor="8B"), "did you mean 'llama3'"),
        (file_of("llama3", flavor="9B"), "model.flavor"),
        (file_of("llama3", flavor="8B", more='converters = ["quantize.linear.mx"]'), "which no recipe here is"),
        (file_of("qwen3", flavor="30B-A3B", more=FLOAT8), "where there are experts"),
        (file_of("llama3", flavor="8B", recompute='mode = "selective"\nselective_ac_option = "x"'), "op or a number"),
        (file_of("llama3", flavor="8B", recompute='mode = "memory_budget"'), "none, full, or selective"),
        (file_of("llama3", flavor="8B", parallelism='tensor_parallel_degree = "8"'), "a value of type int"),
        (file_of("llama3", flavor="8B", parallelism="expert_parallel_degree = 2\ntensor_parallel_degree = 4\n"
                 "expert_tensor_parallel_degree = 3"), "1, or tensor_parallel_degree = 4"),
        (file_of("llama3", flavor="8B", parallelism='context_parallel_degree = 2\ncontext_parallel_rotate_method = "x"'),
         "one of allgather, alltoall"),
        (file_of("llama3", flavor="8B", parallelism='pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["layers.0"]]'),
         "layers.0 to layers.31"),
        (file_of("llama3", flavor="8B", parallelism="pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [1]"),
         "a list of lists"),
        (file_of("llama3", flavor="8B", parallelism="pipeline_parallel_degree = 64"), "at least one on each"),
        (file_of("llama3", flavor="8B", training="local_batch_size = 0"), "a multiple of"),
        ('[optimizer]\nname = "Adam"\n', "AdamW"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_launch({"run.toml": text}, Machines(num_devices=64, devices_per_node=8), target="torchtitan-toml")
    assert reason in str(raised.value)


def test_options_that_the_release_lacks_are_named() -> None:
    assert parse_text(file_of("llama3", flavor="8B") + "\n[training2]\nx = 1\n").unknown == ("training2.x",)


def test_toml_is_read_as_it_is_written() -> None:
    options = {"a.b": True, "a.c": 'a "text"', "d.e.f": [["x"], ["y"]], "d.e.g": 1e-5}
    assert parse_toml_options(format_toml_options(options), "x") == options


@pytest.mark.parametrize(("seq_len", "factor"), [(4096, 1.0), (8192, 40.0)])
def test_deepseek_scales_angles_for_long_sequences_alone(seq_len: int, factor: float) -> None:
    """deepseek_v3/model/model.py of 0.2.2, precompute_freqs_cis: beyond original_seq_len."""
    text = f'[model]\nname = "deepseek_v3"\nflavor = "671B"\n[training]\nseq_len = {seq_len}\nlocal_batch_size = 1\n'
    launch = parse_launch(
        {"a.toml": text}, Machines(num_devices=8, devices_per_node=8), target="torchtitan-toml"
    ).launch
    assert launch.model.numerics.rotary.factor == factor
    assert (launch.model.numerics.attention_scale is None) is (factor == 1.0)
