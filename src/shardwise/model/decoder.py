"""The programs of a decoder: embedding, block, head with loss, and the whole model.

Dims: B sequences, T positions, D model width, F hidden width, K key-value heads, G query heads for each of them, H head
width, V vocabulary, E experts of width M, S width of the shared expert. A query head is a pair (K, G), so that fewer
key-value heads than `tp` is only another sharding. Latent attention: Q and C widths of the queries' and the keys' latent,
I and R the plain and the rotary part of H, U width of a value. J is two hidden states, one after the other; r is the rank
of adapters, y twice that; u a single number; d the width of the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.model.alternating_streams import AlternatingStreamBuilder
from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import HIDDEN, TOKENS, NormDims, add_norm
from shardwise.model.carried_tensors import (
    CARRIED_EMBEDDING,
    INPUT_WIDTH,
    LAYER_INPUT_DIMS,
    LAYER_INPUTS_DIMS,
    LAYERS,
    CarriedSource,
    add_layer_inputs,
    carried_sources,
)
from shardwise.model.decoder_block import BlockBuilder
from shardwise.model.layer_pattern import EMBEDDING, HEAD
from shardwise.model.operations import Carry, Concatenate, Lookup, TakeIndex
from shardwise.model.placeholder_sizes import placeholder_architecture
from shardwise.model.program import ModelPart, Program, ProgramBuilder, Role
from shardwise.model.residual_streams import StreamBuilder, residual_dims
from shardwise.model.structure import ModelStructure


def embedding_program(architecture: Architecture) -> Program:
    """Return the program from token ids to the first block's input."""
    builder = _new_builder(architecture)
    return builder.build(add_embeddings(builder, architecture, ""))


def untied_program(architecture: Architecture) -> Program:
    """Return the program of an embedding whose matrix is the head's, which a tied model has once: it owns positions, for one."""
    return embedding_program(architecture).borrowing(EMBEDDING, HEAD)


def block_program(architecture: Architecture) -> Program:
    """Return the program of the base layer: x + attention(norm(x)), then + mlp(norm(...)), or both from one norm (parallel
    blocks), or one of the two alone."""
    builder, x = _builder_with_input(architecture)
    block = BlockBuilder(builder, architecture, "")
    return builder.build([block.build(x), *block.handed_on])


def head_program(architecture: Architecture) -> Program:
    """Return the program from the last block's output to the loss, averaged over the tokens of the whole step."""
    builder, x = _builder_with_input(architecture)
    return builder.build([_add_head(builder, architecture, x, "", tied=False)])


def mtp_program(architecture: Architecture) -> Program:
    """Return the program of the last module of multi-token prediction.

    It joins a hidden state with the embedding of a later token, and has a block and the head. The hidden state is that of the
    last layer, or of the module before. Embedding and head are the model's own. Source: DeepSeek-AI 2025 (DeepSeek-V3),
    section 2.2.
    """
    builder, x = _builder_with_input(architecture)
    return builder.build([_add_mtp_module(builder, architecture, x, "").loss])


def inner_mtp_program(architecture: Architecture) -> Program:
    """Return the program of a module of multi-token prediction whose hidden state the next module reads."""
    builder, x = _builder_with_input(architecture)
    return builder.build(_add_mtp_module(builder, architecture, x, ""))


def carry_program(architecture: Architecture) -> Program:
    """Return the program that hands one stage's output to the next stage."""
    builder, x = _builder_with_input(architecture)
    return builder.build(
        [builder.add(Carry((x,), (builder.tensor("x_next", builder.tensors[x].dims, Role.RESIDUAL),)))]
    )


