"""The command line as a user meets it: help, reports, JSON, errors, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.model import policy_names
from shardwise.present.command_line import build_parser, main, verb_parsers
from shardwise.search.plan import software_versions
from shardwise.search.plan_file import load_plan, parse_plan, plan_payload
from shardwise.search.verdicts import RESOLUTION
from shardwise.values.units import format_bytes

PLAN = ["plan", "llama-3-8b", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "8192", "--tokens", "1T"]
ESTIMATE = ["estimate", *PLAN[1:]]

ADAPTERS = ["--set", "model.lora_rank=16", "--set", "model.lora_targets=qkv, mlp"]

# Flags are chosen by hand: a new one shows here first.
FLAGS = {
    "explain": [
        "--against",
        "--batch-tokens",
        "--help",
        "--json",
        "--noise-scale",
        "--overlap",
        "--precision",
        "--report",
        "--seq-len",
        "--set",
        "--stack",
        "--term",
        "--tokens",
        "--verbose",
    ],
    "instructions": ["--all", "--help", "--json", "--pass", "--stage", "--unit"],
    "memory": [
        "--batch-tokens",
        "--help",
        "--json",
        "--layout",
        "--overlap",
        "--plot",
        "--plot-kept",
        "--precision",
        "--seq-len",
        "--set",
        "--stack",
        "--tokens",
        "--verbose",
    ],
    "kv-cache": ["--batch", "--context", "--dtype", "--help", "--json", "--no-runtime", "--on", "--set", "--weights"],
    "schedule": [
        "--csv",
        "--draw",
        "--help",
        "--json",
        "--memory-limit",
        "--micro-batches",
        "--round-size",
        "--stages",
        "--times",
        "--trace",
        "--virtual-stages",
    ],
    "experiments": [
        "--help",
        "--json",
        "--ledger",
        "--on",
        "--out",
        "--set",
        "--verbose",
    ],
    "serve": [
        "--acceptance",
        "--attention-weights",
        "--cache",
        "--cached",
        "--calibration",
        "--cluster",
        "--concurrency",
        "--draft-tokens",
        "--engine",
        "--env",
        "--expert-weights",
        "--file",
        "--from",
        "--help",
        "--isl",
        "--json",
        "--layout",
        "--max-batched-tokens",
        "--max-num-seqs",
        "--memory-fraction",
        "--model",
        "--osl",
        "--out",
        "--pareto",
        "--rate",
        "--release",
        "--set",
        "--tpot",
        "--ttft",
        "--verbose",
        "--weights",
    ],
    "roofline": [
        "--causal",
        "--dtype",
        "--from",
        "--help",
        "--json",
        "--layout",
        "--plot",
        "--set",
        "--unfused",
        "--weights",
        "--with",
    ],
    "simulate": ["--contention", "--draw", "--help", "--json", "--overlap", "--trace", "--verbose"],
    "precision": ["--help", "--json", "--plot"],
    "show": ["--against-transformers", "--chip", "--help", "--json", "--precision"],
    "explore": ["--at", "--help", "--host", "--json", "--no-browser", "--port", "--run", "--static"],
    "export": ["--help", "--json", "--out", "--pools", "--to"],
    "figures": ["--help", "--json", "--out"],
    "rule": ["--help", "--json"],
    "completion": ["--help", "--json"],
    "doctor": ["--help", "--json"],
    "mcp": ["--help", "--json", "--tool"],
    "read": [
        "--arg",
        "--batch-seqs",
        "--cluster",
        "--env",
        "--from",
        "--help",
        "--json",
        "--micro-batch-seqs",
        "--model",
        "--out",
        "--recipe",
        "--seq-len",
        "--verbose",
    ],
    "bench": ["--device", "--dtype", "--help", "--json", "--out", "--processes"],
    "calibrate": [
        "--bench",
        "--cluster",
        "--help",
        "--json",
        "--launch",
        "--name",
        "--out",
        "--run",
        "--runs",
        "--stack",
    ],
    "mfu": [
        "--batch-tokens",
        "--cluster",
        "--help",
        "--json",
        "--launch",
        "--layout",
        "--model",
        "--plan",
        "--precision",
        "--row",
        "--seq-len",
        "--set",
        "--stack",
        "--step-time",
        "--tokens-per-s",
    ],
    "tokenize": [
        "--end-of-document",
        "--force",
        "--glob",
        "--held-out",
        "--help",
        "--json",
        "--out",
        "--python-library",
        "--tokenizer",
        "--vocab-size",
    ],
    "kernels": ["--chip", "--compile-for", "--device", "--help", "--json"],
    "verify": ["--help", "--json", "--seed", "--set", "--steps"],
    "train": [
        "--batch-lr",
        "--batch-schedule",
        "--checkpoint-every",
        "--clip",
        "--data",
        "--decay",
        "--device",
        "--elastic",
        "--force",
        "--from",
        "--help",
        "--json",
        "--keep-every",
        "--keep-last",
        "--learning-rate",
        "--noise-scale-every",
        "--out",
        "--policy",
        "--profile",
        "--reduce",
        "--resume",
        "--schedule",
        "--seed",
        "--set",
        "--steps",
        "--tensorboard",
        "--to-loss",
        "--validate-every",
        "--warmup",
    ],
    "reconcile": ["--help", "--json", "--plot", "--report", "--verbose"],
    "trace": ["--bottlenecks", "--help", "--json", "--memory", "--out", "--step", "--verbose"],
    "rehearse": ["--help", "--json", "--rank", "--set"],
    "validate": [
        "--bound",
        "--chip",
        "--folds",
        "--groups",
        "--help",
        "--json",
        "--plot",
        "--report",
        "--rows",
        "--serving",
        "--source",
    ],
    "plan": [
        "--batch-schedule",
        "--batch-tokens",
        "--budget",
        "--csv",
        "--deadline",
        "--divisible",
        "--draw",
        "--export",
        "--help",
        "--json",
        "--max",
        "--minimise",
        "--noise-scale",
        "--out",
        "--overlap",
        "--pin",
        "--precision",
        "--report",
        "--runnable",
        "--seq-len",
        "--set",
        "--stack",
        "--sweep",
        "--to-loss",
        "--tokens",
        "--verbose",
    ],
    "matmul": [
        "--backward",
        "--draw",
        "--dtype",
        "--emit",
        "--free",
        "--help",
        "--json",
        "--mesh",
        "--objective",
        "--on",
        "--run",
        "--size",
        "--verify",
    ],
    "reshard": [
        "--draw",
        "--dtype",
        "--emit",
        "--help",
        "--json",
        "--mesh",
        "--objective",
        "--on",
        "--run",
        "--size",
        "--verify",
    ],
    "convert": [
        "--dtype",
        "--ep",
        "--help",
        "--json",
        "--make-vocab-size-divisible-by",
        "--model",
        "--out",
        "--pp",
        "--seq-len",
        "--to",
        "--tp",
        "--transformer-impl",
    ],
    "collective": ["--axes", "--draw", "--dtype", "--help", "--json", "--on", "--one-way"],
    "cheat-sheet": [
        "--a4",
        "--batch-tokens",
        "--help",
        "--json",
        "--letter",
        "--overlap",
        "--precision",
        "--seq-len",
        "--set",
        "--stack",
        "--tokens",
    ],
    "network": ["--bytes", "--draw", "--help", "--json", "--layout", "--verbose"],
    "estimate": [
        "--batch-schedule",
        "--batch-tokens",
        "--help",
        "--json",
        "--layout",
        "--overlap",
        "--precision",
        "--seq-len",
        "--set",
        "--stack",
        "--tokens",
        "--verbose",
    ],
    "batch": [
        "--batch-lr",
        "--batches",
        "--data",
        "--help",
        "--json",
        "--learning-rate",
        "--learning-rates",
        "--out",
        "--plot",
        "--processes",
        "--seeds",
        "--set",
        "--step",
        "--steps",
        "--to-loss",
        "--tokens",
        "--tolerance",
        "--warmup",
    ],
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_of_the_help_can_be_pinned(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    """The plan is the fastest with it: no other micro-batch or stage of ZeRO is."""
    _, out, err = run(capsys, *PLAN, "--pin", f"recompute={policy}", "--json")
    assert err == ""
    layout, estimated = json.loads(out)["layout"], json.loads(out)["estimate"]
    assert layout["recompute"] == policy
    degrees = " ".join(f"{axis}={layout[axis]}" for axis in ("dp", "fsdp", "tp", "cp", "pp"))
    for zero in (1, 2, 3) if layout["fsdp"] > 1 else (0,):
        for micro in (1, 2, 4):
            text = (
                f"{degrees} zero_stage={zero} micro_batch_seqs={micro} recompute={policy} async_tp={layout['async_tp']}"
            )
            alternative = json.loads(run(capsys, *ESTIMATE, "--layout", text, "--json")[1])["estimate"]
            assert alternative["memory_bytes"] > alternative["memory_capacity_bytes"] or (
                estimated["step_time_s"] <= alternative["step_time_s"] * (1 + RESOLUTION)
            )


def test_verbs_have_exactly_the_listed_flags() -> None:
    flags_by_verb = {
        name: sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
        for name, parser in verb_parsers().items()
    }
    assert flags_by_verb == FLAGS
    top = {flag for action in build_parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert top == {"--help", "--version"}


def test_verbose_plan_report_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *PLAN, "-v")
    assert (code, err) == (0, "")
    for part in (
        "llama-3-8b",
        "MFU",
        "bound by",
        "fits",
        "layout",
        "time of a step",
        "memory of a device",
        "other shapes",
    ):
        assert part in out


def test_plan_payload_has_the_keys_that_other_tools_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *PLAN, "--json")
    payload = json.loads(out)
    assert code == 0
    assert payload["schema"] == "shardwise.plan/3"
    assert {"name", "num_params", "num_active_params"} <= payload["model"].keys()
    assert {"name", "chip", "num_devices"} <= payload["cluster"].keys()
    assert {"seq_len", "global_batch_tokens", "overlap"} <= payload["job"].keys()
    assert payload["layout"].keys() == {
        "dp", "fsdp", "tp", "cp", "pp", "ep", "etp", "num_virtual_stages", "zero_stage", "sequence_parallel", "cp_variant",
        "async_tp", "micro_batch_seqs", "num_micro_batches", "max_seqs_per_replica", "layers_per_stage", "recompute",
        "recompute_layers", "offload", "schedule", "placement", "text",
    }  # fmt: skip
    estimate = payload["estimate"]
    assert {
        "step_time_s", "tokens_per_s_per_device", "mfu", "hfu", "bound", "memory_bytes", "memory_capacity_bytes", "margin",
        "fits", "time", "hidden", "memory", "train_days", "interval90",
    } <= estimate.keys()  # fmt: skip
    assert sum(estimate["time"].values()) == pytest.approx(estimate["step_time_s"], rel=1e-12)
    assert sum(estimate["memory"].values()) == pytest.approx(estimate["memory_bytes"], rel=1e-12)
    assert all({"layout", "estimate", "reason"} <= alternative.keys() for alternative in payload["alternatives"])
    assert all({"name", "value", "verdict"} <= rule.keys() for rule in payload["rules"])
    assert {"space", "num_layouts", "num_illegal_by_rule", "cpu_seconds"} <= payload["search"].keys()
    fastest_s = estimate["step_time_s"] / (1 + RESOLUTION)
    assert all(alternative["estimate"]["step_time_s"] >= fastest_s for alternative in payload["alternatives"])
    assert 0 < payload["bound_s"] < estimate["step_time_s"]


def test_a_plan_file_is_read_back_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    code, out, _ = run(capsys, *PLAN, "--json", "--out", str(target))
    assert code == 0
    again = load_plan(target)
    printed = json.loads(out)
    del printed["published"]  # of the catalogue's runs, which are looked up when a plan is made
    assert json.loads(json.dumps(plan_payload(again))) == printed


def test_estimate_takes_the_payloads_layout(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--json")
    plan = json.loads(out)
    words, text_of_all = [], plan["layout"].pop("text")
    for key, value in plan["layout"].items():
        if key == "placement":
            text = ",".join(value["axes"]) + "@" + ",".join(map(str, value["levels"]))
        elif isinstance(value, list):
            text = ",".join(map(str, value))
        else:
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else {"etp": "none"}.get(key, "all")
                if value is None
                else str(value)
            )
        words.append(f"{key}={text}")
    for layout in (" ".join(words), text_of_all):
        code, out, _ = run(capsys, *ESTIMATE, "--layout", layout, "--json")
        assert code == 0
        assert json.loads(out)["estimate"] == plan["estimate"]


def test_layers_of_each_stage_are_a_choice_where_they_are_not_the_natural_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    layout = "pp=4 fsdp=2 layers_per_stage=6,9,9,8"
    _, out, _ = run(capsys, *ESTIMATE, "--layout", layout, "-v")
    assert "schedule 1f1b, 1 virtual stages, blocks per stage 6, 2x9, 8" in out
    _, out, _ = run(capsys, *ESTIMATE, "--layout", layout, "--json")
    target.write_text(out)
    again = load_plan(target)
    assert again.layout.layers_per_stage == (6, 9, 9, 8)
    assert "layers_per_stage=6,9,9,8" in str(again.layout)
    payload = plan_payload(again)
    assert payload["layout"]["layers_per_stage"] == [6, 9, 9, 8]
    assert plan_payload(parse_plan(json.loads(json.dumps(payload)))) == payload
    _, natural, _ = run(capsys, *ESTIMATE, "--layout", "pp=4 fsdp=2", "--json")
    layers = json.loads(natural)["layout"]["layers_per_stage"]
    _, explicit, _ = run(
        capsys, *ESTIMATE, "--layout", f"pp=4 fsdp=2 layers_per_stage={','.join(map(str, layers))}", "--json"
    )
    assert explicit == natural
    assert parse_plan(json.loads(explicit)).layout.layers_per_stage is None
    assert json.loads(natural)["estimate"]["step_time_s"] < again.estimate.step_time_s


def test_zero_stage_defaults_to_three_with_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    _, sharded, _ = run(capsys, *ESTIMATE, "--layout", "fsdp=8 recompute=full", "--json")
    _, replicated, _ = run(capsys, *ESTIMATE, "--layout", "dp=8 recompute=full", "--json")
    assert json.loads(sharded)["layout"]["zero_stage"] == 3
    assert json.loads(replicated)["layout"]["zero_stage"] == 0


def test_a_printed_layout_with_whole_experts_can_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("estimate", "deepseek-v3", "h100:256", "--batch-tokens", "4Mi", "--seq-len", "4096", "--layout")
    words = "fsdp=32 tp=8 ep=64 etp=1 recompute=full"
    _, out, _ = run(capsys, *job, words, "-v")
    degrees = next(line.strip() for line in out.splitlines() if line.startswith("  dp="))
    assert degrees == "dp=1 fsdp=32 tp=8 cp=1 pp=1 ep=64 etp=1"
    assert run(capsys, *job, f"{degrees} recompute=full", "-v")[1] == out


def test_set_overrides_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ESTIMATE, "--layout", "fsdp=8 recompute=full", "--json", "--set", "model.num_layers=16",
                    "--set", "chip.memory_bytes=141GB", "--set", "job.overlap=sum")  # fmt: skip
    payload = json.loads(out)
    assert payload["model"]["num_layers"] == 16
    assert payload["estimate"]["memory_capacity_bytes"] == 141e9
    assert payload["job"]["overlap"] == "sum"


def test_a_number_of_bytes_needs_no_unit_where_it_is_one_that_a_chip_can_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in ("9.6e10", "96000000000", "96G", "96 GB"):
        _, out, _ = run(capsys, *ESTIMATE, "--layout", "fsdp=8", "--json", "--set", f"chip.memory_bytes={value}")
        assert json.loads(out)["estimate"]["memory_capacity_bytes"] == 96e9
    code, _, _ = run(capsys, *ESTIMATE, "--layout", "fsdp=8", "--set", "chip.runtime_bytes=0")
    assert code == 0


def test_set_changes_how_the_run_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ESTIMATE, "--layout", "fsdp=8 recompute=full", "--json", "--set", "run.pue=1.1",
                    "--set", "chip.price_usd_per_hour=2.5", "--set", "chip.price_date=2026-01-01")  # fmt: skip
    payload = json.loads(out)
    assert payload["run"]["reliability"]["pue"] == 1.1
    assert payload["run"]["usd"] == pytest.approx(2.5 * payload["run"]["chip_hours"])
    assert payload["run"]["price_date"] == "2026-01-01"
    assert payload["cluster"]["chip_specification"]["sources"]["price_usd_per_hour"] == "set by hand"


def test_report_has_days_and_dollars_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, *ESTIMATE, "--layout", "fsdp=8 recompute=full", "--set", "chip.price_usd_per_hour=2.5", "-v"
    )
    for part in (
        "the whole run",
        "without interruptions",
        "goodput",
        "chip-hours, $",
        "at $2.50 a chip-hour",
        "PUE 1.56",
    ):
        assert part in out
    _, out, _ = run(capsys, *ESTIMATE[:-2], "--layout", "fsdp=8 recompute=full", "-v")
    assert "the whole run" not in out


def test_report_names_a_local_machine_and_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("estimate", "gpt-2", "local:4", "--batch-tokens", "64Ki", "--seq-len", "1024", "--layout", "fsdp=4")
    _, out, _ = run(capsys, *job, "--precision", "fp32", "--tokens", "10M", "-v")
    assert "local:N is a cluster of N processes that share the catalogue's generic host (show chips cpu)" in out
    assert re.search(r"steps: [\d.]+ min without interruptions, [\d.]+ min with them", out)
    assert "0.0 days" not in out


WRONG = [
    (["plan", "llama-3-8b", "h100:8", "h200:8", "h100:8", *PLAN[3:]], ["cluster: found h100:8 more than once"]),
    (["show", "chips", "local"], ["'local'", "N processes that share the catalogue's generic host", "'cpu'"]),
    (["roofline", "matmul", "B=8,D=8,F=8", "local"], ["'local'", "N processes", "'cpu'"]),
    (
        ["plan", "gpt-2", "local:4", "--batch-tokens", "64Ki", "--seq-len", "1024"],
        ["no sourced bf16 peak", "--precision fp32"],
    ),
    (["plan", "llama-9", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "4096"], ["'llama-9'", "llama-3-8b"]),
    (["plan", "llama-3-8b", "h100", "--batch-tokens", "1Mi", "--seq-len", "4096"], ["'h100'", "h100:512"]),
    (["plan", "llama-3-8b", "h900:8", "--batch-tokens", "1Mi", "--seq-len", "4096"], ["'h900'", "tpu-v5p"]),
    (["plan", "llama-3-8b", "h100:12", "--batch-tokens", "1Mi", "--seq-len", "4096"], ["nodes of 8", "8 and 16"]),
    (
        ["plan", "llama-3-8b", "tpu-v5p:512", "--batch-tokens", "1Mi", "--seq-len", "4096"],
        ["torus of 3 axes", "16x20x28"],
    ),
    (
        ["plan", "llama-3-8b", "tpu-v5p:32x32x32", "--batch-tokens", "1Mi", "--seq-len", "4096"],
        ["larger than a pod", "8960"],
    ),
    (["plan", "llama-3-8b", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "5000"], ["1048576", "1045000", "1050000"]),
    (["plan", "llama-3-8b", "h100:8", "--batch-tokens", "lots", "--seq-len", "nan"], ["'lots'", "'nan'"]),
    (["plan", "llama-3-8b", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "-4096"], ["'-4096'"]),
    ([*ESTIMATE, "--layout", "tp=3 fsdp=8"], ["24", "8 devices", "32 query heads"]),
    ([*ESTIMATE, "--layout", "tp=8 zero=3"], ["'zero=3'", "zero_stage"]),
    ([*ESTIMATE, "--layout", "fsdp=8 recompute=some"], ["'some'", "selective"]),
    ([*ESTIMATE, "--layout", "fsdp=8 num_micro_batches=3"], ["num_micro_batches is 3", "8 follows"]),
    ([*ESTIMATE, "--layout", "fsdp=8 schedule=1f1b"], ["'1f1b'", "'none' is required"]),
    (
        [*ESTIMATE, "--layout", "fsdp=2 pp=4 schedule=dualpipe micro_batch_seqs=8"],
        [
            "dualpipe requires at least 8 micro-batches in multiples of 2 and an even pp",
            "there are 4",
            "schedule=1f1b",
        ],
    ),
    (
        [*ESTIMATE, "--layout", "fsdp=2 pp=4 layers_per_stage=8,8,8,9"],
        ["layers_per_stage: 33 layers are given, llama-3-8b has 32"],
    ),
    ([*ESTIMATE, "--layout", "pp=8 layers_per_stage=16,16"], ["2 stages are given for pp = 8"]),
    ([*ESTIMATE, "--layout", "pp=8 layers_per_stage=25,1,1,1,1,1,1,-1"], ["found '-1'; a whole number of at least"]),
    (
        [*ESTIMATE, "--layout", "pp=8 num_virtual_stages=2 layers_per_stage=7,4,1,4,4,4,4,4"],
        ["stage 2 of 1 layers is in num_virtual_stages = 2 parts; at least 2 layers are required"],
    ),
    ([*ESTIMATE, "--layout", "fsdp=8", "--set", "model.colour=red"], ["no 'colour'", "d_model"]),
    ([*ESTIMATE, "--layout", "fsdp=8", "--set", "num_layers=2"], ["model.NAME=VALUE"]),
    ([*PLAN, "--set", "run.pue=0.5"], ["pue is 0.5", "1 to 10 is required"]),
    (
        [*PLAN, "--set", "chip.memory_bytes=96"],
        ["--set chip.memory_bytes: found '96', which is 96 B; a unit is required, such as 80 GB"],
    ),
    (
        [*PLAN, "--set", "chip.memory_bytes_per_s=3.35"],
        ["found '3.35', which is 3.35 B/s; a unit is required, such as 3.35 TB/s"],
    ),
    ([*PLAN, "--set", "model.num_layer=8"], ["no 'num_layer' (did you mean 'num_layers'?)"]),
    ([*PLAN, "--set", "modle.num_layers=8"], ["found 'modle.num_layers=8' (did you mean 'model'?)"]),
    ([*ESTIMATE, "--layout", "fsdp=8 recompte=full"], ["found 'recompte=full' (did you mean 'recompute'?)"]),
    *(
        (
            [verb, "gpt-2", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "4096", *layout],
            ["sequences of 4,096 tokens", "1,024 rows", "--seq-len 1024", "model.max_positions=4096"],
        )
        for verb, layout in (("plan", ()), ("estimate", ("--layout", "fsdp=8")), ("memory", ("--layout", "fsdp=8")))
    ),
    ([*PLAN, "--set", "run.colour=2"], ["no 'colour'", "failures_per_device_hour"]),
    (
        [*PLAN, "--set", "chip.memory_bytes=141GB/s"],
        ["--set chip.memory_bytes", "'141GB/s'", "a number in B is required"],
    ),
    ([*PLAN[:-2], "--tokens", "15 TB"], ["--tokens", "'15 TB'", "a number without a unit is required"]),
    ([*PLAN[:5], "--seq-len", "8192 B"], ["--seq-len", "'8192 B'", "a number without a unit is required"]),
    (["collective", "all-gather", "1GB/s", "--axes", "4", "--on", "tpu-v5e"], ["SIZE", "'1GB/s'", "a number in B"]),
    ([*PLAN, "--precision", "fp7"], ["'fp7'", "bf16"]),
    ([*PLAN, "--overlap", "none"], ["'none'", "per_axis, sum, max"]),
    ([*PLAN, "--out", "/nowhere/at/all/plan.json"], ["cannot write"]),
]


@pytest.mark.parametrize(
    ("arguments", "parts"), WRONG, ids=lambda value: " ".join(value[-4:]) if len(value) > 4 else None
)
def test_wrong_input_exits_2_with_the_problem(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([*PLAN[:-2], "--tokens", ""], "--tokens"),
        ([*PLAN, "--out", " "], "--out"),
        ([*PLAN, "--pin", ""], "--pin"),
        (["plan", "", *PLAN[2:]], "model"),
        (["plan", "llama-3-8b", "h100:8", "", *PLAN[3:]], "cluster"),
        (["matmul", "A[I, J] * B[J]", "--mesh", "X=2", "--size", ""], "--size"),
        (["kv-cache", "llama-3-8b", "--context", "8", "--on", ""], "--on"),
        (["explain", "plan.json", "--term", ""], "--term"),
        (["explain", ""], "PLAN"),
        (["show", "models", ""], "NAME"),
    ],
)
def test_an_empty_argument_is_refused(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.search(rf"argument {name}\b.*: found '\s*'; a value is required", capsys.readouterr().err, re.I)


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", "llama-3-8b", "h100:8", "--layout", "fsdp=8", "--plot", "bars.gif"],
        ["roofline", "matmul", "B=8,D=8,F=8", "h100", "--plot", "lines"],
        ["roofline", "matmul", "B=8,D=8,F=8", "h100", "--plot", ""],
        ["collective", "all-gather", "1MB", "--axes", "4", "--on", "tpu-v5e", "--draw", "steps.ps"],
        ["matmul", "A[I, J] * B[J]", "--mesh", "X=2", "--size", "I=4,J=4", "--draw", "shards.jpeg"],
    ],
)
def test_a_picture_of_another_kind_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "a name that ends in .svg, .png, .pdf is required" in capsys.readouterr().err


def test_negative_memory_terms_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The peak of the first stage is where saved tensors of a layer have gone: its workspace is below zero."""
    layout = "fsdp=4 pp=2 schedule=1f1b zero_stage=2 layers_per_stage=17,15"
    arguments = [
        "memory",
        "llama-3-8b",
        "h100:8",
        "--layout",
        layout,
        "--seq-len",
        "2048",
        "--set",
        "job.loss=in_place",
    ]
    assert main([*arguments, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["layouts"][0]["stages"][0]
    assert memory["workspace"] < 0
    assert main([*arguments, "-v"]) == 0
    by_term = capsys.readouterr().out.split("by term")[1].split("[1] stages")[0]
    shown = {line.split()[0]: " ".join(line.split()[1:3]) for line in by_term.splitlines() if line.strip()}
    assert shown == {name: format_bytes(size) for name, size in memory.items() if size}


def test_an_unwritable_out_file_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardwise.search.planner.make_plan", lambda *operands, **options: pytest.fail("searched"))
    for target in (tmp_path / "none" / "plan.json", tmp_path):
        code, _, err = run(capsys, *PLAN, "--out", str(target))
        assert code == 2
        assert f"cannot write {target}" in err


def test_counts_of_one_are_singular(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ESTIMATE[:-1], "512Ki", "--layout", "fsdp=8 micro_batch_seqs=8 recompute=full", "-v")
    assert "524K tokens are 1 step: " in out
    assert "8 replicas, 1 micro-batch of 8 sequences each" in out


def test_the_leanest_layout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "-v")
    assert out.count("the least memory; ") == 1
    assert " 0 B less memory" not in out


def test_all_violations_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, *ESTIMATE, "--layout", "tp=3 pp=64 micro_batch_seqs=999 cp=7")
    for rule in ("devices", "heads_by_tp", "sequence_by_cp", "stages", "micro_batch"):
        assert f"layout: {rule}:" in err


