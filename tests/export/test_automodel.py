"""NeMo Automodel: recipes that its repository has, read and priced; what its classes ask of a launch; files that are broken."""

from __future__ import annotations

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.frameworks.automodel import TARGET
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout.layers_per_stage import layers_by_virtual_stage
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8)


def recipe(model: str, batch: tuple[int, int], length: int, distributed: str, more: str = "") -> str:
    """A recipe as those of the repository are; `batch`: sequences of a step, and those that a replica takes at once."""
    return f"""recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config:
    _target_: transformers.AutoConfig.from_pretrained
    pretrained_model_name_or_path: {model}
step_scheduler: {{global_batch_size: {batch[0]}, local_batch_size: {batch[1]}, max_steps: 30}}
loss_fn: {{_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}}
dataset: {{seq_len: {length}}}
distributed: {{strategy: fsdp2, {distributed}}}
{more}"""


# Of NVIDIA-NeMo/Automodel, examples; those that name FSDP2Manager in place of a strategy, as it was before 0.7, in its words.
PUBLISHED = {
    "benchmark/configs/qwen3_moe_30b_torch.yaml": (
        recipe("Qwen/Qwen3-30B-A3B", (256, 4), 4096,
               "tp_size: 1, cp_size: 1, pp_size: 1, ep_size: 8, activation_checkpointing: true"),
        "h100:8", "qwen3-30b-a3b", "fsdp=8 ep=8 zero_stage=3 micro_batch_seqs=4 recompute=full",
    ),
    "benchmark/configs/deepseek_v3_torch.yaml": (
        recipe("deepseek-ai/DeepSeek-V3", (512, 8), 4096,
               "pp_size: 4, ep_size: 64, pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 1, layers_per_stage: 2, "
               "round_virtual_stages_to_pp_multiple: down}"),
        "h100:256", "deepseek-v3", "fsdp=64 pp=4 ep=64 num_virtual_stages=7 zero_stage=2 micro_batch_seqs=1 recompute=none",
    ),
    "benchmark/configs/moonlight_16b_torch.yaml": (
        recipe("moonshotai/Moonlight-16B-A3B", (256, 4), 2048,
               "pp_size: 1, ep_size: 8, pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 4, layers_per_stage: 2}"),
        "h100:8", "moonlight-16b-a3b", "fsdp=8 ep=8 zero_stage=3 micro_batch_seqs=4 recompute=none",
    ),
    "llm_pretrain/llama3_1_70b_pretrain_benchmark_8nodes_tp1cp2pp1.yaml": (
        recipe("meta-llama/Llama-3.1-70B", (128, 1), 8192, "dp_size: null, cp_size: 2, activation_checkpointing: true"),
        "h100:64", "llama-3.1-70b", "fsdp=32 cp=2 zero_stage=3 cp_variant=all_gather recompute=full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_are_read_and_priced(name: str) -> None:
    text, machines, model, layout = PUBLISHED[name]
    cluster = load_cluster(machines)
    heard = parse_launch({"recipe.yaml": text}, cluster_machines(cluster))
    assert (heard.target, heard.unknown) == (TARGET, ())
    assert heard.launch.model.name == model
    assert {**_fields_of(heard.launch.layout), "layers_per_stage": None} == _fields_of(Layout.parse(layout))
    cluster = with_published_constants(cluster, get_stack(TARGET.stack))
    assert plan_layout(heard.launch.model, cluster, heard.launch.job, heard.launch.layout).estimate.step_time_s > 0


def _fields_of(layout: Layout) -> dict[str, object]:
    return {name: getattr(layout, name) for name in Layout.__dataclass_fields__}


def parse_recipe(distributed: str = "", batch: tuple[int, int] = (64, 4), more: str = "") -> ParsedLaunch:
    return parse_launch({"recipe.yaml": recipe("meta-llama/Meta-Llama-3-8B", batch, 4096, distributed, more)}, EIGHT)


@pytest.mark.parametrize(
    ("distributed", "layout"),
    [
        ("reshard_after_forward: false", "fsdp=8 zero_stage=2 micro_batch_seqs=4"),
        ("dp_replicate_size: 2", "dp=2 fsdp=4 zero_stage=3 micro_batch_seqs=4"),
        ("dp_size: none, tp_size: 2, sequence_parallel: true", "fsdp=4 tp=2 zero_stage=3 micro_batch_seqs=4"),
        ("tp_size: 8", "tp=8 sequence_parallel=false micro_batch_seqs=4"),
        ("activation_checkpointing: selective", "fsdp=8 zero_stage=3 micro_batch_seqs=4 recompute=alternate"),
    ],
)
def test_degrees_and_shards_are_those_of_fsdp2(distributed: str, layout: str) -> None:
    assert parse_recipe(distributed).launch.layout == Layout.parse(layout)


def test_replicas_of_ddp_have_no_shards() -> None:
    text = recipe("meta-llama/Meta-Llama-3-8B", (64, 4), 4096, "").replace("fsdp2", "ddp")
    assert parse_launch({"recipe.yaml": text}, EIGHT).launch.layout == Layout.parse("dp=8 micro_batch_seqs=4")


@pytest.mark.parametrize(
    ("pipeline", "stages"),
    [
        ("{}", (8, 8, 8, 8)),
        ("{pp_schedule: interleaved1f1b}", (4,) * 8),
        (
            "{pp_schedule: interleaved_1f1b, layers_per_stage: 3, round_virtual_stages_to_pp_multiple: up}",
            (3,) * 8 + (2,) * 4,
        ),
        ("{pp_schedule: gpipe, layers_per_stage: 8}", (8, 8, 8, 8)),
    ],
)
def test_stages_are_dealt_out_as_its_pipelining_does(pipeline: str, stages: tuple[int, ...]) -> None:
    launch = parse_recipe(f"pp_size: 4, pipeline: {pipeline}", (64, 32)).launch
    assert layers_by_virtual_stage(launch.model, launch.layout) == stages
    assert launch.layout.zero_stage == 2  # layers of a pipeline stay gathered unless they are told otherwise


@pytest.mark.parametrize(
    ("more", "precision"),
    [
        ("model.torch_dtype: float32", "bf16_fp32_reduction"),
        ("model.torch_dtype: bf16", "bf16_no_master"),
        ("", "bf16_no_master"),
        ("fp8: {enabled: true, recipe_name: tensorwise}", "fp8_torchao"),
        ("fp8: {enabled: true, recipe_name: rowwise}", "fp8_torchao_rowwise"),
        ("fp8: {enabled: false, recipe_name: rowwise}", "bf16_no_master"),
    ],
)
def test_precisions_are_those_of_the_storage_and_of_fp8(more: str, precision: str) -> None:
    text = recipe("meta-llama/Meta-Llama-3-8B", (64, 4), 4096, "")
    name, _, value = more.partition(": ")
    text = text.replace("model:\n", f"model:\n  torch_dtype: {value}\n") if "torch_dtype" in name else text + more
    assert parse_launch({"recipe.yaml": text}, EIGHT).launch.job.precision == precision


def launch_of(text: str, model: str = "llama-3-8b") -> Launch:
    layout = Layout.parse(text)
    job = Job(global_batch_tokens=2**22, seq_len=4096, precision="bf16_fp32_reduction")
    machines = Machines(num_devices=layout.num_devices, devices_per_node=8)
    return Launch(model=load_model(model), job=job, layout=layout, machines=machines)


@pytest.mark.parametrize(
    ("text", "model", "reason"),
    [
        ("dp=8", "gpt-3-1.3b", "no name"),
        ("dp=4 tp=2", "llama-3-8b", "DDP"),
        ("dp=8 cp=2 zero_stage=3", "llama-3-8b", "copies of shards have to be fewer"),
        ("cp=2", "llama-3-8b", "no plain replicas with context parallelism"),
        ("fsdp=4 tp=2 zero_stage=3 sequence_parallel=true", "mixtral-8x7b", "whole"),
        ("fsdp=8 zero_stage=3 micro_batch_seqs=3", "llama-3-8b", "does not divide"),
        ("fsdp=256 pp=8 zero_stage=2 schedule=afab", "llama-3-8b", "are fewer than the 8 ranks"),
        ("fsdp=8 zero_stage=1", "llama-3-8b", "ZeRO-1"),
        ("fsdp=8 zero_stage=3 recompute=selective", "llama-3-8b", "recompute"),
    ],
)
def test_layouts_that_automodel_lacks_are_refused(text: str, model: str, reason: str) -> None:
    assert any(reason in refusal for refusal in refusals(launch_of(text, model), TARGET))


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("dp=8", "llama-3-8b"), ("dp=2 fsdp=4 zero_stage=3", "llama-3-8b"),
        ("fsdp=4 tp=2 ep=4 etp=1 zero_stage=3 sequence_parallel=false", "mixtral-8x7b"),
        ("fsdp=8 pp=4 zero_stage=2 recompute=alternate layers_per_stage=8,8,8,8", "llama-3-8b"),
    ],
)  # fmt: skip
def test_layouts_that_automodel_runs_are_accepted(text: str, model: str) -> None:
    assert not refusals(launch_of(text, model), TARGET)


