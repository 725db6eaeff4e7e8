"""Megatron-LM: its own published launches, what its parser and its configurations ask of a launch, and files that are broken."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from export.published_megatron import PUBLISHED, Published

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.frameworks.megatron.launch_script import TARGET
from shardwise.interop.launches.export_launch import build_files
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout.choices import stack_recompute_policies
from shardwise.layout.layers_per_stage import layers_by_virtual_stage
from shardwise.layout.layout import Layout
from shardwise.layout.rules.stack_abilities import stack_of
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

NEAR = (
    0.05  # of what was measured: FP8 rows of Llama 3, which are among those that the stack's constants were fitted to
)
PIPED = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 512 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 "
)
EIGHT = Machines(num_devices=8, devices_per_node=8)


def parse_published(published: Published) -> ParsedLaunch:
    script = f"torchrun pretrain_gpt.py {published.options}"
    model = load_model(published.model) if published.model else None
    return parse_launch({"launch.sh": script}, cluster_machines(load_cluster(published.cluster)), model=model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_launches_are_read(name: str) -> None:
    published = PUBLISHED[name]
    parsed = parse_published(published)
    assert parsed.target is TARGET
    assert parsed.unknown == ()
    assert parsed.launch.job.precision == published.precision
    assert replace(parsed.launch.layout, layers_per_stage=None) == Layout.parse(published.layout)
    if published.model is None:
        assert parsed.launch.model.name in name


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_launches_are_priced(name: str) -> None:
    published = PUBLISHED[name]
    launch = parse_published(published).launch
    cluster = with_published_constants(load_cluster(published.cluster), get_stack(TARGET.stack))
    priced = plan_layout(launch.model, cluster, launch.job, launch.layout).estimate
    rate = launch.job.global_batch_tokens / priced.step_time_s / cluster.num_devices
    assert rate > 0
    if published.tokens_per_s_and_gpu:
        assert priced.fits
        assert rate == pytest.approx(published.tokens_per_s_and_gpu, rel=NEAR)


def test_modules_that_are_not_known_are_named() -> None:
    script = f"torchrun pretrain_gpt.py {SIZES} --recompute-granularity selective --recompute-modules mlp gdn_norm_out"
    assert "recompute-modules" in parse_launch({"a.sh": script}, EIGHT, target="megatron").unread
    assert "recompute-modules" not in parse_published(PUBLISHED["deepseek-v3 by Megatron-FSDP"]).unread


def launch_of(text: str, model: str = "llama-3-8b", **job: object) -> Launch:
    layout = Layout.parse(text)
    job_of_launch = Job(**{"global_batch_tokens": 2**22, "seq_len": 4096, **job})  # type: ignore[arg-type]
    return Launch(
        model=load_model(model),
        job=job_of_launch,
        layout=layout,
        machines=Machines(num_devices=layout.num_devices, devices_per_node=8),
    )


def test_megatron_fsdp_comes_with_its_checkpoints() -> None:
    """validate_args: Megatron-FSDP requires the fsdp_dtensor format, and CUDA_DEVICE_MAX_CONNECTIONS other than 1."""
    launch = launch_of("fsdp=8 zero_stage=3")
    options = to_options(TARGET, launch)
    assert options["ckpt-format"] == "fsdp_dtensor"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in build_files(TARGET, options, launch)["launch.sh"]
    launch = launch_of("fsdp=8 zero_stage=1")
    assert "ckpt-format" not in to_options(TARGET, launch)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1\n" in build_files(TARGET, to_options(TARGET, launch), launch)["launch.sh"]


def test_there_is_no_dropout_and_other_options_may_be_given() -> None:
    """Megatron-LM's defaults are 0.1."""
    launch = launch_of("fsdp=8 zero_stage=1")
    text = build_files(TARGET, to_options(TARGET, launch), launch)["launch.sh"]
    assert "  --hidden-dropout 0.0\n  --attention-dropout 0.0\n" in text
    assert text.endswith('"${ARGS[@]}" "$@"\n')


