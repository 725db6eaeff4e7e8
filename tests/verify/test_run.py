"""Emitted programs run: every collective kind, on JAX host devices and on gloo processes, against the unsharded product."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from thinned import part_of

from shardwise.derive.sharded_einsum import derive_by_cases, shard_expression
from shardwise.derive.sharded_program import CollectiveStep, ShardedProgram
from shardwise.run.numpy import device_kernel
from shardwise.sharding.collectives import MESSAGE_ENDS, Collective, CollectiveKind
from shardwise.sharding.notation import parse_expression, parse_tensor
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError, ShardwiseError
from shardwise.verify import product_runs as module
from shardwise.verify.product_runs import ProductProgram, RunResult, emit, run_product, run_products

HANG_S = 120  # a run that has not ended by then hangs
EIGHT = {"X": 2, "Y": 2, "Z": 2}
UNEVEN = {"X": 4, "Y": 2}

BY_CASES: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", UNEVEN),  # nothing moves
    ("A[I, J_X] * B[J, K] -> C[I, K]", UNEVEN),  # case 2
    ("A[I, J_XY] * B[J_XY, K] -> C[I, K]", UNEVEN),  # case 3: all-reduce over two axes
    ("A[I, J_YX] * B[J_YX, K] -> C[I_YX, K]", UNEVEN),  # reduce-scatter, Y the major axis
    ("A[I, J_XY] * B[J_XY, K] -> C[I_Y, K_X]", UNEVEN),
    ("A[I_X, J] * B[J, K_X] -> C[I_X, K]", UNEVEN),  # case 4
    ("A[I_XY, J] * B[J, K] -> C[I, K]", UNEVEN),  # all-gather, X the major axis
    ("A[I_YX, J] * B[J, K] -> C[I, K_YX]", UNEVEN),  # all-to-all over two axes
    ("A[I_ZX, J] * B[J, K] -> C[I, K_ZX]", EIGHT),
    ("A[I_X, J_Y]{U_Z} * B[J_Y, K] -> C[I_X, K_Z]", EIGHT),  # an operand that is a partial sum
    ("A[B_X, I, J_Y] * D[B_X, J_Y, K] -> C[B_X, I, K_Y]", EIGHT),  # a batch dim
    ("A[B_X, I] * D[B, I_Y] -> C[I_Y, B_X]", UNEVEN),  # elementwise, turned round
    ("In[B_X, D] * W1[D_X, F_Y] * W2[F_Y, D'_X] -> Out[B_X, D']", UNEVEN),  # FSDP and TP
    ("Q[B_X, T, H_Y] * K[B_X, S, H] * V[B_X, S_Y, E] -> O[B_X, T_Y, E]", UNEVEN),  # a batch dim of all operands
    ("Q[B_X, T, H_Y] * K[B, S_X, H_Y] * V[B_X, S, H] -> O[B_Y, T, H_X]", UNEVEN),
    ("A[I, J_X] * B[K_Y, L] -> C[I, L_X]", UNEVEN),  # each summed alone
    ("A[I_X, J_Y] -> C[I_Y]", UNEVEN),
    ("A[I_X, J_Y] -> C[J_X, I]", UNEVEN),
    ("A[I_X, J] * B[J, K_Y] * D[K_X, L] -> C[I, L_YX]", UNEVEN),
    ("A[I_X] * B[I_X] -> C[]", {"X": 8}),
    ("A[I] * B[J_X]", {"X": 1}),
    ("A[I, J] * B[J, K]", {}),
)
# The first operand before and after a permute; then `* B[J, K] -> C[I, K]` follows by cases.
PERMUTED: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("A[I_XY, J]", "A[I_YX, J]", UNEVEN),
    ("A[I_XYZ, J]", "A[I_ZXY, J]", EIGHT),
    ("A[I_YXZ, J]", "A[I_XYZ, J]", EIGHT),
    ("A[I_X, J]", "A[I_Z, J]", EIGHT),
    ("A[I_X, J_Y]", "A[I_Y, J_X]", EIGHT),
    ("A[I_XY, J]{U_Z}", "A[I_YX, J]{U_Z}", EIGHT),
    ("A[I_Y, J]", "A[I_X, J]", UNEVEN),  # from here on parts of shards
    ("A[I_X, J]", "A[I_Z, J_YX]", EIGHT),
    ("A[I_X, J]{U_Z}", "A[I_Y, J_X]{U_Z}", EIGHT),
    ("A[I_Y, J]", "A[I_X, J_Y]", UNEVEN),
)


def by_cases(text: str, mesh: Mapping[str, int]) -> ProductProgram:
    expression = parse_expression(text)
    sizes = {dim: 8 * (1 + index % 2) for index, dim in enumerate(d for o in expression.operands for d in o.spec.dims)}
    sharded = shard_expression(expression, Mesh.of(mesh), sizes)
    return sharded, derive_by_cases(sharded)


def permute_operand(before: str, after: str, mesh: Mapping[str, int]) -> ProductProgram:
    sharded, _ = by_cases(f"{before} * B[J, K] -> C[I, K]", mesh)
    _, program = by_cases(f"{after} * B[J, K] -> C[I, K]", mesh)
    goal = parse_tensor(after).spec
    moved = sharded.operands[0].sharded_axes | goal.sharded_axes
    permute = Collective(CollectiveKind.PERMUTE, tuple(sorted(moved)), sharded.operands[0], goal)
    steps = (CollectiveStep(program.program.tensors["A"], permute), *program.steps)
    return sharded, ShardedProgram(program.program, steps, program.specs)


def cases() -> list[ProductProgram]:
    return [by_cases(*case) for case in BY_CASES] + [permute_operand(*case) for case in PERMUTED]


def kinds(known: list[ProductProgram]) -> set[CollectiveKind]:
    return {step.collective.kind for _, program in known for step in program.communication}


def test_cases_cover_every_kind_of_collective() -> None:
    assert kinds(cases()) == set(CollectiveKind) - {CollectiveKind.SEND_RECV, *MESSAGE_ENDS}


def test_numpy_agrees_with_the_unsharded_product() -> None:
    assert max(run_products(cases(), "numpy")) <= 1e-13


def test_large_products_are_planned_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contractions of large operands go through BLAS, whose sums have another order."""
    monkeypatch.setattr(device_kernel, "MIN_PLANNED_ELEMENTS", 0)
    assert max(run_products(cases(), "numpy")) <= 1e-13


