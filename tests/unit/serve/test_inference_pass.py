"""Kernels and collectives of a pass of inference equal the closed forms of books and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from shardwise.model import Architecture, load_model, num_active_params, num_params
from shardwise.model.program import Role
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.serve import ServingLayout
from shardwise.serve.inference_pass import (
    InferencePass,
    PassForm,
    PassUnit,
    SequenceGroup,
    axis_stride,
    inference_pass,
    instance_degrees,
    slots_of_group,
)
from shardwise.step.instructions import Kernel, UnitCollective
from shardwise.values import SymbolValues

DECODING = SequenceGroup(kind="decode", num_seqs=64, cached_tokens=4095)
CHUNK = SequenceGroup(kind="prefill", num_seqs=2, new_tokens=512, cached_tokens=1024)


class Evaluated:
    """A pass of a model on a layout, with groups of sequences, in numbers."""

    def __init__(
        self, model: str | Architecture, layout: str, groups: Sequence[SequenceGroup], form: PassForm | None = None
    ) -> None:
        self.model = load_model(model) if isinstance(model, str) else model
        self.degrees = instance_degrees(self.model, ServingLayout.parse(layout))
        self.groups = groups
        self.inference: InferencePass = inference_pass(self.model, form or PassForm())

    def kernels(self, unit: PassUnit) -> Iterator[tuple[Kernel, SymbolValues]]:
        values = self.inference.token_values(unit, self.groups, self.degrees)
        yield from ((kernel.kernel, values) for kernel in unit.token_kernels)
        for group in self.groups:
            of_group = self.inference.group_values(unit, group, self.degrees)
            yield from ((kernel.kernel, of_group) for kernel in unit.group_kernels[group.kind])

    def collectives(self, unit: PassUnit) -> Iterator[tuple[UnitCollective, float]]:
        values = self.inference.token_values(unit, self.groups, self.degrees)
        moved = [(collective, values) for collective in unit.token_collectives]
        for group in self.groups:
            of_group = self.inference.group_values(unit, group, self.degrees)
            moved += [(collective, of_group) for collective in unit.group_collectives[group.kind]]
        for collective, symbols in moved:
            if symbols.group_degree(collective.axes) > 1:
                yield collective, collective.elements.evaluate(symbols)

    def flops(self, *names: str) -> float:
        units = (unit for unit in self.inference.units if not names or unit.name in names)
        return float(sum(u.count * k.flops.evaluate(v) for u in units for k, v in self.kernels(u)))

    def elements(self, role: Role, *names: str) -> float:
        units = (unit for unit in self.inference.units if not names or unit.name in names)
        return float(
            sum(u.count * k.elements[role].evaluate(v) for u in units for k, v in self.kernels(u) if role in k.elements)
        )

    def weights(self) -> float:
        """Elements of one device, without those of modules of multi-token prediction."""
        total = 0.0
        for unit in (unit for unit in self.inference.units if unit.name != "predict"):
            values = self.inference.token_values(unit, self.groups, self.degrees)
            total += unit.count * sum(elements.evaluate(values) for elements in unit.weights.values())
        return total

    def cache_elements_per_token(self) -> float:
        """Elements of one device for one token of a sequence, in all layers."""
        total = 0.0
        for unit in self.inference.units:
            values = self.inference.group_values(unit, self.groups[0], self.degrees)
            total += unit.count * sum(c.slot_elements.evaluate(values) for c in unit.cache if c.grows)
        return total


def _matrix_params(model: Architecture) -> float:
    """Parameters that a token is multiplied by: all that are active without the embedding, norms being negligible."""
    return num_active_params(model) - model.vocab_size * model.d_model * (not model.tied_embeddings)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "mixtral-8x7b", "qwen3-235b-a22b"])
def test_decode_takes_2n_flops_for_each_token_and_those_of_attention(name: str) -> None:
    decode = Evaluated(name, "tp=1", [DECODING])
    model = decode.model
    products = 2 * _matrix_params(model) * DECODING.num_seqs
    attention = 4 * DECODING.num_seqs * 4096 * model.num_heads * model.head_dim * model.num_layers
    assert decode.flops() == pytest.approx(products + attention, rel=1e-3)  # norms are parameters without products


def test_prefill_attends_to_cached_tokens_and_to_half_of_the_new_ones() -> None:
    prefill = Evaluated("llama-3.1-8b", "tp=1", [CHUNK])
    model, mean_keys = prefill.model, 1024 + (512 + 1) / 2
    attention = 4 * 2 * 512 * mean_keys * model.num_heads * model.head_dim * model.num_layers
    layers = 2 * (_matrix_params(model) - model.vocab_size * model.d_model) * 2 * 512
    head = 2 * model.vocab_size * model.d_model * 2  # only the last token of each sequence
    assert prefill.flops() == pytest.approx(layers + head + attention, rel=1e-3)


@pytest.mark.parametrize(("name", "per_layer"), [("llama-3.1-8b", 2 * 8 * 128), ("deepseek-v3", 512 + 64)])
def test_the_cache_has_2klh_elements_for_each_token_or_a_latent(name: str, per_layer: int) -> None:
    decode = Evaluated(name, "tp=1", [DECODING])
    layers = decode.model.num_layers + decode.model.num_predict_layers
    assert decode.cache_elements_per_token() == per_layer * layers
    read = per_layer * layers * DECODING.num_seqs * (4096 + 1)  # once in each pass, and the new token is written
    assert decode.elements(Role.CACHE) == read


def test_weights_are_read_once_and_equal_the_parameters() -> None:
    for name in ("llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3"):
        decode = Evaluated(name, "tp=1", [DECODING])
        assert decode.weights() == num_params(decode.model), name


def test_tensor_parallelism_splits_heads_and_keeps_copies_beyond_the_key_value_heads() -> None:
    unsplit, split = (Evaluated("llama-3.3-70b", layout, [DECODING]) for layout in ("tp=1", "tp=8"))
    assert split.cache_elements_per_token() * 8 == unsplit.cache_elements_per_token()
    assert split.flops() * 8 == unsplit.flops()
    copies = Evaluated("llama-3.3-70b", "tp=16", [DECODING])
    assert copies.cache_elements_per_token() == split.cache_elements_per_token()
    assert copies.degrees["rep_m"] == 2


@pytest.mark.parametrize(("layout", "axes"), [("tp=8", 8), ("tp=16", 16)])
def test_a_dense_layer_reduces_two_hidden_states_over_tensor_parallelism(layout: str, axes: int) -> None:
    decode = Evaluated("llama-3.3-70b", layout, [DECODING])
    block = decode.inference.unit("block")
    moved = [(c.kind.value, elements) for c, elements in decode.collectives(block)]
    assert moved == [("all_reduce", 64 * 8192)] * 2
    assert decode.degrees["kv_m"] * decode.degrees["rep_m"] == axes


EXPERT_FORMS = [
    ("tp=8", "all_gather", [("all_reduce", 1), ("all_reduce", 1)]),  # attention, and both kinds of experts in one sum
    ("tp=8 ep=8", "all_gather", [("all_reduce", 1), ("all_reduce", 1)]),
    ("attention_dp=8 ep=8", "all_gather", [("all_gather", 8), ("reduce_scatter", 8)]),
    ("attention_dp=8 ep=8", "all_to_all", [("all_to_all", 8), ("all_to_all", 8)]),
    ("attention_dp=8", "all_gather", [("all_gather", 8), ("reduce_scatter", 8)]),
    ("tp=2 attention_dp=4 ep=8", "all_gather", [
        ("all_reduce", 1), ("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 1),
    ]),
    ("tp=2 attention_dp=4 ep=8", "all_to_all", [
        ("all_reduce", 1), ("all_to_all", 8 / 2), ("all_to_all", 8 / 2), ("all_gather", 1), ("all_reduce", 1),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "dispatch", "expected"), EXPERT_FORMS)
def test_tokens_reach_their_experts_by_the_engines_collectives(
    layout: str, dispatch: str, expected: list[tuple[str, float]]
) -> None:
    form = PassForm(dispatch=dispatch)  # type: ignore[arg-type]
    decode = Evaluated("deepseek-v3", layout, [DECODING], form)
    hidden = 64 / ServingLayout.parse(layout).attention_dp * 7168  # the hidden states of one copy of attention
    moved = [(c.kind.value, elements / hidden) for c, elements in decode.collectives(decode.inference.unit("block"))]
    assert moved == expected


def test_weights_of_unused_experts_are_not_read() -> None:
    small_batch, large_batch = (
        Evaluated("deepseek-v3", "attention_dp=8 ep=8", [SequenceGroup(kind="decode", num_seqs=n, cached_tokens=99)])
        for n in (8, 4096)
    )
    experts = 3 * 7168 * 2048 * 256 / 8
    for decode, tokens in ((small_batch, 8), (large_batch, 4096)):
        block = decode.inference.unit("block")
        values = decode.inference.token_values(block, decode.groups, decode.degrees)
        read = sum(k.weights["experts"].evaluate(values) for k in block.token_kernels if "experts" in k.weights)
        assert read == pytest.approx(experts * (1 - (1 - 8 / 256) ** tokens))


def test_a_mixed_pass_has_the_kernels_of_attention_of_both_groups() -> None:
    for name in ("llama-3.1-8b", "deepseek-v3"):
        mixed = Evaluated(name, "tp=1", [DECODING, CHUNK])
        separate = [Evaluated(name, "tp=1", [group]) for group in (DECODING, CHUNK)]
        assert mixed.flops() == pytest.approx(sum(part.flops() for part in separate), rel=1e-12)
        assert mixed.elements(Role.CACHE) == sum(part.elements(Role.CACHE) for part in separate)


def test_latents_are_read_once_in_decode_and_expanded_to_keys_in_prefill() -> None:
    decode, prefill = Evaluated("deepseek-v3", "tp=1", [DECODING]), Evaluated("deepseek-v3", "tp=1", [CHUNK])
    block = decode.inference.unit("block")
    attention = next(k for k, _ in decode.kernels(block) if k.kind == "cached_attention")
    values = decode.inference.group_values(block, DECODING, decode.degrees)
    assert attention.flops.evaluate(values) == 64 * 128 * 4096 * 2 * (2 * 512 + 64)
    keys = next(k for k, _ in prefill.kernels(block) if "k_plain" in k.outputs)
    values = prefill.inference.group_values(block, CHUNK, prefill.degrees)
    assert keys.flops.evaluate(values) == 2 * 2 * 1536 * 512 * 128 * (128 + 128)


def test_a_window_bounds_the_tokens_that_are_read() -> None:
    decode = Evaluated("gpt-oss-120b", "tp=1", [DECODING])
    model = decode.model
    windowed, full = (decode.inference.unit("block", window) for window in (128, None))
    assert (windowed.count, full.count) == (18, 18)
    for unit, slots in ((windowed, 128), (full, 4096)):
        attention = [(k, v) for k, v in decode.kernels(unit) if k.kind == "cached_attention"]
        assert [k.elements[Role.CACHE].evaluate(v) for k, v in attention] == [64 * slots * 2 * 8 * 64]
        assert [k.flops.evaluate(v) for k, v in attention] == [4 * 64 * slots * model.num_heads * 64]


def test_selected_keys_bound_the_reads_of_sparse_attention() -> None:
    model = replace(load_model("deepseek-v3"), index_heads=64, index_head_dim=128, index_topk=2048)  # DeepSeek-V3.2
    decode = Evaluated(model, "tp=1", [DECODING])
    block = decode.inference.unit("block")
    by_kind = {k.kind: (k, v) for k, v in decode.kernels(block) if k.kind in ("select", "cached_attention")}
    attention, values = by_kind["cached_attention"]
    assert attention.elements[Role.CACHE].evaluate(values) == 64 * 2048 * (512 + 64)
    indexer, values = by_kind["select"]
    assert indexer.elements[Role.CACHE].evaluate(values) == 64 * 4096 * 128
    assert indexer.flops.evaluate(values) == 2 * 64 * 4096 * 64 * (128 + 1)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 7), (4, 0), (4, 6), (16, 3)])
def test_slots_of_a_group_are_those_that_its_tokens_attend_to(window: int | None, new: int, cached: int) -> None:
    num_keys = [min(cached + i, window or 10**9) for i in range(1, new + 1)]
    first = cached + 1 - num_keys[0]  # of the slots that the first token sees
    slots, mean = slots_of_group(
        SequenceGroup(kind="prefill", num_seqs=1, new_tokens=new, cached_tokens=cached), window
    )
    assert (slots, mean) == (cached + new - first, sum(num_keys) / new)


@pytest.mark.parametrize(("new", "cached"), [(8, 0), (16, 0), (3, 2), (4, 32)])
def test_tokens_attend_to_their_own_chunk(new: int, cached: int) -> None:
    """For whole chunks, and within the first chunk, the mean is exact."""
    num_keys = [(cached + i) % 8 + 1 for i in range(new)] if cached < 8 else [4.5]
    group = SequenceGroup(kind="prefill", num_seqs=1, new_tokens=new, cached_tokens=cached)
    slots, mean = slots_of_group(group, 8, "chunked")
    assert mean == sum(num_keys) / len(num_keys)
    assert slots <= cached + new


def test_values_of_arrays_equal_those_of_numbers() -> None:
    model = load_model("gpt-oss-120b")
    inference, degrees = inference_pass(model), instance_degrees(model, ServingLayout(tp=4))
    seqs, cached = np.array([1, 7, 64]), np.array([10, 100, 9000])
    for unit in inference.units:
        groups = SequenceGroup(kind="decode", num_seqs=seqs, cached_tokens=cached)
        arrays = inference.group_values(unit, groups, degrees)
        tokens = inference.token_values(unit, [groups], degrees)
        for index in range(3):
            group = SequenceGroup(kind="decode", num_seqs=int(seqs[index]), cached_tokens=int(cached[index]))
            numbers = inference.group_values(unit, group, degrees)
            for kernel in unit.group_kernels["decode"]:
                flops = np.broadcast_to(kernel.kernel.flops.evaluate(arrays), 3)[index]
                assert flops == pytest.approx(kernel.kernel.flops.evaluate(numbers))
            numbers = inference.token_values(unit, [group], degrees)
            for kernel in unit.token_kernels:
                flops = np.broadcast_to(kernel.kernel.flops.evaluate(tokens), 3)[index]
                assert flops == pytest.approx(kernel.kernel.flops.evaluate(numbers))


def test_the_innermost_devices_split_each_experts_matrices() -> None:
    model = load_model("deepseek-v3")
    degrees = instance_degrees(model, ServingLayout(tp=4, attention_dp=4, ep=8))
    assert (degrees["dp_e"], degrees["dp_m"], degrees["kv_e"], degrees["kv_m"]) == (4, 1, 2, 2)
    assert axis_stride(("kv_e", "kv_m"), degrees) == 1
    assert axis_stride(("dp_e",), degrees) == 4
    assert axis_stride(("dp_e", "kv_e"), degrees) == 2


def test_recurrent_layers_keep_a_state_and_the_rows_of_their_convolutions() -> None:
    mixer = RecurrentMixer(
        kind="gated_delta", num_heads=32, num_groups=16, key_dim=128, head_dim=128, conv_width=4, chunk=64
    )  # of Qwen3-Next
    decode = Evaluated(replace(load_model("qwen3-8b"), mixer="none", recurrence=mixer), "tp=1", [DECODING])
    unit = next(u for u in decode.inference.units if any(not c.grows for c in u.cache))
    values = decode.inference.group_values(unit, DECODING, decode.degrees)
    sizes = {c.name: c.slot_elements.evaluate(values) for c in unit.cache}
    assert sizes["mixer.state"] == 32 * 128 * 128  # heads of values, widths of a key and of a value
    assert sum(size for name, size in sizes.items() if name.endswith("_rows")) == 3 * (2 * 16 * 128 + 32 * 128)


def test_redundant_experts_take_memory_and_a_share_of_the_rows() -> None:
    groups = [SequenceGroup(kind="decode", num_seqs=4096, cached_tokens=99)]
    plain, redundant = (
        Evaluated("deepseek-v3", f"attention_dp=32 ep=32 redundant_experts={count}", groups) for count in (0, 32)
    )
    for decode, experts in ((plain, 256 // 32), (redundant, 288 // 32)):
        block = decode.inference.unit("block")
        values = decode.inference.token_values(block, groups, decode.degrees)
        assert block.weights["experts"].evaluate(values) == experts * 3 * 7168 * 2048
        products = [k.kernel for k in block.token_kernels if k.kernel.shape.group_rows]
        assert products[0].shape.group_rows.evaluate(values) == 4096 * 8 / (experts * 32)  # of each expert
        flops = 4096 * 8 / 32 * 2 * 2 * 7168 * 2048  # of each device: the same
        assert products[0].flops.evaluate(values) == pytest.approx(flops)
