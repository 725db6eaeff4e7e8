"""What docs/extending.md says of families, policies and other choices is done here, from its own text, and works without more."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executing import Executor, batch_of
from train.stand_in import small_plan, write_inputs

from shardwise.hardware import published_constants, stacks
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout import layout as layout_module
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model import recompute_policies
from shardwise.model.architecture import Architecture
from shardwise.model.huggingface import family_rules
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.optimizers import definition as optimizers
from shardwise.model.parameters_and_flops import num_params
from shardwise.pipeline import registry as pipelines
from shardwise.pipeline import schedule_definition as schedule_module
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import Durations, PassTimes, play_actions
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate, stage_memories
from shardwise.run.engine.model_builder import initial_weights
from shardwise.run.kernels import optimizers as engine_optimizers
from shardwise.search.explain.other_layouts import compare_plan_schedules
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

from .test_derivation import check
from .training_step import Case

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
JOB = ["h100:8", "--batch-tokens", "64Ki", "--seq-len", "4096"]


def block(section: str, language: str) -> str:
    """The first block of code of a language in a section of the page."""
    match = re.search(rf"^## {section}\n.*?^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert match, f"{section} shows no {language}"
    return match.group(1)


def entry(section: str, names: dict[str, Any]) -> tuple[str, Any]:
    """The entry of a table that a section shows."""
    ((name, value),) = eval(f"{{{block(section, 'python')}}}", dict(names)).items()
    return name, value


def test_a_stack_is_one_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be planned with, has what is usual of its kind, and runs that name it are of it."""
    ((name, entry_fields),) = tomllib.loads(block("A software stack", "toml")).items()
    table = {name: entry_fields, **stacks._stack_tables()}
    monkeypatch.setattr(stacks, "_stack_tables", lambda: table)
    kind = published_constants.published_calibration("h100", stacks.get_stack(entry_fields["kind"]))
    calibration = published_constants.published_calibration("h100", stacks.get_stack(name))
    assert (calibration.constants, calibration.spread) == (kind.constants, kind.spread)
    assert stacks.match_stack("My-Trainer 1.2 (my-fork of Megatron)").name == name
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", "fsdp=8", "--stack", name]) == 0
    assert f"predicted for {name}" in capsys.readouterr().out


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The page's family in the table, and its config.json."""
    ((name, table),) = tomllib.loads(block("A model family", "toml")).items()
    tables = family_rules.family_tables()
    assert name not in tables
    monkeypatch.setattr(family_rules, "family_tables", lambda: {**tables, name: table})
    path = tmp_path / "config.json"
    path.write_text(block("A model family", "json"), encoding="utf-8")
    return path


