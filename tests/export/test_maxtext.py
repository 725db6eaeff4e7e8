"""MaxText: published launches, what its own configuration asks, slices, models by name, and files that are no launch of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.interop.frameworks.maxtext import launch_config
from shardwise.interop.frameworks.maxtext.model_options import expand_name, known_models, shorten_to_name
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.export_launch import build_files, export
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines, launch_from_fields
from shardwise.interop.launches.target import OptionReader
from shardwise.interop.launches.translate_launch import from_options, refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.text_formats.config_trees import parse_yaml
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.numerics import Rotary
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

COMMAND = (
    'python3 -m maxtext.trainers.pre_train.train "${{HOME}}"/base.yml steps=15 enable_checkpointing=false \\\n  {}\n'
)
# Launches of MaxText's repository at e591f30, src/maxtext/configs, and what its README.md measured, where the table of
# published runs has it: options, cluster, its row there.
PUBLISHED = {
    "tpu/v5p/128b.sh": (
        "per_device_batch_size=1 remat_policy=minimal global_parameter_scale=128 ici_fsdp_parallelism=-1 "
        "ici_tensor_parallelism=8 max_target_length=2048", "tpu-v5p:4x4x8", "maxtext-tpu-v5p-005"),
    "tpu/v5p/32b.sh": (
        "per_device_batch_size=6 remat_policy=minimal global_parameter_scale=32 ici_fsdp_parallelism=-1 "
        "ici_tensor_parallelism=4 max_target_length=2048", "tpu-v5p:4x4x4", "maxtext-tpu-v5p-013"),
    "tpu/v5e/16b.sh": (
        "per_device_batch_size=6 remat_policy=full global_parameter_scale=16 max_target_length=2048", "tpu-v5e:16x16",
        "maxtext-tpu-v5e-007"),
    "tpu/v6e/llama2_7b_4096.sh": (
        "model_name=llama2-7b per_device_batch_size=12 remat_policy=full ici_fsdp_parallelism=-1 max_target_length=4096 "
        "attention='flash'", "tpu-v6e:16x16", None),
    "tpu/v5p/gpt3_175b/gpt3_175b_base.sh": (
        'model_name=gpt3-175b per_device_batch_size="${PER:-4}" ici_data_parallelism=1 ici_fsdp_parallelism=64 '
        "ici_tensor_parallelism=8 remat_policy=full quantization=int8", "tpu-v5p:8x8x8", None),
}  # fmt: skip
GOOD = """\
base_config: base.yml
model_name: llama3-8b
ici_fsdp_parallelism: 8
ici_tensor_parallelism: 8
max_target_length: 8192
per_device_batch_size: 0.25
remat_policy: full
"""
TPUS = cluster_machines(sw.load_cluster("tpu-v5p:4x4x4"))


def parse_text(text: str, machines: Machines = TPUS, target: str = "maxtext") -> ParsedLaunch:
    return parse_launch({"config.yml": text}, machines, target=target)


def launch(text: str, cluster: str, model: str = "llama-3-8b", micro_batches: int = 4, **job: object) -> Launch:
    layout, where = sw.Layout.parse(text), sw.load_cluster(cluster)
    tokens = layout.num_replicas * layout.micro_batch_seqs * micro_batches * 8192
    every: dict[str, object] = {"global_batch_tokens": tokens, "seq_len": 8192, **job}
    return Launch(
        model=sw.load_model(model),
        job=sw.Job(**every),
        layout=layout,
        machines=cluster_machines(where),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_launch_is_read_and_priced_as_it_was_measured(name: str) -> None:
    options, where, row = PUBLISHED[name]
    cluster = sw.load_cluster(where, stack="maxtext")
    parsed_launch = parse_launch({name: COMMAND.format(options)}, cluster_machines(cluster)).launch
    assert parsed_launch.layout.num_devices == cluster.num_devices
    estimate = plan_layout(parsed_launch.model, cluster, parsed_launch.job, parsed_launch.layout).estimate
    assert estimate.step_time_s > 0
    if row:
        published = next(run_row for run_row in published_rows() if run_row.id == row)
        assert parsed_launch.job.num_seqs == int(published.cell("global_batch"))
        assert estimate.step_time_s == pytest.approx(published.step_time_s, rel=0.25)


def test_the_gpu_model_of_the_repository_is_read() -> None:
    """configs/gpu/models/llama2_7b.yml as gpu/a3/llama_2_7b/16vm.sh starts it: 16 nodes of 8."""
    text = (
        "base_config: base.yml\nhardware: gpu\nper_device_batch_size: 4\nmax_target_length: 4096\nmodel_name: llama2-7b\n"
        "attention: cudnn_flash_te\nremat_policy: minimal_with_context\ndcn_data_parallelism: 16\nici_fsdp_parallelism: 8\n"
    )
    parsed = parse_launch({"llama2_7b.yml": text}, cluster_machines(sw.load_cluster("h100:128")))
    assert parsed.target.name == "maxtext-gpu"
    assert str(parsed.launch.layout) == "dp=16 fsdp=8 zero_stage=3 micro_batch_seqs=4 recompute=selective"
    assert parsed.launch.model.name == "llama-2-7b"


@pytest.mark.parametrize(
    "name", ["llama2-7b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen2.5-7b"]
)
def test_a_model_of_the_release_is_written_by_its_name(name: str) -> None:
    options = expand_name({"model_name": name, "steps": 5})
    expanded = {key: value for key, value in options.items() if key != "model_name"}
    assert shorten_to_name(expanded) == {"model_name": name, "steps": 5}
    assert "model_name" not in shorten_to_name({**expanded, "vocab_size": 7})


def test_every_model_of_the_release_is_read_or_refused_in_a_line() -> None:
    refused: dict[str, tuple[str, ...]] = {}
    for name in known_models():
        try:
            parse_text(GOOD.replace("llama3-8b", name))
        except InputError as error:
            refused[name] = tuple(error.problems)
    assert all(len(problem) < 500 for problems in refused.values() for problem in problems)
    assert len(known_models()) - len(refused) >= 40
    assert "use_indexer" in refused["deepseek3.2-671b"][0]
    assert "partial_rotary_factor" in refused["qwen3-next-80b-a3b"][0]
    assert "olmo3-7b" not in refused


# Names, the sizes that MaxText's configs/models/gemma3-*.yml set, and the scale of scores (models/gemma3.py,
# get_query_pre_attn_scalar), as MaxText e591f30 has them.
GEMMA_3 = {
    "gemma3-4b": (34, 2560, None),
    "gemma3-12b": (48, 3840, None),
    "gemma3-27b": (62, 5376, (5376 // 32) ** -0.5),
}


@pytest.mark.parametrize("name", GEMMA_3)
def test_gemma_3_is_read_by_its_name(name: str) -> None:
    model = parse_text(GOOD.replace("llama3-8b", name)).launch.model
    layers, width, scale = GEMMA_3[name]
    assert (model.num_layers, model.d_model, model.numerics.attention_scale) == (layers, width, scale)
    assert (model.sliding_window, model.global_every, model.qk_norm, model.post_norms) == (1024, 6, True, True)
    assert model.numerics.local_rotary == Rotary(base=10_000.0)
    assert (model.numerics.rotary.base, model.numerics.rotary.factor) == (1e6, 8.0)


@pytest.mark.parametrize("target", ["maxtext", "maxtext-gpu"])
@pytest.mark.parametrize("name", ["gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "gemma-3-27b"])
def test_gemma_3_of_other_sizes_overrides_the_named_model_on_the_command_line(target: str, name: str) -> None:
    """MaxText's parser ignores what a file says beside the name of a model that sets it."""
    cluster = "tpu-v5p:4x4x4" if target == "maxtext" else "h100:64"
    written = launch("fsdp=64 zero_stage=3 recompute=full", cluster, name)
    files = build_files(get_target(target), to_options(get_target(target), written), written)
    config = parse_yaml(files["config.yml"], "config.yml")
    assert config["model_name"] == ("gemma3-27b" if name == "gemma-3-27b" else "gemma3-4b")
    assert "vocab_size" not in config
    assert "override_model_config=true" in files["launch.sh"]
    read = parse_launch(files, written.machines, target=target).launch
    fields = {f"model.{field}" for field in ("name", "nominal_num_params", "source", "max_positions")}
    assert {field for field, value in written.fields().items() if read.fields()[field] != value} <= {
        *fields,
        "job.loss",
    }


