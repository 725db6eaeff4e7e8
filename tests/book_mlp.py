"""The books' MLP of two matrices under their four strategies, forward and backward derived from the shardings alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.derive.sharded_program import ShardedProgram, ShardingTargets, shard_program
from shardwise.model.backward import transpose_program
from shardwise.model.operations import Contract
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.sharding.notation import parse_tensor
from shardwise.sharding.spec import Spec

# The four shardings of a two-matrix MLP, as S0 prints them.
STRATEGIES = {
    "DP": ("In[B_X, D]", "W_in[D, F]", "W_out[F, D]", "Out[B_X, D]"),
    "FSDP": ("In[B_X, D]", "W_in[D_X, F]", "W_out[F, D_X]", "Out[B_X, D]"),
    "TP": ("In[B, D_Y]", "W_in[D, F_Y]", "W_out[F_Y, D]", "Out[B, D_Y]"),
    "FSDP_TP": ("In[B_X, D_Y]", "W_in[D_X, F_Y]", "W_out[F_Y, D_X]", "Out[B_X, D_Y]"),
}


def spec(text: str) -> Spec:
    text = text.replace("_in", "in").replace("_out", "out")
    return parse_tensor(text).spec


def mlp() -> Program:
    builder = ProgramBuilder()
    x = builder.input("In", "BD", Role.ACTIVATION)
    w_in, w_out = builder.weight("W_in", "DF"), builder.weight("W_out", "FD")
    tmp = builder.add(Contract((x, w_in), (builder.tensor("Tmp", "BF", Role.ACTIVATION),)))
    return builder.build([builder.add(Contract((tmp, w_out), (builder.tensor("Out", "BD", Role.ACTIVATION),)))])


@dataclass(frozen=True)
class Passes:
    forward: ShardedProgram
    backward: ShardedProgram


def derive_mlp(strategy: str, *, keep_gathered: bool = False) -> Passes:
    """Forward and backward of the MLP from the strategy's shardings alone."""
    program = mlp()
    specs = dict(zip(("In", "W_in", "W_out", "Out"), map(spec, STRATEGIES[strategy]), strict=True))
    out = specs.pop("Out")
    forward = shard_program(program, specs, ShardingTargets(final={"Out": out}))
    transposed = transpose_program(program, outputs=["Out"], inputs=("In", "W_in", "W_out"))
    kept = {"In": specs["In"].gather_axes(["Y"])} if keep_gathered else {}
    final = {transposed.gradients[name]: specs[name] for name in ("In", "W_in", "W_out")}
    saved = {**specs, "Tmp": forward.specs["Tmp"], "d.Out": out}
    targets = ShardingTargets(final=final, primal=forward.specs)
    return Passes(forward, shard_program(transposed.program, saved, targets, already_available=kept))
