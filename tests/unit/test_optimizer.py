"""The table of optimizers: formulas against plain implementations in NumPy and PyTorch, fields, and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from plain.lion import Lion
from plain.shampoo import Shampoo, inverse_root

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import require_runnable
from shardwise.model.job import Job
from shardwise.model.operations import MatrixFunction
from shardwise.model.optimizer_program import (
    WeightMatrix,
    build_optimizer_program,
    bytes_per_parameter,
    moment_bytes,
    moment_formats,
    state_bytes,
)
from shardwise.model.optimizers.definition import (
    GRADIENT,
    MASTER,
    OPTIMIZERS,
    Granularity,
    Hyperparameter,
    Optimizer,
    formula_values,
    get_optimizer,
    optimizer_fields,
    optimizer_names,
)
from shardwise.price.training_run import checkpoint_bytes
from shardwise.run.kernels import optimizers
from shardwise.run.kernels.optimizers import BLOCK_ELEMENTS, FormulaOptimizer, build_torch_optimizer
from shardwise.run.numpy.kernels import LEARNING_RATE, get_map
from shardwise.run.recipe import TrainingRecipe
from shardwise.search.explain.playbook_steps import explain_fit
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.sharding.spec import Spec
from shardwise.step.rank_program import RankProgram
from shardwise.values.errors import InputError
from shardwise.values.precision import get_precision
from shardwise.values.symbolic import SymbolValues

STEPS, RATES = 5, (1e-2, 3e-2, 1e-2, 5e-3, 1e-3)
VALUES: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.2},
    "lion": {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.2},
    "sgd": {"momentum": 0.8, "nesterov": 0.0, "weight_decay": 0.2},
    "sgd, nesterov": {"momentum": 0.8, "nesterov": 1.0, "weight_decay": 0.2},
}
SIZE = 2 * BLOCK_ELEMENTS + 7


def gradients() -> list[torch.Tensor]:
    return [torch.randn(SIZE, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(STEPS)]


def first_weights() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, SIZE, dtype=torch.float64)


def reference_weights(name: str, values: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and another tensor after some steps of an implementation that is independent of the table."""
    weights = [torch.nn.Parameter(first_weights()) for _ in range(2)]
    kinds = [[weights[0]], [weights[1]]]
    judges = {
        "adamw": lambda: torch.optim.AdamW(
            [{"params": kinds[0], "weight_decay": values["weight_decay"]}, {"params": kinds[1], "weight_decay": 0.0}],
            betas=(values["beta1"], values["beta2"]), eps=values["epsilon"], foreach=False,
        ),
        "lion": lambda: Lion.of_kinds(kinds, values),
        "sgd": lambda: torch.optim.SGD(
            [{"params": kinds[0], "weight_decay": values["weight_decay"]}, {"params": kinds[1], "weight_decay": 0.0}],
            momentum=values["momentum"], nesterov=bool(values["nesterov"]),
        ),
    }  # fmt: skip
    run_steps(judges[name](), weights)
    return weights[0].detach(), weights[1].detach()


