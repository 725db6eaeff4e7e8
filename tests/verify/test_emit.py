"""Emitted source: it names every step, stands alone, compiles, and picks names and permutations that are safe."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import pytest

from shardwise.derive.sharded_einsum import ShardedExpression, derive_by_cases, shard_expression
from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ShardedProgram
from shardwise.model.operations import Map, OperationSharding
from shardwise.sharding.collectives import Collective, CollectiveKind
from shardwise.sharding.notation import parse_expression, parse_tensor
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError
from shardwise.verify.product_listing import RESERVED_NAMES, CollectiveLine, build_listing
from shardwise.verify.product_runs import emit

EXPRESSIONS = (
    ("A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]", {"X": 4, "Y": 2}),
    ("A[I_YX, J]{U_Z} * B[J_X, K] -> C[I_Y, K_ZX]", {"X": 2, "Y": 2, "Z": 2}),
    (
        "In[B_{dp,fsdp}, D] * W1[D_fsdp, F_tp] * W2[F_tp, D'_fsdp] -> Out[B_{dp,fsdp}, D']",
        {"dp": 2, "fsdp": 2, "tp": 2},
    ),
    ("A[I_X] * B[I_X] -> C[]", {"X": 2}),
    ("A[I, J] * B[J, K]", {}),
)


def solve(text: str, mesh: Mapping[str, int], size: int = 16) -> tuple[ShardedExpression, ShardedProgram]:
    expression = parse_expression(text)
    sizes = {dim: size for operand in expression.operands for dim in operand.spec.dims}
    sharded = shard_expression(expression, Mesh.of(mesh), sizes)
    return sharded, derive_by_cases(sharded)


def permute_result(before: str, after: str, mesh: Mapping[str, int]) -> tuple[ShardedExpression, ShardedProgram]:
    """An elementwise product whose result is handed from `C[before]` to `C[after]` by one permute."""
    sharded, program = solve(f"A[{before}] * B[{before}] -> C[{before}]", mesh, size=12)
    goal = parse_tensor(f"C[{after}]").spec
    permute = Collective(CollectiveKind.PERMUTE, tuple(reversed(mesh)), sharded.operands[0], goal)
    steps = (*program.steps, CollectiveStep(program.program.tensors["C"], permute))
    return sharded, ShardedProgram(program.program, steps, {**program.specs, "C": goal})


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize(("text", "mesh"), EXPRESSIONS)
def test_the_source_stands_alone(text: str, mesh: dict[str, int], framework: str) -> None:
    source = emit(*solve(text, mesh), framework)  # type: ignore[arg-type]
    tree = ast.parse(source)
    compile(source, "product.py", "exec")
    imported = {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "os", "sys", "numpy", framework} | ({"math"} if framework == "torch" else set())
    assert not re.search(r"\{[a-z_]+\}|TODO|[ \t]$", source.replace("{dp,fsdp}", ""), re.MULTILINE)
    assert max(map(len, source.splitlines())) <= 130
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} >= {"product", "main"}


def test_every_step_is_one_line_under_its_comment() -> None:
    source = emit(*solve(*EXPRESSIONS[1]), "jax")
    body = source[source.index("def product") : source.index("    return c\n")].splitlines()[2:]
    assert body == [
        "    # B: [J_X, K] -> [J, K], all-gather over X",
        '    b = lax.all_gather(b, "X", axis=0, tiled=True)',
        "    # C: [I_YX, K]{U_Z} = A[I_YX, J]{U_Z} * B[J, K]",
        '    c = jnp.einsum("ij,jk->ik", a, b)',
        "    # C: [I_YX, K]{U_Z} -> [I_YX, K_Z], reduce-scatter over Z",
        '    c = lax.psum_scatter(c, "Z", scatter_dimension=1, tiled=True)',
        "    # C: [I_YX, K_Z] -> [I_Y, K_ZX], all-to-all over X",
        '    c = lax.all_to_all(c, "X", split_axis=1, concat_axis=0, tiled=True)',
    ]


def test_the_header_gives_the_command() -> None:
    sharded, program = solve(*EXPRESSIONS[0])
    assert "torchrun --standalone --nproc-per-node 8 product.py" in emit(sharded, program, "torch")
    assert "--xla_force_host_platform_device_count=8" in emit(sharded, program, "jax")
    for framework in ("jax", "torch"):
        assert emit(sharded, program, framework).startswith(f'"""{sharded.expression}\n')  # type: ignore[arg-type]