def test_rotary_share_of_a_head_is_written_and_read() -> None:
    """RotaryEmbedding of rotary_pos_embedding.py: dim · rotary_percent; its parser's default is 1.0."""
    for options, part in (("", 1.0), ("--rotary-percent 0.5", 0.5)):
        launch = parse_launch(
            {"launch.sh": f"pretrain_gpt.py {SIZES} --position-embedding-type rope {options}"}, EIGHT
        ).launch
        assert launch.model.numerics.rotary.part == part
        assert to_options(TARGET, launch).get("rotary-percent", 1.0) == part


def test_an_offloaded_optimizer_is_a_precision_aware_one() -> None:
    """validate_args: --optimizer-cpu-offload takes the way of --use-precision-aware-optimizer."""
    options = to_options(TARGET, launch_of("fsdp=8 zero_stage=1 offload=optimizer"))
    assert options["use-precision-aware-optimizer"] is True
    assert "exp-avg-dtype" not in options


@pytest.mark.parametrize(
    ("text", "model", "reason"),
    [
        (
            "fsdp=8 zero_stage=1 recompute=mla_up_proj",
            "llama-3-8b",
            "nothing for recompute=mla_up_proj",
        ),  # TransformerConfig
        ("dp=8 offload=optimizer", "llama-3-8b", "a sharded one"),  # OptimizerConfig
        ("fsdp=4 tp=2 zero_stage=1 sequence_parallel=true", "gpt-oss-20b", "have biases"),  # TransformerConfig
        ("fsdp=4 tp=2 zero_stage=1 sequence_parallel=false", "mixtral-8x7b", "sequence parallelism"),  # validate_args
    ],
)
def test_layouts_that_its_configurations_refuse_are_refused(text: str, model: str, reason: str) -> None:
    assert any(reason in refusal for refusal in refusals(launch_of(text, model), TARGET))


def test_layouts_that_its_configurations_take_are_accepted() -> None:
    assert not refusals(launch_of("fsdp=8 zero_stage=1 recompute=mla_up_proj", "deepseek-v3"), TARGET)
    assert not refusals(launch_of("fsdp=4 tp=2 etp=1 zero_stage=1 sequence_parallel=true", "gpt-oss-20b"), TARGET)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ("--fp16", "fp16_fp32_update"),
        ("--fp16 --loss-scale 8192", "fp16_fp32_update"),
        ("--bf16", "bf16_fp32_main_gradients"),
        ("--bf16 --use-precision-aware-optimizer", "bf16_fp32_main_gradients"),
        ("--bf16 --fp8-format hybrid", "fp8_delayed"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("--bf16 --fp4-format e2m1", "nvfp4"),
        ("", "fp32"),
    ],
)
def test_formats_that_are_left_out_are_the_usual_ones(options: str, precision: str) -> None:
    script = f"torchrun pretrain_gpt.py {SIZES.replace('--bf16', '')} {options}"
    assert parse_launch({"a.sh": script}, EIGHT, target="megatron").launch.job.precision == precision


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 9", (7, 8, 8, 9)),
        ("--decoder-last-pipeline-num-layers 5", (9, 9, 9, 5)),
        ("--num-layers-per-virtual-pipeline-stage 4", (4,) * 8),
        ("--pipeline-model-parallel-layout Et*7|t*8|t*8|t*9L", (7, 8, 8, 9)),
        ("", (8, 8, 8, 8)),
    ],
)
def test_layers_are_dealt_out_as_the_options_say(options: str, stages: tuple[int, ...]) -> None:
    script = f"torchrun pretrain_gpt.py {SIZES} --num-layers 32 --pipeline-model-parallel-size 4 {shlex.join(options.split())}"
    launch = parse_launch({"a.sh": script}, EIGHT, target="megatron").launch
    assert layers_by_virtual_stage(launch.model, launch.layout) == stages


