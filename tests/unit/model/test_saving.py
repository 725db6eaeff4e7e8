"""Sets of tensors to keep: none is beaten by any subset of what may be kept, and texts of sets are read back."""

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
    """Nine operations, each of up to three tensors that are there by then."""
    chance, builder = Random(seed), ProgramBuilder()
    there = [builder.input("x", ("D",), Role.ACTIVATION)]
    for number in range(9):
        reads = tuple(chance.sample(there, min(len(there), chance.randint(1, 3))))
        there.append(builder.add(Map(reads, (builder.tensor(f"t{number}", ("D",), Role.ACTIVATION),), "add")))
    return builder.build([there[-1]])


def by_trying(
    program: Program, reads: list[str], sizes: dict[str, float], seconds: dict[str, float], may: list[str]
) -> set[tuple[float, float]]:
    """Bytes and seconds of every subset that no other beats, by deriving each."""
    found = []
    for number in range(len(may) + 1):
        for kept in combinations(may, number):
            split = split_saved(program, reads, format_tensor_set({"": kept}) if kept else "full")
            saved = sum(sizes[name] for name in split.saved if name in sizes)
            found.append((saved, sum(seconds[operation.outputs[0]] for operation in split.operations)))
    best = {}
    for saved, again in found:
        best[saved] = min(again, best.get(saved, again))
    return {(a, b) for a, b in best.items() if not any(c < a and d <= b for c, d in best.items())}


def numbers(found: tuple[SaveChoice, ...]) -> set[tuple[float, float]]:
    return {(one.num_bytes, one.seconds) for one in found}


@pytest.mark.parametrize("seed", range(40))
def test_of_a_random_program_no_subset_is_better(seed: int) -> None:
    program, chance = random_program(seed), Random(seed)
    made = [operation.outputs[0] for operation in program.operations]
    sizes = {name: float(chance.randint(1, 6)) for name in made}
    seconds = {name: float(chance.randint(1, 6)) for name in made}
    reads = chance.sample(made, 5)
    assert numbers(pareto_save_choices(program, reads, sizes, seconds, made)) == by_trying(
        program, reads, sizes, seconds, made
    )


def test_of_a_block_no_subset_is_better() -> None:
    program = unit_program(SMALL.structure, "block")
    reads = [*transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs).program.inputs]
    may, chance = saveable_results(program, reads), Random(0)
    made = {out for operation in program.operations for out in operation.outputs}
    sizes = {name: float(chance.randint(1, 9)) for name in made}
    seconds = {operation.outputs[0]: float(chance.randint(1, 9)) for operation in program.operations}
    found = pareto_save_choices(program, reads, sizes, seconds, may)
    assert len(found) > 5
    firsts = [operation.outputs[0] for operation in program.operations if operation.outputs[0] in may]
    assert numbers(found) == by_trying(program, reads, sizes, seconds, firsts)


def test_what_is_found_is_what_is_derived() -> None:
    """The kept tensors of a choice are those that its policy saves, and no more."""
    program = unit_program(SMALL.structure, "block")
    reads = [*transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs).program.inputs]
    seconds = {operation.outputs[0]: 1.0 for operation in program.operations}
    for one in pareto_save_choices(
        program, reads, dict.fromkeys(seconds, 2.0), seconds, saveable_results(program, reads)
    ):
        split = split_saved(program, reads, format_tensor_set({"": one.saved}) if one.saved else "full")
        assert {*split.saved} - {"x"} == {*one.saved}
        assert len(split.operations) == one.seconds


def test_pairs_of_two_programs_are_not_beaten() -> None:
    chance = Random(1)
    first, second = ([SaveChoice((), float(9 - n), n * chance.random()) for n in range(9)] for _ in range(2))
    found = combine_choices((first, second), (3.0, 2.0))
    every = [(3 * a.num_bytes + 2 * b.num_bytes, 3 * a.seconds + 2 * b.seconds) for a in first for b in second]
    for a, b in found:
        size, again = 3 * a.num_bytes + 2 * b.num_bytes, 3 * a.seconds + 2 * b.seconds
        assert not any(one < size and other <= again for one, other in every)


def test_texts_of_sets_are_read_back() -> None:
    for kept in ({"": ("q", "k")}, {"block": ("q",), "dense_block": ()}):
        assert parse_tensor_set(format_tensor_set(kept)) == kept
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
def test_what_is_no_policy_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        Layout(recompute=text)
