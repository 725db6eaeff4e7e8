"""The programs of a dense decoder: embedding, block, head with loss, and the whole model.

Dims: B sequences, T positions, D model width, F hidden width, K key-value heads, G query heads for each of them, H head
width, V vocabulary. A query head is a pair (K, G), so that fewer key-value heads than `tp` is only another sharding.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.model.architecture import Architecture
from shardwise.model.operations import Carry, Contract, Lookup, Map, Scan
from shardwise.model.program import Program, ProgramBuilder, Role

TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")


def embedding_program(architecture: Architecture) -> Program:
    """Token ids to the first block's input."""
    builder = ProgramBuilder()
    return builder.build([_embedding(builder)])


def block_program(architecture: Architecture) -> Program:
    """One decoder block: x -> x + attention(norm(x)) -> + mlp(norm(...))."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([_block(builder, architecture, x, prefix="")])


def head_program(architecture: Architecture) -> Program:
    """The last block's output to the loss, averaged over the tokens of the whole step."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([_head(builder, x, tied=False)])


def carry_program(architecture: Architecture) -> Program:
    """One stage's output to the next stage."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([builder.add(Carry((x,), (builder.tensor("x_next", HIDDEN, Role.RESIDUAL),)))])


def whole_program(architecture: Architecture) -> Program:
    """Token ids to the loss through all blocks; a tied head reads the embedding's weight."""
    builder = ProgramBuilder()
    x = _embedding(builder)
    for layer in range(architecture.num_layers):
        x = _block(builder, architecture, x, prefix=f"{layer}.")
    return builder.build([_head(builder, x, tied=architecture.tied_embeddings)])


def _map(
    builder: ProgramBuilder,
    function: str,
    inputs: Iterable[str],
    name: str,
    dims: Iterable[str],
    role: Role = Role.ACTIVATION,
) -> str:
    reduction = "max" if function == "maximum" else "sum"
    return builder.add(Map(tuple(inputs), (builder.tensor(name, dims, role),), function, reduction))


def _contract(
    builder: ProgramBuilder, left: str, right: str, name: str, dims: Iterable[str], role: Role = Role.ACTIVATION
) -> str:
    return builder.add(Contract((left, right), (builder.tensor(name, dims, role),)))


def _norm(builder: ProgramBuilder, x: str, name: str) -> str:
    squares = _map(builder, "sum_square", [x], f"{name}.squares", TOKENS, Role.STATISTIC)
    return _map(builder, "rms_norm", [x, squares, builder.weight(f"{name}.weight", "D")], f"{name}.out", HIDDEN)


def _embedding(builder: ProgramBuilder) -> str:
    table = builder.weight("embedding", ("V", "D"))
    ids = builder.input("ids", TOKENS, Role.CONSTANT)
    return builder.add(Lookup((table, ids), (builder.tensor("embedded", HIDDEN, Role.RESIDUAL),)))


def _block(builder: ProgramBuilder, architecture: Architecture, x: str, *, prefix: str) -> str:
    attended = _map(builder, "add", [x, _attention(builder, x, prefix)], f"{prefix}x_mid", HIDDEN, Role.RESIDUAL)
    return _map(
        builder,
        "add",
        [attended, _mlp(builder, architecture, attended, prefix)],
        f"{prefix}x_out",
        HIDDEN,
        Role.RESIDUAL,
    )


def _attention(builder: ProgramBuilder, x: str, prefix: str) -> str:
    y = _norm(builder, x, f"{prefix}attention_norm")
    positions = builder.input("positions", "T", Role.CONSTANT)
    query, key = (*TOKENS, "K", "G", "H"), (*TOKENS, "K", "H")
    flat_q = _contract(builder, y, builder.weight(f"{prefix}wq", ("K", "G", "H", "D")), f"{prefix}q_flat", query)
    flat_k = _contract(builder, y, builder.weight(f"{prefix}wk", ("K", "H", "D")), f"{prefix}k_flat", key)
    v = _contract(builder, y, builder.weight(f"{prefix}wv", ("K", "H", "D")), f"{prefix}v", key)
    q = _map(builder, "rotary", [flat_q, positions], f"{prefix}q", query)
    k = _map(builder, "rotary", [flat_k, positions], f"{prefix}k", key)
    outputs = (
        builder.tensor(f"{prefix}attended", query, Role.ACTIVATION),
        builder.tensor(f"{prefix}lse", query[:-1], Role.STATISTIC),
    )
    attended = builder.add(Scan((q, k, v, positions), outputs))
    return _contract(
        builder, attended, builder.weight(f"{prefix}wo", ("K", "G", "H", "D")), f"{prefix}attention_out", HIDDEN
    )


def _mlp(builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str) -> str:
    y = _norm(builder, x, f"{prefix}mlp_norm")
    hidden = (*TOKENS, "F")
    up = _contract(builder, y, builder.weight(f"{prefix}w_up", ("F", "D")), f"{prefix}up", hidden)
    inputs = [up]
    if architecture.gated:
        inputs = [_contract(builder, y, builder.weight(f"{prefix}w_gate", ("F", "D")), f"{prefix}gate", hidden), up]
    act = _map(builder, architecture.mlp, inputs, f"{prefix}act", hidden)
    return _contract(builder, act, builder.weight(f"{prefix}w_down", ("F", "D")), f"{prefix}mlp_out", HIDDEN)


def _head(builder: ProgramBuilder, x: str, *, tied: bool) -> str:
    y = _norm(builder, x, "final_norm")
    weight = builder.weight("embedding" if tied else "head", ("V", "D"))
    targets = builder.input("targets", TOKENS, Role.CONSTANT)
    logits = _contract(builder, y, weight, "logits", (*TOKENS, "V"), Role.LOGITS)
    largest = _map(builder, "maximum", [logits], "largest", TOKENS, Role.STATISTIC)
    total = _map(builder, "sum_exp", [logits, largest], "sum_exp", TOKENS, Role.STATISTIC)
    target = builder.add(Lookup((logits, targets), (builder.tensor("target_logit", TOKENS, Role.STATISTIC),)))
    losses = _map(builder, "token_loss", [total, largest, target], "token_loss", TOKENS, Role.STATISTIC)
    scale = builder.input("loss_scale", (), Role.CONSTANT)
    return _map(builder, "scaled_sum", [losses, scale], "loss", (), Role.STATISTIC)
