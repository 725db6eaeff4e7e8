"""Forms in which launches are published: test cases, experiments of Primus, files of recipes; and options without a price."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.interop.frameworks.megatron.bridge_recipe import to_bridge
from shardwise.interop.frameworks.megatron.launch_script import TARGET
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.launch import Launch, Machines, with_numerics
from shardwise.interop.launches.launch_scripts import with_script_context
from shardwise.interop.launches.target import OptionReader
from shardwise.interop.launches.translate_launch import from_options, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.text_formats.option_tables import UNPRICED_EFFECTS
from shardwise.layout import Layout
from shardwise.model import Job, load_model
from shardwise.values import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8, chip="h100")
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 "
)
BATCH = "--global-batch-size 16 --bf16 "
VOCABULARY = "--vocab-size 512 "


def read_script(arguments: str, program: str = "pretrain_gpt.py") -> ParsedLaunch:
    return parse_launch({"launch.sh": f"torchrun --nproc-per-node 8 {program} {arguments}"}, EIGHT)


TEST_CASE = """ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-file: ${DATA_PATH}/bpe/vocab.json
  --merge-file: ${DATA_PATH}/bpe/merges.txt
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --recompute-granularity: full
  --recompute-granularity: selective
  --recompute-modules: [core_attn, mlp]
  --bf16: true
