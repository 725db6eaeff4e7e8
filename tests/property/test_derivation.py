"""The central proof: the derived, sharded training step equals the unsharded one and moves what the derivation says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.derive.sharded_program import CollectiveStep, ProgramStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_units
from shardwise.model.optimizers.definition import optimizer_names
from shardwise.model.recompute_policies import policy_names
from shardwise.run.numpy.step import derived_traffic
from shardwise.sharding.collectives import CollectiveKind

from .training_step import TOLERANCE, Case, Change, nonzero, run_units, whole, worst_error

RECOMPUTES = tuple(policy_names())
MLPS = ("swiglu", "geglu", "gelu", "relu")


def check(case: Case) -> None:
    """The step is right to 1e-12 for every tensor, and moved exactly what was derived.

    Twice: the model derived as a whole, and as the chain of units that costs are read off; tied weights are one tensor of
    two units, and multi-token prediction is a branch, so these are derived as a whole only.
    """
    one_chain = not case.tied and not case.architecture.num_predict_layers
    for run in (whole, run_units) if one_chain else (whole,):
        outcome = run(case)
        worst, name = worst_error(case, outcome)
        assert worst <= TOLERANCE, f"{run.__name__}: {name}: relative error {worst:.2e}"
        assert outcome.moved == outcome.derived
        if case.mesh.num_devices > 1:
            assert any(outcome.moved.values()), "several devices, and nothing moved"


LAYOUTS = {
    "zero0": Case(dp=2),
    "zero0_4": Case(dp=4),
    "zero1": Case(fsdp=2, zero_stage=1),
    "zero2": Case(fsdp=2, zero_stage=2),
    "zero3": Case(fsdp=2, zero_stage=3),
    "zero3_4": Case(fsdp=4, zero_stage=3, num_layers=2),
    "hybrid_zero1": Case(dp=2, fsdp=2, zero_stage=1),
    "hybrid_zero2": Case(dp=2, fsdp=2, zero_stage=2),
    "hybrid_zero3": Case(dp=2, fsdp=2, zero_stage=3),
    "ring": Case(cp=3, cp_variant="ring", zero_stage=1),
    "ring_sp": Case(cp=2, tp_kv=2, tp_rep=2, sequence_parallel=True, cp_variant="ring", zero_stage=3),
    "ring_recomputed": Case(cp=4, fsdp=2, cp_variant="ring", zero_stage=3, recompute="full", positions=3),
    "ulysses": Case(cp=2, kv_heads_per_rank=2, cp_variant="ulysses", zero_stage=1),
    "ulysses_sp": Case(
        cp=2, tp_kv=2, kv_heads_per_rank=2, sequence_parallel=True, cp_variant="ulysses", zero_stage=3, recompute="full"
    ),
    "tp2": Case(tp_kv=2),
    "tp2_sp": Case(tp_kv=2, sequence_parallel=True),
    "tp4": Case(tp_kv=4),
    "tp4_sp": Case(tp_kv=4, sequence_parallel=True, num_layers=2),
    "few_kv_heads": Case(tp_kv=2, tp_rep=2),
    "few_kv_heads_sp": Case(tp_kv=2, tp_rep=2, sequence_parallel=True, query_heads_per_rank=2),
    "mqa": Case(tp_rep=2, query_heads_per_rank=2),
    "mqa_sp": Case(tp_rep=4, sequence_parallel=True),
    "mqa_zero3": Case(fsdp=2, tp_rep=2, zero_stage=3, sequence_parallel=True),
    "cp2": Case(cp=2),
    "cp2_zero1": Case(cp=2, zero_stage=1),
    "cp2_zero2": Case(cp=2, zero_stage=2),
    "cp2_zero3": Case(cp=2, zero_stage=3),
    "cp2_tp2_sp": Case(cp=2, tp_kv=2, sequence_parallel=True),
    "fsdp_tp": Case(fsdp=2, tp_kv=2, zero_stage=3),
    "fsdp_tp_sp": Case(fsdp=2, tp_kv=2, zero_stage=3, sequence_parallel=True),
    "fsdp_tp_zero1_sp": Case(fsdp=2, tp_kv=2, zero_stage=1, sequence_parallel=True),
    "fsdp_tp_zero2": Case(fsdp=2, tp_kv=2, zero_stage=2),
    "fsdp_tp_cp": Case(fsdp=2, tp_kv=2, cp=2, zero_stage=3, sequence_parallel=True),
    "fsdp_tp_cp_zero2": Case(fsdp=2, tp_kv=2, cp=2, zero_stage=2),
    "all_five": Case(dp=2, fsdp=2, cp=2, tp_kv=2, tp_rep=2, zero_stage=3, sequence_parallel=True),
    "all_five_zero1": Case(dp=2, fsdp=2, cp=2, tp_kv=2, tp_rep=2, zero_stage=1),
    "all_five_zero2": Case(dp=2, fsdp=2, cp=2, tp_kv=2, tp_rep=2, zero_stage=2, sequence_parallel=True),
    "three_ways": Case(fsdp=3, tp_kv=3, zero_stage=3, sequence_parallel=True),
}


def in_turn(first: Iterable[str], second: Iterable[str], third: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every pair of the first two with one of the third, which take turns: every pair of any two is among them."""
    second = list(second)
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize(
    "name", ["zero3_4", "hybrid_zero2", "ring", "ulysses_sp", "tp4", "few_kv_heads_sp", "all_five"]
)
def test_layout_equals_unsharded(name: str, recompute: str) -> None:
    check(dataclasses.replace(LAYOUTS[name], recompute=recompute))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "recompute"), [(name, RECOMPUTES[i % len(RECOMPUTES)]) for i, name in enumerate(LAYOUTS)]
)
def test_every_layout_equals_unsharded(name: str, recompute: str) -> None:
    check(dataclasses.replace(LAYOUTS[name], recompute=recompute))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_accumulation_equals_unsharded(zero_stage: int, num_micro_batches: int) -> None:
    check(
        Case(
            dp=2,
            fsdp=2 if zero_stage else 1,
            tp_kv=2,
            zero_stage=zero_stage,
            sequence_parallel=True,
            num_micro_batches=num_micro_batches,
        )
    )


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("zero_stage", "optimizer"), list(itertools.product([0, 1, 2, 3], optimizer_names())))
def test_every_optimizer_equals_unsharded(zero_stage: int, optimizer: str) -> None:
    sharded = {"fsdp": 2, "zero_stage": zero_stage} if zero_stage else {"dp": 2}
    check(Case(**sharded, tp_kv=2, sequence_parallel=True, optimizer=optimizer))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_tied_embeddings_equal_unsharded(recompute: str, zero_stage: int) -> None:
    check(
        Case(
            dp=1 if zero_stage else 2,
            fsdp=2 if zero_stage else 1,
            tp_kv=2,
            cp=2,
            zero_stage=zero_stage,
            sequence_parallel=True,
            recompute=recompute,
            tied=True,
        )
    )


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("zero_stage", "tied", "words"), list(itertools.product([0, 1, 2, 3], [False, True], [2, 5, 9, 10, 11]))
)
def test_vocabularies_that_tp_does_not_divide_equal_unsharded(zero_stage: int, tied: bool, words: int) -> None:
    """Over four ranks; of two, five and nine words a rank has none."""
    check(
        Case(
            fsdp=2 if zero_stage else 1,
            tp_kv=2,
            tp_rep=2,
            zero_stage=zero_stage,
            sequence_parallel=True,
            tied=tied,
            structure=(("vocab_size", words),),
        )
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_mlp_kind_equals_unsharded(recompute: str, mlp: str) -> None:
    check(Case(fsdp=2, tp_kv=2, zero_stage=3, sequence_parallel=True, recompute=recompute, mlp=mlp))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts of up to 16 devices over all five axes, and small odd sizes that they divide."""
    degrees = {axis: draw(st.sampled_from([1, 2, 3])) for axis in ("dp", "fsdp", "cp", "tp_kv", "tp_rep")}
    devices = 1
    for axis, degree in degrees.items():
        if devices * degree > 16:
            degrees[axis] = 1
        devices *= degrees[axis]
    small = st.integers(1, 2)
    return Case(
        **degrees,
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTES)),
        cp_variant=draw(st.sampled_from(["all_gather", "ring"])),
        num_micro_batches=draw(st.integers(1, 3)),
        mlp=draw(st.sampled_from(MLPS)),
        tied=draw(st.booleans()),
        num_layers=draw(small),
        kv_heads_per_rank=draw(small),
        query_heads_per_rank=draw(small),
        half_head_dim=draw(small),
        width=draw(st.integers(2, 4)),
        hidden=draw(st.integers(1, 3)),
        vocab=draw(st.integers(2, 5)),
        seqs=draw(small),
        positions=draw(st.integers(2, 3)),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_a_zigzag_ring_equals_attention_over_the_sequence_in_order(cp: int, recompute: str) -> None:
    """Each rank has a piece from either end. The loss and all gradients are those of the sequence as it was."""
    case = Case(cp=cp, cp_variant="ring", zero_stage=3, positions=4, num_micro_batches=2, recompute=recompute)
    zigzag = run_units(dataclasses.replace(case, zigzag=True))
    worst, name = worst_error(case, zigzag)
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert zigzag.moved == run_units(case).moved == zigzag.derived


def test_a_ring_moves_what_the_gathers_and_scatters_would_have_moved() -> None:
    """As permutes: nothing else about the derivation changes."""
    ring, gathered = (
        run_units(Case(cp=4, zero_stage=1, cp_variant=v)).moved["micro_batch"] for v in ("ring", "all_gather")
    )
    by_cp = {kind: count for (kind, axes), count in gathered.items() if axes == ("cp",)}
    around = ring[CollectiveKind.PERMUTE, ("cp",)]
    assert around > 0
    assert around + sum(
        n for (kind, axes), n in ring.items() if axes == ("cp",) and kind is not CollectiveKind.PERMUTE
    ) == sum(by_cp.values())


@given(cases())
def test_any_layout_equals_unsharded(case: Case) -> None:
    check(case)


# The proof above can fail: each derived collective that is left out, or does nothing, is noticed.

CORRUPTED = {
    "zero3": Case(dp=2, fsdp=2, zero_stage=3, num_micro_batches=1, recompute="selective"),
    "zero1": Case(dp=2, fsdp=2, cp=2, zero_stage=1, num_micro_batches=1, recompute="full"),
    "tp": Case(tp_kv=2, tp_rep=2, num_micro_batches=1),
    "tp_sp": Case(tp_kv=2, sequence_parallel=True, num_micro_batches=1),
}


def places(unit: ShardedUnit) -> Iterator[tuple[str, int, CollectiveStep]]:
    """Every communication of the three programs that an execution runs."""
    for program in ("forward", "backward", "update"):
        for index, step in enumerate(getattr(unit, program).steps):
            if isinstance(step, CollectiveStep):
                yield program, index, step


def with_steps(unit: ShardedUnit, program: str, steps: tuple[ProgramStep, ...]) -> ShardedUnit:
    """The unit with other steps in one of its programs; what is recomputed stays in front of the backward pass."""
    changed = dataclasses.replace(unit, **{program: dataclasses.replace(getattr(unit, program), nodes=steps)})
    if program != "backward":
        return changed
    kept = {id(step) for step in unit.recompute_steps}
    border = max((place + 1 for place, step in enumerate(steps) if id(step) in kept), default=0)
    return dataclasses.replace(changed, recompute_nodes=steps[:border], backward_nodes=steps[border:])


def is_noticed(case: Case, change: Change) -> bool:
    """Whether a corrupted derivation gives wrong numbers, devices that disagree, or no step at all."""
    try:
        outcome = run_units(case, change)
    except (KeyError, ValueError, AssertionError):
        return True
    worst, _ = worst_error(case, outcome)
    return not worst <= 1e-6


def corruptions(
    case: Case, replacement: Callable[[CollectiveStep], tuple[ProgramStep, ...]]
) -> Iterator[tuple[str, Change]]:
    """Each collective of each unit over several devices replaced in turn: what was replaced, and the change."""
    for unit in derive_units(case.scheme).values():
        for program, index, step in places(unit):
            if unit.name != "carry" and case.mesh.size(step.collective.axes) > 1:
                steps = getattr(unit, program).steps
                corrupted = with_steps(unit, program, (*steps[:index], *replacement(step), *steps[index + 1 :]))
                label = f"{unit.name}, {program}: {step.tensor.name}: {step.collective}"
                yield label, lambda u, name=unit.name, corrupted=corrupted: corrupted if u.name == name else u


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CORRUPTED)
def test_every_collective_is_needed(name: str) -> None:
    case = CORRUPTED[name]
    check(case)
    tried = [(label, is_noticed(case, change)) for label, change in corruptions(case, lambda step: ())]
    assert len(tried) >= 10
    assert [label for label, was_noticed in tried if not was_noticed] == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CORRUPTED)
def test_a_reduction_that_does_not_sum_is_noticed(name: str) -> None:
    """Each device keeps its own summand: every shape stays right, so only the numbers can tell."""

    def without_sum(step: CollectiveStep) -> tuple[ProgramStep, ...]:
        if step.collective.kind is not CollectiveKind.ALL_REDUCE:
            return (step,)
        return (dataclasses.replace(step, collective=dataclasses.replace(step.collective, axes=())),)

    case = CORRUPTED[name]
    tried = [
        (label, is_noticed(case, change))
        for label, change in corruptions(case, without_sum)
        if f": {CollectiveKind.ALL_REDUCE}_" in label
    ]
    assert tried
    assert [label for label, was_noticed in tried if not was_noticed] == []


def test_a_collective_that_is_not_counted_is_noticed() -> None:
    case = LAYOUTS["hybrid_zero3"]
    _, fewer = next(corruptions(case, lambda step: ()))
    units = derive_units(case.scheme)
    moved = run_units(case).moved
    counted = [
        nonzero(derived_traffic(change(units["embedding"]), case.mesh, case.sizes, case.num_micro_batches))
        for change in (lambda unit: unit, fewer)
    ]
    assert moved == run_units(case).derived
    assert counted[0] != counted[1]


def test_the_cases_cover_every_kind_of_collective() -> None:
    """Between them the layouts above use every collective but a pipeline's, over each axis that splits something."""
    collectives = {
        key
        for case in LAYOUTS.values()
        for unit in derive_units(case.scheme).values()
        if unit.name != "carry"
        for counts in nonzero(derived_traffic(unit, case.mesh, case.sizes, case.num_micro_batches)).values()
        for key in counts
    }
    assert {kind for kind, _ in collectives} >= {
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
    }
    assert {axis for _, axes in collectives for axis in axes} == {"dp", "fsdp", "cp", "tp_kv", "tp_rep"}


def test_sequence_parallelism_changes_what_moves() -> None:
    """With it, tensor parallelism gathers and scatters; without, it only reduces."""
    tp = ("tp_kv", "tp_rep")
    plain = set(run_units(LAYOUTS["tp4"]).moved["micro_batch"])
    split = set(run_units(LAYOUTS["tp4_sp"]).moved["micro_batch"])
    assert (CollectiveKind.ALL_GATHER, tp) not in plain
    assert (CollectiveKind.REDUCE_SCATTER, tp) not in plain
    assert {(CollectiveKind.ALL_GATHER, tp), (CollectiveKind.REDUCE_SCATTER, tp)} <= split