LLAMA = ("meta-llama/Meta-Llama-3-8B", (64, 4), 4096)
BROKEN = {
    "nothing": "",
    "a list": "- 1\n- 2",
    "YAML: ": "a: [1",
    "a value that is built": "a: !!python/object/apply:os.system [ls]",
    "a picture": "\x00PNG",
    "itself within itself": "&a {b: *a}",
    "no model": "distributed: {tp_size: 1}",
    "a model that nobody knows": recipe("nobody/knows", (64, 4), 4096, "pp_size: 2, pipeline: {}"),
    "a degree of zero": recipe(*LLAMA, "tp_size: 0"),
    "a degree in words": recipe(*LLAMA, "tp_size: two"),
    "a degree that does not divide": recipe(*LLAMA, "tp_size: 3"),
    "a strategy that nobody knows": recipe(*LLAMA, "").replace("fsdp2", "fsdp3"),
    "a schedule that nobody knows": recipe(*LLAMA, "pp_size: 2, pipeline: {pp_schedule: Foo}"),
    "stages that do not divide": recipe(*LLAMA, "pp_size: 4, pipeline: {layers_per_stage: 7}"),
    "a batch that does not fill the pipeline": recipe(
        "meta-llama/Meta-Llama-3-8B", (50, 4), 4096, "pp_size: 2, pipeline: {}"
    ),
    "adapters of nothing": recipe(*LLAMA, "", "peft: {dim: 8, target_modules: ['*.query']}"),
    "adapters without a rank": recipe(*LLAMA, "", "peft: {dim: 0}"),
    "an optimizer that nobody knows": recipe(*LLAMA, "", "optimizer: {_target_: my.Optimizer}"),
    "recomputation that nobody knows": recipe(*LLAMA, "activation_checkpointing: some"),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_broken_recipes_are_refused_in_clear_words(text: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_launch({"recipe.yaml": text}, EIGHT, target="automodel")
    assert all(problem and "\n" not in problem for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("torch.optim.Adam", "adamw"), ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "adamw"),
     ("torch.optim.SGD", "sgd")],
)  # fmt: skip
def test_optimizers_are_read_by_class(name: str, optimizer: str) -> None:
    text = recipe(*LLAMA, "", f"optimizer: {{_target_: {name}, master_weights: true}}")
    parsed = parse_launch({"recipe.yaml": text}, EIGHT)
    assert parsed.launch.job.optimizer == optimizer
    assert any("master_weights" in note for note in parsed.notes)