def test_gemma_3_has_no_pipeline() -> None:
    piped = launch("pp=2 fsdp=32 zero_stage=3 recompute=full", "tpu-v5p:4x4x4", "gemma-3-12b", micro_batches=8)
    assert any("one kind of layer, and gemma3 has two" in reason for reason in refusals(piped, launch_config.TPU))


def test_a_command_overrides_a_named_model_only_when_it_says_so() -> None:
    """As MaxText's parser has it: a file's sizes beside a name are ignored, those of a command are refused or taken."""
    beside = parse_text(GOOD + "base_emb_dim: 1024\noverride_model_config: true\n").launch.model
    assert beside.d_model == 4096
    command = "model_name=llama3-8b per_device_batch_size=1 remat_policy=full base_emb_dim=1024 {}"
    with pytest.raises(InputError, match="base_emb_dim: the model llama3-8b sets it too, to another value"):
        parse_launch({"run.sh": COMMAND.format(command.format(""))}, TPUS, target="maxtext")
    script = COMMAND.format(command.format("override_model_config=true"))
    assert parse_launch({"run.sh": script}, TPUS, target="maxtext").launch.model.d_model == 1024


def test_axes_span_slices_from_the_outermost() -> None:
    two = launch("dp=2 fsdp=16 tp=4 zero_stage=3 recompute=full async_tp=true", "tpu-v5e:8x8*2")
    options = to_options(launch_config.TPU, two)
    assert {name: options[name] for name in options if "parallelism" in name} == {
        "ici_fsdp_parallelism": 16, "ici_tensor_parallelism": 4, "dcn_data_parallelism": 2,
    }  # fmt: skip
    script = build_files(launch_config.TPU, options, two)["launch.sh"]
    assert "--tpu-type v5litepod-64 --num-slices 2" in script
    assert "launch.slurm" not in build_files(launch_config.TPU, options, two)
    nodes = launch("fsdp=16 tp=8 zero_stage=3 recompute=full async_tp=true", "h100:128")
    assert {name: value for name, value in to_options(launch_config.GPU, nodes).items() if "parallelism" in name} == {
        "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": 16,
    }  # fmt: skip
    files = build_files(launch_config.GPU, to_options(launch_config.GPU, nodes), nodes)
    assert "srun bash launch.sh" in files["launch.slurm"]
    assert "NNODES=16" in files["launch.sh"]


