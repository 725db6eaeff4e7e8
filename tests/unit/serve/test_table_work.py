"""Derived work of passes against counts written by hand: elements and FLOPs of a device, for several layouts at once."""

import numpy as np
import pytest

import shardwise as sw
from shardwise.serve import ConfigurationTable, ServingLayout
from shardwise.serve.pass_work import Routing
from shardwise.serve.resting_elements import request_elements, weight_elements
from shardwise.serve.table_work import PassLengths, TableWork

CONTEXT, PROMPT = 4095, 2048
LENGTHS = PassLengths(decode_context=CONTEXT, prompt_tokens=PROMPT)
UNIFORM = Routing()


def table_of(*texts):
    layouts = [ServingLayout.parse(text) for text in texts]
    return ConfigurationTable.of(layouts, [1.0] * len(layouts), [8192] * len(layouts))


def test_work_of_a_dense_model_equals_a_count():
    table = table_of("tp=1", "tp=2", "tp=8", "tp=16")
    tp = table.tp.astype(float)
    work = TableWork.of(sw.load_model("llama-3.1-70b"), table, LENGTHS).work(10.0, UNIFORM)
    kv_heads = np.maximum(8 / tp, 1)  # copies beyond the key-value heads
    attention = 80 * (8192 * (64 * 128 / tp + 2 * kv_heads * 128) + 64 * 128 / tp * 8192)
    mlp = 80 * 3 * 8192 * 28672 / tp
    for group, elements in {"attention": attention, "mlp": mlp, "vocabulary": 8192 * 128256 / tp}.items():
        assert work.products[group].elements == pytest.approx(elements, rel=1e-12)
        assert work.products[group].flops == pytest.approx(2 * 10 * elements, rel=1e-12)
    slots = CONTEXT + 1
    # Keys and values of all slots are read, and those of the new token written.
    assert work.cache_elements == pytest.approx(10 * 80 * 2 * kv_heads * 128 * (slots + 1), rel=1e-12)
    assert work.decode_flops == pytest.approx(10 * 80 * 4 * slots * 64 / tp * 128, rel=1e-12)


def test_work_of_latent_attention_and_experts_equals_a_count():
    table = table_of("tp=8", "tp=8 ep=8", "attention_dp=8 ep=8", "tp=2 attention_dp=4 ep=4")
    tp, copies = table.tp.astype(float), table.attention_dp.astype(float)
    work = TableWork.of(sw.load_model("deepseek-v3"), table, LENGTHS).work(16.0, UNIFORM)
    # Queries by a latent of 1536, keys and values by one of 512 and 64 rotary, 128 heads of 128 + 64 and 128.
    attention = 61 * (7168 * (1536 + 512 + 64) + (1536 * 192 + 512 * 256 + 128 * 7168) * 128 / tp)
    assert work.products["attention"].elements == pytest.approx(attention, rel=1e-12)
    tokens = 16 * copies
    touched = 1 - (1 - 8 / 256) ** tokens
    experts = 58 * 256 * 3 * 7168 * 2048 / 8
    assert work.products["experts"].elements == pytest.approx(experts * touched, rel=1e-12)
    assert work.products["experts"].flops == pytest.approx(2 * tokens * 58 * 8 * 3 * 7168 * 2048 / 8, rel=1e-12)
    slots = CONTEXT + 1
    assert work.cache_elements == pytest.approx(16 * 61 * (512 + 64) * (slots + 1), rel=1e-12)  # on every device of tp
    flops = 16 * 61 * slots * 128 / tp * (4 * 512 + 2 * 64)
    assert work.decode_flops == pytest.approx(flops, rel=1e-12)


def test_prompts_are_quadratic_and_causal():
    work = TableWork.of(sw.load_model("llama-3.1-8b"), table_of("tp=1"), LENGTHS).work(0.0, UNIFORM, prompts=1.0)
    assert work.prompt_flops == pytest.approx(32 * 4 * 32 * 128 * PROMPT * (PROMPT + 1) / 2, rel=1e-12)
    assert work.products["mlp"].flops == pytest.approx(32 * 2 * 3 * 4096 * 14336 * PROMPT, rel=1e-12)
    assert work.products["vocabulary"].flops == pytest.approx(2 * 4096 * 128256, rel=1e-12)  # of the last token only


def test_all_reduces_of_a_pass_equal_a_count():
    work = TableWork.of(sw.load_model("llama-3.1-70b"), table_of("tp=1", "tp=4"), LENGTHS).work(10.0, UNIFORM)
    reduce = next(c for c in work.collectives if c.kind == "all_reduce")
    # Two a layer and one behind the embedding; a ring sends 2 (N - 1) / N of the hidden states.
    assert reduce.count.tolist() == [0, 161]
    assert reduce.elements[1] == pytest.approx(161 * 10 * 8192 * 2 * 3 / 4, rel=1e-12)


def test_windows_bound_the_cache():
    model, table = sw.load_model("gemma-3-27b"), table_of("tp=1")
    windowed = model.num_windowed_layers
    per_slot = 2 * model.num_kv_heads * model.head_dim
    expected = per_slot * (windowed * model.sliding_window + (model.num_layers - windowed) * 32768)
    assert request_elements(model, table, 32768)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_weights_of_a_single_device_are_the_model(name):
    model = sw.load_model(name)
    total = sum(size[0] for size in weight_elements(model, table_of("tp=1")).values())
    assert total == pytest.approx(sw.num_params(model), rel=1e-12)


def test_rows_with_one_layout_share_its_work():
    model, lengths = sw.load_model("llama-3.1-8b"), LENGTHS
    table = table_of("tp=2", "tp=1", "tp=2")
    work = TableWork.of(model, table, lengths).work(np.array([1.0, 2.0, 3.0]), UNIFORM)
    flops = work.products["mlp"].flops
    assert flops[2] == pytest.approx(3 * flops[0], rel=1e-12)
    assert flops[1] == pytest.approx(4 * flops[0], rel=1e-12)
