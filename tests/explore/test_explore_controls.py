"""Every option of a slider is a state; what goes with a degree follows it; what cannot run says why."""

from __future__ import annotations

import pytest

from shardwise.present.explorer.control_values import PRESETS, Preset
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.request import ViewRequest, resolve_request
from shardwise.present.explorer.state import parse_query, write_query

QUERY = "model={model}&cluster={cluster}&batch_tokens=4Mi&seq_len=4096&layout={layout}"
CASES = [
    ("llama-3-8b", "h100:64", "tp=2+pp=4+fsdp=8"),
    ("mixtral-8x7b", "h100:64", "ep=8+fsdp=64"),
    ("llama-3-70b", "tpu-v5p:4x4x8", "tp=4+fsdp=32"),
    ("gpt-2", "a100-80gb:8", "dp=8"),
    ("deepseek-v3", "h800:1024", "ep=64+fsdp=64+pp=16"),
]


def open_layout(model: str, cluster: str, layout: str) -> ViewRequest:
    return resolve_request(parse_query(QUERY.format(model=model, cluster=cluster, layout=layout)), NameResolver())


def edit_request(of: ViewRequest, edit: dict[str, str | None]) -> ViewRequest:
    query = dict(part.split("=", 1) for part in write_query(of.state).split("&"))
    query = {key: value for key, value in {**query, **edit}.items() if value is not None}
    return resolve_request(parse_query("&".join(f"{key}={value}" for key, value in query.items())), NameResolver())


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("model", "cluster", "layout"), CASES)
def test_options_are_states_that_run_or_say_why_not(model: str, cluster: str, layout: str, free: bool) -> None:
    of = open_layout(model, cluster, layout)
    for control in controls(of, free=free):
        assert control["value"] in [option["value"] for option in control["options"]], control["name"]
        if control["group"] != "layout":
            continue
        for option in control["options"]:
            if not option["edit"]:
                assert option["problem"]
                continue
            changed = edit_request(of, option["edit"])
            assert list(changed.problems[:1]) == ([option["problem"]] if option["problem"] else [])
            if not option["problem"]:
                assert changed.layout.num_devices == changed.cluster.num_devices


def value(of: ViewRequest, name: str, text: str, *, free: bool = False) -> ViewRequest:
    control = next(control for control in controls(of, free=free) if control["name"] == name)
    return edit_request(of, next(option["edit"] for option in control["options"] if option["value"] == text))


def test_a_degree_takes_its_devices_from_the_replicas() -> None:
    of = value(open_layout("llama-3-8b", "h100:64", "fsdp=64"), "tp", "8")
    assert (of.layout.tp, of.layout.fsdp, of.layout.sequence_parallel) == (8, 8, True)
    back = value(of, "tp", "1")
    assert (back.layout.tp, back.layout.fsdp, back.layout.sequence_parallel) == (1, 64, False)


def test_stages_bring_their_schedule_and_sharding_its_axis() -> None:
    of = value(open_layout("llama-3-8b", "h100:64", "fsdp=64"), "pp", "4")
    assert (of.layout.schedule, of.layout.fsdp) == ("1f1b", 16)
    assert value(of, "num_virtual_stages", "2").layout.schedule == "interleaved"
    plain = value(of, "zero_stage", "0").layout
    assert (plain.dp, plain.fsdp) == (16, 1)
    again = value(value(of, "zero_stage", "0"), "zero_stage", "1").layout
    assert (again.dp, again.fsdp, again.zero_stage) == (1, 16, 1)


def test_an_illegal_degree_stays_and_says_what_is_possible() -> None:
    tp = next(
        control for control in controls(open_layout("llama-3-8b", "h100:64", "fsdp=64")) if control["name"] == "tp"
    )
    problem = next(option["problem"] for option in tp["options"] if option["value"] == "64")
    assert "heads_by_tp" in problem
    assert "tp may be one of 1, 2, 4, 8, 16, 32" in problem


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.model)
def test_a_preset_is_a_job_with_a_source(preset: Preset) -> None:
    of = open_layout("llama-3-8b", "h100:64", "fsdp=64")
    option = next(option for control in controls(of) if control["name"] == "preset" for option in control["options"]
                  if option["value"] == preset.name)  # fmt: skip
    assert option["note"] == preset.source
    changed = edit_request(of, option["edit"])
    assert (changed.model.name, changed.cluster.name, changed.state.layout) == (
        preset.model,
        preset.cluster,
        changed.layout,
    )
    assert changed.job.global_batch_tokens % changed.job.seq_len == 0
    assert next(control["value"] for control in controls(changed) if control["name"] == "preset") == preset.name


def test_boolean_options_are_checkboxes() -> None:
    every = controls(open_layout("llama-3-8b", "h100:64", "tp=2+fsdp=32"))
    kinds = {control["name"]: control["kind"] for control in every}
    assert (kinds["sequence_parallel"], kinds["async_tp"], kinds["tp"], kinds["model"]) == (
        "checkbox", "checkbox", "slider", "select",
    )  # fmt: skip
    for control in every:
        assert (control["kind"] == "checkbox") == (
            {option["value"] for option in control["options"]} == {"false", "true"}
        )


def test_in_the_memory_view_the_cluster_follows() -> None:
    of = value(open_layout("llama-3-8b", "h100:64", "fsdp=64"), "tp", "8", free=True)
    assert (of.layout.tp, of.layout.fsdp, of.cluster.name) == (8, 64, "h100:512")
    wider = value(open_layout("llama-3-8b", "h100:64", "fsdp=64"), "d_model", "8192", free=True)
    assert (wider.model.d_model, wider.model.head_dim) == (8192, 256)