def test_inferred_degrees_are_filled_in() -> None:
    inferred = parse_text(GOOD.replace("ici_fsdp_parallelism: 8\n", "").replace("0.25", "1"))
    assert inferred.launch.layout == parse_text(GOOD.replace("0.25", "1")).launch.layout
    two = cluster_machines(sw.load_cluster("tpu-v5e:8x8*2"))
    assert parse_text(GOOD.replace("ici_fsdp_parallelism: 8\n", ""), two).launch.layout.dp == 2


def test_a_plan_is_a_workload_of_xpk() -> None:
    cluster = sw.load_cluster("tpu-v5p:4x4x4", stack="maxtext")
    layout = sw.Layout.parse("fsdp=16 tp=4 zero_stage=3 recompute=full async_tp=true micro_batch_seqs=2")
    plan = plan_layout(sw.load_model("llama-3-70b"), cluster, sw.Job(global_batch_tokens=2**20, seq_len=8192), layout)
    exported = export(plan, launch_config.TPU)
    options = parse_yaml(exported.files["config.yml"], "config.yml")
    assert options["model_name"] == "llama3-70b"
    assert (options["per_device_batch_size"], options["gradient_accumulation_steps"]) == (0.5, 4)
    assert "v5p-128 --num-slices 1" in exported.files["launch.sh"]
    assert any("yours" in text or "your data" in text for text in exported.warnings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp=64 zero_stage=3 recompute=none", "no recompute=none"),
        ("fsdp=16 tp=4 zero_stage=3 recompute=full sequence_parallel=false", "layout.sequence_parallel is false"),
        ("dp=2 fsdp=32 zero_stage=1 recompute=full", "ZeRO-1 shards over all replicas"),
        (
            "fsdp=16 cp=4 zero_stage=1 recompute=full",
            "no ZeRO-1 with context parallelism; a zero_stage of 3 is required",
        ),
        ("fsdp=64 zero_stage=3 recompute=full recompute_layers=3", "recompute_layers"),
        ("fsdp=1 dp=8 pp=8 recompute=full schedule=afab micro_batch_seqs=2", "not a multiple of its 8 stages"),
        ("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=ring", "cp_variant=ring"),
        ("fsdp=64 zero_stage=2 recompute=full", "no ZeRO-2"),
        ("fsdp=64 zero_stage=3 recompute=alternate", "recompute=alternate"),
    ],
)
def test_layouts_that_maxtext_lacks_are_refused(text: str, words: str) -> None:
    reasons = refusals(launch(text, "tpu-v5p:4x4x4"), launch_config.TPU)
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("text", "model", "words"),
    [
        ("fsdp=8 tp=8 ep=8 etp=1 zero_stage=3 recompute=full async_tp=true", "mixtral-8x7b", "leave etp out"),
        ("dp=64 recompute=full schedule=afab pp=1", "olmo-2-7b", "olmo3, has windows on 3 layers of 4"),
        ("fsdp=16 pp=4 zero_stage=3 recompute=full schedule=afab", "deepseek-v3", "outside of the pipeline"),
        (
            "dp=32 pp=2 recompute=full schedule=afab",
            "gemma-2-9b",
            "the 21 decoder layers of gemma2 do not divide evenly over 2",
        ),
        ("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=zigzag", "gpt-oss-20b", "neither in rings"),
        ("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=zigzag", "gemma-2-9b", "does not go in rings"),
        ("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=zigzag", "deepseek-v3", "multi-token prediction"),
        ("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=ulysses", "gemma-2-9b", "global attention alone"),
    ],
)
def test_models_that_maxtext_lacks_are_refused(text: str, model: str, words: str) -> None:
    reasons = refusals(launch(text, "tpu-v5p:4x4x4", model), launch_config.TPU)
    assert any(words in reason for reason in reasons), reasons