TEST_TYPE: regular
"""


def test_a_test_case_of_megatron_is_read() -> None:
    parsed = parse_launch({"model_config.yaml": TEST_CASE}, EIGHT)
    assert parsed.target is TARGET
    assert parsed.launch.layout == Layout.parse(
        "dp=4 tp=2 sequence_parallel=true micro_batch_seqs=4 recompute=core_attn+mlp"
    )
    assert (parsed.launch.job.num_seqs, parsed.launch.model.vocab_size) == (32, 50257)
    assert any("GPT2BPETokenizer: 50,257" in note for note in parsed.notes)


EXPERIMENT = """work_group: ${{PRIMUS_TEAM:amd}}
modules:
  pre_trainer:
    framework: {framework}
    config: pre_trainer.yaml
    model: ${{PRIMUS_MODEL:{model}}}.yaml
    overrides:
{overrides}
"""


def experiment(framework: str, model: str, *overrides: str) -> dict[str, str]:
    text = EXPERIMENT.format(
        framework=framework, model=model, overrides="".join(f"      {line}\n" for line in overrides)
    )
    return {"experiment.yaml": text}


def test_an_experiment_of_primus_with_megatron_is_read() -> None:
    files = experiment(
        "megatron", "llama3.1_8B", "micro_batch_size: 2", "global_batch_size: 128", "seq_length: 8192", "lr: 1.0e-5",
        "fp8: hybrid", "tensor_model_parallel_size: 2", "add_bias_linear: false", "save: null",
    )  # fmt: skip
    parsed = parse_launch(files, EIGHT)
    assert parsed.target is TARGET
    assert parsed.launch.model.name in ("llama-3-8b", "llama-3.1-8b")
    assert parsed.launch.job.precision == "fp8_delayed"
    assert parsed.launch.layout == Layout.parse("fsdp=4 tp=2 zero_stage=1 sequence_parallel=true micro_batch_seqs=2")
    assert (parsed.launch.job.num_seqs, parsed.launch.job.seq_len) == (128, 8192)


def test_an_experiment_of_primus_with_torchtitan_is_read() -> None:
    files = experiment(
        "torchtitan",
        "llama3.1_8B",
        "training: {local_batch_size: 4, seq_len: 8192}",
        "activation_checkpoint: {mode: full}",
    )
    parsed = parse_launch(files, EIGHT)
    assert parsed.target.name == "torchtitan-toml"
    assert parsed.launch.layout == Layout.parse("fsdp=8 zero_stage=3 micro_batch_seqs=4 recompute=full")
    assert (parsed.launch.job.num_seqs, parsed.launch.job.precision) == (32, "bf16_fp32_reduction")


def test_an_experiment_of_primus_with_maxtext_is_read() -> None:
    files = experiment(
        "maxtext", "llama2_7B", "per_device_batch_size: 4", "max_target_length: 4096", "ici_fsdp_parallelism: -1"
    )
    parsed = parse_launch(files, EIGHT)
    assert parsed.target.name == "maxtext-gpu"
    assert (parsed.launch.model.name, parsed.launch.job.precision) == ("llama-2-7b", "bf16_bf16_state")
    assert parsed.launch.layout.recompute == "full"


@pytest.mark.parametrize(
    ("files", "problem"),
    [(experiment("megatron", "zebra_llama_1B", "micro_batch_size: 2"), "model: found 'zebra_llama_1B'"),
     (experiment("megatron", "llama3_9B", "micro_batch_size: 2"), "did you mean 'llama3_8B'"),
     ({"experiment.yaml": "modules:\n  pre_trainer: 3\n"}, "found 1 of pre_trainer"),
     ({"experiment.yaml": "modules:\n  other: {}\n"}, "found 0 of pre_trainer"),
     ({"model_config.yaml": "MODEL_ARGS: 3\n"}, "MODEL_ARGS is int"),
     ({"model_config.yaml": "MODEL_ARGS:\n"}, "MODEL_ARGS is NoneType")],
)  # fmt: skip
def test_what_is_no_experiment_is_refused(files: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        parse_launch(files, EIGHT, target="megatron")


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size"),
    [("--tokenizer-type GPT2BPETokenizer", 50257), ("--tokenizer-type Llama2Tokenizer --tokenizer-model /t.model", 32000),
     ("--tokenizer-type TikTokenizer", 131072), ("--tokenizer-type NullTokenizer --vocab-size 131071", 131072),
     ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B", 151936), ("--vocab-size 77", 77)],
)  # fmt: skip
def test_the_tokenizer_tells_the_vocabulary(tokenizer: str, vocab_size: int) -> None:
    assert read_script(f"{SIZES}{BATCH}{tokenizer}").launch.model.vocab_size == vocab_size


def test_what_the_arguments_leave_out_is_megatrons_default() -> None:
    parsed = read_script(f"{SIZES}{VOCABULARY}--swiglu --tensor-model-parallel-size 2")
    assert parsed.launch.model.d_ff == 128  # int(4·64·2/3/64)·64
    assert parsed.launch.job.num_seqs == 4  # a micro-batch of each replica
    grown = read_script(f"{SIZES}{VOCABULARY}--step-batch-size-schedule '0:384 200B:768 400B:1152'")
    assert grown.launch.job.num_seqs == 1152
    assert any("grows" in note for note in grown.notes)


def test_norms_of_latent_attention_are_its_own() -> None:
    dims = "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    latent = f"{SIZES}{BATCH}{VOCABULARY}--multi-latent-attention {dims}"
    with_norms, without = read_script(f"{latent} --qk-layernorm"), read_script(latent)
    assert with_norms.launch.model == without.launch.model
    assert not with_norms.launch.model.qk_norm
    assert any("qk-layernorm" in note for note in without.notes)


@pytest.mark.parametrize(
    ("option", "optimizer"),
    [("--optimizer dist_muon", "muon"), ("--optimizer muon", "muon"), ("--optimizer sgd", "sgd"), ("", "adamw")],
)
def test_optimizers_of_megatron(option: str, optimizer: str) -> None:
    assert read_script(f"{SIZES}{BATCH}{VOCABULARY}{option}").launch.job.optimizer == optimizer


def test_fsdp_of_pytorch_shards_all() -> None:
    sharded = read_script(f"{SIZES}{BATCH}{VOCABULARY}--use-torch-fsdp2").launch.layout
    gathered = read_script(
        f"{SIZES}{BATCH}{VOCABULARY}--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"
    ).launch.layout
    assert (sharded.fsdp, sharded.zero_stage, gathered.zero_stage) == (8, 3, 2)


def test_experts_that_are_split_otherwise_than_layers_are_refused() -> None:
    experts = f"{SIZES}{BATCH}{VOCABULARY}--num-experts 4 --tensor-model-parallel-size 4 --expert-tensor-parallel-size"
    assert read_script(f"{experts} 1").launch.layout.etp == 1
    assert read_script(f"{experts} 4").launch.layout.etp is None
    with pytest.raises(InputError, match="found 2 beside 4 of layers"):
        read_script(f"{experts} 2")


def test_exchanges_of_two_levels_are_priced_as_a_ring_and_noted() -> None:
    parsed = read_script(f"{SIZES}{BATCH}{VOCABULARY}--context-parallel-size 4 --cp-comm-type a2a+p2p")
    assert parsed.launch.layout.cp_variant == "zigzag"
    assert any("a2a+p2p" in note for note in parsed.notes)
    with pytest.raises(InputError, match="cp-comm-type: found 'ring'"):
        read_script(f"{SIZES}{BATCH}{VOCABULARY}--context-parallel-size 4 --cp-comm-type ring")


@pytest.mark.parametrize("program", ["pretrain_bert.py", "pretrain_t5.py", "tools/run_text_generation_server.py"])
def test_programs_that_train_no_decoder_are_refused(program: str) -> None:
    with pytest.raises(InputError, match="no training of a decoder"):
        parse_launch({"launch.sh": f"torchrun {program} {SIZES}{BATCH}{VOCABULARY}"}, EIGHT, target="megatron")


@pytest.mark.parametrize(
    "option",
    ["--hybrid-layer-pattern M-M*", "--spec megatron.core.models.mamba.spec stack", "--attention-output-gate",
     "--experimental-attention-variant gated_delta_net", "--no-rope-freq 4", "--moe-latent-size 32"],
)  # fmt: skip
def test_options_that_make_another_model_are_refused(option: str) -> None:
    with pytest.raises(InputError, match="which makes the model another one"):
        read_script(f"{SIZES}{BATCH}{VOCABULARY}{option}")


def test_a_model_that_the_user_names_replaces_what_options_make_of_it() -> None:
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES}{BATCH}{VOCABULARY}--hybrid-layer-pattern M-M*"
    model = load_model("tiny-llama-15m")
    assert parse_launch({"launch.sh": script}, EIGHT, model=model).launch.model == model


def test_options_that_change_memory_withhold_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "launch.sh"
    options = (
        "--fp8-param-gather --moe-enable-deepep --attention-backend flash --main-grads-dtype fp32 --log-interval 5"
    )
    path.write_text(f"torchrun pretrain_gpt.py {SIZES}{BATCH}{VOCABULARY}{options}")
    launch = sw.read_launch(path, "h100:8")
    assert launch.parsed.not_priced == {"fp8-param-gather": "memory", "moe-enable-deepep": "time"}
    assert launch.parsed.unread == ("attention-backend", "main-grads-dtype", "log-interval")
    from shardwise.present.command_line import main  # the verb prints what a user sees

    assert main(["read", str(path), "--cluster", "h100:8"]) == 0
    printed = capsys.readouterr().out
    assert "whether it fits is not known" in printed
    assert "moe-enable-deepep changes time, which is left out" in printed


def test_every_option_of_megatron_stands_in_one_list() -> None:
    arguments = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 8, "micro-batch-size": 1}
    variants: tuple[dict[str, object], ...] = (
        {}, {"num-experts": 4, "multi-latent-attention": True, "pipeline-model-parallel-size": 2},
        {"num-experts": 4, "group-query-attention": True, "context-parallel-size": 2, "cp-comm-type": ["a2a+p2p"]},
        {"recompute-granularity": "selective", "window-size": "1,0"}, {"use-torch-fsdp2": True},
        {"position-embedding-type": "yarn", "rotary-scaling-factor": 2.0}, {"use-rope-scaling": True},
        {"num-experts": 4, "moe-router-num-groups": 2, "moe-router-group-topk": 1},
    )  # fmt: skip
    read: set[str] = set()
    for variant in variants:
        reader = OptionReader({**arguments, **variant}, EIGHT)
        from_options(TARGET, reader)
        read |= reader.read_names
    effects = {name: option.effect for name, option in TARGET.options.items()}
    assert set(effects.values()) == {"priced", "none", *UNPRICED_EFFECTS}
    priced = {name for name, effect in effects.items() if effect == "priced"}
    assert priced | {"hierarchical-context-parallel-sizes"} == read & effects.keys() | {
        "hierarchical-context-parallel-sizes"
    }


EARLIER_TOML = """
[model]
name = "llama3"
flavor = "8B"

