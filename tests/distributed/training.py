"""Small models trained for a few steps: by the engine on many ranks, and by a plain loop in one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from plain import build, initialise
from plain.adafactor import Adafactor
from plain.adamw_8bit import AdamW8bit
from plain.experts import balance
from plain.lion import Lion
from plain.muon import Muon
from plain.shampoo import Shampoo

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Gating, Numerics, Rotary
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import issue_policy
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.run.transport.interface import Transport
from shardwise.sharding.collectives import IssuedCollective
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import Precision
from shardwise.verify.training.compare_runs import to_micro_batch
from shardwise.verify.training.training_case import FP64
from shardwise.verify.training.training_case import TrainingCase as Small

DENSE = Architecture(
    name="dense", num_layers=3, d_model=12, d_ff=20, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=24
)
TIED = replace(DENSE, name="tied", tied_embeddings=True, qk_norm=True)
MOE = replace(DENSE, name="moe", d_ff=10, num_experts=5, experts_per_token=2, num_layers=2)
ADAPTED = replace(DENSE, name="adapted", lora_rank=2, lora_targets=("qkv", "mlp"))
BIASED = replace(DENSE, name="biased", bias=("qkv", "attention_out", "mlp"), sinks=True, norm="layer", norm_bias=True)
FLAT_NORMS = replace(
    DENSE, name="flat norms", qk_norm=True, qk_norm_over="projection", pre_norms=False, post_norms=True
)
LEADING = replace(MOE, name="leading", num_layers=3, num_dense_layers=1, dense_d_ff=14, shared_expert_width=6)
ROUTED = replace(LEADING, name="routed", num_experts=4)
WINDOWED = replace(
    ROUTED, name="windowed", sliding_window=3, global_every=2, sinks=True, num_dense_layers=0, dense_d_ff=0
)
GROUPED = replace(
    ROUTED, name="grouped",
    numerics=Numerics(gating=Gating(scores="sigmoid", scale=2.5, groups=2, chosen_groups=1, votes=2)),
)  # fmt: skip
PREDICTING = replace(
    LEADING, name="predicting", num_kv_heads=4, head_dim=6, kv_lora_rank=5, rope_head_dim=2, v_head_dim=3, q_lora_rank=3,
    num_predict_layers=2,
)  # fmt: skip
TURNED = replace(
    ROUTED, name="half of each head turned", head_dim=8, qk_norm=True, numerics=Numerics(rotary=Rotary(part=0.5))
)
TIED_PREDICTING = replace(TIED, name="tied predicting", num_predict_layers=2)
ADAPTED_PREDICTING = replace(ADAPTED, name="adapted predicting", num_predict_layers=1)
DEEP = replace(DENSE, name="deep", num_layers=8)
DEEP_ROUTED = replace(ROUTED, name="deep routed", num_layers=5)
DEEP_TIED = replace(TIED, name="deep tied", num_layers=4)
# Vocabularies that neither two nor four ranks of tp divide; of nine words over four the last has none.
UNEVEN = replace(DENSE, name="uneven", vocab_size=23)
UNEVEN_TIED = replace(TIED, name="uneven tied", vocab_size=23, num_layers=4)
NINE = replace(DENSE, name="nine words", vocab_size=9)
UNEVEN_PREDICTING = replace(TIED_PREDICTING, name="uneven predicting", vocab_size=23)
UNEVEN_ADAPTED = replace(ADAPTED, name="uneven adapted", vocab_size=23)
UNEVEN_CAPPED = replace(TIED, name="uneven capped", vocab_size=9, numerics=Numerics(logit_cap=0.5))
MODELS = {
    architecture.name: architecture
    for architecture in (
        DEEP, DEEP_ROUTED, DEEP_TIED, UNEVEN, UNEVEN_TIED, NINE, UNEVEN_PREDICTING, UNEVEN_ADAPTED, UNEVEN_CAPPED,
        DENSE, TIED, MOE, ADAPTED, BIASED, FLAT_NORMS, LEADING, ROUTED, GROUPED, WINDOWED, PREDICTING, TURNED,
        TIED_PREDICTING, ADAPTED_PREDICTING,
    )
}  # fmt: skip
# Of whose matrices four ranks of tp have whole blocks of 256 elements.
BLOCKS = replace(DENSE, name="blocks", num_layers=2, d_model=32, d_ff=64, head_dim=8, vocab_size=32)
ROUTED_BLOCKS = replace(
    ROUTED, name="routed blocks", d_model=32, d_ff=16, dense_d_ff=16, shared_expert_width=16, head_dim=8, vocab_size=32
)
# Of which that is so whatever its vocabulary.
WIDE_BLOCKS = replace(DENSE, name="wide blocks", num_layers=2, d_model=256, d_ff=8, head_dim=2)
MODELS |= {architecture.name: architecture for architecture in (BLOCKS, ROUTED_BLOCKS, WIDE_BLOCKS)}
STEPS, POSITIONS, SEED = 2, 8, 5


@dataclass(frozen=True)
class Case:
    """A run: the model by name, the layout, the sequences of its global batch, and what of the recipe is not as usual."""

    model: str = "dense"
    layout: Layout = field(default_factory=Layout)
    num_seqs: int = 8
    recipe: dict[str, Any] = field(default_factory=dict)
    precision: Precision = FP64
    optimizer: str = "adamw"
    parts: int = 1  # of a matrix, in which blocks of moments in 8 bits are counted

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model]

    def recipe_of(self) -> TrainingRecipe:
        usual = {
            "steps": STEPS,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "clip_norm": 0.5,
            "seed": SEED,
            "bucket_bytes": 2_000,
        }
        return TrainingRecipe(**{**usual, **self.recipe})

    def instance(self) -> RankProgram:
        recipe = self.recipe_of()
        return RankProgram(
            architecture=self.architecture, layout=self.layout, precision=self.precision,
            policy=issue_policy(recipe, routed=self.architecture.num_experts > 0), seq_len=POSITIONS,
            optimizer=self.optimizer,
        )  # fmt: skip

    @property
    def num_micro_batches(self) -> int:
        return -(-self.num_seqs // (self.layout.num_replicas * self.layout.micro_batch_seqs))

    def small(self) -> Small:
        """The same as `shardwise verify` runs it."""
        return Small(
            architecture=self.architecture, layout=self.layout, recipe=self.recipe_of(), num_seqs=self.num_seqs,
            seq_len=POSITIONS, precision=self.precision, optimizer=self.optimizer,
        )  # fmt: skip

    def micro_batches(self, step: int, replica: int, num_replicas: int) -> list[MicroBatch]:
        """One replica's part of each global micro-batch, which are as large for any number of replicas."""
        small = self.small()
        shared = small if num_replicas == small.layout.num_replicas else small.on_single_device()
        return [to_micro_batch(*arrays) for arrays in shared.micro_batches(step, replica)]