def test_stages_of_a_model_whose_layers_come_in_pairs() -> None:
    """A decoder layer of gemma2 is one with a window and one without: 42 layers are 21, 7 for each of 3 stages."""
    piped = launch("dp=8 pp=3 recompute=full schedule=afab", "h100:24", "gemma-2-9b", micro_batches=3)
    options = to_options(launch_config.GPU, piped)
    assert (options["base_num_decoder_layers"], options["num_layers_per_pipeline_stage"]) == (21, 7)
    assert parse_launch(build_files(launch_config.GPU, options, piped), piped.machines).launch.layout == replace(
        piped.layout, layers_per_stage=(14, 14, 14)
    )


@pytest.mark.parametrize(
    "option", ["num_layers_per_pipeline_stage", "num_pipeline_repeats", "pipeline_parallel_layers"]
)
def test_sizes_of_stages_that_contradict_one_another_are_refused(option: str) -> None:
    piped = launch("fsdp=16 pp=4 num_virtual_stages=2 zero_stage=3 recompute=full schedule=looped_bfs", "tpu-v5p:4x4x4")
    options = {**to_options(launch_config.TPU, piped), "pipeline_parallel_layers": 32}

    def read(value: int) -> Layout:
        return parse_launch(
            build_files(launch_config.TPU, {**options, option: value}, piped), piped.machines
        ).launch.layout

    assert read(options[option]) == piped.layout
    for value in {1, 2, 3, 4, 8, 16, 31, 33} - {options[option]}:
        with pytest.raises(InputError, match="32 layers in all are required"):
            read(value)


