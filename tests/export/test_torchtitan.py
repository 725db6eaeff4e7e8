"""torchtitan 0.3.0: what a plan's launch says, what it asks of one, and launches of its own repository read and priced."""

from __future__ import annotations

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.frameworks.torchtitan.config_registry import (
    evaluate_config,
    parse_config_module,
    registered_configs,
)
from shardwise.interop.frameworks.torchtitan.models import find_flavor, list_flavors
from shardwise.interop.frameworks.torchtitan.parallelism import generate_stages
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.target import LaunchFiles, OptionReader, Target
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.text_formats.command_flags import format_tyro, parse_tyro
from shardwise.interop.text_formats.option_tables import option_table
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.values.errors import InputError

TITAN = get_target("torchtitan")
RUN = "torchrun --nproc_per_node=8 -m torchtitan.train"


def launch(
    layout: str, *, model: str = "llama-3.1-8b", cluster: str = "h100:64", precision: str = "bf16_fp32_reduction",
    seq_len: int = 8192, loss: str | None = "chunked", batch: int = 2**22,
) -> Launch:  # fmt: skip
    job = Job(global_batch_tokens=batch, seq_len=seq_len, precision=precision, loss=loss)
    return Launch(
        model=load_model(model), job=job, layout=Layout.parse(layout), machines=cluster_machines(load_cluster(cluster))
    )


def write_launch(exported: Launch, target: Target = TITAN) -> LaunchFiles:
    assert refusals(exported, target) == []
    return target.write(to_options(target, exported), exported)


def parse_flags(flags: str, devices: int = 64, **files: str) -> ParsedLaunch:
    names = {f"{name}.py": text for name, text in files.items()}
    return parse_launch({"launch.sh": f"{RUN} {flags}", **names}, Machines(num_devices=devices, devices_per_node=8))


def test_flags_need_no_python_file() -> None:
    files = write_launch(launch("fsdp=32 tp=2 recompute=alternate"))
    assert list(files) == ["launch.sh"]
    for words in ("--module llama3", "--config llama3_8b", "--parallelism.tensor_parallel_degree 2", "--compile.enable\n",
                  "--parallelism.data_parallel_shard_degree 32", "--training.global_batch_size 512",
                  "torchrun --nnodes 8 --nproc-per-node 8"):  # fmt: skip
        assert words in files["launch.sh"]


def test_flags_override_the_function_of_the_registry() -> None:
    script = write_launch(launch("fsdp=64 recompute=none", model="llama-3.1-70b"))["launch.sh"]
    assert "--config llama3_70b" in script
    assert "--parallelism.tensor_parallel_degree 1" in script  # the function has 8
    assert script.index("activation-checkpoint:none") > script.rindex(
        "--training"
    )  # what follows would be the subcommand's


def test_formats_losses_and_other_flavours_take_a_function_of_their_own() -> None:
    files = write_launch(launch("fsdp=64", precision="fp8_torchao_rowwise", loss="unfused"))
    assert "--module run_config" in files["launch.sh"]
    for words in ("from torchtitan.components.quantization import Float8LinearConverter", "config = llama3_8b()",
                  "Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns=['lm_head'], model_compile_enabled=True)",
                  "config.loss = CrossEntropyLoss.Config("):  # fmt: skip
        assert words in files["run_config.py"]
    assert "model_registry('4B')" in write_launch(launch("fsdp=64", model="qwen3-4b"))["run_config.py"]
    experts = write_launch(launch("fsdp=64 ep=8", model="qwen3-30b-a3b", precision="fp8_torchao_rowwise"))[
        "run_config.py"
    ]
    assert "Float8GroupedExpertsConverter.Config(" in experts
    assert "'router.gate'" in experts


def test_context_parallelism_takes_flex_attention() -> None:
    assert "attn_backend='flex'" in write_launch(launch("fsdp=8 cp=8", model="gpt-oss-20b"))["run_config.py"]
    assert list(write_launch(launch("fsdp=8 cp=8"))) == ["launch.sh"]


def test_multi_token_prediction_has_a_loss_of_its_own() -> None:
    text = write_launch(launch("fsdp=64 ep=8", model="deepseek-v3"))["run_config.py"]
    assert "model_registry('671B', num_mtp_layers=1)" in text
    assert "config.loss = MTPLoss.Config(" in text