[training]
batch_size = 1
seq_len = 8192
compile = true
tensor_parallel_degree = 2
data_parallel_shard_degree = -1

[experimental]
pipeline_parallel_degree = 1

[float8]
enable_fsdp_float8_all_gather = false
"""


def test_options_of_torchtitan_are_read_under_their_earlier_names() -> None:
    parsed = parse_launch({"train.toml": EARLIER_TOML}, EIGHT)
    assert (parsed.launch.layout.tp, parsed.launch.layout.micro_batch_seqs, parsed.launch.job.num_seqs) == (2, 1, 4)
    assert parsed.unknown == ()
    assert not any("compiled" in note for note in parsed.notes)
    eager = parse_launch({"train.toml": EARLIER_TOML.replace("compile = true", "")}, EIGHT)
    assert any("not compiled" in note for note in eager.notes)


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan-toml", "maxtext"])
def test_every_option_of_a_configuration_stands_in_one_list(name: str) -> None:
    target = get_target(name)
    effects = {option: entry.effect for option, entry in target.options.items()}
    assert set(effects.values()) == {"priced", "none", *UNPRICED_EFFECTS}
    recipes = ("bf16", "bf16_bf16_state") if name == "maxtext" else ("bf16_fp32_reduction", "fp8_torchao")
    for recipe, layout in zip(
        recipes, ("fsdp=8 zero_stage=3", "fsdp=2 tp=2 pp=2 zero_stage=2 schedule=1f1b"), strict=True
    ):
        layout = layout if name != "maxtext" else "fsdp=8 zero_stage=3"
        job = Job(global_batch_tokens=64 * 4096, seq_len=4096, precision=recipe, tokens=1e9)
        launch = Launch(model=load_model("llama-3-8b"), job=job, layout=Layout.parse(layout), machines=EIGHT)
        reader = OptionReader(to_options(target, launch), EIGHT)
        from_options(target, reader)
        assert {effects[option] for option in reader.read_names & effects.keys()} == {"priced"}


RECIPES = """from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _peft_common, _pretrain_common, _sft_common