BROKEN = {
    "no script": "",
    "a picture": "\x00\x01\x02 PNG",
    "no option": "python pretrain_gpt.py 1 2 3",
    "a quote that stays open": "torchrun pretrain_gpt.py --num-layers '4",
    "no sizes": "torchrun pretrain_gpt.py --bf16 --num-layers 4",
    "a word for a number": f"torchrun pretrain_gpt.py {SIZES} --num-layers many",
    "a degree of zero": f"torchrun pretrain_gpt.py {SIZES} --tensor-model-parallel-size 0",
    "a degree that does not divide": f"torchrun pretrain_gpt.py {SIZES} --tensor-model-parallel-size 3",
    "stages that do not divide": f"torchrun pretrain_gpt.py {SIZES.replace('4', '5', 1)} --pipeline-model-parallel-size 4",
    "a layout that is none": f"torchrun pretrain_gpt.py {SIZES} {PIPED} x",
    "a layout without end": f"torchrun pretrain_gpt.py {SIZES} {PIPED} 'E(((t)*99999)*99999)*99999L'",
    "layers of experts by a program": f"torchrun pretrain_gpt.py {SIZES} --num-experts 4 --moe-layer-freq '__import__(\"os\")'",
    "positions that nobody knows": f"torchrun pretrain_gpt.py {SIZES} --position-embedding-type spiral",
    "an optimizer that nobody knows": f"torchrun pretrain_gpt.py {SIZES} --optimizer magic",
    "variables that grow": "A=xxxx\n" + "A=$A$A\n" * 40 + f"torchrun pretrain_gpt.py {SIZES} $A",
    "a sharding that nobody knows": f"torchrun pretrain_gpt.py {SIZES} --use-megatron-fsdp --data-parallel-sharding-strategy all",
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_broken_launches_are_refused_in_clear_words(text: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_launch({"launch.sh": text}, EIGHT, target="megatron")
    assert all(problem and "\n" not in problem for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ("", "none"),
        ("--recompute-activations", "core_attn"),
        ("--recompute-granularity selective", "core_attn"),
        ("--recompute-granularity selective --recompute-modules mlp core_attn", "core_attn+mlp"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full"),
    ],
)
def test_recomputed_modules_are_read_and_written(options: str, recompute: str) -> None:
    """TransformerConfig: recompute_modules are ["core_attn"] where they are not said."""
    parsed_launch = parse_launch(
        {"a.sh": f"torchrun pretrain_gpt.py {SIZES} {options}"}, EIGHT, target="megatron"
    ).launch
    assert parsed_launch.layout.recompute == recompute
    modules = to_options(TARGET, parsed_launch).get("recompute-modules", [])
    assert "+".join(sorted(modules)) == (recompute if "c" in recompute or "+" in recompute else "")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", "fsdp=16 tp=8 pp=4 zero_stage=1 recompute={}"),
        ("mixtral-8x7b", "fsdp=64 ep=8 zero_stage=1 recompute={}"),
    ],
)
def test_every_searched_recompute_policy_is_written_as_priced(model: str, layout: str) -> None:
    cluster = load_cluster("h100:512" if "70b" in model else "h100:64", stack="megatron")
    policies = stack_recompute_policies(
        stack_of(cluster), load_model(model), Job(global_batch_tokens=2**22, seq_len=4096)
    )
    assert len(policies) == 3
    for policy in policies:
        launch = launch_of(layout.format(policy), model)
        assert not refusals(launch, TARGET)
        files = build_files(TARGET, to_options(TARGET, launch), launch)
        assert parse_launch(files, launch.machines, target="megatron").launch.layout.recompute == policy
    assert any(
        "recompute=selective" in refusal for refusal in refusals(launch_of(layout.format("selective"), model), TARGET)
    )


def test_a_vocabulary_that_is_guessed_is_noted() -> None:
    """Megatron-LM's examples leave --vocab-size to the tokenizer."""
    options = PUBLISHED["llama-3-8b"].options.replace("--vocab-size 128256 ", "")
    script, machines = {"launch.sh": f"torchrun pretrain_gpt.py {options}"}, cluster_machines(load_cluster("h100:8"))
    (note,) = (text for text in parse_launch(script, machines).notes if "vocabulary" in text)
    assert note.startswith("the launch says no vocabulary, which its tokenizer decides: taken to be llama-3-8b")
    assert "128,256 tokens" in note
    assert not any("vocabulary" in text for text in parse_published(PUBLISHED["llama-3-8b"]).notes)
    assert not any(
        "vocabulary" in text for text in parse_launch(script, machines, model=load_model("llama-3-8b")).notes
    )