@pytest.mark.parametrize(
    ("refused_launch", "reason"),
    [
        (launch("fsdp=64", precision="bf16"), "precision=bf16_fp32_reduction"),
        (launch("fsdp=64", model="gemma-2-9b"), "gemma-2-9b has not the sizes of any model"),
        (launch("fsdp=8 tp=8", model="qwen3-30b-a3b"), "tp = 8 for 4 key-value heads"),
        (launch("fsdp=8 cp=4 tp=2", seq_len=8200, batch=8200 * 512), "not a multiple of 16"),
        (launch("fsdp=32 pp=2", model="llama-3.2-1b"), "ties its embeddings"),
        (launch("fsdp=64", model="qwen3-8b", seq_len=65536), "above the 40960 positions"),
        (launch("fsdp=32 pp=2", model="deepseek-v3"), "multi-token prediction goes without pipeline"),
        (launch("fsdp=8 pp=8", batch=8192 * 32), "1f1b takes no fewer micro-batches than stages, found 4 for 8"),
        (launch("fsdp=8 cp=8 cp_variant=zigzag"), "layout.cp_variant is zigzag"),
        (launch("fsdp=1 dp=32 cp=2 zero_stage=0"), "no plain replicas with context parallelism"),
        (launch("fsdp=64", precision="fp8_torchao"), "job.precision is fp8_torchao"),
        (launch("fsdp=64 recompute=full recompute_layers=4"), "layout.recompute_layers is 4"),
        (launch("fsdp=64 zero_stage=1"), "no ZeRO-1"),
    ],
)
def test_layouts_that_torchtitan_lacks_are_refused(refused_launch: Launch, reason: str) -> None:
    assert any(reason in text for text in refusals(refused_launch, TITAN)), refusals(refused_launch, TITAN)


# Functions of its config registries at release 0.3.0, with what they set. Source: models/*/config_registry.py.
@pytest.mark.parametrize(
    ("flags", "model", "layout", "seqs", "precision"),
    [
        ("--module llama3 --config llama3_8b", "llama-3-8b",
         "fsdp=64 zero_stage=3 micro_batch_seqs=1 recompute=alternate", 64, "bf16_fp32_reduction"),
        ("--module llama3 --config llama3_70b", "llama-3-70b",
         "fsdp=8 tp=8 zero_stage=3 sequence_parallel=true micro_batch_seqs=8 recompute=full", 64, "bf16_fp32_reduction"),
        ("--module torchtitan.models.llama3 --config=llama3_405b", "llama-3-405b",
         "fsdp=8 tp=8 zero_stage=3 sequence_parallel=true async_tp=true micro_batch_seqs=2 recompute=full", 16,
         "fp8_torchao_rowwise"),
        ("--module deepseek_v3 --config deepseek_v3_16b --parallelism.pipeline_parallel_degree 2 "
         "--parallelism.pipeline-parallel-schedule ZBVZeroBubble", "deepseek-v2-lite",
         "fsdp=32 pp=2 ep=8 num_virtual_stages=2 zero_stage=2 schedule=zb_v layers_per_stage=13,14 micro_batch_seqs=1 "
         "recompute=alternate", 128, "bf16_fp32_reduction"),
        ("--module qwen3 --config qwen3_30b_a3b --parallelism.expert_parallel_degree 8 activation-checkpoint:selective",
         "qwen3-30b-a3b", "fsdp=64 ep=8 zero_stage=3 micro_batch_seqs=2 recompute=alternate", 128, "bf16_fp32_reduction"),
        ("--module llama3 --config llama3_8b --parallelism.data_parallel_replicate_degree 4 "
         "--parallelism.fsdp_reshard_after_forward never --parallelism.context_parallel_degree 2", "llama-3-8b",
         "dp=4 fsdp=8 cp=2 zero_stage=2 cp_variant=all_gather micro_batch_seqs=1 recompute=alternate", 32,
         "bf16_fp32_reduction"),
    ],
)  # fmt: skip
def test_launches_with_functions_of_its_registry_are_read(
    flags: str, model: str, layout: str, seqs: int, precision: str
) -> None:
    parsed = parse_flags(flags)
    assert parsed.target.name == "torchtitan"
    assert (parsed.launch.model.name, parsed.launch.job.num_seqs, parsed.launch.job.precision) == (
        model,
        seqs,
        precision,
    )
    assert str(parsed.launch.layout) == str(Layout.parse(layout))
    assert parsed.unknown == ()