def llama3_8b_pretrain_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    return cfg


def llama3_8b_pretrain_long_config() -> ConfigContainer:
    cfg = llama3_8b_pretrain_config()
    cfg.model.context_parallel_size = 2
    cfg.model.seq_length = 16384
    return cfg


def llama3_8b_sft_config() -> ConfigContainer:
    cfg = _sft_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    return cfg


def llama3_8b_lora_config() -> ConfigContainer:
    cfg = _peft_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    return cfg


def llama3_8b_attention_lora_config(peft_scheme: str = "lora") -> ConfigContainer:
    cfg = llama3_8b_lora_config()
    cfg.peft = default_peft_config(peft_scheme, dim=8, target_modules=["linear_qkv"])
    return cfg
"""


def test_a_recipe_of_several_is_chosen_by_name() -> None:
    files = {"llama3.py": RECIPES}
    short = parse_launch(files, EIGHT, target="megatron-bridge", recipe="llama3_8b_pretrain_config").launch
    long = parse_launch(files, EIGHT, recipe="llama3_8b_pretrain_long_config").launch
    tuned = parse_launch(files, EIGHT, recipe="llama3_8b_sft_config").launch
    assert (short.job.seq_len, short.layout.cp, short.layout.tp) == (8192, 1, 2)
    assert (long.job.seq_len, long.layout.cp, long.layout.tp, long.job.num_seqs) == (16384, 2, 2, 64)
    assert (tuned.job.seq_len, tuned.job.num_seqs, tuned.layout.zero_stage) == (2048, 128, 1)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [(None, "found 5 recipes (llama3_8b_pretrain_config"), ("llama3_8b_pretrain", "did you mean 'llama3_8b_pretrain_config'")],
)  # fmt: skip
def test_a_recipe_that_is_not_there_is_refused(recipe: str | None, problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        parse_launch({"llama3.py": RECIPES}, EIGHT, target="megatron-bridge", recipe=recipe)


def test_adapters_of_a_recipe_are_those_of_its_modules() -> None:
    """Defaults of megatron/bridge/peft/lora.py: rank 32, of linear_qkv, linear_proj, linear_fc1 and linear_fc2."""
    whole, attention = (
        parse_launch({"llama3.py": RECIPES}, EIGHT, recipe=recipe)
        for recipe in ("llama3_8b_lora_config", "llama3_8b_attention_lora_config")
    )
    assert (whole.launch.model.name, whole.launch.model.lora_rank) == ("llama-3-8b", 32)
    assert len(whole.launch.model.structure.lora_targets) == 7
    assert (whole.launch.job.seq_len, whole.launch.job.num_seqs) == (2048, 128)
    assert attention.launch.model.lora_rank == 8
    assert sorted(attention.launch.model.structure.lora_targets) == ["k_proj", "q_proj", "v_proj"]
    assert "adapters of linear_qkv and linear_fc1 are priced as one for each of their matrices" in whole.notes


def test_other_frameworks_have_no_recipes_to_choose() -> None:
    with pytest.raises(InputError, match="no recipes to choose from"):
        parse_launch({"model_config.yaml": TEST_CASE}, EIGHT, target="megatron", recipe="a")


REGISTRY = """from torchtitan.trainer import Trainer
from . import model_registry


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(local_batch_size=1, seq_len=8192))


