"""The programs of a decoder: embedding, block, head with loss, and the whole model.

Dims: B sequences, T positions, D model width, F hidden width, K key-value heads, G query heads for each of them, H head
width, V vocabulary, E experts of width M, S width of the shared expert. A query head is a pair (K, G), so that fewer
key-value heads than `tp` is only another sharding. Latent attention: Q and C widths of the queries' and the keys' latent,
I and R the plain and the rotary part of H, U width of a value. J is two hidden states, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shardwise.model.architecture import Architecture
from shardwise.model.operations import Carry, Contract, Join, Lookup, Map, Route, Scan
from shardwise.model.program import Program, ProgramBuilder, Role

TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")
RECEIVED, RETURNED = "received", "returned"  # tokens where their experts are, and results back where their tokens rest


def embedding_program(architecture: Architecture) -> Program:
    """Token ids to the first block's input."""
    builder = ProgramBuilder()
    return builder.build([_embedding(builder, architecture, "")])


def block_program(architecture: Architecture) -> Program:
    """One decoder block: x -> x + attention(norm(x)) -> + mlp(norm(...)), or both from one norm (parallel blocks)."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([_Block(builder, architecture, "").build(x)])


def head_program(architecture: Architecture) -> Program:
    """The last block's output to the loss, averaged over the tokens of the whole step."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([_head(builder, architecture, x, "", tied=False)])


def dense_block_program(architecture: Architecture) -> Program:
    """One of the leading dense layers."""
    return block_program(architecture.dense())


def predict_program(architecture: Architecture) -> Program:
    """A module that predicts one token further: the last hidden state with the next token's embedding, a block, the head.

    Embedding and head are the model's own. Source: DeepSeek-AI 2025 (DeepSeek-V3), section 2.2.
    """
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([_predict(builder, architecture, x, "")])


def carry_program(architecture: Architecture) -> Program:
    """One stage's output to the next stage."""
    builder = ProgramBuilder()
    x = builder.input("x", HIDDEN, Role.RESIDUAL)
    return builder.build([builder.add(Carry((x,), (builder.tensor("x_next", HIDDEN, Role.RESIDUAL),)))])


def whole_program(architecture: Architecture) -> Program:
    """Token ids to the loss through all layers; a tied head reads the embedding's weight.

    The losses of multi-token prediction are added to it, each scaled by an input of its own.
    """
    builder = ProgramBuilder()
    x = _embedding(builder, architecture, "")
    for layer in range(architecture.num_layers):
        shape = architecture.dense() if layer < architecture.num_dense_layers else architecture
        x = _Block(builder, shape, f"{layer}.").build(x)
    loss = _head(builder, architecture, x, "", tied=architecture.tied_embeddings)
    for module in range(architecture.num_predict_layers):
        further = _predict(builder, architecture, x, f"predict{module}.")
        loss = _map(builder, "add", [loss, further], f"loss{module}", (), Role.STATISTIC)
    return builder.build([loss])


# The units that a model is made of; `unit_counts` says how many of each.
UNITS: Mapping[str, Callable[[Architecture], Program]] = {
    "embedding": embedding_program,
    "dense_block": dense_block_program,
    "block": block_program,
    "predict": predict_program,
    "head": head_program,
    "carry": carry_program,
}
LAYERS = ("dense_block", "block")  # the units that the layers of a model are, in order
# Weights of a unit that are another unit's: they rest, and their gradients are reduced, there.
BORROWED: Mapping[str, tuple[str, ...]] = {"predict": ("embedding", "head", "position_embedding")}


def unit_counts(architecture: Architecture) -> dict[str, int]:
    """How often the whole model has each unit; units that it never has are left out."""
    dense, predict = architecture.num_dense_layers, architecture.num_predict_layers
    counts = {
        "embedding": 1,
        "dense_block": dense,
        "block": architecture.num_layers - dense,
        "predict": predict,
        "head": 1,
    }
    return {name: count for name, count in counts.items() if count}