OWN = """
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.config import ParallelismConfig

def base(degree=4):
    config = llama3_70b()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=degree, enable_sequence_parallel=False)
    return config

def mine():
    '''A run.'''
    config = base(degree=2)
    config.training.local_batch_size = 4
    config.activation_checkpoint = None
    config.optimizer_hook(3)
    return config

def strange():
    return [one() for one in (base,)][0]
"""


def test_a_custom_function_is_read_and_unknown_calls_are_named() -> None:
    parsed = parse_flags("--module my.own --config mine --training.seq_len 4096", own=OWN)
    layout = parsed.launch.layout
    assert (layout.tp, layout.sequence_parallel, layout.micro_batch_seqs, layout.recompute) == (2, False, 4, "none")
    assert parsed.launch.job.seq_len == 4096
    assert parsed.unknown == ("config.optimizer_hook(3)",)


MANY = "def f0():\n    return Trainer.Config(model_spec=model_registry('8B'))\n" + "".join(
    f"def f{i}():\n    a = f{i - 1}()\n    b = f{i - 1}()\n    return a\n" for i in range(1, 40)
)
LLAMA = "--module llama3 --config llama3_8b"
PP = f"{LLAMA} --training.local_batch_size 8 --parallelism.pipeline_parallel_degree 2"