def run_steps(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    for rate, gradient in zip(RATES, gradients(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight in weights:
            weight.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", VALUES)
def test_pytorch_updates_equal_a_plain_implementation(
    case: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's kernel if there is one, and by the formulas, over several blocks of elements."""
    if not kernels:
        monkeypatch.setattr(optimizers, "ADAMW_SETTINGS", {})
    weights = [torch.nn.Parameter(first_weights()) for _ in range(2)]
    name, values = case.partition(",")[0], VALUES[case]
    torch_optimizer = build_torch_optimizer(name, weights[:1], weights[1:], values)
    assert isinstance(torch_optimizer, FormulaOptimizer) == (not kernels or name != "adamw")
    run_steps(torch_optimizer, weights)
    for weight, expected in zip(weights, reference_weights(name, values), strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("case", VALUES)
def test_numpy_updates_equal_a_plain_implementation(case: str) -> None:
    name, hyperparameters = case.partition(",")[0], VALUES[case]
    optimizer = get_optimizer(name)
    state = {MASTER: first_weights().numpy(), **{moment: np.zeros(SIZE) for moment in optimizer.moments}}
    for step, (rate, gradient) in enumerate(zip(RATES, gradients(), strict=True), start=1):
        values = formula_values(
            optimizer.hyperparameters_for(optimizer.resolve_hyperparameters(hyperparameters), matrix=True),
            learning_rate=rate,
            step=step,
        )
        state = optimizer.step(values, {**state, GRADIENT: gradient.numpy()})
    np.testing.assert_allclose(
        state[MASTER], reference_weights(name, hyperparameters)[0].numpy(), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, optimizer in OPTIMIZERS.items()
        if not (optimizer.updates_whole_matrices or optimizer.reduces_means)
    ],
)
def test_updates_of_virtual_devices_equal_the_engines(name: str) -> None:
    """The maps of the derived update, in order, against the first step of PyTorch's optimizer with the defaults."""
    optimizer, gradient = get_optimizer(name), gradients()[0]
    weight = torch.nn.Parameter(first_weights())
    weight.grad = gradient
    torch_optimizer = build_torch_optimizer(name, [weight], [], {})
    torch_optimizer.param_groups[0]["lr"] = LEARNING_RATE
    torch_optimizer.step()
    tensors = {
        MASTER: first_weights().numpy(),
        GRADIENT: gradient.numpy(),
        **{m: np.zeros(SIZE) for m in optimizer.moments},
    }
    for part, update in optimizer.updates.items():
        tensors[f"{part}'"] = get_map(f"{name}.{part}")(*(tensors[read] for read in update.reads), width=1)
    np.testing.assert_allclose(tensors[f"{MASTER}'"], weight.detach().numpy(), rtol=1e-12, atol=1e-14)
    for moment in optimizer.moments:
        np.testing.assert_allclose(
            tensors[f"{moment}'"], torch_optimizer.state[weight][moment].numpy(), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("nesterov", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (40, 40)])
def test_muon_updates_equal_pytorchs(shape: tuple[int, int], nesterov: float) -> None:
    """PyTorch's products run in bf16, with 8 bits: five steps of three products agree to some percent of the update."""
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    state = {MASTER: weight.detach().numpy().copy(), "momentum_buffer": np.zeros(shape)}
    judge = torch.optim.Muon(
        [weight], momentum=0.9, nesterov=bool(nesterov), weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    optimizer, first = get_optimizer("muon"), weight.detach().clone()
    fields = optimizer.resolve_hyperparameters({"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2})
    for step, rate in enumerate(RATES, start=1):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        judge.param_groups[0]["lr"], weight.grad = rate, gradient
        judge.step()
        values = formula_values(fields, learning_rate=rate, step=step)
        state = optimizer.step(values, {**state, GRADIENT: gradient.numpy()})
    update_norm = (weight.detach() - first).norm()
    assert np.linalg.norm(state[MASTER] - weight.detach().numpy()) < 0.03 * update_norm
    np.testing.assert_allclose(state["momentum_buffer"], judge.state[weight]["momentum_buffer"].numpy(), rtol=1e-12)


def test_a_step_of_muon_is_nearly_orthogonal_and_as_large_as_one_of_adamw() -> None:
    """Singular values come to between 0.68 and 1.14, by the coefficients (Jordan et al. 2024)."""
    optimizer, matrices = get_optimizer("muon"), np.random.default_rng(0).normal(size=(3, 32, 80))
    values = formula_values(optimizer.resolve_hyperparameters({}), learning_rate=1.0, step=1)
    update = optimizer.updates["orthogonal"].formula(values, matrices)
    singular_values = np.linalg.svd(update / (0.2 * 80**0.5), compute_uv=False)
    assert 0.6 < singular_values.min() < singular_values.max() < 1.2
    sizes = np.sqrt((update**2).mean(axis=(1, 2)))  # 0.2 where every singular value is 1
    assert 0.6 * 0.2 < sizes.min() < sizes.max() < 1.2 * 0.2
    tall = optimizer.updates["orthogonal"].formula(values, matrices.transpose(0, 2, 1))
    np.testing.assert_allclose(tall.transpose(0, 2, 1), update, rtol=1e-9)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (48,)])
def test_adafactor_updates_equal_pytorchs(shape: tuple[int, ...]) -> None:
    """A matrix or a vector, over steps that are clipped and a row without gradients."""
    optimizer = get_optimizer("adafactor").for_weight(is_matrix=len(shape) == 2)
    hyperparameters = {"beta2_decay": -0.6, "epsilon1": 1e-4, "epsilon2": 0.02, "clip": 1.05, "weight_decay": 0.2}
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    judge = torch.optim.Adafactor([weight], beta2_decay=-0.6, eps=(1e-4, 0.02), d=1.05, weight_decay=0.2, foreach=False)
    sizes = {Granularity.ELEMENT: shape, Granularity.ROW: (*shape[:-1], 1), Granularity.COLUMN: (1, *shape[1:])}
    state = {MASTER: weight.detach().numpy().copy()}
    state |= {name: np.zeros(sizes[update.granularity]) for name, update in optimizer.moments.items()}
    for step, rate in enumerate(RATES, start=1):
        gradient = step * torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        gradient[0] = 0.0
        judge.param_groups[0]["lr"], weight.grad = rate, gradient
        judge.step()
        values = formula_values(optimizer.resolve_hyperparameters(hyperparameters), learning_rate=rate, step=step)
        state = optimizer.step(values, {**state, GRADIENT: gradient.numpy()})
    np.testing.assert_allclose(state[MASTER], weight.detach().numpy(), rtol=1e-12, atol=1e-14)
    for name in optimizer.moments:
        np.testing.assert_allclose(state[name], judge.state[weight][name].numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS.values(), *(optimizer.fallback for optimizer in OPTIMIZERS.values() if optimizer.fallback)],
)
def test_tensors_recomputed_in_a_later_round_read_no_changed_tensor(optimizer: Optimizer) -> None:
    """Engines recompute tensors of the weight's size that are not part of the state, where they are read."""
    rounds = [*optimizer.rounds]
    place = {name: number for number, names in enumerate(rounds) for name in names}
    for reader, update in optimizer.updates.items():
        for read in update.reads:
            source = read.removesuffix("'")
            is_recomputed = (
                source in optimizer.updates and not optimizer.updates[source].is_state and place[source] < place[reader]
            )
            for old in (
                optimizer.updates[source].reads
                if is_recomputed
                and optimizer.granularity(source) is Granularity.ELEMENT
                and not optimizer.updates_whole_matrices
                else ()
            ):
                assert old == GRADIENT or old.endswith("'") or place[old] >= place[reader]


def test_rounds_contain_all_updates_in_order() -> None:
    for optimizer in OPTIMIZERS.values():
        assert [name for names in optimizer.rounds for name in names] == [*optimizer.updates]
    assert [len(optimizer.rounds) for optimizer in map(get_optimizer, ("adamw", "muon", "shampoo", "adafactor"))] == [
        1,
        2,
        2,
        4,
    ]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("shape", [(6, 15), (15, 6), (3, 8, 5)])
def test_shampoo_updates_equal_a_plain_implementation(shape: tuple[int, ...], every: int) -> None:
    """The reference takes eigenvectors. The first gradient has rank 2, and some of the stacked matrices have none in it."""
    optimizer, (rows, columns) = get_optimizer("shampoo"), shape[-2:]
    hyperparameters = {
        "beta1": 0.8,
        "beta2": 0.9,
        "damping": 1e-3,
        "precondition_every": float(every),
        "weight_decay": 0.2,
    }
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    name, norm = "w_up" if len(shape) == 2 else "experts_up", torch.nn.Parameter(torch.ones(2))
    judge = Shampoo({f"layers.0.{name}": weight, "layers.0.norm_weight": norm}, [norm], hyperparameters)
    sides = {
        Granularity.ELEMENT: (rows, columns),
        Granularity.ROW_PAIR: (rows, rows),
        Granularity.COLUMN_PAIR: (columns, columns),
    }
    state = {MASTER: weight.detach().numpy().copy()}
    state |= {name: np.zeros((*shape[:-2], *sides[update.granularity])) for name, update in optimizer.moments.items()}
    for step, rate in enumerate(RATES, start=1):
        gradient = step * torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if step == 1:
            gradient[..., 2:, :] = 0.0
            gradient[:-2] = 0.0 if len(shape) == 3 else gradient[:-2]
        judge.param_groups[0]["lr"], weight.grad = rate, gradient
        judge.step()
        values = formula_values(optimizer.resolve_hyperparameters(hyperparameters), learning_rate=rate, step=step)
        state = optimizer.step(values, {**state, GRADIENT: gradient.numpy()})
    np.testing.assert_allclose(state[MASTER], weight.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_shampoo_skips_a_side_beyond_the_limit() -> None:
    """The state has nothing of that side: the update is that of the other side only."""
    optimizer, gradient = (
        get_optimizer("shampoo"),
        torch.randn(6, 15, generator=torch.Generator().manual_seed(1)).double(),
    )
    values = formula_values(
        optimizer.resolve_hyperparameters({"weight_decay": 0.0, "damping": 1e-3}), learning_rate=0.1, step=1
    )
    state = {name: np.zeros((6, 6) if "left" in name else (0, 0)) for name in optimizer.moments}
    state |= {MASTER: np.zeros((6, 15)), "exp_avg": np.zeros((6, 15)), GRADIENT: gradient.numpy()}
    updated = optimizer.step(values, state)
    step = inverse_root(gradient @ gradient.T, 1e-3) @ gradient
    np.testing.assert_allclose(updated[MASTER], -0.1 * (step / step.square().mean().sqrt()).numpy(), rtol=1e-9)
    assert updated["right"].size == updated["right_root"].size == 0


@pytest.mark.parametrize(("model", "hidden"), [("llama-3.2-1b", 8192), ("llama-3-8b", 0)])
def test_shampoo_keeps_squares_of_sides(model: str, hidden: int) -> None:
    """Two of each side of a matrix, where it has at most 10,000 rows or columns: no 14,336; on every device of a group."""
    architecture = sw.load_model(model)
    width, keys, layers = architecture.d_model, 64 * 8 * (1 if hidden else 2), architecture.num_layers
    sides = 4 * [width] + 2 * [keys] + 2 * [width] + 3 * [hidden] + 3 * [width]  # of wq and wo, wk and wv, the MLP's
    squares = layers * 2 * sum(side**2 for side in sides)
    block = 2 * width * width + 2 * width * keys + 3 * width * architecture.d_ff
    other_params = sw.num_params(architecture) - layers * block
    job = Job(global_batch_tokens=2**18, seq_len=4096, tokens=1e9, optimizer="shampoo")
    assert checkpoint_bytes(architecture, job) == layers * block * 10 + other_params * 14 + 4 * squares
    optimizer_bytes = sw.estimate(architecture, "h100:8", job, "fsdp=8 zero_stage=3").memory["optimizer"]
    assert optimizer_bytes == pytest.approx(4 * (squares + layers * block / 8 + 2 * other_params / 8), rel=1e-3)


def test_a_step_of_shampoo_has_the_products_of_its_functions() -> None:
    """Per matrix: one for each average, four for each of twenty iterations of a root every tenth step, two with the roots."""
    rows, columns = 48, 20
    matrix, shape = WeightMatrix((), ("F",), ("D",)), SymbolValues({"F": rows, "D": columns, "E": 3, "ep": 1})
    program = build_optimizer_program({"w": ("F", "D")}, {"w": "d.w"}, "shampoo", {"w": matrix})
    specs = {name: Spec.of(tensor.dims) for name, tensor in program.tensors.items()}
    dims = {name: tensor.dims for name, tensor in program.tensors.items()}
    flops = {
        operation.outputs[0]: operation.flops(
            operation.propagate_sharding([specs[name] for name in operation.inputs], dims, lambda name: False)
        ).evaluate(shape)
        for operation in program.operations
        if isinstance(operation, MatrixFunction)
    }  # fmt: skip
    assert flops == {
        "w.left'": 2 * rows**2 * columns, "w.right'": 2 * columns**2 * rows,
        "w.left_root'": 2 * 4 * 20 / 10 * rows**3, "w.right_root'": 2 * 4 * 20 / 10 * columns**3,
        "w.preconditioned'": 2 * rows**2 * columns + 2 * rows * columns**2,
    }  # fmt: skip


def test_adafactor_keeps_rows_and_columns_instead_of_elements() -> None:
    """Llama 3.2 1B in bf16: 4 bytes for each row and column of its matrices, and for each element of its norms."""
    model = sw.load_model("llama-3.2-1b")
    width, hidden, keys, layers, vocabulary = 2048, 8192, 512, 16, 128256
    ends = [(width, width), (keys, width), (keys, width), (width, width), *[(hidden, width)] * 3]
    factors = layers * sum(rows + columns for rows, columns in ends) + vocabulary + width
    norms = (2 * layers + 1) * width
    job = Job(global_batch_tokens=2**18, seq_len=4096, tokens=1e9, optimizer="adafactor")
    assert checkpoint_bytes(model, job) == sw.num_params(model) * 6 + 4 * (factors + norms)
    for layout, num_parts in (("fsdp=8 zero_stage=3", 8), ("dp=8 fsdp=1", 1)):
        optimizer_bytes = sw.estimate(model, "h100:8", job, layout).memory["optimizer"]
        assert optimizer_bytes == pytest.approx(4 * (factors + norms / num_parts), rel=1e-3)


def test_an_adamw_with_another_field_does_not_use_a_kernel_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = get_optimizer("adamw")
    with_floor = replace(
        adamw,
        fields={**adamw.fields, "floor": Hyperparameter(default=0.0, limits=(0.0, 1.0), help="the least of every weight")},
        updates={**adamw.updates, MASTER: adamw.updates[MASTER]._replace(
            formula=lambda v, *tensors: adamw.updates[MASTER].formula(v, *tensors).clip(v.floor)
        )},
    )  # fmt: skip
    monkeypatch.setitem(OPTIMIZERS, "adamw", with_floor)
    weight = torch.nn.Parameter(first_weights())
    run_steps(build_torch_optimizer("adamw", [weight], [], {**VALUES["adamw"], "floor": 0.25}), [weight])
    assert weight.min() == 0.25
    assert weight.max() > 0.9
    assert optimizer_fields()["floor"] == "the least of every weight (adamw 0)"


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("adamw", {"beta1": 1.5}, "recipe: beta1 is 1.5; a number of at least 0, below 1, is required"),
        (
            "adamw",
            {"weight_decay": -1.0},
            "recipe: weight_decay is -1.0; a number of at least 0, below 1000, is required",
        ),
        ("adamw", {"beta2": 1.0}, "recipe: beta2 is 1.0; a number of at least 0, below 1, is required"),
        ("lion", {"epsilon": 1e-6}, "recipe: found 'epsilon'; the plan's optimizer has beta1, beta2, weight_decay"),
        ("lion", {"beta": 0.9}, "recipe: found 'beta' (did you mean 'beta1' or 'beta2'?); the plan's optimizer has"),
        ("lion", {"beta2": float("nan")}, "recipe: beta2 is nan; a number of at least 0, below 1, is required"),
        ("sgd", {"nesterov": 0.5}, "recipe: nesterov is 0.5; a whole number of at least 0, below 2, is required"),
    ],
)
def test_hyperparameters_of_other_optimizers_are_refused(name: str, fields: dict[str, float], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        get_optimizer(name).resolve_hyperparameters(fields)
    assert str(caught.value).startswith(problem)


def test_all_wrong_values_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        get_optimizer("adamw").resolve_hyperparameters({"beta1": 2.0, "momentum": 0.9, "epsilon": -1.0})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", optimizer_names())
def test_defaults_are_within_limits_and_updates_read_existing_tensors(name: str) -> None:
    optimizer = get_optimizer(name)
    assert list(optimizer.resolve_hyperparameters({})) == list(optimizer.fields)
    assert not {field.name for field in fields(TrainingRecipe)} & set(optimizer.fields), (
        "`--set recipe.NAME` would be ambiguous"
    )
    available = {*optimizer.state, GRADIENT}
    for part, update in optimizer.updates.items():
        assert set(update.reads) <= available
        available.add(f"{part}'")
    assert MASTER in optimizer.updates
    assert len(optimizer.source) > 10


def estimate_optimizer(optimizer: str, precision: str = "bf16") -> sw.Estimate:
    job = Job(global_batch_tokens=2**18, seq_len=4096, precision=precision, optimizer=optimizer)
    return sw.estimate("llama-3.2-1b", "h100:8", job, "fsdp=8 zero_stage=1")


@pytest.mark.parametrize(
    ("precision", "first", "second"), [("bf16", 4, 4), ("bf16_bf16_moments", 2, 2), ("fp8_lm_o3", 1, 2)]
)
def test_an_optimizer_with_a_single_moment_has_its_memory(precision: str, first: int, second: int) -> None:
    recipe = get_precision(precision)
    lion_bytes, adamw_bytes = (moment_bytes(recipe, get_optimizer(name)) for name in ("lion", "adamw"))
    assert (lion_bytes, adamw_bytes) == (first, first + second)
    assert bytes_per_parameter(recipe) - state_bytes(recipe, get_optimizer("lion")) == second
    lion, adamw = estimate_optimizer("lion", precision), estimate_optimizer("adamw", precision)
    assert lion.memory["optimizer"] == pytest.approx(adamw.memory["optimizer"] * first / (first + second))
    other_terms = [
        {term: size for term, size in priced.memory.items() if term != "optimizer"} for priced in (lion, adamw)
    ]
    assert other_terms[0] == other_terms[1]


def test_moments_in_8_bits_take_a_byte_and_a_share_of_a_scale_under_any_recipe() -> None:
    """The 33 norms of Llama 3.2 1B have two moments in the recipe's format."""
    optimizer, num_norms = get_optimizer("adamw_8bit"), 33 * 2048
    for precision, width in (("bf16", 4), ("bf16_bf16_moments", 2)):
        recipe = get_precision(precision)
        assert moment_formats(recipe, optimizer) == {"exp_avg": "dynamic8", "exp_avg_sq": "unsigned_dynamic8"}
        assert (moment_bytes(recipe, optimizer), moment_bytes(recipe, optimizer.for_weight(is_matrix=False))) == (
            2 + 8 / 256,
            2 * width,
        )
        num_matrices = sw.num_params(sw.load_model("llama-3.2-1b")) - num_norms
        expected = (num_matrices * (2 + 8 / 256) + num_norms * 2 * width) / 8
        assert estimate_optimizer("adamw_8bit", precision).memory["optimizer"] == pytest.approx(expected, rel=1e-6)


def test_shards_of_flat_arrays_cut_no_block_of_8_bits() -> None:
    """Under any layout; shards of other optimizers are not aligned to blocks."""
    model = replace(sw.load_model("llama-3.2-1b"), d_model=96, d_ff=200, num_layers=2, vocab_size=1000)
    for layout in (
        Layout(fsdp=3, zero_stage=1),
        Layout(fsdp=5, zero_stage=3),
        Layout(dp=2, fsdp=7, tp=2, zero_stage=2),
    ):
        for name, is_cut in (("adamw", True), ("adamw_8bit", False)):
            groups = RankProgram(
                architecture=model, layout=layout, precision=get_precision("bf16"), optimizer=name
            ).groups
            places = {
                place for group in groups for place in (group.shard_size, *(member.start for member in group.members))
            }
            assert bool(math.gcd(*places) % 256) == is_cut


def test_moments_in_blocks_require_elementwise_updates() -> None:
    muon = get_optimizer("muon")
    updates = {name: update._replace(format="dynamic8") for name, update in muon.updates.items()}
    with pytest.raises(
        ValueError, match=r"moments in dynamic8, .*: found means or functions of matrices; neither is required"
    ):
        replace(muon, updates=updates)


def test_an_update_moves_the_bytes_of_its_state() -> None:
    """AdamW reads 2 + 4 + 4 + 4 and writes 2 + 4 + 4 + 4 bytes of each weight, Lion 2 + 4 + 4 and 2 + 4 + 4."""
    lion, adamw = estimate_optimizer("lion"), estimate_optimizer("adamw")
    assert lion.time["optimizer"] / adamw.time["optimizer"] == pytest.approx(20 / 28, rel=1e-3)
    other_terms = [
        {term: time for term, time in priced.time.items() if term != "optimizer"} for priced in (lion, adamw)
    ]
    assert other_terms[0] == other_terms[1]


def test_a_plan_keeps_its_optimizer_and_older_plans_have_adamw() -> None:
    job = Job(global_batch_tokens=2**18, seq_len=4096, tokens=1e9, optimizer="lion")
    model, cluster = sw.load_model("llama-3.2-1b"), sw.load_cluster("h100:8")
    plan = plan_layout(model, cluster, job, Layout(fsdp=8, zero_stage=1))
    payload = plan_payload(plan)
    assert payload["job"]["optimizer_fields"] == {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    assert parse_plan(payload).job == plan.job
    assert checkpoint_bytes(model, job) == sw.num_params(model) * 10
    assert explain_fit(plan).state_bytes == sw.num_params(model) * 12
    older = {name: value for name, value in payload["job"].items() if not name.startswith("optimizer")}
    assert parse_plan({**payload, "job": older}).job.optimizer == "adamw"
    wrong = {**payload, "job": {**payload["job"], "optimizer": "adam"}}
    with pytest.raises(
        InputError, match=r"optimizer is 'adam' .did you mean 'adamw'.*; one of adamw, adafactor, .*shampoo is required"
    ):
        parse_plan(wrong)


@pytest.mark.parametrize(
    ("dtype", "is_number"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]
)
def test_muon_takes_small_gradients_in_formats_of_a_wide_range(dtype: torch.dtype, is_number: bool) -> None:
    """The reason that fp16 is refused: squares of gradients of 1e-5 are 0, and so is the norm that divides them."""
    optimizer = get_optimizer("muon")
    values = formula_values(optimizer.resolve_hyperparameters({}), learning_rate=1.0, step=1)
    matrix = 1e-5 * torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, update = (
        optimizer.updates["orthogonal"].formula(values, matrix.to(format_dtype))
        for format_dtype in (torch.float64, dtype)
    )
    assert bool(((update.double() - expected).norm() < 0.05 * expected.norm()).item()) == is_number
    assert (has_problem(dtype) is None) == is_number


def has_problem(dtype: torch.dtype) -> str | None:
    """The problem for which a recipe with activations of this format is refused."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    try:
        require_runnable(sw.load_model("llama-3.2-1b"), Layout(), get_precision(name), "muon")
    except InputError as error:
        return str(error)
    return None
