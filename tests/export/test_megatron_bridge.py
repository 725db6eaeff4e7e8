"""Megatron Bridge: recipes that its release has, read and priced; what is no literal is named; nothing of a recipe is run."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.frameworks.huggingface_hub_names import hub_model, hub_name
from shardwise.interop.frameworks.megatron.bridge_recipe import TARGET, options_by_field, to_megatron
from shardwise.interop.frameworks.targets import TARGETS
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines, launch_from_fields
from shardwise.interop.launches.target import OptionReader
from shardwise.interop.launches.translate_launch import from_options, refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.text_formats.option_tables import option_table
from shardwise.interop.text_formats.python_config import parse_python_config
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8)
BRIDGE = 'AutoBridge.from_hf_pretrained("{}").to_megatron_provider(load_weights=False)'


def recipe(*lines: str, base: str = "_pretrain_common()") -> str:
    return "\n    ".join(("def pretrain_config() -> ConfigContainer:", f"cfg = {base}", *lines, "return cfg")) + "\n"


def of_hub(name: str, seq_len: int, batch: int, **model: object) -> str:
    """A recipe as those of the release are: of a model of the hub, with a layout of its own."""
    return recipe(
        f"cfg.model = {BRIDGE.format(name)}",
        f"cfg.dataset.seq_length = {seq_len}",
        f"cfg.model.seq_length = {seq_len}",
        f"cfg.train.global_batch_size = {batch}",
        "cfg.train.micro_batch_size = 1",
        *(f"cfg.model.{field} = {value!r}" for field, value in model.items()),
        "cfg.ddp.use_distributed_optimizer = True",
        'cfg.ddp.data_parallel_sharding_strategy = "no_shard"',
        "cfg.optimizer.exp_avg_dtype = torch.float32",
    )


# Of megatron-bridge 0.3.1, src/megatron/bridge/recipes: the layouts of its functions.
PUBLISHED = {
    "llama/llama3.py, llama3_8b_pretrain_config": (
        of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512, context_parallel_size=2, recompute_granularity=None),
        "h100:16", "llama-3-8b", "fsdp=8 cp=2 zero_stage=1 cp_variant=zigzag",
    ),
    "llama/llama3.py, llama3_70b_pretrain_config": (
        of_hub("meta-llama/Meta-Llama-3-70B", 8192, 512, tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
               virtual_pipeline_model_parallel_size=5, context_parallel_size=2, sequence_parallel=True),
        "h100:64", "llama-3-70b",
        "fsdp=2 tp=4 cp=2 pp=4 num_virtual_stages=5 zero_stage=1 sequence_parallel=true cp_variant=zigzag",
    ),
    "llama/llama3.py, llama31_405b_pretrain_config": (
        of_hub("meta-llama/Meta-Llama-3.1-405B", 131072, 512, tensor_model_parallel_size=8, pipeline_model_parallel_size=8,
               virtual_pipeline_model_parallel_size=2, context_parallel_size=4, sequence_parallel=True,
               account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
        "h100:1024", "llama-3-405b",
        "fsdp=4 tp=8 cp=4 pp=8 num_virtual_stages=2 zero_stage=1 sequence_parallel=true cp_variant=zigzag",
    ),
    "qwen/qwen3_moe.py, qwen3_30b_a3b_pretrain_config": (
        of_hub("Qwen/Qwen3-30B-A3B", 4096, 32, tensor_model_parallel_size=4, pipeline_model_parallel_size=2,
               expert_model_parallel_size=4, expert_tensor_parallel_size=1, sequence_parallel=True,
               recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        "h100:64", "qwen3-30b-a3b", "fsdp=8 tp=4 pp=2 ep=4 etp=1 zero_stage=1 sequence_parallel=true recompute=full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_are_read_and_priced(name: str) -> None:
    text, machines, model, layout = PUBLISHED[name]
    cluster = load_cluster(machines)
    heard = parse_launch({"recipe.py": text}, cluster_machines(cluster))
    assert (heard.target, heard.unknown) == (TARGET, ())
    assert heard.launch.model.name == model
    assert heard.launch.layout == Layout.parse(layout)
    assert heard.launch.job.precision == "bf16_fp32_main_gradients"
    cluster = with_published_constants(cluster, get_stack(TARGET.stack))
    assert plan_layout(heard.launch.model, cluster, heard.launch.job, heard.launch.layout).estimate.step_time_s > 0


def parse_recipe(*lines: str) -> ParsedLaunch:
    text = of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512).replace(
        "    return cfg", "".join(f"    {x}\n" for x in lines)
    )
    return parse_launch({"recipe.py": text + "    return cfg\n"}, EIGHT)


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        (["cfg.mixed_precision = bf16_mixed()"], "bf16_fp32_main_gradients"),
        (['cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"'], "fp8_current"),
        (['cfg.mixed_precision = get_mixed_precision_config("bf16-with-mxfp8-mixed")'], "mxfp8"),
        (["cfg.mixed_precision = bf16_with_nvfp4_mixed()"], "nvfp4"),
        (["cfg.mixed_precision = fp16_mixed()"], "fp16_fp32_update"),
        (["cfg.mixed_precision.grad_reduce_in_fp32 = False"], "bf16"),
        (["cfg.mixed_precision = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)"], "bf16"),
        (["cfg.mixed_precision = None"], "fp32"),
    ],
)
def test_lines_of_a_recipe_map_to_precisions(lines: list[str], precision: str) -> None:
    assert parse_recipe(*lines).launch.job.precision == precision


@pytest.mark.parametrize(
    ("lines", "zero"),
    [
        ((), 1),
        (("cfg.ddp.use_distributed_optimizer = False",), 0),
        (("cfg.ddp.use_megatron_fsdp = True", 'cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"'), 3),
        (("cfg.ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)",), 0),
    ],
)
def test_stages_of_zero_are_those_of_the_optimizer_and_its_fsdp(lines: tuple[str, ...], zero: int) -> None:
    assert parse_recipe(*lines).launch.layout.zero_stage == zero


def test_flags_that_are_not_set_are_no_arguments() -> None:
    table = option_table("megatron")
    flags = {field: option for field, option in options_by_field().items() if table[option].kind == "bool"}
    for field, option in flags.items():
        arguments = [to_megatron({field: value}) for value in (False, None, True)]
        assert not any(value is None or value is False for written in arguments for value in written.values()), field
        assert arguments[1].get(option) == to_megatron({}).get(option), field


def test_arguments_that_are_no_literals_are_named() -> None:
    heard = parse_recipe(
        "cfg.model.num_layers = layers_of(3)", "if 1 > 0:\n        cfg.model.hidden_size = 1", "set_layout(cfg.model)"
    )
    assert [text.split(" ")[0] for text in heard.unknown] == ["model.num_layers", "line", "line"]
    assert heard.launch.model.d_model == 4096


def test_constants_and_sums_of_a_file_are_known() -> None:
    text = "SIZE = 4 * 1024\n" + of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512).replace("= 8192", "= SIZE + 4096")
    assert parse_launch({"recipe.py": text}, EIGHT).launch.job.seq_len == 8192


def test_reading_a_recipe_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "made"
    text = f"open({str(path)!r}, 'w')\n" + of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512).replace(
        "return cfg", f"cfg.model.num_layers = open({str(path)!r}, 'w')\n    return cfg"
    )
    parse_launch({"recipe.py": text}, EIGHT)
    assert not path.exists()


BROKEN = {
    "nothing": "",
    "not valid Python": "def (:",
    "a picture": "\x00PNG",
    "too deep": "x = " + "(" * 5000 + ")" * 5000,
    "no recipe": "x = 1",
    "two recipes": of_hub("a/b", 1, 1) + of_hub("a/b", 1, 1).replace("pretrain_config", "other"),
    "a model that nobody knows": of_hub("nobody/knows", 4096, 8),
    "no model": recipe("cfg.train.global_batch_size = 8"),
    "a text for a number": of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512, tensor_model_parallel_size="two"),
    "a degree of zero": of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512, tensor_model_parallel_size=0),
    "a degree that does not divide": of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512, tensor_model_parallel_size=3),
    "stages that do not divide": of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512, pipeline_model_parallel_size=8,
                                        virtual_pipeline_model_parallel_size=5),
    "a list for a batch": of_hub("meta-llama/Meta-Llama-3-8B", 8192, [1]),  # type: ignore[arg-type]
    "a batch that is no number": of_hub("meta-llama/Meta-Llama-3-8B", 8192, 512).replace("= 512", "= 'many'"),
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_broken_recipes_are_refused_in_clear_words(text: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_launch({"recipe.py": text}, EIGHT, target="megatron-bridge")
    assert all(problem and "\n" not in problem for problem in raised.value.problems)


def test_recipes_without_end_are_no_recipes() -> None:
    with pytest.raises(InputError, match="characters"):
        parse_python_config("#" * 1_000_001, "recipe.py")


def test_learned_positions_are_as_many_as_a_sequence_has() -> None:
    model = load_model("gpt-3-175b")
    job = Job(global_batch_tokens=2**20, seq_len=1024, precision="bf16")
    machines = Machines(num_devices=256, devices_per_node=8)
    launch = Launch(model=model, job=job, layout=Layout.parse("tp=8 pp=16 fsdp=2 zero_stage=1"), machines=machines)
    assert any("learned positions" in reason for reason in refusals(launch, TARGET))
    assert not refusals(launch, TARGETS["megatron"])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"), ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)  # fmt: skip
def test_models_have_their_names_on_the_hub(name: str, model: str) -> None:
    hub_entry = hub_model(name)
    assert hub_entry is not None
    assert hub_entry.name == model
    assert hub_model(hub_name(hub_entry) or "") == hub_entry
    assert hub_model("nobody/knows") is None


def recipe_of(name: str) -> str:
    """The recipe of a model on one GPU."""
    model = load_model(name)
    seq_len = model.max_positions or 1024
    job = Job(global_batch_tokens=8 * seq_len, seq_len=seq_len, precision="bf16_fp32_main_gradients")
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    return TARGET.write(to_options(TARGET, launch), launch)["recipe.py"]


EXPORTED = (
    "deepseek-v3", "kimi-k2", "gemma-2b", "gemma-3-27b", "gpt-2", "gpt-oss-20b", "llama-3.1-8b", "olmoe-1b-7b", "opt-175b",
    "mistral-7b",
)  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_each_argument_of_a_provider_is_a_field_of_its_class(name: str) -> None:
    """Others are set afterwards, as its own conversion does (models/conversion/model_bridge.py)."""
    fields = json.loads((Path(__file__).parent / "megatron_bridge_fields.json").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(ast.parse(recipe_of(name))) if isinstance(node, ast.Call)]
    provider = next(call for call in calls if isinstance(call.func, ast.Name) and call.func.id.endswith("Provider"))
    assert isinstance(provider.func, ast.Name)
    known = set(" ".join([*fields["GPTModelProvider"], *fields[provider.func.id]]).split())
    assert {keyword.arg for keyword in provider.keywords} <= known


@pytest.mark.parametrize("name", EXPORTED)
def test_models_are_read_back_as_they_are(name: str) -> None:
    """Constants of the arithmetic too."""
    model = load_model(name)
    options = TARGET.read({"recipe.py": recipe_of(name)})
    assert TARGET.problems(options) == []
    machines = Machines(num_devices=1, devices_per_node=1)
    launch = launch_from_fields(from_options(TARGET, OptionReader(options, machines)), machines)
    labels = {name: getattr(model, name) for name in ("name", "source", "nominal_num_params", "max_positions")}
    assert replace(launch.model, **labels) == model


def test_yarn_is_set_where_gptmodel_reads_it() -> None:
    """GPTModel of 0.16.1 reads yarn_* of the configuration without defaults (gpt_model.py)."""
    text = recipe_of("gpt-oss-20b")
    settings = dict(re.findall(r"cfg\.model\.yarn_(\w+) = (\S+)", text))
    assert settings == {
        "rotary_scaling_factor": "32.0", "original_max_position_embeddings": "4096", "beta_fast": "32.0", "beta_slow": "1.0",
        "correction_range_round_to_int": "False", "mscale": "1.0", "mscale_all_dim": "0.0",
    }  # fmt: skip


def test_a_provider_of_latent_attention_scales_angles_by_forty_unless_it_says_otherwise() -> None:
    """Its default (MLATransformerConfig.rotary_scaling_factor)."""
    text = recipe_of("moonlight-16b-a3b").replace("        rotary_scaling_factor=1.0,\n", "")
    launch = parse_launch({"recipe.py": text}, Machines(num_devices=1, devices_per_node=1)).launch
    rotary = launch.model.numerics.rotary
    assert (rotary.factor, rotary.original_positions, rotary.high) == (40.0, 4096, 32.0)


def test_capped_scores_are_refused() -> None:
    job = Job(global_batch_tokens=8 * 1024, seq_len=1024, precision="bf16_fp32_main_gradients")
    launch = Launch(model=load_model("gemma-2-9b"), job=job, layout=Layout(), machines=EIGHT)
    assert any("Gemma2ModelProvider" in reason for reason in refusals(launch, TARGET))
