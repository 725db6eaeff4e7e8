"""Sets of saved tensors: no subset of the saveable tensors is better, and texts of sets are read back."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.backward import (
    SaveChoice,
    combine_choices,
    pareto_save_choices,
    saveable_results,
    split_saved,
    transpose_program,
)
from shardwise.model.decoder import unit_program
from shardwise.model.operations import Map
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.model.recompute_policies import format_tensor_set, parse_tensor_set, policy_for_layer
from shardwise.values.errors import InputError

SMALL = Architecture(
    name="small", num_layers=1, d_model=8, d_ff=8, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=8, mlp="relu",
    norm="layer", parallel=True,
)  # fmt: skip


def random_program(seed: int) -> Program:
    """Nine operations, each of up to three tensors computed before."""
    chance, builder = Random(seed), ProgramBuilder()
    tensors = [builder.input("x", ("D",), Role.ACTIVATION)]
    for number in range(9):
        reads = tuple(chance.sample(tensors, min(len(tensors), chance.randint(1, 3))))
        tensors.append(builder.add(Map(reads, (builder.tensor(f"t{number}", ("D",), Role.ACTIVATION),), "add")))
    return builder.build([tensors[-1]])


def pareto_by_enumeration(
    program: Program, reads: list[str], sizes: dict[str, float], seconds: dict[str, float], may: list[str]
) -> set[tuple[float, float]]:
    """Bytes and seconds of every subset that no other beats, by deriving each subset."""
    choices = []
    for number in range(len(may) + 1):
        for subset in combinations(may, number):
            split = split_saved(program, reads, format_tensor_set({"": subset}) if subset else "full")
            saved = sum(sizes[name] for name in split.saved if name in sizes)
            choices.append((saved, sum(seconds[operation.outputs[0]] for operation in split.operations)))
    best = {}
    for saved, recompute_s in choices:
        best[saved] = min(recompute_s, best.get(saved, recompute_s))
    return {(a, b) for a, b in best.items() if not any(c < a and d <= b for c, d in best.items())}


def sizes_and_seconds(choices: tuple[SaveChoice, ...]) -> set[tuple[float, float]]:
    return {(choice.num_bytes, choice.seconds) for choice in choices}


@pytest.mark.parametrize("seed", range(40))
def test_no_subset_of_a_random_programs_tensors_is_better(seed: int) -> None:
    program, chance = random_program(seed), Random(seed)
    results = [operation.outputs[0] for operation in program.operations]
    sizes = {name: float(chance.randint(1, 6)) for name in results}
    seconds = {name: float(chance.randint(1, 6)) for name in results}
    reads = chance.sample(results, 5)
    assert sizes_and_seconds(pareto_save_choices(program, reads, sizes, seconds, results)) == pareto_by_enumeration(
        program, reads, sizes, seconds, results
    )


def test_no_subset_of_a_blocks_tensors_is_better() -> None:
    program = unit_program(SMALL.structure, "block")
    reads = [*transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs).program.inputs]
    may, chance = saveable_results(program, reads), Random(0)
    results = {out for operation in program.operations for out in operation.outputs}
    sizes = {name: float(chance.randint(1, 9)) for name in results}
    seconds = {operation.outputs[0]: float(chance.randint(1, 9)) for operation in program.operations}
    choices = pareto_save_choices(program, reads, sizes, seconds, may)
    assert len(choices) > 5
    firsts = [operation.outputs[0] for operation in program.operations if operation.outputs[0] in may]
    assert sizes_and_seconds(choices) == pareto_by_enumeration(program, reads, sizes, seconds, firsts)


def test_a_choice_saves_what_its_policy_saves() -> None:
    """The kept tensors of a choice are those that its policy saves, and no more."""
    program = unit_program(SMALL.structure, "block")
    reads = [*transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs).program.inputs]
    seconds = {operation.outputs[0]: 1.0 for operation in program.operations}
    for choice in pareto_save_choices(
        program, reads, dict.fromkeys(seconds, 2.0), seconds, saveable_results(program, reads)
    ):
        split = split_saved(program, reads, format_tensor_set({"": choice.saved}) if choice.saved else "full")
        assert {*split.saved} - {"x"} == {*choice.saved}
        assert len(split.operations) == choice.seconds


def test_no_pair_of_choices_beats_the_combined_ones() -> None:
    chance = Random(1)
    first, second = ([SaveChoice((), float(9 - n), n * chance.random()) for n in range(9)] for _ in range(2))
    combined = combine_choices((first, second), (3.0, 2.0))
    every = [(3 * a.num_bytes + 2 * b.num_bytes, 3 * a.seconds + 2 * b.seconds) for a in first for b in second]
    for a, b in combined:
        size, total_s = 3 * a.num_bytes + 2 * b.num_bytes, 3 * a.seconds + 2 * b.seconds
        assert not any(other_size < size and other_s <= total_s for other_size, other_s in every)


def test_texts_of_sets_are_read_back() -> None:
    for tensors_by_layer in ({"": ("q", "k")}, {"block": ("q",), "dense_block": ()}):
        assert parse_tensor_set(format_tensor_set(tensors_by_layer)) == tensors_by_layer
    assert Layout.parse(str(Layout.parse("recompute=keep:q,k"))).recompute == "keep:q,k"
    assert [policy_for_layer("keep:q/block:k", kind) for kind in ("block", "dense_block")] == ["keep:k", "keep:q"]
    assert policy_for_layer("selective", "block") == "selective"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keep:", "names of tensors with commas"),
        ("keep:block:q/block:k", "for each kind of layer once"),
        ("budget:much", "budget"),
        ("fll", "did you mean 'full'?"),
        ("keeping", "one of none, selective, full, .* keep:TENSOR"),
    ],
)
def test_an_invalid_policy_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Layout(recompute=text)