def test_jax_agrees_with_the_unsharded_product() -> None:
    of = part_of(cases())
    errors = run_products(of, "jax")
    assert len(errors) == len(of)
    assert max(errors) <= 1e-5
    assert run_products([], "jax") == []


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "case",
    [
        by_cases("A[I, J_YX]{U_Z} * B[J_X, K] -> C[I_Z, K_X]", {"X": 2, "Y": 1, "Z": 2}),
        by_cases("In[B_X, D] * W1[D_X, F_Y] * W2[F_Y, D'_X] -> Out[B_X, D']", {"X": 2, "Y": 2}),
        by_cases("Q[B_X, T, H_Y] * K[B_X, S, H] * V[B_X, S_Y, H] * U[U] -> O[B_X, T_Y, H]", {"X": 2, "Y": 2}),
        permute_operand("A[I_X, J]", "A[I_Y, J_X]", {"X": 2, "Y": 2}),
        by_cases("A[I_YX, J_Z] * B[J_Z, K] -> C[I, K_YX]", {"X": 2, "Y": 2, "Z": 1}),
    ],
)
def test_torch_agrees_with_the_unsharded_product(case: ProductProgram) -> None:
    result = run_product(*case, "torch", seed=5)
    assert isinstance(result, RunResult)
    assert result.num_devices == 4
    assert result.max_relative_error <= 1e-5


@pytest.mark.parametrize(
    ("framework", "launcher", "mesh"),
    [
        ("jax", [], {"X": 3, "Y": 2}),
        ("torch", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], {"X": 2}),
    ],
)
def test_the_file_runs_by_the_command_in_its_header(
    tmp_path: Path, framework: str, launcher: list[str], mesh: dict[str, int]
) -> None:
    text = "A[I_X, J] * B[J, K] -> C[I, K_X]"
    expression = parse_expression(text)
    sharded = shard_expression(expression, Mesh.of(mesh), {"I": 12, "J": 6, "K": 24})
    path = tmp_path / "product.py"
    path.write_text(emit(sharded, derive_by_cases(sharded), framework))  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, *launcher, str(path), "7"], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert line["num_devices"] == sharded.mesh.num_devices
    assert line["max_relative_error"] <= 1e-5


def test_a_framework_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    case = by_cases(*BY_CASES[0])
    with pytest.raises(InputError, match=r'^jax is not installed; pip install "shardwise\[jax\]"$'):
        run_product(*case, "jax")
    with pytest.raises(InputError, match=r'^torch is not installed; pip install "shardwise\[train\]"$'):
        run_product(*case, "torch")
    with pytest.raises(InputError, match="found framework 'mpi'; one of numpy, jax, torch is required"):
        run_product(*case, "mpi")  # type: ignore[arg-type]


def test_a_product_on_the_way_that_fits_no_host_is_refused() -> None:
    """Queries and keys of two numbers each, but a score for every pair of them."""
    expression = parse_expression("Q[T_X, H] * K[S, H] * V[S, E] -> O[T_X, E]")
    sharded = shard_expression(expression, Mesh.of({"X": 2}), {"T": 2**14, "S": 2**14, "H": 2, "E": 2})
    with pytest.raises(InputError, match=r"found 2\.69e\+08 elements in the arrays .* at most 1\.34e\+08 are required"):
        run_product(sharded, derive_by_cases(sharded), "numpy")


def test_a_mesh_that_is_too_large_for_one_host_is_refused() -> None:
    with pytest.raises(InputError, match="found 128 devices; torch runs on one host with at most 64"):
        run_product(*by_cases("A[I_X] * B[I_X] -> C[]", {"X": 2, "Y": 64}), "torch")


@pytest.mark.parametrize(
    ("source", "timeout_s", "message"),
    [
        (
            "import os, time\nif os.environ['RANK'] == '1': raise ValueError('rank 1 stops')\ntime.sleep(600)",
            HANG_S,
            "rank 1 stops",
        ),
        ("import time\ntime.sleep(600)", 0.3, "did not finish in 0.3 s"),
    ],
)
def test_when_one_process_fails_the_others_end(
    monkeypatch: pytest.MonkeyPatch, source: str, timeout_s: float, message: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(module, "emit", lambda expression, program, framework: source)
    monkeypatch.setattr(module.subprocess, "Popen", start)
    with pytest.raises(ShardwiseError, match=message):
        run_product(*by_cases("A[I_X] * B[I_X] -> C[]", {"X": 2}), "torch", timeout_s=timeout_s)
    assert len(started) == 2
    assert started[0].poll() == -signal.SIGKILL  # nobody waited for its end


def test_the_module_loads_no_framework() -> None:
    code = "import sys, shardwise.verify.product_runs, shardwise.verify.jax_source; print({'jax', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