def test_a_family_is_one_rule(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(str(family))
    assert (model.post_norms, model.bias, model.num_layers) == (True, (), 40)
    assert main(["estimate", str(family), *JOB, "--layout", "fsdp=8"]) == 0
    assert "(9.4B parameters) on h100:8" in capsys.readouterr().out


def test_layers_of_other_types_are_kinds(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = re.findall(r"^```toml\n(.*?)^```", TEXT[TEXT.index("## A model family") :], re.DOTALL | re.MULTILINE)[
        :2
    ]
    tables = family_rules.family_tables()
    monkeypatch.setattr(family_rules, "family_tables", lambda: {**tables, **tomllib.loads(second)})
    config = json.loads(family.read_text(encoding="utf-8")) | {"model_type": "acme_hybrid", "sliding_window": 1024}
    family.write_text(json.dumps(config), encoding="utf-8")
    model = load_model(str(family))
    assert (model.layer_counts, model.layer_pattern) == (
        {"full_attention": 10, "block": 30},
        ("block*3", "full_attention"),
    )
    assert (model.unit_architecture("full_attention").positions, model.sliding_window) == ("none", 1024)
    family.write_text(json.dumps({**config, "layer_types": ["conv"] * 40}), encoding="utf-8")
    with pytest.raises(InputError, match="layer_types has 'conv'"):
        load_model(str(family))


def test_a_family_without_its_rule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(block("A model family", "json"), encoding="utf-8")
    with pytest.raises(InputError, match=r"model_type is 'acme' .*, which is not known"):
        load_model(str(path))


@pytest.mark.parametrize("biased", [False, True])
def test_parameters_of_a_new_family_equal_transformers(family: Path, biased: bool) -> None:
    import torch
    import transformers

    config = json.loads(family.read_text(encoding="utf-8")) | {"attention_bias": biased}
    family.write_text(json.dumps(config), encoding="utf-8")
    del config["model_type"]
    described = transformers.AutoConfig.for_model("glm4", tie_word_embeddings=False, **config)  # which has such blocks
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    assert num_params(load_model(str(family))) == sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's policy, where it says: before the one that keeps least."""
    name, value = entry("A recompute policy", vars(recompute_policies))
    assert name not in recompute_policies.POLICIES
    full_policy = recompute_policies.POLICIES["full"]
    monkeypatch.delitem(recompute_policies.POLICIES, "full")
    monkeypatch.setitem(recompute_policies.POLICIES, name, value)
    monkeypatch.setitem(recompute_policies.POLICIES, "full", full_policy)
    return name


def estimate_policy(policy: str) -> Estimate:
    model, cluster = load_model("llama-3.2-1b"), load_cluster("h100:8")
    job = Job(global_batch_tokens=2**18, seq_len=4096)
    return estimate(Problem(model, cluster, job), Layout(fsdp=8, zero_stage=3, recompute=policy))


def test_a_policy_is_one_entry(policy: str) -> None:
    assert Layout(recompute=policy).recompute == policy
    assert Choices().recompute == ("none", "selective", policy, "full")
    assert check(Case(fsdp=2, tp_kv=2, cp=2, zero_stage=3, sequence_parallel=True, recompute=policy)) is None
    between = [estimate_policy(name) for name in ("none", "selective", policy, "full")]
    kept = [estimated.memory["activations"] for estimated in between]
    again = [estimated.time["recompute"] for estimated in between]
    assert kept == sorted(kept, reverse=True)
    assert again == sorted(again)
    assert len(set(kept)) == len(set(again)) == 4


def test_the_engine_runs_a_new_policy(policy: str) -> None:
    """Gradients are those without recomputation, and attention alone is kept."""
    architecture = Architecture(
        name="small", num_layers=2, d_model=8, d_ff=12, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11
    )
    weights, ids = initial_weights(architecture, 0, torch.float64), torch.arange(10).view(2, 5)
    gradients = {}
    for name in ("none", policy):
        executor = Executor(weights, name)
        passes = executor.model.forward(batch_of(ids, ids), ids.numel(), trains=True)
        executor.model.backward(passes)
        gradients[name] = executor.gradients.computed
    assert gradients["none"].keys() == gradients[policy].keys()
    assert all(torch.equal(gradient, gradients[policy][name]) for name, gradient in gradients["none"].items())
    block = executor.model.layers[1].unit
    assert block.unit.saved.keys() == {"x", "attended", "lse"}


def test_the_command_line_knows_a_new_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", f"fsdp=8 recompute={policy}"]) == 0
    assert f"recompute={policy}" in capsys.readouterr().out
    assert main(["plan", "llama-3.2-1b", *JOB, "--pin", f"recompute={policy}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["recompute"] == policy
    for verb in ("plan", "estimate", "memory"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert policy in capsys.readouterr().out


def test_a_policy_without_its_entry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", "fsdp=8 recompute=attention"]) == 2
    assert (
        "recompute is 'attention'; one of none, selective, full, alternate, core_attn, layernorm, moe_act, mla_up_proj, "
        "mlp, moe, shared_experts, keep:TENSOR,..., budget:BYTES is required" in capsys.readouterr().err
    )


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's variant in the table."""
    name, value = entry("A variant of context parallelism", vars(layout_module))
    assert name not in layout_module.CP_VARIANTS
    monkeypatch.setitem(layout_module.CP_VARIANTS, name, value)
    return name


def test_a_variant_is_one_entry(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is priced, searched and listed; its time is that of a ring whose ranks wait for nobody."""
    assert Choices().cp_variant == ("all_gather", "zigzag", "ulysses", variant)
    model, cluster = load_model("llama-3.2-1b"), load_cluster("h100:8")
    job = Job(global_batch_tokens=2**16, seq_len=2**16)
    seconds = {
        name: estimate(Problem(model, cluster, job), Layout(cp=8, zero_stage=3, cp_variant=name)).step_time_s
        for name in ("zigzag", "ring", variant)
    }
    assert seconds[variant] == pytest.approx(seconds["zigzag"])
    assert seconds[variant] < seconds["ring"]
    long = ["llama-3.2-1b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "64Ki"]
    assert main(["plan", *long, "--pin", "cp=8", "--pin", f"cp_variant={variant}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["cp_variant"] == variant


def test_a_variant_without_its_entry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", "cp=8 cp_variant=striped"]) == 2
    assert "cp_variant is 'striped'; one of all_gather, zigzag, ulysses, ring is required" in capsys.readouterr().err


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's schedule in the tables."""
    names: dict[str, Any] = {}
    exec(block("A pipeline schedule", "python"), names)
    name = names["actions"](2, 2).name
    assert name not in pipelines.ALL_SCHEDULES
    for table in (pipelines.ALL_SCHEDULES, pipelines.SCHEDULES):
        monkeypatch.setitem(table, name, names["SCHEDULE"])
    return name


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 9), (8, 64)])
def test_a_schedule_waits_and_holds_as_its_file_says(schedule: str, p: int, m: int) -> None:
    form, line = pipelines.get_schedule(schedule), play_actions(build_actions(schedule, p, m))
    assert line.makespan - m * 3.0 == pytest.approx(form.bubble_s(p, 1, m, schedule_module.PassSeconds(1.0, 2.0)))
    assert line.peak_activations == tuple(form.in_flight(p, 1, m, stage) for stage in range(p))
    late = PassTimes(message_s=1.0)
    slower = [
        play_actions(build_actions(name, p, m), Durations.even(p, times=late)).makespan for name in (schedule, "1f1b")
    ]
    assert slower[0] < slower[1] or m == p


def test_a_schedule_is_one_file(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is checked, priced, compared, searched and listed: the bubble of 1F1B, and nearly twice as many micro-batches held."""
    model, cluster = load_model("llama-3.2-1b"), load_cluster("h100:8")
    job = Job(global_batch_tokens=2**18, seq_len=4096)
    plain = Layout(dp=2, pp=4, schedule="1f1b")
    with_schedule = replace(plain, schedule=schedule)
    times = [estimate(Problem(model, cluster, job), layout).time["bubble"] for layout in (plain, with_schedule)]
    activation_bytes = [
        stage_memories(Problem(model, cluster, job), layout)[0]["activations"] for layout in (plain, with_schedule)
    ]
    assert times[0] == times[1]
    assert activation_bytes[1] / activation_bytes[0] == pytest.approx(7 / 4)
    (staged,) = violations(model, job, 8, replace(with_schedule, num_virtual_stages=2))
    assert staged.startswith("schedule: 'eager_1f1b' with pp = 4 and num_virtual_stages = 2")
    outcomes = {
        outcome.schedule: outcome for outcome in compare_plan_schedules(plan_layout(model, cluster, job, plain))
    }
    assert outcomes[schedule].bubble_s is not None
    assert main(["plan", "llama-3.2-1b", *JOB, "--pin", f"schedule={schedule}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["schedule"] == schedule
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    assert schedule in capsys.readouterr().out


def test_a_schedule_may_be_searched_without_being_asked_for(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedule not in Choices().schedule
    monkeypatch.setitem(pipelines.SCHEDULES, schedule, replace(pipelines.SCHEDULES[schedule], searched=True))
    assert Choices().schedule == (pipelines.NATURAL, schedule)


def test_a_schedule_without_its_entry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", "fsdp=2 pp=4 schedule=eager_1f1b"]) == 2
    assert (
        "schedule is 'eager_1f1b' (did you mean '1f1b'?); one of none, afab, 1f1b, interleaved, zb_h1"
        in capsys.readouterr().err
    )


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The page's file as a module of the room, which the table then finds."""
    name = re.findall(r"as\s`(\w+)\.py`", TEXT.partition("## An optimizer")[2])[0]
    assert name not in optimizers.OPTIMIZERS
    (tmp_path / f"{name}.py").write_text(block("An optimizer", "python"), encoding="utf-8")
    monkeypatch.setattr(sys.modules[optimizers.PACKAGE], "__path__", [*optimizers.FOLDERS, str(tmp_path)])
    monkeypatch.setattr(optimizers, "FOLDERS", [*optimizers.FOLDERS, str(tmp_path)])
    for known, value in optimizers.discover_optimizers():
        monkeypatch.setitem(optimizers.OPTIMIZERS, known, value)
    yield name
    del sys.modules[f"{optimizers.PACKAGE}.{name}"]


def test_an_optimizer_is_one_file(optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is derived, proven on virtual devices, priced and listed: one moment, where AdamW has two."""
    for zero_stage in (0, 1, 2, 3):
        sharded = {"fsdp": 2, "zero_stage": zero_stage} if zero_stage else {"dp": 2}
        check(Case(**sharded, tp_kv=2, sequence_parallel=True, optimizer=optimizer))
    words = ["estimate", "llama-3.2-1b", *JOB, "--layout", "fsdp=8", "--json"]
    payloads = []
    for name in ("adamw", optimizer):
        assert main([*words, "--set", f"job.optimizer={name}"]) == 0
        payloads.append(json.loads(capsys.readouterr().out))
    adamw, added = (payload["estimate"] for payload in payloads)
    assert added["memory"]["optimizer"] == adamw["memory"]["optimizer"] / 2
    assert added["time"]["optimizer"] < adamw["time"]["optimizer"]
    assert payloads[1]["job"]["optimizer_fields"] == {"rate_decay": 0.0, "epsilon": 1e-10}
    for verb, help_text in (
        ("plan", optimizer),
        ("train", "rate_decay: decay of the learning rate in a step (adagrad 0)"),
    ):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert help_text in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_fields_of_a_new_optimizer_reach_the_update(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Set by a flag they are in the run's recipe, and the engine updates as torch.optim.Adagrad does with them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    passed_fields: list[Mapping[str, float]] = []
    original = engine_optimizers.build_torch_optimizer

    def judged(
        name: str, matrices: Any, other_weights: Any, fields: Mapping[str, float], *formats: Any, **kind: bool
    ) -> torch.optim.Optimizer:
        passed_fields.append(fields)
        return original(name, matrices, other_weights, fields, *formats, **kind)

    monkeypatch.setattr("shardwise.run.parallel.sharded_optimizer.build_torch_optimizer", judged)
    flags = write_inputs(tmp_path, small_plan(optimizer=optimizer))
    words = ["--steps", "2", "--set", "recipe.rate_decay=0.1", "--set", "recipe.epsilon=1e-6"]
    assert main(["train", *flags, *words]) == 0
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text(encoding="utf-8"))
    assert (recipe["rate_decay"], recipe["epsilon"]) == (0.1, 1e-6)
    assert "beta1" not in recipe
    assert passed_fields
    assert all(fields == {"rate_decay": 0.1, "epsilon": 1e-6} for fields in passed_fields)
    capsys.readouterr()
    assert main(["train", *flags, "--steps", "2", "--force", "--set", "recipe.rate_decay=2"]) == 2
    assert "recipe: rate_decay is 2.0; a number of at least 0, below 1, is required" in capsys.readouterr().err
    weight_of_engine, weight_of_torch = (
        torch.nn.Parameter(torch.linspace(-1.0, 1.0, 100, dtype=torch.float64)) for _ in range(2)
    )
    adagrad = torch.optim.Adagrad([weight_of_torch], lr=0.1, lr_decay=0.1, eps=1e-6)
    engine_optimizer = original(optimizer, [weight_of_engine], [], passed_fields[0])
    engine_optimizer.param_groups[0]["lr"] = 0.1
    for step in range(4):
        for weight, stepping in ((weight_of_engine, engine_optimizer), (weight_of_torch, adagrad)):
            weight.grad = torch.randn(100, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            stepping.step()
    torch.testing.assert_close(weight_of_engine, weight_of_torch, rtol=1e-12, atol=1e-14)


def test_an_optimizer_without_its_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", *JOB, "--layout", "fsdp=8", "--set", "job.optimizer=adagrad"]) == 2
    assert "optimizer is 'adagrad'; one of adamw, " in capsys.readouterr().err