def test_rings_and_gpu_layouts_that_maxtext_lacks_are_refused() -> None:
    ring = launch(
        "fsdp=2 cp=32 zero_stage=3 recompute=full cp_variant=zigzag",
        "tpu-v5p:4x4x4",
        seq_len=4096 + 512,
        global_batch_tokens=36 * 512,
    )
    assert any("cp² = 1024" in reason for reason in refusals(ring, launch_config.TPU))
    heads = launch("fsdp=16 cp=4 zero_stage=3 recompute=full cp_variant=ulysses", "h100:64")
    assert any("no cp_variant=ulysses" in reason for reason in refusals(heads, launch_config.GPU))
    eight = launch("fsdp=64 zero_stage=3 recompute=full", "h100:64", precision="fp8_delayed")
    assert any("does not go with gradient accumulation" in reason for reason in refusals(eight, launch_config.GPU))
    assert refusals(replace(eight, job=replace(eight.job, global_batch_tokens=64 * 8192)), launch_config.GPU) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "options by name"),
        ("base_config: [base.yml", "is not YAML: line"),
        ("a: !!python/name:os.system", "YAML: "),
        (GOOD + "remat_policy: full\n", "remat_policy is given twice"),
        (GOOD.replace("full", "foo"), "remat_policy: found 'foo'"),
        (GOOD.replace("full", "save_out_proj"), "remat_policy: found 'save_out_proj'"),
        (GOOD.replace("llama3-8b", "llama3-9b"), "model_name: .*llama3-9b"),
        (GOOD.replace("ici_fsdp_parallelism: 8", "ici_fsdp_parallelism: 7"), "do not divide|degrees take|whole number"),
        (GOOD.replace("ici_fsdp_parallelism: 8", "ici_fsdp_parallelism: 0"), "degrees below 1|ici"),
        (GOOD.replace("ici_fsdp_parallelism: 8", "ici_fsdp_parallelism: many"), "a value of type int is required"),
        (GOOD.replace("ici_tensor", "ici_fsdp_transpose"), "ici_fsdp_transpose_parallelism: found 8; 1"),
        (GOOD.replace("0.25", "0.3"), "per_device_batch_size: found 0.3, 19.2 sequences"),
        (GOOD + "quantization: intmp\n", "no precision here"),
        (GOOD + "hardware: gpu\n", "hardware: found gpu; tpu"),
        (GOOD + "opt_type: muon\n", "opt_type"),
        (GOOD + "use_indexer: true\n", "use_indexer: found True; False"),
        (GOOD + "shard_optimizer_over_data: true\ndcn_data_parallelism: 1\nici_data_parallelism: 2\n", "ici"),
        (GOOD + "context_parallel_strategy: usp\nici_context_parallelism: 2\n", "ici|context_parallel_strategy"),
        (GOOD.replace("model_name: llama3-8b", "decoder_block: llama4"), "decoder_block: found 'llama4'"),
        (GOOD.replace("model_name: llama3-8b", "attention_type: mla"), "attention_type: found 'mla' with llama2"),
        (GOOD.replace("model_name: llama3-8b", "mlp_activations: [tanh]"), "mlp_activations: found"),
        (GOOD.replace("model_name: llama3-8b", "global_parameter_scale: 3"), "a power of two is required"),
    ],
)
def test_invalid_configurations_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        parse_text(text)
    assert all(len(problem) < 900 for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo maxtext.trainers.pre_train\n", "no command starts"),
        ('python3 -m maxtext.trainers.pre_train.train base.yml "steps=1\n', "not a shell command"),
        ("python3 -m maxtext.trainers.pre_train.train base.yml steps=[1\n", "YAML: "),
    ],
)
def test_a_script_without_a_command_is_refused(script: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_launch({"run.sh": script}, TPUS, target="maxtext")


def test_adam_as_pax_has_it_is_planned_as_adamw() -> None:
    assert parse_text(GOOD + "opt_type: adam_pax\n").launch == parse_text(GOOD).launch


def test_options_that_the_release_lacks_are_named() -> None:
    assert parse_text(GOOD.replace("max_target_length", "max_target_len")).unknown == ("max_target_len",)
    assert "gcs_metrics" in parse_text(GOOD + "gcs_metrics: true\n").unread


@pytest.mark.parametrize(
    ("tiles", "loss"), [("", "streamed"), ("num_vocab_tiling: 1\n", "streamed"), ("num_vocab_tiling: 8\n", "chunked")]
)
def test_tiles_of_the_vocabulary_are_a_chunked_loss(tiles: str, loss: str) -> None:
    assert parse_text(GOOD + tiles).launch.job.loss == loss


def test_a_chunked_loss_is_written_and_frees_logits() -> None:
    """Gemma's vocabulary: XLA's loss over all logits takes four bytes for each."""
    model, cluster = sw.load_model("gemma-2-9b"), sw.load_cluster("tpu-v6e:8x8", stack="maxtext")
    layout = sw.Layout.parse("fsdp=64 zero_stage=3 recompute=full")
    logits = {}
    for loss in ("streamed", "chunked"):
        job = sw.Job(global_batch_tokens=64 * 8192, seq_len=8192, loss=loss)
        plan = plan_layout(model, cluster, job, layout)
        logits[loss] = plan.estimate.memory["logits"]
        text = export(plan, launch_config.TPU).files["config.yml"]
        assert ("num_vocab_tiling: 4" in text) == (loss == "chunked")
    assert logits["streamed"] == 4 * 8192 * model.vocab_size
    assert logits["chunked"] < logits["streamed"] / 3


TPU = launch_config.TPU


def launch_of(name: str) -> Launch:
    """A launch of a model of the catalogue on one chip."""
    job = Job(global_batch_tokens=8 * 1024, seq_len=1024, precision="bf16")
    machines = Machines(num_devices=1, devices_per_node=1, chip="tpu-v5p")
    return Launch(model=load_model(name), job=job, layout=Layout(recompute="full"), machines=machines)


def write_and_read(name: str) -> tuple[Architecture, dict[str, object]]:
    """A model of the catalogue as its options say it, and the options that are written."""
    launch = launch_of(name)
    options = to_options(TPU, launch)
    read = launch_from_fields(from_options(TPU, OptionReader(options, launch.machines)), launch.machines)
    return read.model, dict(shorten_to_name(options))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama-3.1-8b", {"model_name": "llama3.1-8b"}), ("llama-3-8b", {"model_name": "llama3-8b"}),
     ("llama-3.3-70b", {"model_name": "llama3.1-70b"}), ("gpt-oss-20b", {"model_name": "gpt-oss-20b"}),
     ("deepseek-v3", {"model_name": "deepseek3-671b", "mtp_num_layers": 1}), ("kimi-k2", {"model_name": "kimi-k2-1t"}),
     ("deepseek-v2-lite", {"model_name": "deepseek2-16b"}), ("moonlight-16b-a3b", {"max_position_embeddings": 4096})],
)  # fmt: skip
def test_angles_and_scales_are_written_and_read_back(name: str, expected: dict[str, object]) -> None:
    """MaxText scales the scores of latent attention wherever max_position_embeddings is above the original ones."""
    read, options = write_and_read(name)
    assert {option: options.get(option) for option in expected} == expected
    assert read.numerics == load_model(name).numerics