def model_program(architecture: Architecture) -> Program:
    """Return the program from token ids to the loss through all layers; a tied head reads the embedding's weight.

    The losses of multi-token prediction, whose modules are a chain, are added, each scaled by an input of its own.
    """
    builder = _new_builder(architecture)
    results = [add_embeddings(builder, architecture, "")]  # of each unit
    for layer, (unit, sources) in enumerate(zip(architecture.layer_units, carried_sources(architecture), strict=True)):
        block = BlockBuilder(builder, architecture.unit_architecture(unit), f"{layer}.")
        block.carried = {name: _carried_name(builder, results, source, name) for name, source in sources.items()}
        if block.architecture.weights_of:
            block.shared_prefix = f"{architecture.layer_units.index(block.architecture.weights_of)}."
        x = block.build(results[-1][0])
        results.append((x, *block.handed_on))
    x = results[-1][0]
    loss = _add_head(builder, architecture, x, "", tied=architecture.tied_embeddings)
    for module in range(architecture.num_predict_layers):
        x, mtp_loss = _add_mtp_module(builder, architecture, x, f"predict{module}.")
        loss = builder.elementwise("add", [loss, mtp_loss], f"loss{module}", (), Role.STATISTIC)
    return builder.build([loss])


# The units that a model is made of, but for its kinds of layers, which are blocks; `unit_counts` says how many of each.
UNIT_PROGRAMS: Mapping[str, Callable[[Architecture], Program]] = {
    "embedding": embedding_program,
    "inner_predict": inner_mtp_program,
    "predict": mtp_program,
    "head": head_program,
    "carry": carry_program,
    "untied": untied_program,
}
MTP_BLOCK_PREFIX = "block."  # prefix of the names in the block of a module of multi-token prediction
# Units whose backward pass follows their forward pass at once, so that weights gathered for the one serve the other.
UNITS_WITH_IMMEDIATE_BACKWARD = ("head",)
MTP_UNITS = ("inner_predict", "predict")  # modules of multi-token prediction, in order


def build_unit_program(architecture: Architecture, unit: str) -> Program:
    """Return the program of a unit of a model: that of a kind of layer is a block with the kind's fields."""
    return UNIT_PROGRAMS.get(unit, block_program)(architecture.unit_architecture(unit))


def unit_counts(architecture: Architecture) -> dict[str, int]:
    """Return how often the whole model has each unit; units that it never has are left out."""
    layers, modules = architecture.layer_counts, mtp_unit_counts(architecture.num_predict_layers)
    counts = {"embedding": 1, **layers, **modules, "head": 1}
    return {name: count for name, count in counts.items() if count}


def result_names(architecture: Architecture, unit: str) -> tuple[str, ...]:
    """Return the names of all results of a unit's operations, in order."""
    program = unit_program(architecture.structure, unit)
    return tuple(out for operation in program.operations for out in operation.outputs)


def has_untied_embedding_weights(architecture: Architecture) -> bool:
    """Return whether a tied embedding has weights of its own beside the shared matrix."""
    return architecture.tied_embeddings and (
        architecture.structure.has_learned_positions
        or architecture.embedding_norm
        or bool(architecture.layer_input_dim)
        or architecture.alternating_streams
    )


def mtp_unit_counts(num_predict_layers: int) -> dict[str, int]:
    """Return the counts of the units of so many modules of multi-token prediction: the last one hands no hidden state on."""
    last = min(num_predict_layers, 1)
    return {"inner_predict": num_predict_layers - last, "predict": last}


def units_of_structure(structure: ModelStructure) -> tuple[str, ...]:
    """Return the units of a model with this structure."""
    return ("embedding", *structure.layer_units, *(MTP_UNITS if structure.predict else ()), "head")


@lru_cache(maxsize=1024)
def unit_program(structure: ModelStructure, name: str) -> Program:
    """Return the program of a unit in a model with this structure."""
    return build_unit_program(placeholder_architecture(structure.unit_structure(name)), name)


class WeightOwner(NamedTuple):
    """The unit that a weight belongs to, and its name there."""

    unit: str
    weight: str


def borrowed_weights(architecture: Architecture, unit: str) -> Mapping[str, WeightOwner]:
    """Return the owner of each weight that a unit uses and another unit owns, by its name in the unit's program.

    It rests, and its gradient is reduced, in the owner; each use has a partial sum of its gradient. The matrix of a tied head is
    the embedding's.

    >>> from shardwise.model.load import load_model
    >>> borrowed_weights(load_model("deepseek-v3"), "predict")["head"]
    WeightOwner(unit='head', weight='head')
    >>> dict(borrowed_weights(load_model("gpt-2"), "head"))
    {'head': WeightOwner(unit='embedding', weight='embedding')}
    """
    program = unit_program(architecture.structure, unit)
    owners = {name: WeightOwner(owner, name) for name, owner in program.borrowed.items()}
    if not architecture.tied_embeddings:
        return owners
    matrix = WeightOwner(HEAD, HEAD)
    owners |= {HEAD: matrix} if unit == HEAD else {}
    return {name: WeightOwner(EMBEDDING, EMBEDDING) if owner == matrix else owner for name, owner in owners.items()}