def test_nothing_fits_exits_3_with_the_smallest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "llama-3-405b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "8192")
    assert code == 3
    assert "no legal layout fits" in err
    assert "too much" in err
    assert "use more devices" in err


def test_adapters_are_set_on_any_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Planned, priced and read back: the model keeps its adapters, and only these have gradients."""
    file = tmp_path / "plan.json"
    assert main([*PLAN, *ADAPTERS, "--out", str(file)]) == 0
    plan = load_plan(str(file))
    assert (plan.model.lora_rank, plan.model.lora_targets) == (16, ("qkv", "mlp"))
    assert plan.estimate.memory["gradients"] < 1e-2 * plan.estimate.memory["parameters"]
    assert main(["explain", str(file)]) == 0
    capsys.readouterr()
    times = []
    for more in ([], ADAPTERS):
        assert main([*ESTIMATE, "--layout", "fsdp=8", *more, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["estimate"]["step_time_s"])
    assert times[1] < 0.92 * times[0]


def test_adapters_are_a_choice_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """`job.lora_rank` is written to the model, whose weights adapters are; a rank alone has those of all linear layers."""
    payloads = []
    for settings in (
        ["job.lora_rank=16"],
        ["model.lora_rank=16", "model.lora_targets=all-linear"],
        ["job.lora_rank=16", "job.lora_targets=qkv,attention_out,mlp"],
    ):
        flags = [word for setting in settings for word in ("--set", setting)]
        assert main([*ESTIMATE, "--layout", "fsdp=8", *flags, "--json"]) == 0
        payloads.append(json.loads(capsys.readouterr().out)["estimate"])
    assert payloads[0] == payloads[1] == payloads[2]
    assert main([*ESTIMATE, "--set", "job.lora_targets=mlp"]) == 2
    assert "lora_rank = 0 and lora_targets = mlp; both are required" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["-m", "shardwise"], ["-m", "shardwise.present.command_line"]])
def test_the_package_runs_as_a_module(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"shardwise {sw.__version__}\n", "")
    assert sw.__version__ == metadata.version("shardwise") == software_versions()["shardwise"]
