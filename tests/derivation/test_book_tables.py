"""The books' communication tables come out of the derivation; no formula of them is written in the package.

Sources: S0 is Austin et al., How to Scale Your Model (chapter 5, "How to parallelize a Transformer for training");
S1 is Tazi et al., The Ultra-Scale Playbook ("Tensor parallelism"); S3 is a note on compute-bound training (table 3).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from book_mlp import STRATEGIES, derive_mlp
from schemes import scheme_of

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ShardedProgram
from shardwise.derive.sharded_unit import derived_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.load import load_model
from shardwise.sharding.collectives import CollectiveKind, reshard
from shardwise.sharding.notation import parse_tensor
from shardwise.values.symbolic import SymbolValues

SIZES = {"B": 4_194_304, "D": 8192, "F": 28672, "X": 1024, "Y": 8}


def list_collectives(program: ShardedProgram) -> list[tuple[str, str]]:
    return [(str(step.collective.kind), step.tensor.name.split("#")[0]) for step in program.communication]


def payload_bytes(program: ShardedProgram) -> float:
    """S0's convention: bytes of the bf16 array of each collective, an AllReduce counted as two."""
    values = SymbolValues(SIZES)
    times = {CollectiveKind.ALL_REDUCE: 2.0, CollectiveKind.SLICE: 0.0}
    parts = (s.collective for s in program.communication)
    return sum(2.0 * c.payload_elements.evaluate(values) * times.get(c.kind, 1.0) for c in parts)


def flops(program: ShardedProgram) -> float:
    computes = (step for step in program.steps if isinstance(step, ComputeStep))
    return sum(step.operation.flops(step.placed).evaluate(SymbolValues(SIZES)) for step in computes)