@lru_cache(maxsize=1024)
def routes_tokens(structure: ModelStructure, name: str) -> bool:
    """Return whether a unit sends tokens to experts."""
    return bool(unit_program(structure, name).names_with_role(Role.ROUTED))


def _new_builder(architecture: Architecture) -> ProgramBuilder:
    return ProgramBuilder(adapters_only=bool(architecture.lora_rank))


def _builder_with_input(architecture: Architecture) -> tuple[ProgramBuilder, str]:
    builder = _new_builder(architecture)
    return builder, builder.input("x", residual_dims(architecture.structure.streams), Role.RESIDUAL)


def add_embedding(builder: ProgramBuilder, architecture: Architecture, prefix: str) -> str:
    """Add the rows of the tokens, and of their positions, where these have a table."""
    table = builder.weight("embedding", ("V", "D"), part=ModelPart.VOCABULARY)
    ids = builder.input(f"{prefix}ids", TOKENS, Role.CONSTANT)
    x = builder.add(Lookup((table, ids), (builder.tensor(f"{prefix}embedded", HIDDEN, Role.RESIDUAL),)))
    if architecture.structure.has_learned_positions:
        position_table = builder.weight("position_embedding", ("P", "D"), part=ModelPart.VOCABULARY)
        positions = builder.positions()
        row_tensor = builder.tensor(f"{prefix}places", (*builder.position_dims, "D"), Role.ACTIVATION)
        rows = builder.add(Lookup((position_table, positions), (row_tensor,), "P"))
        x = builder.elementwise("add_vector", [x, rows], f"{prefix}placed", HIDDEN, Role.RESIDUAL)
    if architecture.embedding_norm:
        x = add_norm(builder, architecture, x, "embedding_norm", Role.RESIDUAL)
    return x


def add_embeddings(builder: ProgramBuilder, architecture: Architecture, prefix: str) -> tuple[str, ...]:
    """Add the embedding, also as what later layers read, and the inputs of all layers where each has an embedding of its own."""
    x = add_embedding(builder, architecture, prefix)
    if architecture.carried_embedding:
        carried = builder.elementwise("handover", [x], f"{prefix}{CARRIED_EMBEDDING}", HIDDEN, Role.CARRIED)
        return x, carried
    streams = stream_builder(builder, architecture, prefix).split(x) if architecture.structure.streams else x
    if not architecture.structure.layer_inputs:
        return (streams,)

    def norm(y: str, name: str) -> str:
        return add_norm(builder, architecture, y, f"{prefix}{name}", dims=_LAYER_INPUT_NORM)

    return streams, add_layer_inputs(builder, (f"{prefix}ids", x), prefix, norm)


def stream_builder(
    builder: ProgramBuilder, architecture: Architecture, prefix: str
) -> StreamBuilder | AlternatingStreamBuilder:
    """Return the builder of several residual streams of an architecture."""
    kind = AlternatingStreamBuilder if architecture.alternating_streams else StreamBuilder
    return kind(builder, prefix)


_LAYER_INPUT_NORM = NormDims(LAYER_INPUTS_DIMS, (INPUT_WIDTH,), (INPUT_WIDTH,))


def _carried_name(builder: ProgramBuilder, results: Sequence[tuple[str, ...]], source: CarriedSource, name: str) -> str:
    """Return the name of a carried tensor in the program of the whole model; of the inputs of all layers, that of one."""
    carried = results[source.unit][source.result]
    if source.layer_index is None:
        return carried
    out = builder.tensor(f"{source.layer_index}.{name}", LAYER_INPUT_DIMS, Role.CARRIED)
    return builder.add(TakeIndex((carried,), (out,), LAYERS, source.layer_index))


class MtpOutputs(NamedTuple):
    """Names of the outputs of a module of multi-token prediction."""

    hidden: str
    loss: str