def rl_llama3_8b() -> Controller.Config:
    return Controller.Config(model_spec=model_registry("8B"), trainer=PolicyTrainer.Config())
"""


def test_a_function_of_a_registry_is_read() -> None:
    launch = parse_launch({"config_registry.py": REGISTRY}, EIGHT, target="torchtitan", recipe="llama3_8b").launch
    assert (launch.model.name, launch.job.seq_len, launch.layout.micro_batch_seqs) == ("llama-3-8b", 8192, 1)
    with pytest.raises(InputError, match=r"no Trainer\.Config"):
        parse_launch({"config_registry.py": REGISTRY}, EIGHT, target="torchtitan", recipe="rl_llama3_8b")


def test_a_launch_is_priced_as_its_options_say_not_as_the_stack_usually_runs(tmp_path: Path) -> None:
    path = tmp_path / "llama3.py"
    path.write_text(RECIPES)
    launch = sw.read_launch(path, "h100:8", recipe="llama3_8b_pretrain_config")
    assert launch.plan.layout == launch.parsed.launch.layout
    assert not launch.plan.layout.async_tp
    assert all(change.estimate.step_time_s < launch.plan.estimate.step_time_s for change in launch.better)


def exported_options(name: str) -> dict[str, object]:
    job = Job(global_batch_tokens=8 * 1024, seq_len=1024, precision="bf16_fp32_main_gradients")
    machines = Machines(num_devices=1, devices_per_node=1)
    return to_options(TARGET, Launch(model=load_model(name), job=job, layout=Layout(), machines=machines))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deepseek-v3", {"qk-layernorm": True, "moe-router-enable-expert-bias": True, "rotary-scaling-factor": 40.0, "mscale": 1.0,
                      "mscale-all-dim": 1.0}),
     ("deepseek-v2-lite", {"qk-layernorm": True, "rotary-scaling-factor": 40.0, "mscale": 0.707, "mscale-all-dim": 0.707}),
     ("moonlight-16b-a3b", {"qk-layernorm": True, "moe-router-enable-expert-bias": True, "rotary-scaling-factor": 1.0}),
     ("glm-4.5", {"qk-layernorm": True, "moe-router-enable-expert-bias": True, "rotary-percent": 0.5}),
     ("llama-3.1-8b", {"use-rope-scaling": True, "rope-scaling-factor": 8.0, "position-embedding-type": "rope"}),
     ("gpt-oss-20b", {"position-embedding-type": "yarn", "rotary-scaling-factor": 32.0, "mscale": 1.0, "mscale-all-dim": 0.0,
                      "yarn-original-max-position-embeddings": 4096, "no-yarn-correction-range-round-to-int": True})],
)  # fmt: skip
def test_norms_angles_and_routers_are_exported_to_megatron(name: str, expected: dict[str, object]) -> None:
    """Source of the values: the models' config.json; of the options megatron/training/arguments.py, d98e8a64."""
    options = exported_options(name)
    assert {option: options.get(option) for option in expected} == expected
    reader = OptionReader(options, Machines(num_devices=1, devices_per_node=1))
    restored = with_numerics(load_model(name), from_options(TARGET, reader))
    assert restored.numerics == load_model(name).numerics