Pieces = list[tuple[Any, torch.Tensor]]  # intervals, and their values


@dataclass
class RunResult:
    """What each step of a run gave; `further` are the losses of multi-token prediction by module, `auxiliary` those that balance
    experts. `issued`: the collectives of the last step. A rank has its `pieces` of gradients and weights: see `put_together`."""

    losses: list[float] = field(default_factory=list)
    further: list[list[float]] = field(default_factory=list)
    auxiliary: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    issued: list[IssuedCollective] = field(default_factory=list)
    pieces: list[Pieces] = field(default_factory=list)  # of the gradients in each step, then of the weights


def adamw(kinds: list[Any], changes: Mapping[str, float]) -> torch.optim.Optimizer:
    """PyTorch's over matrices and all else, with the values that recipes have."""
    values = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, **changes}
    groups = [{"params": kinds[0], "weight_decay": values["weight_decay"]}, {"params": kinds[1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(values["beta1"], values["beta2"]), eps=values["epsilon"], lr=1.0)


def sgd(kinds: list[Any], changes: Mapping[str, float]) -> torch.optim.Optimizer:
    """Likewise with momentum."""
    values = {"momentum": 0.9, "nesterov": 0.0, "weight_decay": 0.0, **changes}
    groups = [{"params": kinds[0], "weight_decay": values["weight_decay"]}, {"params": kinds[1], "weight_decay": 0.0}]
    return torch.optim.SGD(groups, momentum=values["momentum"], nesterov=bool(values["nesterov"]), lr=1.0)


OPTIMIZERS = {"adamw": adamw, "lion": Lion.of_kinds, "sgd": sgd}
OF_MATRICES = {"adafactor": Adafactor, "muon": Muon, "shampoo": Shampoo}


def optimizer_of(case: Case, trained: Mapping[str, Any], kinds: list[Any]) -> torch.optim.Optimizer:
    """The case's, over trained parameters by name, and as matrices and all else."""
    if case.optimizer == "adamw_8bit":
        return AdamW8bit(trained, kinds[1], case.recipe_of().optimizer, case.parts)
    if case.optimizer in OF_MATRICES:
        return OF_MATRICES[case.optimizer](trained, kinds[1], case.recipe_of().optimizer)
    return OPTIMIZERS[case.optimizer](kinds, case.recipe_of().optimizer)


def plain(case: Case) -> RunResult:
    """The same micro-batches in a loop that knows of no mesh."""
    recipe, architecture = case.recipe_of(), case.architecture
    model = build(architecture, dtype=torch.float64)
    initialise(model, SEED)
    if recipe.capacity_factor is not None:
        for module in model.modules():
            module.capacity = recipe.capacity_factor, case.layout.num_replicas
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    plain_names = ("norm_weight", "norm_bias", "_bias", "sinks")
    kinds = [
        [parameter for name, parameter in trained.items() if name.endswith(plain_names) is not matrix]
        for matrix in (True, False)
    ]
    optimizer = optimizer_of(case, trained, kinds)
    result = RunResult()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, further, auxiliary, counts = 0.0, [0.0] * architecture.num_predict_layers, 0.0, []
        batches = case.micro_batches(step, 0, 1)
        for batch in batches:
            output = model(batch.ids_BT, batch.targets_BT, case.num_seqs * POSITIONS, batch.documents_BT)
            total = output.total(recipe.prediction_weight)
            if architecture.num_experts:
                counts.append(torch.stack([routing.counts for routing in output.routings]))
            if architecture.num_experts and recipe.balance == "auxiliary":
                total = total + recipe.balance_coefficient / len(batches) * output.auxiliary()
                auxiliary += output.auxiliary().item() / len(batches)
            total.backward()
            loss += output.loss.item()
            further = [
                total_loss + module_loss.item() for total_loss, module_loss in zip(further, output.further, strict=True)
            ]
        result.losses.append(loss)
        result.auxiliary += [auxiliary] if architecture.num_experts and recipe.balance == "auxiliary" else []
        result.further.append([recipe.prediction_weight / len(further) * total_loss for total_loss in further])
        result.gradients.append({name: parameter.grad.clone().flatten() for name, parameter in trained.items()})
        result.norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), recipe.clip_norm).item())
        for settings in optimizer.param_groups:
            settings["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
        if architecture.num_experts and recipe.balance == "bias":
            for bias, rows in zip(model.buffers(), sum(counts), strict=True):
                balance(bias, rows, recipe.balance_rate)
    result.weights = {name: parameter.detach().clone().flatten() for name, parameter in model.named_parameters()}
    result.biases = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return result


def engine_of(case: Case) -> TrainingEngine:
    instance = case.instance()
    engine = TrainingEngine(instance, case.recipe_of(), World(instance.mesh))
    engine.initialize(SEED)
    return engine


def replica_of(engine: TrainingEngine, case: Case) -> int:
    return engine.world.position(engine.instance.batch_axes)


def run_step(engine: TrainingEngine, case: Case, step: int) -> Any:
    whole = case.micro_batches(step, replica_of(engine, case), case.layout.num_replicas)
    batches = [batch.restrict_to(engine.places_read(POSITIONS)) for batch in whole]
    return engine.step(batches, case.num_seqs * POSITIONS, case.num_micro_batches, step)


def pieces_of(engine: TrainingEngine, tensor: str) -> Pieces:
    """This rank's part of every parameter's gradient ("gradient_shard") or weight ("state")."""
    return [
        (shard, getattr(group, tensor)[shard.start : shard.start + shard.size].clone())
        for group in engine.groups
        if group.group.trained or tensor == "state"
        for shard in group.intervals()
    ]


def gathered(engine: TrainingEngine, tensor: str) -> dict[str, torch.Tensor]:
    """What the pieces of all ranks are together, flat."""
    return whole_of(gather_values(engine.world.transport, pieces_of(engine, tensor)))


def gather_values(transport: Transport, value: Any) -> list[Any]:
    """Return the value of each rank, on every rank."""
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([len(content)])
    transport.world.all_reduce(length, "max").wait()
    padded = torch.cat([content, content.new_zeros(int(length) - len(content))])
    whole = padded.new_empty(transport.size * len(padded))
    transport.world.all_gather(whole, padded).wait()
    return [pickle.loads(part.numpy().tobytes()) for part in whole.view(transport.size, len(padded))]


def whole_of(ranks: Sequence[Pieces]) -> dict[str, torch.Tensor]:
    """Parameters by name, flat; NaN where no rank has a piece. What several ranks have is alike on all of them."""
    parameters: dict[str, torch.Tensor] = {}
    for shard, values in (piece for rank in ranks for piece in rank):
        whole = parameters.setdefault(shard.name, torch.full(shard.global_shape, float("nan"), dtype=torch.float64))
        for box, piece in zip(shard.boxes(), values.split([box.volume for box in shard.boxes()]), strict=True):
            values_of_rank, before = piece.view(box.lengths).to(torch.float64), whole[box.slices]
            assert bool((before.isnan() | (before == values_of_rank)).all()), f"{shard.name}: copies differ"
            whole[box.slices] = values_of_rank
    return {name: whole.flatten() for name, whole in parameters.items()}


def put_together(ranks: Sequence[RunResult]) -> Sequence[RunResult]:
    """Return the result with whole gradients and weights."""
    *gradients, weights = (whole_of(pieces) for pieces in zip(*(rank.pieces for rank in ranks), strict=True))
    for rank in ranks:
        rank.gradients, rank.weights = gradients, weights
    return ranks


def trained(case: Case) -> RunResult:
    """Train with the engine on every rank. Gradients are taken when their norm is: before they are clipped."""
    engine = engine_of(case)
    measured = RunResult()
    norm = engine.updater.norm

    def looked() -> torch.Tensor:
        measured.pieces.append(pieces_of(engine, "gradient_shard"))
        return norm()

    engine.updater.norm = looked  # type: ignore[method-assign]
    for step in range(STEPS):
        capture = CollectiveCapture(engine.world) if step == STEPS - 1 else nullcontext()
        with capture:
            result = run_step(engine, case, step)
        measured.losses.append(result.loss.item())
        measured.auxiliary += [] if engine.balancer.loss is None else [engine.balancer.loss.item()]
        measured.further.append([mtp_loss.item() for mtp_loss in result.mtp_losses])
        measured.norms.append(result.norm.item())
    measured.pieces.append(pieces_of(engine, "state"))
    measured.biases = {name: buffer.clone() for name, buffer in engine.buffers()}
    measured.issued = capture.sequence
    return measured