def _add_mtp_module(builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str) -> MtpOutputs:
    """Add the embedding of a later token joined with a hidden state, a block, and the loss over the token after it. Differs:
    the report has the hidden state first; its files have them in this order (eh_proj)."""
    hidden = add_norm(builder, architecture, x, f"{prefix}hidden_norm")
    with builder.borrowing(EMBEDDING):
        rows = add_embedding(builder, architecture, prefix)
    embedded = add_norm(builder, architecture, rows, f"{prefix}embedding_norm")
    pair = builder.tensor(f"{prefix}pair", (*TOKENS, "J"), Role.ACTIVATION)
    builder.add(Concatenate((embedded, hidden), (pair,), ("D", "D")))
    projection = builder.weight(f"{prefix}pair_projection", ("D", "J"), part=ModelPart.PREDICTION)
    y = builder.contract(pair, projection, f"{prefix}projected", HIDDEN, Role.RESIDUAL)
    y = BlockBuilder(builder, architecture, f"{prefix}{MTP_BLOCK_PREFIX}").build(y)
    return MtpOutputs(y, _add_head(builder, architecture, y, prefix, tied=architecture.tied_embeddings, lender=HEAD))


def _add_head_layer(builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str) -> str:
    """Add a product of the width of the model, GELU and a norm (Devlin et al. 2019, the head of BERT)."""
    rows = builder.tensors[x].dims[:-1]
    matrix = builder.weight("head_layer", ("d", "D"), part=ModelPart.VOCABULARY)
    hidden = builder.contract(x, matrix, f"{prefix}head_hidden", (*rows, "d"))
    act = builder.elementwise("gelu", [hidden], f"{prefix}head_act", (*rows, "d"))
    y = builder.tensor(f"{prefix}head_act_wide", (*rows, "D"), Role.ACTIVATION)
    builder.add(Concatenate((act,), (y,), ("d",)))
    return add_norm(builder, architecture, y, f"{prefix}head_norm", dims=NormDims((*rows, "D")))


def add_logits(
    builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str, *, tied: bool, lender: str = ""
) -> str:
    """Add the last norm and the logits of hidden states `x`, whose dims but the last are kept; the matrix may be another unit's,
    the norm is not."""
    x = stream_builder(builder, architecture, prefix).join(x) if architecture.structure.streams else x
    rows = builder.tensors[x].dims[:-1]
    dims = NormDims((*rows, "D"))
    y = add_norm(builder, architecture, x, f"{prefix}final_norm", dims=dims) if architecture.final_norm else x
    y = _add_head_layer(builder, architecture, y, prefix) if architecture.head_layer else y
    with builder.borrowing(lender):
        weight = builder.weight(EMBEDDING if tied else HEAD, ("V", "D"), part=ModelPart.VOCABULARY)
    logit_dims = (*rows, "V")
    logits = builder.contract(y, weight, f"{prefix}logits", logit_dims, Role.LOGITS)
    if "head" not in architecture.bias:
        return logits
    with builder.borrowing(lender):
        bias = builder.weight("head.bias", "V", part=ModelPart.VOCABULARY)
    return builder.elementwise("add_vector", [logits, bias], f"{prefix}logits_biased", logit_dims, Role.LOGITS)


def _add_head(
    builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str, *, tied: bool, lender: str = ""
) -> str:
    def statistic(function: str, inputs: Iterable[str], name: str, dims: Iterable[str] = TOKENS) -> str:
        return builder.elementwise(function, inputs, f"{prefix}{name}", dims, Role.STATISTIC)

    logits = add_logits(builder, architecture, x, prefix, tied=tied, lender=lender)
    targets = builder.input(f"{prefix}targets", TOKENS, Role.CONSTANT)
    largest = statistic("maximum", [logits], "largest")
    total = statistic("sum_exp", [logits, largest], "sum_exp")
    target_logit = builder.tensor(f"{prefix}target_logit", TOKENS, Role.STATISTIC)
    target = builder.add(Lookup((logits, targets), (target_logit,)))
    losses = statistic("token_loss", [total, largest, target], "token_loss")
    scale = builder.input(f"{prefix}loss_scale", (), Role.CONSTANT)
    return statistic("scaled_sum", [losses, scale], "loss", ())
