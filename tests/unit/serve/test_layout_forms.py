"""Forms of a layout: work, memory and traffic by closed forms, the engines that have them, and their use in searches."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import shardwise as sw
from shardwise.hardware import load_cluster
from shardwise.search.serving.candidates import list_serving_layouts
from shardwise.serve import (
    ConfigurationTable,
    ServingFormats,
    ServingLayout,
    get_serving_engine,
    serving_layout_problems,
)
from shardwise.serve.pass_work import PassWork, Routing
from shardwise.serve.resting_elements import request_elements, weight_elements
from shardwise.serve.serving_constants import ENGINE_CONSTANTS, load_constants
from shardwise.serve.table_work import PassLengths, TableWork
from shardwise.values import InputError

CONTEXT, PROMPT, SEQS = 4095, 2048, 64.0
LENGTHS = PassLengths(decode_context=CONTEXT, prompt_tokens=PROMPT)


def table_of(layout: str) -> ConfigurationTable:
    return ConfigurationTable.of([ServingLayout.parse(layout)], [1.0], [8192])


def work_of(model: str, layout: str, sequences: float = SEQS, *, prompts: float | None = None) -> PassWork:
    work = TableWork.of(sw.load_model(model), table_of(layout), LENGTHS)
    return work.work(sequences, Routing(), prompts=prompts)


def sent_by_kind(work: PassWork) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the count of collectives and the elements that a device sends, by kind and number of devices."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for c in work.collectives:
        key = c.kind, int(c.degree[0])
        count, elements = sums.get(key, (0.0, 0.0))
        sums[key] = count + float(c.count[0]), elements + float(c.elements[0])
    return {key: values for key, values in sums.items() if values[1]}


@pytest.mark.parametrize("copies", [8, 32])
def test_tokens_are_sent_to_k_experts_and_back(copies: int) -> None:
    """58 layers with 256 experts of which 8 are chosen, at width 7168: k rows of each token leave a device and return, except
    those of local experts. Gathers move the tokens of all copies instead."""
    gathered, exchanged = (
        sent_by_kind(work_of("deepseek-v3", f"attention_dp={copies} ep={copies} dispatch={form}"))[("exchange", copies)]
        for form in ("all_gather", "all_to_all")
    )
    remote_share = (copies - 1) / copies
    assert exchanged[1] == pytest.approx(58 * 2 * SEQS * 8 * 7168 * remote_share, rel=1e-12)
    assert gathered[1] == pytest.approx(58 * 2 * SEQS * copies * 7168 * remote_share, rel=1e-12)
    assert exchanged[0] == gathered[0] == 2 * 58


def test_devices_of_a_copy_send_their_part_of_its_tokens() -> None:
    exchanged = sent_by_kind(work_of("deepseek-v3", "tp=4 ep=4 dispatch=all_to_all"))
    # Rows to experts and back of a quarter of the tokens; a gather brings each token to all of tp again, and one its logits.
    rows = 58 * 2 * SEQS / 4 * 8 * 7168 * 3 / 4
    tokens = 58 * SEQS * 7168 * 3 / 4
    logits = SEQS * 129280 * 3 / 4
    assert exchanged[("exchange", 4)][1] == pytest.approx(rows + tokens + logits, rel=1e-12)


@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
def test_both_forms_have_equal_products(form: str) -> None:
    work = work_of("deepseek-v3", f"tp=2 attention_dp=4 ep=8 dispatch={form}")
    assert work.products["experts"].flops[0] == pytest.approx(2 * SEQS * 4 * 58 * 8 * 3 * 7168 * 2048 / 8, rel=1e-12)
    assert work.products["vocabulary"].flops[0] == pytest.approx(2 * SEQS * 7168 * 129280 / 2, rel=1e-12)


def test_redundant_experts_are_stored_and_read_in_addition() -> None:
    model = sw.load_model("deepseek-v3")
    layout = "attention_dp=32 ep=32 redundant_experts=32"
    resting = weight_elements(model, table_of(layout))["experts"][0]
    assert resting == 58 * (256 + 32) / 32 * 3 * 7168 * 2048
    experts = work_of("deepseek-v3", layout).products["experts"]
    assert experts.elements[0] == pytest.approx(resting * (1 - (1 - 8 / 288) ** (SEQS * 32)), rel=1e-12)
    assert experts.flops[0] == pytest.approx(2 * SEQS * 58 * 8 * 3 * 7168 * 2048, rel=1e-12)


@pytest.mark.parametrize(("model", "tp", "kv_heads"), [("llama-3-70b", 16, 8), ("llama-3-70b", 32, 8)])
def test_sequences_are_shared_beyond_the_key_value_heads(model: str, tp: int, kv_heads: int) -> None:
    """Two AllToAlls a layer of queries and results, [b, N H] / tp each; a device reads and keeps 1 / tp of the cache."""
    architecture, layout = sw.load_model(model), f"tp={tp} cache_split=heads_then_batch"
    copies, shared = work_of(model, f"tp={tp}"), work_of(model, layout)
    group = tp // kv_heads
    assert shared.cache_elements[0] == pytest.approx(copies.cache_elements[0] / group, rel=1e-12)
    assert shared.decode_flops[0] == pytest.approx(copies.decode_flops[0], rel=1e-12)
    payload = SEQS * 64 * 128 / tp
    assert sent_by_kind(shared)[("exchange", group)] == pytest.approx(
        (2 * 80, 80 * 2 * payload * (group - 1) / group), rel=1e-12
    )
    cache_elements = [request_elements(architecture, table_of(text), 1000.0)[0] for text in (f"tp={tp}", layout)]
    assert cache_elements[1] == pytest.approx(cache_elements[0] / group, rel=1e-12)


def test_a_latent_is_shared_by_all_devices() -> None:
    model = sw.load_model("deepseek-v3")
    cache_elements = request_elements(model, table_of("tp=8 ep=8 cache_split=heads_then_batch"), 800.0)
    assert cache_elements[0] == pytest.approx(61 * 800 * (512 + 64) / 8, rel=1e-12)


def test_a_single_sequence_is_not_shared() -> None:
    """A device has the whole of one sequence, or of a chunk of one."""
    single_sequence, two_sequences = (
        work_of("llama-3-70b", "tp=16 cache_split=heads_then_batch", n) for n in (1.0, 2.0)
    )
    assert single_sequence.cache_elements[0] == two_sequences.cache_elements[0]
    chunk = work_of("llama-3-70b", "tp=16 cache_split=heads_then_batch", 0.0, prompts=1.0)
    assert chunk.prompt_flops[0] == pytest.approx(80 * 4 * 64 / 8 * 128 * PROMPT * (PROMPT + 1) / 2, rel=1e-12)


def test_2d_weight_stationary_reduces_along_both_axes() -> None:
    """An MLP of three matrices: two of [b, F / y] over x, one of [b, D / x] over y. A device holds 1 / (x y) of all."""
    x, y = 4, 8
    width, hidden = 8192, 28672
    work = work_of("llama-3-70b", f"tp={y} ws={x}")
    assert work.products["mlp"].elements[0] == 80 * 3 * width * hidden / (x * y)

    def reduced(elements: float, degree: int) -> float:
        return 2 * elements * (degree - 1) / degree

    over_x = 80 * reduced(
        2 * SEQS * hidden / y + SEQS * 64 * 128 / y + 2 * SEQS * 128, x
    )  # gate and up; queries; one kv head
    norms = (2 * 80) * reduced(SEQS, x) + reduced(SEQS, x)  # sums of squares, the last of them before the head
    logits = reduced(SEQS * 128256 / y, x)
    assert sent_by_kind(work)[("all_reduce", x)][1] == pytest.approx(over_x + norms + logits, rel=1e-9)
    over_y = (2 * 80 + 1) * reduced(SEQS * width / x, y)  # attention, MLP, and the embedding
    assert sent_by_kind(work)[("all_reduce", y)][1] == pytest.approx(over_y, rel=1e-12)


ENGINE_LAYOUTS: Mapping[str, Mapping[str, str | None]] = {
    "attention_dp=8 ep=8 dispatch=all_to_all": {"vllm": None, "sglang": None, "trtllm": "no option", "neutral": None},
    "tp=8 ep=8 dispatch=all_to_all": {"vllm": "attention_dp of at least 2", "sglang": None, "neutral": None},
    "attention_dp=8 ep=4 dispatch=all_to_all": {"sglang": "ep=8 is required", "neutral": None},
    "attention_dp=8 ep=8 redundant_experts=8": {"vllm": None, "sglang": None, "trtllm": None, "neutral": None},
    "tp=8 ep=8 cache_split=heads_then_batch": {"vllm": "no option", "sglang": "no option", "neutral": None},
    "tp=4 ep=4 ws=2": {"vllm": "no option", "sglang": "no option", "trtllm": "no option", "neutral": None},
}  # fmt: skip


@pytest.mark.parametrize("layout", ENGINE_LAYOUTS)
def test_an_engine_runs_the_forms_of_its_options(layout: str) -> None:
    model = sw.load_model("deepseek-v3")
    for engine, message in ENGINE_LAYOUTS[layout].items():
        problems = get_serving_engine(engine).layout_problems(model, ServingLayout.parse(layout))
        assert (message is None) == (not problems)
        assert message is None or message in problems[0]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("llama-3-70b", "tp=8 dispatch=all_to_all", "experts that are split"),
        ("deepseek-v3", "tp=8 redundant_experts=8", "experts that are split"),
        ("deepseek-v3", "attention_dp=72 ep=72", "or redundant_experts=32"),
        ("llama-3-70b", "tp=8 cache_split=heads_then_batch", "more devices of tp than the 8 key-value heads"),
        ("llama-3-70b", "ws=3", "the nearest are 2 and 4"),
    ],
)
def test_forms_that_change_nothing_are_refused(model: str, layout: str, message: str) -> None:
    assert message in serving_layout_problems(sw.load_model(model), ServingLayout.parse(layout))[0]


def test_a_layout_with_forms_is_read_back_from_its_text() -> None:
    layout = ServingLayout.parse("tp=8 ep=8 ws=2 dispatch=all_to_all redundant_experts=8 cache_split=heads_then_batch")
    assert ServingLayout.parse(str(layout)) == layout
    assert layout.num_devices == 16
    assert table_of(str(layout)).layout_of(0) == ServingLayout.parse(f"{layout} expert_tp=1")
    with pytest.raises(InputError, match=r"dispatch is 'all_2_all'.*one of all_gather, all_to_all"):
        ServingLayout.parse("dispatch=all_2_all")


def test_a_search_has_the_forms_of_its_engine() -> None:
    model, formats = sw.load_model("deepseek-v3"), ServingFormats(weights="fp8_block")

    def forms(engine: str, cluster: str) -> set[tuple[str, ...]]:
        layouts = list_serving_layouts(model, load_cluster(cluster), formats, get_serving_engine(engine))
        return {layout.forms for layout in layouts}

    assert forms("trtllm", "h200:16") == {()}
    assert forms("vllm", "h200:16") == forms("sglang", "h200:16") == {(), ("dispatch=all_to_all",)}
    assert ("ws=2", "dispatch=all_to_all", "cache_split=heads_then_batch") in forms("neutral", "h200:16")


def test_constants_of_the_neutral_engine_are_between_those_of_the_engines() -> None:
    neutral, engines = load_constants("neutral"), [load_constants(name) for name in ("vllm", "sglang", "trtllm")]
    for name in ENGINE_CONSTANTS:
        values = [getattr(constants, name) for constants in engines]
        assert min(values) < getattr(neutral, name) < max(values)
    assert neutral.weight_share == engines[0].weight_share
    wide, narrow = (
        sw.serve_estimate("llama-3-8b", "h100:1", isl=1024, osl=256, concurrency=8, engine=engine).tpot_s
        for engine in ("neutral", "vllm")
    )
    assert wide.high / wide.value > narrow.high / narrow.value