def test_latent_attention_without_scaled_angles_says_so_to_bridge() -> None:
    """Megatron Bridge's own default is a factor of 40."""
    options = to_bridge(exported_options("moonlight-16b-a3b"))
    assert options["model.rotary_scaling_factor"] == 1.0
    assert options["model.qk_layernorm"] is True
    assert options["model.moe_router_enable_expert_bias"] is True
    assert to_bridge(exported_options("llama-3.1-8b"))["model.rope_scaling"] is True


def test_harmless_values_of_options() -> None:
    scan, deepep = get_target("maxtext").options["scan_layers"], TARGET.options["moe-enable-deepep"]
    assert (scan.changes(True), scan.changes(False), scan.changes(None)) == (None, "memory", None)
    assert (deepep.changes(True), deepep.changes(False)) == ("time", None)
    assert TARGET.options["attention-backend"].changes("unfused") == "memory"
    assert TARGET.options["attention-backend"].changes("flash") is None
    assert TARGET.options["log-interval"].changes(5) is None


SIZED = """#!/bin/bash
MODEL=$1
BATCH=${2:-16}
case $MODEL in
  8b)
    LAYERS=32; HIDDEN=4096
    ;;
  "70b" | big)
    LAYERS=80
    HIDDEN=8192 ;;
  *)
    LAYERS=4; HIDDEN=64 ;;
esac
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads 4 --seq-length 128 \\
  --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size $BATCH --vocab-size ${VOCABULARY:-512} --bf16
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "sizes"),
    [
        ((), (), (4, 64, 16, 512)),
        (("8b",), (), (32, 4096, 16, 512)),
        (("big", "32"), ("VOCABULARY=1024",), (80, 8192, 32, 1024)),
    ],
)
def test_scripts_are_read_with_arguments_and_environment(
    arguments: tuple[str, ...], environment: tuple[str, ...], sizes: tuple[int, int, int, int]
) -> None:
    files = with_script_context({"launch.sh": SIZED}, arguments, environment)
    parsed = parse_launch(files, EIGHT)
    launch, model = parsed.launch, parsed.launch.model
    assert any("--arg gives them" in note for note in parsed.notes) == (not arguments)
    assert (model.num_layers, model.d_model, launch.job.num_seqs, model.vocab_size) == sizes


def test_columns_of_awk_are_no_arguments_of_a_script() -> None:
    lines = "NODES=$(sinfo | awk '{print $1}')\n"
    parsed = parse_launch({"launch.sh": f"{lines}torchrun pretrain_gpt.py {SIZES}{BATCH}{VOCABULARY}"}, EIGHT)
    assert not any("--arg" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("files", "environment", "problem"),
    [({"launch.sh": ""}, ("VOCABULARY",), "NAME=VALUE is required"), ({"launch.sh": ""}, ("1A=2",), "NAME=VALUE is required"),
     ({"recipe.yaml": ""}, ("A=2",), "no script in recipe.yaml")],
)  # fmt: skip
def test_a_context_without_a_script_is_refused(
    files: dict[str, str], environment: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        with_script_context(files, (), environment)


CHAT = """deepspeed main.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_len 512 \\
  --gradient_accumulation_steps 2 --gradient_checkpointing --zero_stage 3 --dtype bf16 --deepspeed"""


def test_a_script_that_configures_deepspeed_by_arguments_is_read() -> None:
    parsed = parse_launch({"run.sh": CHAT}, EIGHT, target="deepspeed")
    assert (parsed.launch.model.name, parsed.launch.job.seq_len, parsed.launch.job.num_seqs) == ("llama-2-7b", 512, 64)
    assert parsed.launch.layout == Layout.parse("fsdp=8 zero_stage=3 micro_batch_seqs=4 recompute=full")
    adapted = parse_launch({"run.sh": f"{CHAT} --lora_dim 128"}, EIGHT, target="deepspeed").launch.model
    assert (adapted.lora_rank, adapted.lora_targets) == (128, ("q_proj", "v_proj"))
    with pytest.raises(InputError, match=re.escape("'facebook/opt-1.3b', which the catalogue lacks")):
        parse_launch(
            {"run.sh": CHAT.replace("meta-llama/Llama-2-7b-hf", "facebook/opt-1.3b")}, EIGHT, target="deepspeed"
        )
