"""Every term of an estimate: its meaning, its inputs, and that the inputs alone reproduce its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout import parse_layout_text
from shardwise.layout.layers_per_stage import layers_by_stage
from shardwise.model.job import Job, OverlapConvention
from shardwise.model.load import load_model
from shardwise.pipeline.registry import get_schedule
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.estimate_terms import MEMORY, TIME, Term
from shardwise.price.layout_pricer import TERM_NAMES, Pricing, term_context
from shardwise.price.overlap import MEASURED_FORMULA
from shardwise.price.term_inputs import InputRecorder, TermInput
from shardwise.values.engine_policies import get_loss_kernel
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS

CASES: Mapping[str, tuple[str, str, str | None, dict[str, Any], str]] = {
    "bound": ("llama-3-8b", "h100:16", None, {}, "fsdp=2 tp=2 pp=2 cp=2 recompute=full num_virtual_stages=2"),
    "prediction": ("gpt-oss-20b", "h100:16", "nemo-25", {}, "fsdp=8 ep=4 tp=2 recompute=selective"),
    "sum": ("llama-3-8b", "h100:16", None, {"overlap": "sum"}, "fsdp=2 tp=8"),
    "max": ("llama-3-8b", "h100:16", None, {"overlap": "max"}, "fsdp=2 tp=8 zero_stage=2"),
    "offload": ("llama-3-8b", "h100:16", None, {}, "fsdp=4 pp=4 offload=both recompute=full recompute_layers=3"),
    "split": ("llama-3-8b", "h100:16", None, {"precision": "fp8_delayed"}, "fsdp=8 pp=2 schedule=zb_h1 zero_stage=1"),
    "both ends": ("deepseek-v2-lite", "h100:16", None, {}, "fsdp=4 ep=4 tp=2 pp=2 schedule=dualpipe"),
    "stepwise": ("llama-3-8b", "h100:16", None, {"loss": "in_place"}, "fsdp=16 recompute=selective"),
    "modules": (
        "tiny-latent-moe-18m",
        "h100:16",
        None,
        {"loss": "in_place", "optimizer": "lion"},
        "fsdp=8 pp=2 zero_stage=3",
    ),
    "torus": ("tiny-latent-moe-18m", "tpu-v5e:4x4", None, {}, "fsdp=16 ep=4"),
}


@cache
def pricing_of(case: str) -> Pricing:
    model_name, cluster_name, stack, changes, text = CASES[case]
    model, cluster = load_model(model_name), load_cluster(cluster_name, stack=stack)
    job = Job(global_batch_tokens=2**19, seq_len=4096, **changes)
    return Pricing(Problem(model, cluster, job), parse_layout_text(text, model, job))


@cache
def term(case: str, name: str) -> Term:
    return pricing_of(case).term(name)


def numbers(case: str, name: str) -> dict[str, float]:
    """The inputs of a term by symbol."""
    return {quantity.symbol: quantity.value for quantity in term(case, name).inputs}


class Replay(InputRecorder):
    """Copies of records with only the recorded inputs of a term; seconds and bytes are multiplied by `scale`."""

    def __init__(self, inputs: tuple[TermInput, ...], scale: float) -> None:
        super().__init__()
        self.known_inputs, self.scale = {quantity.symbol: quantity for quantity in inputs}, scale

    def note(self, value: Any, field: Any) -> Any:
        if not isinstance(value, (int, float)):
            return value
        quantity = self.known_inputs.get(field.input(value).symbol)
        if quantity is None:
            return math.nan
        return quantity.value * self.scale if quantity.unit in ("s", "B") else type(value)(quantity.value)


def replay_term(case: str, name: str, scale: float = 1.0) -> float:
    """The value of a term, computed from its inputs alone."""
    pricing, (tree, _, term_name) = pricing_of(case), name.partition(".")
    stages = pricing.stages()
    replay = Replay(term(case, name).inputs, scale)
    if tree == "time":
        rule = TIME.by_name[term_name]
        return float(rule.value(replay.copy(pricing.slowest_step(stages), input_properties=rule.input_properties)))
    memory = MEMORY.by_name[term_name]
    return float(memory.value(replay.copy(pricing.fullest_device(stages)[0], input_properties=memory.input_properties)))


def test_every_name_has_a_rule_in_its_place() -> None:
    assert tuple(TIME.by_name) == TIME_TERMS
    assert tuple(MEMORY.by_name) == MEMORY_TERMS


@pytest.mark.parametrize("case", CASES)
def test_terms_have_the_estimates_value_and_an_explanation(case: str) -> None:
    pricing = pricing_of(case)
    priced = estimate(Problem(pricing.architecture, pricing.cluster, pricing.job), pricing.layout)
    values = {f"time.{name}": value for name, value in priced.time.items()}
    values |= {f"memory.{name}": value for name, value in priced.memory.items()}
    assert tuple(values) == TERM_NAMES
    for name, value in values.items():
        estimate_term = term(case, name)
        assert (estimate_term.name, estimate_term.value) == (name, value)
        assert estimate_term.unit == ("s" if name.startswith("time.") else "B")
        assert min(map(len, (estimate_term.words, estimate_term.formula, estimate_term.source))) > 5, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TERM_NAMES)
def test_inputs_of_a_term_reproduce_its_value(case: str, name: str) -> None:
    """All other numbers of the stage are NaN, so that any use of them makes the value NaN."""
    estimate_term = term(case, name)
    assert estimate_term.inputs
    assert replay_term(case, name) == estimate_term.value


@pytest.mark.parametrize("name", TERM_NAMES)
def test_terms_scale_with_their_seconds_and_bytes(name: str) -> None:
    """A term doubles with the seconds and bytes of its units: no other input has a unit."""
    for case in CASES:
        assert replay_term(case, name, scale=2.0) == pytest.approx(2.0 * term(case, name).value, rel=1e-12)


def test_every_input_has_a_meaning_and_a_unit() -> None:
    inputs = {quantity for case in CASES for name in TERM_NAMES for quantity in term(case, name).inputs}
    assert all(quantity.meaning != quantity.symbol.partition("(")[0] for quantity in inputs)
    units = {quantity.symbol.partition("(")[0]: quantity.unit for quantity in inputs}
    assert {units["forward_s"], units["traffic_s"], units["F"], units["host_s"]} == {"s"}
    assert {units["saved_bytes"], units["transient_bytes"]} == {"B"}
    assert {units["layers"], units["m"], units["exposed"], units["in flight"]} == {""}


def test_terms_by_hand() -> None:
    """Micro-batches, layers and their unit costs; stages and passes; weights of layers and of the ends."""
    forward, pricing = numbers("bound", "time.forward"), pricing_of("bound")
    layers = layers_by_stage(pricing.architecture, pricing.layout)
    assert forward["m"] == 2**19 / 4096 / 2
    assert forward["layers(block)"] in layers
    once = sum(forward.get(unit, 0.0) * forward.get(f"forward_s({unit})", 0.0) for unit in ("embedding", "head"))
    once += forward["layers(block)"] * forward["forward_s(block)"]
    assert forward["m"] * once == pytest.approx(term("bound", "time.forward").value, rel=1e-12)
    bubble = numbers("bound", "time.bubble")
    assert (bubble["p"] - 1) * (bubble["F"] + bubble["B"]) / bubble["v"] == pytest.approx(
        term("bound", "time.bubble").value, rel=1e-12
    )
    split = numbers("split", "time.bubble")
    assert (split["p"] - 1) * (split["F"] + split["B"] - 2 * split["W"]) == pytest.approx(
        term("split", "time.bubble").value, rel=1e-12
    )
    master = numbers("stepwise", "memory.master")
    parts = {"layers(block)": "block", "copies": "embedding", "head": "head"}
    total = sum(master[count] * master[f"master_bytes({unit})"] for count, unit in parts.items())
    assert total == pytest.approx(term("stepwise", "memory.master").value, rel=1e-12)


def test_formulas_follow_the_choices_of_the_plan() -> None:
    """The convention of overlap, the stack, the schedule, the loss, the recipe and the chip each bring their own."""
    formulas = {case: term(case, "time.fsdp").formula for case in ("bound", "prediction", "sum", "max")}
    assert len(set(formulas.values())) == 4
    assert term("prediction", "time.tp").formula == term("bound", "time.tp").formula  # products wait for it
    assert formulas["prediction"] == MEASURED_FORMULA
    assert term("both ends", "time.bubble").formula == get_schedule("dualpipe").bubble
    assert term("stepwise", "memory.logits").source == get_loss_kernel("in_place").source
    assert "fp8_delayed" in term("split", "memory.parameters").source
    chip = pricing_of("bound").cluster.chip
    assert term("bound", "memory.runtime").source == chip.sources["runtime_bytes"]
    assert "launch_s" in term("prediction", "time.forward").formula
    assert "launch_s" not in term("bound", "time.forward").formula


@pytest.mark.parametrize("overlap", ["per_axis", "sum", "max"])
def test_the_settings_of_a_plan_are_those_of_its_prices(overlap: OverlapConvention) -> None:
    pricing = pricing_of("bound")
    job = Job(global_batch_tokens=2**19, seq_len=4096, overlap=overlap)
    setting = term_context(pricing.cluster, job, pricing.layout)
    assert (setting.overlap, setting.schedule) == (overlap, pricing.layout.schedule)
    assert setting.rates == pricing.pricer.rates