@pytest.mark.parametrize(
    ("flags", "source", "reason"),
    [
        ("--module llama3", "", "--config"),
        ("--module llama3 --config llama3_9b", "", "llama3_8b"),
        ("--module mine --config run", "", "file is not among those given"),
        ("--module own --config none", OWN, "no function 'none' among base, mine, strange"),
        ("--module own --config strange", OWN, "without running it"),
        ("--module own --config mine", "def mine(:\n", "not valid Python"),
        ("--module own --config mine", "x = " + "(" * 5000, "not valid Python"),
        ("--module own --config f39", MANY, "more than 200 calls"),
        (f"{LLAMA} --parallelism.tensor_parallel_degree 3", "", "a cluster that they divide"),
        (f"{LLAMA} --parallelism.tensor_parallel_degree 0", "", "at least 1"),
        (f"{LLAMA} --parallelism.data_parallel_shard_degree -2", "", "or -1"),
        (f"{LLAMA} --training.dtype bfloat16", "", "float32 is what can be read"),
        (f"{LLAMA} --training.enable_cpu_offload", "", "rest on the host"),
        (f"{LLAMA} --training.global_batch_size 65", "", "a multiple of"),
        (f"{LLAMA} --compile.enable_async_tensor_parallel --parallelism.tensor_parallel_degree 2", "", "without a compiled"),
        (f"{LLAMA} --parallelism.fsdp_reshard_after_forward sometimes", "", "one of default, always, never"),
        (f"{LLAMA} --parallelism.context_parallel_degree 2 --parallelism.context_parallel_load_balancer None", "", "uneven"),
        (f"{LLAMA} activation-checkpoint:memory-budget", "", "activation_checkpoint"),
        (f"{PP} --parallelism.pipeline_parallel_schedule Foo", "", "Interleaved1F1B"),
        (f"{PP} --parallelism.pipeline_parallel_schedule_csv a.csv", "", "a schedule by name"),
        (f"{PP} --training.global_batch_size 1024", "", "drains"),
        (f"{PP} --parallelism.pipeline_parallel_layers_per_stage 4", "", "one stage on each rank"),
        ("--module llama3 --config llama3_8b_mxfp8", "", "which no recipe here is"),
    ],
)  # fmt: skip
def test_invalid_launches_are_refused_in_one_line(flags: str, source: str, reason: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_flags(flags, own=source) if source else parse_flags(flags)
    assert reason in str(raised.value)


def test_experts_outside_a_recipe_of_float8_are_no_recipe() -> None:
    source = OWN.replace("config.activation_checkpoint = None", "config.model_spec = model_registry('30B-A3B', converters=["
                      "Float8LinearConverter.Config(filter_fqns=['lm_head'])])").replace("llama3", "qwen3").replace(
                          "qwen3_70b", "qwen3_30b_a3b")  # fmt: skip
    with pytest.raises(InputError, match="with Float8GroupedExpertsConverter where there are experts"):
        parse_flags("--module own --config mine", own=source)


def test_stages_are_dealt_out_as_it_deals_them() -> None:
    # Its own generator for 32 and 126 layers: pipeline_parallel.py, _generate_llm_fqn_per_model_part
    assert generate_stages(32, 4, 1, 1) == (8, 9, 8, 7)
    assert generate_stages(126, 8, 1, 1) == (15, *(16,) * 6, 15)
    assert generate_stages(6, 8, 1, 1) == (0, 1, 1, 1, 1, 1, 1, 0)
    assert generate_stages(4, 8, 1, 1) is None
    assert generate_stages(32, 4, 12, 1) is None


def test_stages_that_no_number_says_are_lists_of_modules() -> None:
    files = write_launch(launch("fsdp=16 pp=4 zero_stage=2 layers_per_stage=6,10,10,6"))
    assert (
        "['layers.26', 'layers.27', 'layers.28', 'layers.29', 'layers.30', 'layers.31', 'norm', 'lm_head']"
        in files["run_config.py"]
    )
    per_stage = write_launch(launch("fsdp=8 pp=8 num_virtual_stages=4 zero_stage=2", batch=2**23))
    assert "--parallelism.pipeline_parallel_layers_per_stage 1" in per_stage["launch.sh"]


def test_flags_of_tyro_are_read_as_they_are_written() -> None:
    table = option_table("torchtitan")
    options = {"compile.enable": False, "compile.components": ["model", "loss"], "training.steps": 5,
               "activation_checkpoint": "full"}  # fmt: skip
    words = " ".join(format_tyro(options, ("activation_checkpoint",))).split()
    assert words[-1] == "activation-checkpoint:full"
    assert parse_tyro(words, table, ("activation_checkpoint",)) == options
    assert parse_tyro(["--training.steps", "None"], table) == {"training.steps": None}


def test_every_flavour_is_a_model_and_is_found_by_its_sizes() -> None:
    for table in ("torchtitan_models", "torchtitan_toml_models"):
        for flavor in list_flavors(table):
            options = {"model.name": flavor.name, "model.flavor": flavor.flavor, "training.seq_len": 2048}
            target = TITAN if table == "torchtitan_models" else get_target("torchtitan-toml")
            read_fields = target.mappings[0].from_options(_make_reader(options))
            assert read_fields["model.num_layers"] == flavor.fields["model.num_layers"]
    named = [
        find_flavor("torchtitan_models", load_model(name)) for name in ("llama-3.2-3b", "qwen3-14b", "gpt-oss-120b")
    ]
    assert [(flavor.name, flavor.flavor) for flavor in named if flavor] == [
        ("llama3", "3B"),
        ("qwen3", "14B"),
        ("gpt_oss", "120b"),
    ]


def _make_reader(options: dict[str, object]) -> OptionReader:
    return OptionReader(options, Machines(num_devices=8, devices_per_node=8))


def test_functions_of_the_registries_have_options_of_the_release() -> None:
    for functions in registered_configs().values():
        for options in functions.values():
            assert TITAN.problems(options) == []


def test_a_config_that_one_call_makes_is_read() -> None:
    text = (
        "from torchtitan.models.qwen3 import model_registry\ndef f():\n"
        "    return My.Config(model_spec=model_registry('8B'), compile=CompileConfig(enable=True))\n"
    )
    assert evaluate_config(parse_config_module(text, "f.py"), "f") == {
        "model.flavor": "8B",
        "model.name": "qwen3",
        "compile.enable": True,
    }


# softmax_scale of an attention layer times the square of the magnitude of cos and sin, of models that 0.3.0 built.
BUILT_SCALES = {
    ("deepseek_v3", "16B"): 0.1142519530894877,
    ("deepseek_v3", "671B"): 0.1352337790634655,
    ("gpt_oss", "20b"): 0.2266575548981272,
    ("llama3", "8B"): 128**-0.5,
}


@pytest.mark.parametrize("release", ["torchtitan_models", "torchtitan_toml_models"])
@pytest.mark.parametrize("flavor", BUILT_SCALES, ids=" ".join)
def test_flavors_scale_scores_as_they_are_built(flavor: tuple[str, str], release: str) -> None:
    fields = next(entry.fields for entry in list_flavors(release) if (entry.name, entry.flavor) == flavor)
    scale = fields.get("numerics.attention_scale") or fields["model.head_dim"] ** -0.5
    magnitude = fields.get("numerics.rotary.amplitude", 1.0)
    assert scale * magnitude**2 == pytest.approx(BUILT_SCALES[flavor], rel=1e-6)
    assert "numerics.unread" not in fields
