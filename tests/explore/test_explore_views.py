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
from shardwise.present.explorer.background_search import found_for
from shardwise.present.explorer.explorer import QUESTIONS, Explorer
from shardwise.present.explorer.number_provenance import NUMBERS
from shardwise.present.explorer.opened_plan import Known
from shardwise.present.explorer.web_server import dumped
from shardwise.search.plan_from_layout import plan_layout
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS

JOB = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192"
LAYOUTS = ["tp=2 pp=4 fsdp=8 zero_stage=1", "fsdp=64", "tp=8 cp=2 fsdp=4 recompute=full"]
ARGUMENTS = ["llama-3-8b", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192"]


def ask(question: str, layout: str, more: str = "") -> dict[str, Any]:
    found = Explorer(Known()).answer(question, f"{JOB}&layout={layout.replace(' ', '+')}{more}")
    payload: dict[str, Any] = json.loads(dumped(found))
    return payload


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    return payload


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimate_and_memory_are_those_of_the_commands(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask("overview", layout)
    assert found["estimate"] == printed(capsys, "estimate", *ARGUMENTS, "--layout", layout)
    assert found["memory"] == printed(capsys, "memory", *ARGUMENTS, "--layout", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_roofline_is_that_of_the_command(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask("roofline", layout)
    assert found["roofline"] == printed(capsys, "roofline", "llama-3-8b", "T=8192", "h100", "--layout", layout)


def test_the_schedule_is_that_of_the_command_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask("schedule", LAYOUTS[0])
    assert found["schedule"] == printed(capsys, *shlex.split(found["command"])[1:])


def test_the_timeline_is_the_simulation_of_the_plan() -> None:
    found = ask("timeline", LAYOUTS[0])
    assert found["num_ranks"] == 4
    own = found["simulation"]
    for rank, shown in zip(own["ranks"], found["ranks"], strict=True):
        drawn = sum((end - start) * busy for start, end, _, busy in shown["compute"])
        assert drawn == pytest.approx(sum(rank["computed_s"].values()), rel=2e-3)
        assert max(held for _, held in shown["curve"]) == rank["peak_bytes"]
        assert all(0 <= start <= end <= found["end_s"] * (1 + 1e-9) for start, end, _, _ in shown["compute"])


def test_a_layout_that_cannot_run_says_why_and_keeps_its_choices() -> None:
    found = ask("overview", "tp=64")
    assert "heads_by_tp" in found["problems"][0]
    assert found["estimate"] is None
    assert {"tp", "pp", "model"} <= {control["name"] for control in found["controls"]}


@pytest.mark.parametrize("name", [*NUMBERS, *(f"time.{n}" for n in TIME_TERMS), *(f"memory.{n}" for n in MEMORY_TERMS)])
def test_every_number_says_where_it_is_from(name: str) -> None:
    why = ask("why", LAYOUTS[0], f"&term={name}")["why"]
    assert why["words"]
    assert why["formula"]
    assert why["source"]
    assert why["kind"].startswith(("a prediction", "a bound"))
    tree, _, own = name.partition(".")
    found = ask("overview", LAYOUTS[0])
    estimate = found["estimate"]
    plain = {**estimate, **estimate["estimate"], **estimate["layout"], **found["verdict"]}
    expected = estimate["estimate"][tree][own] if own else plain[name]
    assert why["value"] == pytest.approx(expected, rel=1e-12)


def test_formulas_of_numbers_give_their_values() -> None:
    why = {name: ask("why", LAYOUTS[0], f"&term={name}")["why"] for name in NUMBERS}
    inputs = {name: {one["symbol"]: one["value"] for one in found["inputs"]} for name, found in why.items()}
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
    first, *rest = keys
    items = list(payload.items()) if isinstance(payload, dict) else [(str(at), one) for at, one in enumerate(payload)]
    return [
        ((name, *stars) if first == "*" else stars, value)
        for name, one in items if first in (name, "*") and one is not None
        for stars, value in placed(one, rest)
    ]  # fmt: skip


CALCULATED: dict[str, Callable[..., float]] = {
    "roofline.operations.*.intensity": lambda flops, moved: flops / moved,
    "roofline.operations.*.time_s": lambda flops, moved, peak, rate: max(flops / peak, moved / rate),
    "roofline.critical_intensity": lambda peak, rate: peak / rate,
    "memory_bound_share": lambda a, all_a, b, all_b: (a + b) / (all_a + all_b),
    "simulation.bubble": lambda waiting, step: waiting / (step - waiting),
    "simulation.critical_path.*.share": lambda seconds, step: seconds / step,
    "critical_batch_tokens": lambda tokens, steps: tokens / steps, "min_tokens": lambda noise, steps: noise * steps,
    "times_min_steps": lambda own, noise: 1 + noise / own, "times_min_tokens": lambda own, noise: 1 + own / noise,
    "rows.*.steps": lambda own, steps, noise: steps * (1 + noise / own),
    "rows.*.tokens": lambda own, steps, noise: steps * (own + noise),
    "rows.*.days": lambda steps, seconds: steps * seconds / 86_400,
}  # fmt: skip


@pytest.mark.parametrize("question", ["timeline", "roofline", "schedule", "notation", "batch"])
def test_fields_explain_numbers_that_are_there(question: str) -> None:
    found = ask(question, LAYOUTS[0])
    for place, field in found["fields"].items():
        own = placed(found, place.split("."))
        assert own, place
        assert all(isinstance(value, int | float) for _, value in own), place
        assert all(field[name] for name in ("words", "formula", "source", "kind")), place
        inputs = {symbol: dict(placed(found, where.split("."))) for symbol, where in field["inputs"].items()}
        for stars, value in own:
            given = [one[stars[: len(next(iter(one)))]] for one in inputs.values()]
            if place in CALCULATED:
                assert value == pytest.approx(CALCULATED[place](*given), rel=1e-9), place
    assert {place for place in CALCULATED if place in found["fields"]} or question in ("schedule", "notation")


def test_a_bound_says_that_it_is_one() -> None:
    assert ask("why", LAYOUTS[1], "&overlap=sum")["why"]["kind"].startswith("a bound")
    assert ask("overview", LAYOUTS[1], "&overlap=sum")["verdict"]["kind"] == "bound"


def test_copied_commands_and_python_give_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    more = "&stack=nemo-25&precision=fp8_delayed&model.num_layers=16"
    own = ask("overview", LAYOUTS[0], more)["estimate"]["estimate"]["step_time_s"]
    command = ask("copy", LAYOUTS[0], f"{more}&target=command")["files"]["command"]
    assert printed(capsys, *shlex.split(command)[1:])["estimate"]["step_time_s"] == own
    code = ask("copy", LAYOUTS[0], f"{more}&target=python")["files"]["python"]
    *imports, call = [line for line in code.splitlines() if line]
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    assert eval(call, names).step_time_s == own


def test_every_target_is_copied_or_says_why_not() -> None:
    for target in ask("copy", LAYOUTS[0])["targets"]:
        found = ask("copy", LAYOUTS[0], f"&target={target}")
        assert bool(found["files"]) != bool(found["problems"])


def test_notation_accounts_for_every_parameter() -> None:
    found = ask("notation", LAYOUTS[1])
    model = sw.load_model("llama-3-8b")
    weights = [(unit["times"], one) for unit in found["units"].values() for one in unit["weights"]]
    assert sum(times * one["elements"] for times, one in weights) == 8030261248
    for _, one in weights:
        for shard in one["shards"].values():
            parts = 1
            for number in shard["parts"]:
                parts *= number
            assert parts * shard["copies"] == 64
            assert shard["elements"] * parts >= one["elements"]
            held = [rank for holder in shard["holders"] for rank in holder["ranks"]]
            assert len(held) == len(set(held))
    assert model.num_layers == found["units"]["block"]["times"]


def test_specs_name_the_axes_that_split_something() -> None:
    found = ask("notation", LAYOUTS[1])
    sizes = {one["axis"]: one["size"] for one in found["mesh"]}
    specs = [spec for unit in found["units"].values() for one in unit["weights"] for spec in one["specs"].values()]
    for spec in [*specs, found["hidden"]]:
        named = {axis for axis in sizes if re.search(rf"[_{{,]{axis}[,}}\]]", spec)}
        assert all(sizes[axis] > 1 for axis in named), spec
    assert "[D_fsdp]" in specs


def test_sequences_are_split_over_ep_too() -> None:
    job = JOB.replace("llama-3-8b", "mixtral-8x7b")
    found = Explorer(Known()).answer("notation", f"{job}&layout=fsdp=64+ep=8+zero_stage=3")
    assert found["hidden"] == "[B_{fsdp,ep}, T, D]"


def test_the_search_finds_what_plan_chooses() -> None:
    job = sw.Job(global_batch_tokens=1 << 19, seq_len=4096)
    model, cluster = sw.load_model("llama-3.2-1b"), sw.load_cluster("h100:8")
    first, last = found_for(model, cluster, job)
    chosen = sw.plan(model, cluster, job)
    assert first["state"] == "searching"
    assert last["best"] == first["best"]
    assert last["best"]["text"] == str(chosen.layout)
    assert last["best"]["step_time_s"] == chosen.estimate.step_time_s
    times, bytes_ = ([one[name] for one in last["front"]] for name in ("step_time_s", "memory_bytes"))
    assert bytes_ == sorted(bytes_)
    assert times == sorted(times, reverse=True)
    for one in last["points"]:
        assert any(
            other["step_time_s"] <= one["step_time_s"] and other["memory_bytes"] <= one["memory_bytes"]
            for other in last["front"]
        )
    point = last["front"][0]
    priced = plan_layout(model, cluster, job, sw.Layout.parse(point["layout"])).estimate
    assert (priced.step_time_s, priced.memory_bytes) == pytest.approx((point["step_time_s"], point["memory_bytes"]))


def test_a_job_that_does_not_fit_says_so() -> None:
    job = sw.Job(global_batch_tokens=1 << 16, seq_len=8192)
    (found,) = found_for(sw.load_model("llama-3-405b"), sw.load_cluster("h100:8"), job)
    assert found["best"] is None
    assert found["problems"]


def test_the_critical_batch_takes_twice_the_least_of_both() -> None:
    found = ask("batch", LAYOUTS[1], "&noise_tokens=1Mi&min_steps=1000")
    row = next(one for one in found["rows"] if one["batch_tokens"] == found["critical_batch_tokens"])
    assert (row["steps"], row["tokens"]) == (2000.0, 2 * found["min_tokens"])
    assert all(
        (one["tokens"] / 2**20 / 1000 - 1) * (one["steps"] / 1000 - 1) == pytest.approx(1) for one in found["rows"]
    )


def test_a_run_is_asked_for_only_where_one_was_opened() -> None:
    assert "--run FOLDER" in ask("run", LAYOUTS[1])["problems"][0]


def test_a_run_stands_beside_its_plan_and_no_other_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, words = opened_run(tmp_path, monkeypatch)
    capsys.readouterr()
    explorer, own = Explorer(known), printed(capsys, "reconcile", *words)
    run = json.loads(dumped(explorer.answer("run", "")))
    overview = json.loads(dumped(explorer.answer("overview", "")))
    assert run["reconcile"] == overview["reconcile"] == own
    for place, field in run["fields"].items():
        assert placed(run, place.split(".")), place
        assert field["kind"].startswith(("measured", "a prediction", "a bound", "exact"))
    other = explorer.answer("overview", overview["query"].replace("micro_batch_seqs=1", "micro_batch_seqs=2"))
    assert not other["problems"]
    assert "reconcile" not in other


def test_questions_of_many_passes_are_refused() -> None:
    found = Explorer(Known()).answer("timeline", f"{JOB}&layout=tp=8+pp=8".replace("1Mi", "1Gi"))
    assert "at most 4,096" in found["problems"][0]


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name not in ("pareto", "run")])
def test_a_layout_that_cannot_run_is_an_answer_to_every_question(question: str) -> None:
    found = Explorer(Known()).answer(question, f"{JOB}&layout=tp=64")
    assert "heads_by_tp" in found["problems"][0]