def test_a_pipeline_that_is_filled_twice_is_noted() -> None:
    parsed = parse_launch({"recipe.yaml": recipe(*LLAMA, "pp_size: 2, pipeline: {}")}, EIGHT)
    assert any("filled 4 times" in note for note in parsed.notes)


def test_a_model_that_the_catalogue_lacks_is_named() -> None:
    with pytest.raises(InputError, match="'nobody/knows', which the catalogue lacks; give --model"):
        parse_launch({"recipe.yaml": recipe("nobody/knows", (64, 4), 4096, "")}, EIGHT)


def test_a_length_that_the_recipe_leaves_out_is_the_default_with_a_note() -> None:
    text = recipe(*LLAMA, "").replace("seq_len", "length")
    parsed = parse_launch({"recipe.yaml": text}, EIGHT)
    assert parsed.launch.job.seq_len == 4096
    assert any("priced with 4,096 tokens (default); --seq-len says another" in note for note in parsed.notes)
    assert parse_launch({"recipe.yaml": text}, EIGHT, user_fields={"job.seq_len": 2048}).launch.job.seq_len == 2048


@pytest.mark.parametrize(
    ("peft", "targets"),
    [
        ("dim: 16", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),  # *_proj
        ("dim: 16, target_modules: '*_proj'", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("dim: 16, target_modules: ['*q_proj', '*.v_proj']", "q_proj v_proj"),
        ("dim: 16, match_all_linear: true", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("dim: 16, exclude_modules: ['*.mlp.*', '*lm_head']", "k_proj o_proj q_proj v_proj"),
    ],
)
def test_adapters_are_those_that_the_patterns_match(peft: str, targets: str) -> None:
    """Source: NeMo Automodel 0.7.0, components/_peft/module_matcher.py."""
    text = recipe(*LLAMA, "", f"peft: {{_target_: nemo_automodel.components._peft.lora.PeftConfig, alpha: 32, {peft}}}")
    model = parse_launch({"recipe.yaml": text}, EIGHT).launch.model
    assert (model.lora_rank, sorted(model.structure.lora_targets)) == (16, targets.split())
    quantized = f"{text}\nquantization: {{load_in_4bit: true, bnb_4bit_use_double_quant: true}}\n"
    assert parse_launch({"recipe.yaml": quantized}, EIGHT).launch.job.precision == "qlora_nf4"


def test_a_degree_of_none_is_the_default() -> None:
    parsed = parse_launch({"recipe.yaml": recipe(*LLAMA, "dp_replicate_size: none, tp_size: 2")}, EIGHT)
    assert (parsed.launch.layout.dp, parsed.launch.layout.fsdp) == (1, 4)