def _map(
    builder: ProgramBuilder,
    function: str,
    inputs: Iterable[str],
    name: str,
    dims: Iterable[str],
    role: Role = Role.ACTIVATION,
    over: tuple[str, ...] = ("D",),
) -> str:
    reduction = "max" if function == "maximum" else "sum"
    return builder.add(Map(tuple(inputs), (builder.tensor(name, dims, role),), function, reduction, over))


def _contract(
    builder: ProgramBuilder, left: str, right: str, name: str, dims: Iterable[str], role: Role = Role.ACTIVATION
) -> str:
    return builder.add(Contract((left, right), (builder.tensor(name, dims, role),)))


def _norm(builder: ProgramBuilder, architecture: Architecture, x: str, name: str, role: Role = Role.ACTIVATION) -> str:
    """RMSNorm or LayerNorm over D; the sums over D are tensors of their own, so D may be sharded."""
    operands = [x]
    if architecture.norm == "layer":
        operands.append(_map(builder, "sum", [x], f"{name}.sum", TOKENS, Role.STATISTIC))
    operands.append(_map(builder, "sum_square", [x], f"{name}.squares", TOKENS, Role.STATISTIC))
    function = "layer_norm" if architecture.norm == "layer" else "rms_norm"
    weight = builder.weight(f"{name}.weight", "D")
    if not architecture.norm_bias:
        return _map(builder, function, [*operands, weight], f"{name}.out", HIDDEN, role)
    scaled = _map(builder, function, [*operands, weight], f"{name}.scaled", HIDDEN)
    return _map(builder, "add_vector", [scaled, builder.weight(f"{name}.bias", "D")], f"{name}.out", HIDDEN, role)


def _embedding(builder: ProgramBuilder, architecture: Architecture, prefix: str) -> str:
    table = builder.weight("embedding", ("V", "D"))
    ids = builder.input(f"{prefix}ids", TOKENS, Role.CONSTANT)
    x = builder.add(Lookup((table, ids), (builder.tensor(f"{prefix}embedded", HIDDEN, Role.RESIDUAL),)))
    if architecture.positions == "learned":
        places = builder.weight("position_embedding", ("P", "D"))
        positions = builder.input("positions", "T", Role.CONSTANT)
        found = builder.tensor(f"{prefix}places", ("T", "D"), Role.ACTIVATION)
        rows = builder.add(Lookup((places, positions), (found,), "P"))
        x = _map(builder, "add_vector", [x, rows], f"{prefix}placed", HIDDEN, Role.RESIDUAL)
    return _norm(builder, architecture, x, "embedding_norm", Role.RESIDUAL) if architecture.embedding_norm else x


def _predict(builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str) -> str:
    """The last hidden state beside the embedding of the next token, a block, and the loss over the token after it."""
    hidden = _norm(builder, architecture, x, f"{prefix}hidden_norm")
    embedded = _norm(builder, architecture, _embedding(builder, architecture, prefix), f"{prefix}embedding_norm")
    pair = builder.tensor(f"{prefix}pair", (*TOKENS, "J"), Role.ACTIVATION)
    builder.add(Join((hidden, embedded), (pair,), ("D", "D")))
    projection = builder.weight(f"{prefix}pair_projection", ("D", "J"))
    y = _contract(builder, pair, projection, f"{prefix}projected", HIDDEN, Role.RESIDUAL)
    y = _Block(builder, architecture, f"{prefix}block.").build(y)
    return _head(builder, architecture, y, prefix, tied=architecture.tied_embeddings)