FORWARD: Mapping[str, list[tuple[str, str]]] = {
    "DP": [],
    "FSDP": [("all_gather", "W_in"), ("all_gather", "W_out")],
    "TP": [("all_gather", "In"), ("reduce_scatter", "Out")],
    "FSDP_TP": [("all_gather", "In"), ("all_gather", "W_in"), ("all_gather", "W_out"), ("reduce_scatter", "Out")],
}
BACKWARD: Mapping[str, set[tuple[str, str]]] = {
    "DP": {("all_reduce", "d.W_in"), ("all_reduce", "d.W_out")},
    "FSDP": {
        ("all_gather", "W_in"), ("all_gather", "W_out"), ("reduce_scatter", "d.W_in"), ("reduce_scatter", "d.W_out"),
    },
    "TP": {("all_gather", "d.Out"), ("all_gather", "In"), ("reduce_scatter", "d.In")},
    "FSDP_TP": {
        ("all_gather", "d.Out"), ("all_gather", "In"), ("reduce_scatter", "d.In"), ("all_gather", "W_in"),
        ("all_gather", "W_out"), ("reduce_scatter", "d.W_in"), ("reduce_scatter", "d.W_out"),
    },
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_of_the_four_strategies(strategy: str) -> None:
    passes = derive_mlp(strategy)
    assert sorted(list_collectives(passes.forward)) == sorted(FORWARD[strategy])
    assert len(list_collectives(passes.backward)) == len(BACKWARD[strategy])
    assert set(list_collectives(passes.backward)) == BACKWARD[strategy]


@pytest.mark.parametrize(
    ("strategy", "compute", "forward", "back"),
    [
        ("DP", 4 * 4194304 * 8192 * 28672 / 1024, 0, 8 * 8192 * 28672),
        ("FSDP", 4 * 4194304 * 8192 * 28672 / 1024, 4 * 8192 * 28672, 8 * 8192 * 28672),
        ("TP", 4 * 4194304 * 8192 * 28672 / 8, 4 * 4194304 * 8192, 6 * 4194304 * 8192),
        # S0's table prints 8BD/X for the backward pass; its own list of twelve steps has three activation collectives.
        (
            "FSDP_TP",
            4 * 4194304 * 8192 * 28672 / 8192,
            4 * 4194304 * 8 + 4 * 8192 * 28672 / 8,
            6 * 4194304 * 8 + 8 * 8192 * 28672 / 8,
        ),
    ],
)
def test_compute_and_bytes_of_the_four_strategies(strategy: str, compute: float, forward: float, back: float) -> None:
    passes = derive_mlp(strategy)
    assert flops(passes.forward) == pytest.approx(compute, rel=1e-12)
    assert flops(passes.backward) == pytest.approx(2 * compute, rel=1e-12)
    assert payload_bytes(passes.forward) == pytest.approx(forward, rel=1e-12)
    assert payload_bytes(passes.backward) == pytest.approx(back, rel=1e-12)


def test_an_input_kept_gathered_is_not_gathered_again() -> None:
    passes = derive_mlp("TP", keep_gathered=True)
    assert set(list_collectives(passes.backward)) == {("all_gather", "d.Out"), ("reduce_scatter", "d.In")}
    assert payload_bytes(passes.backward) == 4 * SIZES["B"] * SIZES["D"]


def test_products_of_the_backward_pass() -> None:
    """S0's appendix B: the four products of the backward pass and what each sums over (its slip for dW_in mended)."""
    operands = {}
    for step in derive_mlp("DP").backward.steps:
        if isinstance(step, ComputeStep):
            first, second = step.placed.inputs
            summed = (set(first.dims) & set(second.dims)) - set(step.placed.outputs[0].dims)
            operands[step.operation.outputs[0].split("#")[0]] = (step.operation.inputs, "".join(summed))
    assert operands == {
        "d.W_out": (("Tmp", "d.Out"), "B"),
        "d.Tmp": (("d.Out", "W_out"), "D"),
        "d.W_in": (("In", "d.Tmp#0"), "B"),
        "d.In": (("d.Tmp#0", "W_in"), "F"),
    }


@pytest.mark.parametrize(("strategy", "axis", "exponent"), [("DP", "X", 0.5), ("FSDP", "X", 0.5), ("TP", "Y", 0.5)])
def test_interconnect_intensity_halves_when_the_devices_double(strategy: str, axis: str, exponent: float) -> None:
    """S3, table 3: B/K for DP and FSDP, D/K for TP."""

    def intensity(sizes: Mapping[str, int]) -> float:
        passes = derive_mlp(strategy)
        work = sum(
            s.operation.flops(s.placed).evaluate(SymbolValues(sizes))
            for s in passes.backward.steps
            if isinstance(s, ComputeStep)
        )
        moved = sum(s.collective.payload_elements.evaluate(SymbolValues(sizes)) for s in passes.backward.communication)
        return work / moved

    doubled = {**SIZES, axis: SIZES[axis] * 2}
    assert intensity(doubled) / intensity(SIZES) == pytest.approx(exponent, rel=1e-9)


def test_interconnect_intensity_of_the_mix_falls_with_the_root_of_the_devices() -> None:
    """S3, table 3: sqrt(BD/K) when both degrees sit at the balance of weight and activation traffic."""

    def intensity(x: float, y: float) -> float:
        values = SymbolValues({"B": 2**40, "D": 2**30, "F": 2**20, "X": round(x), "Y": round(y)})
        forward = derive_mlp("FSDP_TP").forward
        work = sum(s.operation.flops(s.placed).evaluate(values) for s in forward.steps if isinstance(s, ComputeStep))
        return work / sum(s.collective.payload_elements.evaluate(values) for s in forward.communication)

    # at the balance B / X = F / Y both degrees grow with the root of the devices: four times as many, twice each
    assert intensity(2**22, 2**2) / intensity(2**21, 2**1) == pytest.approx(4**-0.5, rel=1e-9)


LLAMA = load_model("llama-3-8b").structure


def region(scheme: ShardingScheme, phase: str, tensor: str) -> list[str]:
    """Collectives over tensor parallelism on one tensor of a block, slices left out."""
    steps = derived_unit(scheme, "block").phases()[phase]
    collectives = (s for s in steps if isinstance(s, CollectiveStep) and s.tensor.name.split("#")[0] == tensor)
    return [str(s.collective.kind) for s in collectives if "tp_kv" in s.collective.axes]


@pytest.mark.parametrize(
    ("sequence_parallel", "enter", "leave"),
    [
        # f: nothing, then all-reduce; f*: all-reduce, then nothing
        (False, ([], ["all_reduce"]), (["all_reduce"], [])),
        # g: all-gather, then reduce-scatter; g*: reduce-scatter, then all-gather
        (True, (["all_gather"], ["reduce_scatter"]), (["reduce_scatter"], ["all_gather"])),
    ],
)
@pytest.mark.parametrize(
    ("inside", "outside", "cotangent"),
    [("attention_norm.out", "attention_out", "d.x_mid"), ("mlp_norm.out", "mlp_out", "d.x_out")],
)
def test_conjugate_operators_of_tensor_parallelism(
    sequence_parallel: bool, enter: tuple[list[str], list[str]], leave: tuple[list[str], list[str]],
    inside: str, outside: str, cotangent: str,
) -> None:  # fmt: skip
    """S1's table of f, f*, g, g*: entering and leaving a tensor-parallel region, forward and backward."""
    scheme = scheme_of(LLAMA, 0, sequence_parallel)
    assert region(scheme, "forward", inside) == enter[0]
    assert region(scheme, "backward", f"d.{inside}") == enter[1]
    assert region(scheme, "forward", outside) == leave[0]
    assert region(scheme, "backward", cotangent) == leave[1]


def test_norm_gradients_are_whole_without_sequence_parallelism() -> None:
    """S1: without sequence parallelism every tensor-parallel rank sees the same activations at a norm."""
    for sequence_parallel in (False, True):
        unit = derived_unit(scheme_of(LLAMA, 0, sequence_parallel), "block")
        partial = unit.backward.specs[unit.gradients["attention_norm.weight"]].partial
        assert ("tp_kv" in partial) == sequence_parallel


def test_replicated_key_value_heads_leave_a_partial_weight_gradient() -> None:
    unit = derived_unit(scheme_of(LLAMA, 0, True), "block")
    assert "tp_rep" in unit.backward.specs[unit.gradients["wk"]].partial
    assert "tp_rep" not in unit.backward.specs[unit.gradients["wq"]].partial


def test_where_zero_shards_a_weight_does_not_change_the_bytes() -> None:
    """Sharding D (as here and in S0) or the stored first dim (as PyTorch's FSDP does by default) moves the same bytes."""
    sizes = {**SIZES, "X": 256}

    def received(stored: str, use: str) -> float:
        gathered = reshard(parse_tensor(stored).spec, parse_tensor(use).spec)
        return sum(c.received_elements.evaluate(SymbolValues(sizes)) for c in gathered)

    assert received("W[F_Y, D_X]", "W[F_Y, D]") == received("W[F_YX, D]", "W[F_Y, D]")