def test_names_are_python_names_and_collide_with_nothing() -> None:
    sharded, program = solve("In[I, J] * IN[J, K] * Max[K, L] * Mesh[L, M] -> Product[I, M]", {"X": 2})
    known = build_listing(sharded, program)
    names = [operand.variable for operand in known.operands] + [known.result]
    assert names == ["in_", "in__", "max_", "mesh_", "product_"]
    assert not set(names) & RESERVED_NAMES


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize(("text", "mesh"), EXPRESSIONS)
def test_no_tensor_may_have_a_name_that_the_source_uses(text: str, mesh: dict[str, int], framework: str) -> None:
    """Names of functions, and of modules and variables where tensors are. Tensors' names are in small letters."""
    sharded, program = solve(text, mesh)
    tree = ast.parse(emit(sharded, program, framework))  # type: ignore[arg-type]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    beside = {"main", "product"} & {function.name for function in functions}
    used = {function.name for function in functions} | {
        node.id
        for function in functions
        if function.name in beside
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
    listed = build_listing(sharded, program)
    tensors = {line.variable for line in listed.operands} | {listed.result} | {line.target for line in listed.steps}
    assert len(used) > 10
    assert {name for name in used - tensors if name == name.lower()} <= RESERVED_NAMES


def test_a_tensor_that_is_needed_twice_keeps_both_variables() -> None:
    sharded, program = solve("A[I_X, J] * B[J, K] -> C[I_X, K]", {"X": 2})
    (product,) = program.steps
    assert isinstance(product, ComputeStep)
    gather = Collective(CollectiveKind.ALL_GATHER, ("X",), sharded.operands[0], sharded.operands[0].gather_axes("X"))
    steps = (CollectiveStep(program.program.tensors["A"], gather), product)
    known = build_listing(sharded, ShardedProgram(program.program, steps, program.specs))
    assert [step.target for step in known.steps] == ["a_2", "c"]


@pytest.mark.parametrize(
    ("before", "after", "mesh", "expected"),
    [
        # The device at (x, y) holds part 3x + y, and needs part x + 2y.
        ("I_XY", "I_YX", {"X": 2, "Y": 3}, (0, 3, 1, 4, 2, 5)),
        # Devices that keep their part send to themselves.
        ("I_X", "I_Y", {"X": 2, "Y": 2}, (0, 2, 1, 3)),
    ],
)
def test_a_permute_is_a_permutation(before: str, after: str, mesh: dict[str, int], expected: tuple[int, ...]) -> None:
    sharded, program = permute_result(before, after, mesh)
    (step,) = [step for step in build_listing(sharded, program).steps if isinstance(step, CollectiveLine)]
    assert step.axes == tuple(mesh)
    assert step.destinations == expected


def test_only_products_can_be_emitted() -> None:
    sharded, program = solve("A[I_X, J] * B[J, K] -> C[I_X, K]", {"X": 2})
    (product,) = program.steps
    assert isinstance(product, ComputeStep)
    mapped = ComputeStep(
        Map(("A", "B"), ("C",), "add"), OperationSharding(product.placed.inputs, product.placed.outputs)
    )
    with pytest.raises(InputError, match="found the operation 'map'; only products can be written"):
        emit(sharded, ShardedProgram(program.program, (mapped,), program.specs), "jax")
    with pytest.raises(InputError, match="found framework 'mpi'; one of jax, torch is required"):
        emit(sharded, program, "mpi")  # type: ignore[arg-type]
