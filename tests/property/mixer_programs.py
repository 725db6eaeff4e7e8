"""Small models of one mixer, recurrent or of sparse attention, derived and run on virtual devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.derive.sharded_unit import ShardedUnit, derive_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import HIDDEN, TOKENS, add_norm
from shardwise.model.indexer import BlockIndexerBuilder, IndexerBuilder
from shardwise.model.mixer_builder import add_recurrent_mixer
from shardwise.model.operations import Lookup, Scan
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.run.numpy.step import UnitStepResult, derived_traffic, run_step
from shardwise.sharding import Mesh

from .training_step import AXES, error, nonzero


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Attention of 4 key-value heads, each of 2 query heads, to the keys that an indexer selects, or to blocks of them."""

    num_selected: int = 3
    block: int = 0

    @property
    def dims(self) -> dict[str, int]:
        return {"K": 4, "G": 2, "H": 4, "U": 4, "Q": 8, "A": 3, "Y": 4, "s": self.num_selected, "z": self.block}

    def add(self, builder: ProgramBuilder, y: str) -> str:
        latent = builder.contract(y, builder.weight("w_latent", ("Q", "D")), "latent", (*TOKENS, "Q"))
        selected = (BlockIndexerBuilder if self.block else IndexerBuilder)(builder, "").build(y, latent)
        q = builder.contract(latent, builder.weight("wq", ("K", "G", "H", "Q")), "q", (*TOKENS, "K", "G", "H"))
        k, v = (
            builder.contract(y, builder.weight(f"w{name}", ("K", "H", "D")), name, (*TOKENS, "K", "H")) for name in "kv"
        )
        outputs = (
            builder.tensor("attended", (*TOKENS, "K", "G", "H"), Role.ACTIVATION),
            builder.tensor("lse", (*TOKENS, "K", "G"), Role.STATISTIC),
        )
        operands = (q, k, v, "positions", "positions", selected)
        attended = builder.add(Scan(operands, outputs, is_sparse=True, selected_block="z" * bool(self.block)))
        return builder.contract(attended, builder.weight("wo", ("K", "G", "H", "D")), "out", HIDDEN)


@dataclass(frozen=True, kw_only=True)
class MixerCase:
    """A model of one mixer, x + mixer(norm(x)) of an embedding, whose loss is the mean square, and how it is sharded."""

    mixer: RecurrentMixer | SparseAttention
    degrees: tuple[tuple[str, int], ...] = ()
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    cp_variant: str = "all_gather"
    seqs: int = 1
    positions: int = 8
    width: int = 4
    vocab: int = 4
    seed: int = 0

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple((axis, dict(self.degrees).get(axis, 1)) for axis in AXES))

    @property
    def architecture(self) -> Architecture:
        fsdp = self.mesh.size(("fsdp", "ep", "cp"))
        return Architecture(
            name="mixer", num_layers=1, d_model=self.width * fsdp, d_ff=1, num_heads=1, num_kv_heads=1, head_dim=2,
            vocab_size=self.vocab * self.mesh.size(("tp_kv", "tp_rep")),
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **self.architecture.dims, **self.mixer.dims,
            "B": self.seqs * self.mesh.size(("dp", "fsdp", "ep")), "T": self.positions,
        }  # fmt: skip

    @property
    def program(self) -> Program:
        builder = ProgramBuilder()
        table, ids = builder.weight("embedding", ("V", "D")), builder.input("ids", TOKENS, Role.CONSTANT)
        x = builder.add(Lookup((table, ids), (builder.tensor("embedded", HIDDEN, Role.RESIDUAL),)))
        y = add_norm(builder, self.architecture, x, "norm")
        if isinstance(self.mixer, SparseAttention):
            mixed = self.mixer.add(builder, y)
        else:
            mixed = add_recurrent_mixer(builder, self.mixer.structure, y, "mixer.")
        x = builder.elementwise("add", [x, mixed], "x_out", HIDDEN, Role.RESIDUAL)
        squares = builder.elementwise("sum_square", [x], "squares", TOKENS, Role.STATISTIC)
        scale = builder.input("loss_scale", (), Role.CONSTANT)
        return builder.build([builder.elementwise("scaled_sum", [squares, scale], "loss", (), Role.STATISTIC)])

    @property
    def scheme(self) -> ShardingScheme:
        unsharded = ShardingScheme.unsharded(self.architecture.structure)
        return replace(
            unsharded, zero_stage=self.zero_stage, sequence_parallel=self.sequence_parallel, recompute=self.recompute,
            cp_variant=self.cp_variant,
        )  # fmt: skip

    def inputs(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Random weights and optimizer states, and one micro-batch."""
        rng, sizes, program = np.random.default_rng(self.seed), self.sizes, self.program
        state = {}
        for name in program.weights:
            shape = [sizes[dim] for dim in program.dims(name)]
            for part in ("", ".master", ".exp_avg", ".exp_avg_sq"):
                values = rng.normal(size=shape) * 0.5 + (1.0 if len(shape) == 1 else 0.0)
                state[name + part] = np.abs(values) if part == ".exp_avg_sq" else values
        tokens = (sizes["B"], sizes["T"])
        batch = {"ids": rng.integers(sizes["V"], size=tokens), "loss_scale": np.array(0.5 / math.prod(tokens))}
        for name in program.inputs:
            if name.endswith("fixed_decay"):
                batch[name] = -0.1 * np.broadcast_to(np.arange(1.0, sizes["L"] + 1.0), (*tokens, sizes["L"]))
        return state, [batch | {"positions": np.arange(tokens[1])} if "positions" in program.inputs else batch]

    def unit(self) -> ShardedUnit:
        return derive_unit("whole", self.program, self.scheme)

    def run(self) -> UnitStepResult:
        return run_step(self.unit(), self.mesh, self.sizes, *self.inputs())

    def on_one_device(self) -> UnitStepResult:
        """The same model, weights and batch on one device."""
        return _run_on_one_device(self)

    def worst_error(self) -> tuple[float, str]:
        """The largest relative error against one device, of the loss, a gradient or an updated weight, and whose it is."""
        result, reference = self.run(), self.on_one_device()
        errors = {"loss": error(result.loss, reference.loss)}
        errors |= {name: error(array, reference.gradients[name]) for name, array in result.gradients.items()}
        errors |= {name: error(array, reference.updated[name]) for name, array in result.updated.items()}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        return errors[worst], worst

    def traffic(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The elements that moved, and those that were derived to move."""
        derived = derived_traffic(self.unit(), self.mesh, self.sizes, 1)
        return nonzero(self.run().moved), nonzero(derived)


@lru_cache(maxsize=64)
def _run_on_one_device(case: MixerCase) -> UnitStepResult:
    single_device = Mesh(tuple((axis, 1) for axis in AXES))
    unit = derive_unit("whole", case.program, ShardingScheme.unsharded(case.architecture.structure))
    return run_step(unit, single_device, case.sizes, *case.inputs())