def test_llama_3_3_has_no_scaled_angles_by_its_name() -> None:
    """MaxText scales those of names that begin with llama3.1 (layers/attentions.py)."""
    assert "rope_type" not in known_models()["llama3.3-70b"]
    assert write_and_read("llama-3.3-70b")[1]["model_name"] == "llama3.1-70b"


def test_groups_of_experts_count_for_models_named_deepseek3_alone() -> None:
    """layers/moe.py, get_topk and expert_group_mask: by the sum of the two best scores."""
    assert write_and_read("deepseek-v3")[0].numerics.gating.votes == 2
    assert write_and_read("deepseek-v2")[0].numerics.gating.groups == 1
    narrower = {**to_options(TPU, launch_of("deepseek-v3")), "vocab_size": 1024}
    machines = Machines(num_devices=1, devices_per_node=1, chip="tpu-v5p")
    assert (
        launch_from_fields(from_options(TPU, OptionReader(narrower, machines)), machines).model.numerics.gating.groups
        == 1
    )


@pytest.mark.parametrize(("name", "is_noted"), [("kimi-k2", True), ("deepseek-v3", False), ("mixtral-8x7b", False)])
def test_gates_with_the_balance_bias_are_named(name: str, is_noted: bool) -> None:
    assert any("balance bias" in note for note in TPU.notes(launch_of(name))) is is_noted
