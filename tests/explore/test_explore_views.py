"""What the page shows is what the commands print with --json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from explore.opened import opened_run

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.present.explorer.answer_workers import dump_payload
from shardwise.present.explorer.background_search import report_searches
from shardwise.present.explorer.explorer import QUESTIONS, Explorer
from shardwise.present.explorer.number_provenance import NUMBERS
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.search.plan import plan_layout
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS

JOB = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192"
LAYOUTS = ["tp=2 pp=4 fsdp=8 zero_stage=1", "fsdp=64", "tp=8 cp=2 fsdp=4 recompute=full"]
ARGUMENTS = ["llama-3-8b", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192"]


def ask(question: str, layout: str, more: str = "") -> dict[str, Any]:
    answer = Explorer(NameResolver()).answer(question, f"{JOB}&layout={layout.replace(' ', '+')}{more}")
    payload: dict[str, Any] = json.loads(dump_payload(answer))
    return payload


def run_verb(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    return payload


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimate_and_memory_are_those_of_the_commands(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("overview", layout)
    assert answer["estimate"] == run_verb(capsys, "estimate", *ARGUMENTS, "--layout", layout)
    assert answer["memory"] == run_verb(capsys, "memory", *ARGUMENTS, "--layout", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_roofline_is_that_of_the_command(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("roofline", layout)
    assert answer["roofline"] == run_verb(capsys, "roofline", "llama-3-8b", "T=8192", "h100", "--layout", layout)


def test_the_schedule_is_that_of_the_command_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("schedule", LAYOUTS[0])
    assert answer["schedule"] == run_verb(capsys, *shlex.split(answer["command"])[1:])


def test_the_timeline_is_the_simulation_of_the_plan() -> None:
    answer = ask("timeline", LAYOUTS[0])
    assert answer["num_ranks"] == 4
    expected = answer["simulation"]
    for rank, shown in zip(expected["ranks"], answer["ranks"], strict=True):
        drawn = sum((end - start) * busy for start, end, _, busy in shown["compute"])
        assert drawn == pytest.approx(sum(rank["computed_s"].values()), rel=2e-3)
        assert max(value for _, value in shown["curve"]) == rank["peak_bytes"]
        assert all(0 <= start <= end <= answer["end_s"] * (1 + 1e-9) for start, end, _, _ in shown["compute"])


def test_a_layout_that_cannot_run_says_why_and_keeps_its_choices() -> None:
    answer = ask("overview", "tp=64")
    assert "heads_by_tp" in answer["problems"][0]
    assert answer["estimate"] is None
    assert {"tp", "pp", "model"} <= {control["name"] for control in answer["controls"]}


@pytest.mark.parametrize("name", [*NUMBERS, *(f"time.{n}" for n in TIME_TERMS), *(f"memory.{n}" for n in MEMORY_TERMS)])
def test_every_number_says_where_it_is_from(name: str) -> None:
    why = ask("why", LAYOUTS[0], f"&term={name}")["why"]
    assert why["words"]
    assert why["formula"]
    assert why["source"]
    assert why["kind"].startswith(("a prediction", "a bound"))
    tree, _, term = name.partition(".")
    answer = ask("overview", LAYOUTS[0])
    estimate = answer["estimate"]
    plain = {**estimate, **estimate["estimate"], **estimate["layout"], **answer["verdict"]}
    expected = estimate["estimate"][tree][term] if term else plain[name]
    assert why["value"] == pytest.approx(expected, rel=1e-12)


def test_formulas_of_numbers_give_their_values() -> None:
    why = {name: ask("why", LAYOUTS[0], f"&term={name}")["why"] for name in NUMBERS}
    inputs = {name: {row["symbol"]: row["value"] for row in answer["inputs"]} for name, answer in why.items()}
    for name in ("step_time_s", "memory_bytes"):
        assert sum(inputs[name].values()) == pytest.approx(why[name]["value"])
    flops, tokens, devices, peak, step = inputs["mfu"].values()
    assert why["mfu"]["value"] == pytest.approx(flops * tokens / (devices * peak * step))
    tokens, step, devices = inputs["tokens_per_s_per_device"].values()
    assert why["tokens_per_s_per_device"]["value"] == pytest.approx(tokens / step / devices)


def placed(payload: Any, keys: list[str]) -> list[tuple[tuple[str, ...], Any]]:
    """What a payload has at the places that a pattern stands for, with what stands for each star."""
    if not keys:
        return [((), payload)]
    first, *remaining = keys
    items = list(payload.items()) if isinstance(payload, dict) else [(str(at), row) for at, row in enumerate(payload)]
    return [
        ((name, *stars) if first == "*" else stars, value)
        for name, row in items if first in (name, "*") and row is not None
        for stars, value in placed(row, remaining)
    ]  # fmt: skip


CALCULATED: dict[str, Callable[..., float]] = {
    "roofline.operations.*.intensity": lambda flops, moved: flops / moved,
    "roofline.operations.*.time_s": lambda flops, moved, peak, rate: max(flops / peak, moved / rate),
    "roofline.critical_intensity": lambda peak, rate: peak / rate,
    "memory_bound_share": lambda a, all_a, b, all_b: (a + b) / (all_a + all_b),
    "simulation.bubble": lambda waiting, step: waiting / (step - waiting),
    "simulation.critical_path.*.share": lambda seconds, step: seconds / step,
    "critical_batch_tokens": lambda tokens, steps: tokens / steps, "min_tokens": lambda noise, steps: noise * steps,
    "times_min_steps": lambda batch, noise: 1 + noise / batch, "times_min_tokens": lambda batch, noise: 1 + batch / noise,
    "rows.*.steps": lambda batch, steps, noise: steps * (1 + noise / batch),
    "rows.*.tokens": lambda batch, steps, noise: steps * (batch + noise),
    "rows.*.days": lambda steps, seconds: steps * seconds / 86_400,
}  # fmt: skip


@pytest.mark.parametrize("question", ["timeline", "roofline", "schedule", "notation", "batch"])
def test_fields_explain_numbers_that_are_there(question: str) -> None:
    answer = ask(question, LAYOUTS[0])
    for place, field in answer["fields"].items():
        expected = placed(answer, place.split("."))
        assert expected, place
        assert all(isinstance(value, int | float) for _, value in expected), place
        assert all(field[name] for name in ("words", "formula", "source", "kind")), place
        inputs = {symbol: dict(placed(answer, where.split("."))) for symbol, where in field["inputs"].items()}
        for stars, value in expected:
            values = [row[stars[: len(next(iter(row)))]] for row in inputs.values()]
            if place in CALCULATED:
                assert value == pytest.approx(CALCULATED[place](*values), rel=1e-9), place
    assert {place for place in CALCULATED if place in answer["fields"]} or question in ("schedule", "notation")


def test_a_bound_says_that_it_is_one() -> None:
    assert ask("why", LAYOUTS[1], "&overlap=sum")["why"]["kind"].startswith("a bound")
    assert ask("overview", LAYOUTS[1], "&overlap=sum")["verdict"]["kind"] == "bound"


def test_copied_commands_and_python_give_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    more = "&stack=nemo-25&precision=fp8_delayed&model.num_layers=16"
    expected = ask("overview", LAYOUTS[0], more)["estimate"]["estimate"]["step_time_s"]
    command = ask("copy", LAYOUTS[0], f"{more}&target=command")["files"]["command"]
    assert run_verb(capsys, *shlex.split(command)[1:])["estimate"]["step_time_s"] == expected
    code = ask("copy", LAYOUTS[0], f"{more}&target=python")["files"]["python"]
    *imports, call = [line for line in code.splitlines() if line]
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    assert eval(call, names).step_time_s == expected


def test_every_target_is_copied_or_says_why_not() -> None:
    for target in ask("copy", LAYOUTS[0])["targets"]:
        answer = ask("copy", LAYOUTS[0], f"&target={target}")
        assert bool(answer["files"]) != bool(answer["problems"])


def test_notation_accounts_for_every_parameter() -> None:
    answer = ask("notation", LAYOUTS[1])
    model = sw.load_model("llama-3-8b")
    weights = [(unit["times"], row) for unit in answer["units"].values() for row in unit["weights"]]
    assert sum(times * row["elements"] for times, row in weights) == 8030261248
    for _, row in weights:
        for shard in row["shards"].values():
            parts = 1
            for number in shard["parts"]:
                parts *= number
            assert parts * shard["copies"] == 64
            assert shard["elements"] * parts >= row["elements"]
            ranks = [rank for holder in shard["holders"] for rank in holder["ranks"]]
            assert len(ranks) == len(set(ranks))
    assert model.num_layers == answer["units"]["block"]["times"]


def test_specs_name_the_axes_that_split_something() -> None:
    answer = ask("notation", LAYOUTS[1])
    sizes = {row["axis"]: row["size"] for row in answer["mesh"]}
    specs = [spec for unit in answer["units"].values() for row in unit["weights"] for spec in row["specs"].values()]
    for spec in [*specs, answer["hidden"]]:
        named = {axis for axis in sizes if re.search(rf"[_{{,]{axis}[,}}\]]", spec)}
        assert all(sizes[axis] > 1 for axis in named), spec
    assert "[D_fsdp]" in specs


def test_sequences_are_split_over_ep_too() -> None:
    job = JOB.replace("llama-3-8b", "mixtral-8x7b")
    answer = Explorer(NameResolver()).answer("notation", f"{job}&layout=fsdp=64+ep=8+zero_stage=3")
    assert answer["hidden"] == "[B_{fsdp,ep}, T, D]"


def test_the_search_finds_what_plan_chooses() -> None:
    job = sw.Job(global_batch_tokens=1 << 19, seq_len=4096)
    model, cluster = sw.load_model("llama-3.2-1b"), sw.load_cluster("h100:8")
    first, last = report_searches(model, cluster, job)
    chosen = sw.plan(model, cluster, job)
    assert first["state"] == "searching"
    assert last["best"] == first["best"]
    assert last["best"]["text"] == str(chosen.layout)
    assert last["best"]["step_time_s"] == chosen.estimate.step_time_s
    times, bytes_ = ([row[name] for row in last["front"]] for name in ("step_time_s", "memory_bytes"))
    assert bytes_ == sorted(bytes_)
    assert times == sorted(times, reverse=True)
    for row in last["points"]:
        assert any(
            front_row["step_time_s"] <= row["step_time_s"] and front_row["memory_bytes"] <= row["memory_bytes"]
            for front_row in last["front"]
        )
    point = last["front"][0]
    priced = plan_layout(model, cluster, job, sw.Layout.parse(point["layout"])).estimate
    assert (priced.step_time_s, priced.memory_bytes) == pytest.approx((point["step_time_s"], point["memory_bytes"]))


def test_a_job_that_does_not_fit_says_so() -> None:
    job = sw.Job(global_batch_tokens=1 << 16, seq_len=8192)
    (answer,) = report_searches(sw.load_model("llama-3-405b"), sw.load_cluster("h100:8"), job)
    assert answer["best"] is None
    assert answer["problems"]


def test_the_critical_batch_takes_twice_the_least_of_both() -> None:
    answer = ask("batch", LAYOUTS[1], "&noise_tokens=1Mi&min_steps=1000")
    row = next(row for row in answer["rows"] if row["batch_tokens"] == answer["critical_batch_tokens"])
    assert (row["steps"], row["tokens"]) == (2000.0, 2 * answer["min_tokens"])
    assert all(
        (row["tokens"] / 2**20 / 1000 - 1) * (row["steps"] / 1000 - 1) == pytest.approx(1) for row in answer["rows"]
    )


def test_a_run_is_asked_for_only_where_one_was_opened() -> None:
    assert "no run was opened" in ask("run", LAYOUTS[1])["problems"][0]


def test_a_run_stands_beside_its_plan_and_no_other_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolver, words = opened_run(tmp_path, monkeypatch)
    capsys.readouterr()
    explorer, expected = Explorer(resolver), run_verb(capsys, "reconcile", *words)
    run = json.loads(dump_payload(explorer.answer("run", "")))
    overview = json.loads(dump_payload(explorer.answer("overview", "")))
    assert run["reconcile"] == overview["reconcile"] == expected
    for place, field in run["fields"].items():
        assert placed(run, place.split(".")), place
        assert field["kind"].startswith(("measured", "a prediction", "a bound", "exact"))
    other_layout = explorer.answer("overview", overview["query"].replace("micro_batch_seqs=1", "micro_batch_seqs=2"))
    assert not other_layout["problems"]
    assert "reconcile" not in other_layout


@pytest.mark.parametrize("question", ["timeline", "schedule"])
def test_pictures_of_many_passes_are_truncated_and_say_so(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(
        dump_payload(Explorer(NameResolver()).answer(question, f"{JOB}&layout=tp=8+pp=8".replace("1Mi", "1Gi")))
    )
    shown = answer["shown"]
    assert (shown["micro_batches"], shown["num_micro_batches"]) == (256, 131_072)
    assert (shown["passes"], shown["num_passes"]) == (4096, 2 * 8 * 131_072)
    if question == "schedule":
        assert answer["schedule"] == run_verb(capsys, *shlex.split(answer["command"])[1:])
        assert (answer["compared"]["micro_batches"], answer["compared"]["num_micro_batches"]) == (32, 131_072)
    else:
        smaller = Explorer(NameResolver()).answer(
            question, f"{JOB}&layout=tp=8+pp=8".replace("1Mi", "2Mi")
        )  # 256 sequences
        assert answer["simulation"] == json.loads(dump_payload(smaller["simulation"]))


def test_pictures_of_all_ranks_and_passes_show_them() -> None:
    for question in ("timeline", "schedule"):
        shown = ask(question, LAYOUTS[0])["shown"]
        assert all(shown[name] == shown[f"num_{name}"] for name in ("micro_batches", "ranks", "passes"))


def test_ranks_that_are_left_out_are_counted() -> None:
    job = "model=llama-3-70b&cluster=h100:512&batch_tokens=1Mi&seq_len=8192"
    shown = Explorer(NameResolver()).answer("timeline", f"{job}&layout=pp=20+tp=8+fsdp=3".replace("512", "480"))[
        "shown"
    ]
    assert (shown["ranks"], shown["num_ranks"]) == (16, 20)


def test_more_stages_than_a_picture_shows_are_refused() -> None:
    job = "model=gpt-3-175b&cluster=a100-80gb:1024&batch_tokens=3Mi&seq_len=2048"
    answer = Explorer(NameResolver()).answer(
        "timeline", f"{job}&layout=pp=48+num_virtual_stages=2".replace("1024", "48")
    )
    assert "at most 4,096" in answer["problems"][0]


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name not in ("pareto", "run", "serving")])
def test_a_layout_that_cannot_run_is_an_answer_to_every_question(question: str) -> None:
    answer = Explorer(NameResolver()).answer(question, f"{JOB}&layout=tp=64")
    assert "heads_by_tp" in answer["problems"][0]