class _Block:
    """Writes one block's operations; `prefix` tells the layers of a whole model apart."""

    def __init__(self, builder: ProgramBuilder, architecture: Architecture, prefix: str) -> None:
        self.builder, self.architecture, self.prefix = builder, architecture, prefix

    def build(self, x: str) -> str:
        y = self.before(x, "attention_norm")
        attended = self.after(self.attention(y), "attention_post_norm")
        if self.architecture.parallel:
            z = self.before(x, "mlp_norm") if self.architecture.separate_norms else y
            both = self.map("add", [attended, self.feed_forward(z)], "both", HIDDEN)
            return self.map("add", [x, both], "x_out", HIDDEN, Role.RESIDUAL)
        middle = self.map("add", [x, attended], "x_mid", HIDDEN, Role.RESIDUAL)
        mlp = self.after(self.feed_forward(self.before(middle, "mlp_norm")), "mlp_post_norm")
        return self.map("add", [middle, mlp], "x_out", HIDDEN, Role.RESIDUAL)

    def attention(self, y: str) -> str:
        latent = self.architecture.structure.latent
        q, k, v = (self.latent_queries(y), *self.latent_keys(y)) if latent else self.queries_and_keys(y)
        positions = self.builder.input("positions", "T", Role.CONSTANT)
        query = (*TOKENS, "K", "G", "U" if latent else "H")
        outputs = (
            self.builder.tensor(f"{self.prefix}attended", query, Role.ACTIVATION),
            self.builder.tensor(f"{self.prefix}lse", query[:-1], Role.STATISTIC),
        )
        attended = self.builder.add(Scan((q, k, v, positions, positions, *self.sinks()), outputs))
        return self.leaving(attended, "wo", (*query[2:], "D"), "attention_out", "attention_out")

    def sinks(self) -> tuple[str, ...]:
        return (self.builder.weight(f"{self.prefix}sinks", ("K", "G")),) if self.architecture.sinks else ()

    def queries_and_keys(self, y: str) -> tuple[str, str, str]:
        """Queries, keys and values, each from the hidden state."""
        query, key = (*TOKENS, "K", "G", "H"), (*TOKENS, "K", "H")
        q = self.placed(self.normed(self.project(y, "q", query), "q", query), "q", query)
        k = self.placed(self.normed(self.project(y, "k", key), "k", key), "k", key)
        return q, k, self.project(y, "v", key)

    def latent_queries(self, y: str) -> str:
        """Queries of latent attention: a plain part and a rotary part of each head, from a latent where there is one."""
        source, width = y, "D"
        if self.architecture.structure.latent_queries:
            down = self.contract(y, "w_q_down", ("Q", "D"), "q_latent", (*TOKENS, "Q"))
            source, width = self.latent_norm(down, "q_latent_norm", "Q"), "Q"
        heads = (*TOKENS, "K", "G")
        plain = self.contract(source, "w_q_plain", ("K", "G", "I", width), "q_plain", (*heads, "I"))
        rotary = self.contract(source, "w_q_rotary", ("K", "G", "R", width), "q_rotary_flat", (*heads, "R"))
        return self.join((plain, self.placed(rotary, "q_rotary", (*heads, "R"))), "q", (*heads, "H"))

    def latent_keys(self, y: str) -> tuple[str, str]:
        """Keys and values from one latent of each token; the keys' rotary part is one for all heads."""
        down = self.contract(y, "w_kv_down", ("C", "D"), "kv_latent", (*TOKENS, "C"))
        latent = self.latent_norm(down, "kv_latent_norm", "C")
        flat = self.contract(y, "w_k_rotary", ("R", "D"), "k_rotary_flat", (*TOKENS, "R"))
        plain = self.contract(latent, "w_k_up", ("K", "I", "C"), "k_plain", (*TOKENS, "K", "I"))
        k = self.join((plain, self.placed(flat, "k_rotary", (*TOKENS, "R"))), "k", (*TOKENS, "K", "H"))
        return k, self.contract(latent, "w_v_up", ("K", "U", "C"), "v", (*TOKENS, "K", "U"))

    def latent_norm(self, x: str, name: str, width: str) -> str:
        dims = (*TOKENS, width)
        squares = self.map("sum_square", [x], f"{name}.squares", TOKENS, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}.weight", width)
        return self.map("rms_norm", [x, squares, weight], f"{name}.out", dims, over=(width,))

    def join(self, parts: tuple[str, str], name: str, dims: tuple[str, ...]) -> str:
        """The plain and the rotary part of heads, one after the other."""
        return self.builder.add(
            Join(parts, (self.builder.tensor(f"{self.prefix}{name}", dims, Role.ACTIVATION),), ("I", "R"))
        )

    def mlp(self, y: str) -> str:
        hidden = (*TOKENS, "F")
        inputs = [self.biased(self.contract(y, "w_up", ("F", "D"), "up", hidden), "mlp", "up", "F", hidden)]
        if self.architecture.structure.gated:
            gate = self.contract(y, "w_gate", ("F", "D"), "gate", hidden)
            inputs.insert(0, self.biased(gate, "mlp", "gate", "F", hidden))
        act = self.map(self.architecture.mlp, inputs, "act", hidden)
        return self.leaving(act, "w_down", ("F", "D"), "mlp", "mlp_out")

    def leaving(self, x: str, weight: str, weight_dims: Iterable[str], which: str, name: str) -> str:
        """A product back to D. Its sums are made whole where the residual stream rests before a bias is added to them."""
        role = Role.RESIDUAL if which in self.architecture.bias else Role.ACTIVATION
        return self.biased(self.contract(x, weight, weight_dims, name, HIDDEN, role), which, name, "D", HIDDEN)

    def feed_forward(self, y: str) -> str:
        """The MLP, or the experts that the router chooses with the shared one beside them."""
        if not self.architecture.structure.experts:
            return self.mlp(y)
        routed = self.experts(y)
        if not self.architecture.structure.shared_experts:
            return routed
        return self.map("add", [routed, self.shared(y)], "both_experts", HIDDEN)

    def experts(self, y: str) -> str:
        """Each token's rows go to its experts and back; the AllToAlls follow from where the rows rest."""
        choices, rows, wide = (*TOKENS, "E"), ("E", *HIDDEN), ("E", *TOKENS, "M")
        logits = self.contract(y, "router", ("D", "E"), "router_logits", choices)
        logits = self.biased(logits, "router", "router_logits", "E", choices)
        gates = self.builder.add(
            Route((logits,), (self.builder.tensor(f"{self.prefix}gates", choices, Role.ACTIVATION),))
        )
        sent = self.map("dispatch", [y, gates], "dispatched", rows, Role.ROUTED)
        sent = self.map("handover", [sent], RECEIVED, rows, Role.ROUTED)
        inputs = [self.expert(sent, "up", wide)]
        if self.architecture.structure.gated:
            inputs.insert(0, self.expert(sent, "gate", wide))
        act = self.map(self.architecture.mlp, inputs, "experts_act", wide, Role.ROUTED)
        back = self.map("handover", [self.expert(act, "down", rows)], RETURNED, rows, Role.ROUTED)
        return self.map("combine", [gates, back], "combined", HIDDEN)

    def expert(self, x: str, which: str, dims: tuple[str, ...]) -> str:
        """A product of every expert, and its bias; sums that a bias is added to are whole where the experts are."""
        partial = "experts" in self.architecture.bias and dims[-1] == "D"
        name = f"experts_{which}_{RECEIVED}" if partial else f"experts_{which}_out"
        out = self.contract(x, f"experts_{which}", ("E", "M", "D"), name, dims, Role.ROUTED)
        return self.biased(out, "experts", f"experts_{which}", ("E", dims[-1]), dims, Role.ROUTED)

    def shared(self, y: str) -> str:
        """An expert that every token takes, all of it or as much as its gate says."""
        hidden = (*TOKENS, "S")
        inputs = [self.contract(y, "shared_up", ("S", "D"), "shared_up_out", hidden)]
        if self.architecture.structure.gated:
            inputs.insert(0, self.contract(y, "shared_gate", ("S", "D"), "shared_gate_out", hidden))
        act = self.map(self.architecture.mlp, inputs, "shared_act", hidden)
        if not self.architecture.shared_gate:
            return self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN)
        logit = self.contract(y, "shared_expert_gate", "D", "shared_logit", TOKENS)
        out = self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN, Role.RESIDUAL)
        return self.map("sigmoid_gate", [out, logit], "shared_gated", HIDDEN)

    def project(self, y: str, name: str, dims: tuple[str, ...]) -> str:
        """Queries, keys or values, flat heads before anything is done to them."""
        heads = dims[2:]
        target = f"{name}_flat" if name != "v" else name
        return self.biased(self.contract(y, f"w{name}", (*heads, "D"), target, dims), "qkv", target, heads, dims)

    def normed(self, x: str, name: str, dims: tuple[str, ...]) -> str:
        if not self.architecture.qk_norm:
            return x
        over = ("H",) if self.architecture.qk_norm_over == "head" else dims[2:]
        rows = tuple(dim for dim in dims if dim not in over)
        squares = self.map("sum_square", [x], f"{name}_squares", rows, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}_norm.weight", over)
        return self.map("rms_norm", [x, squares, weight], f"{name}_normed", dims, over=over)

    def placed(self, x: str, name: str, dims: tuple[str, ...]) -> str:
        if self.architecture.positions != "rotary":
            return x
        positions = self.builder.input("positions", "T", Role.CONSTANT)
        return self.map("rotary", [x, positions], name, dims)

    def biased(
        self, x: str, which: str, name: str, bias: Iterable[str], dims: tuple[str, ...], role: Role = Role.ACTIVATION
    ) -> str:
        """`x` plus its bias, where the structure has one."""
        if which not in self.architecture.bias:
            return x
        vector = self.builder.weight(f"{self.prefix}{name}.bias", bias)
        return self.map("add_vector", [x, vector], f"{name}_biased", dims, role)

    def before(self, x: str, name: str) -> str:
        return self.norm(x, name) if self.architecture.pre_norms else x

    def after(self, x: str, name: str) -> str:
        return self.norm(x, name) if self.architecture.post_norms else x

    def norm(self, x: str, name: str) -> str:
        return _norm(self.builder, self.architecture, x, f"{self.prefix}{name}")

    def map(
        self, function: str, inputs: Iterable[str], name: str, dims: Iterable[str], role: Role = Role.ACTIVATION,
        over: tuple[str, ...] = ("D",),
    ) -> str:  # fmt: skip
        return _map(self.builder, function, inputs, f"{self.prefix}{name}", dims, role, over)

    def contract(
        self,
        x: str,
        weight: str,
        weight_dims: Iterable[str],
        name: str,
        dims: Iterable[str],
        role: Role = Role.ACTIVATION,
    ) -> str:
        matrix = self.builder.weight(f"{self.prefix}{weight}", weight_dims)
        return _contract(self.builder, x, matrix, f"{self.prefix}{name}", dims, role)


def _head(builder: ProgramBuilder, architecture: Architecture, x: str, prefix: str, *, tied: bool) -> str:
    y = _norm(builder, architecture, x, f"{prefix}final_norm")
    weight = builder.weight("embedding" if tied else "head", ("V", "D"))
    targets = builder.input(f"{prefix}targets", TOKENS, Role.CONSTANT)

    def statistic(function: str, inputs: Iterable[str], name: str, dims: Iterable[str] = TOKENS) -> str:
        return _map(builder, function, inputs, f"{prefix}{name}", dims, Role.STATISTIC)

    logits = _contract(builder, y, weight, f"{prefix}logits", (*TOKENS, "V"), Role.LOGITS)
    largest = statistic("maximum", [logits], "largest")
    total = statistic("sum_exp", [logits, largest], "sum_exp")
    target_logit = builder.tensor(f"{prefix}target_logit", TOKENS, Role.STATISTIC)
    target = builder.add(Lookup((logits, targets), (target_logit,)))
    losses = statistic("token_loss", [total, largest, target], "token_loss")
    scale = builder.input(f"{prefix}loss_scale", (), Role.CONSTANT)
    return statistic("scaled_sum", [losses, scale], "loss", ())
