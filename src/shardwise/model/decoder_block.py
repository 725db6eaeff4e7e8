"""One decoder block as operations on named tensors; its dims are those of `decoder.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardwise.model.alternating_streams import LAUREL_RANK, AlternatingStreamBuilder
from shardwise.model.attention_block import AttentionBuilder
from shardwise.model.block_parts import HIDDEN, TOKENS, NormDims
from shardwise.model.carried_tensors import CARRIED_EMBEDDING, INPUT_WIDTH, LAYER_INPUT, LAYER_INPUT_DIMS
from shardwise.model.mixer_builder import add_recurrent_mixer
from shardwise.model.operations import Concatenate, HashedRoute, Route
from shardwise.model.program import ModelPart, Role
from shardwise.model.recurrent_mixers import RecurrentStructure
from shardwise.model.residual_streams import StreamBuilder
from shardwise.model.structure import ACTIVATION_WEIGHTS, NORMS_BEFORE, NORMS_BEHIND

RECEIVED, RETURNED = "received", "returned"  # tokens where their experts are, and results back where their tokens rest


class BlockBuilder(AttentionBuilder):
    """Writes one block's operations: what mixes its tokens, and an MLP or experts."""

    def build(self, x: str) -> str:
        if self.architecture.shared_block:
            return self.mixer_beside_shared_block(x)
        if self.architecture.alternating_streams:
            return self.alternate_streams(x)
        if self.architecture.structure.streams:
            return self.update_streams(x)
        if self.architecture.parallel:
            return self.parallel_branches(x)
        x = self.halves(x)
        if not self.architecture.structure.layer_inputs:
            return x
        return self.elementwise("add", [x, self.layer_input(x)], "x_next_layer", HIDDEN, Role.RESIDUAL)

    def mixer_beside_shared_block(self, x: str) -> str:
        """Add a recurrence of the residual stream and of what a shared block makes of it, which the stream itself does not take
        (Glorioso et al. 2024, Zamba, figure 2)."""
        joined = self.elementwise("add", [x, self.shared_block(x)], "mixer_input", HIDDEN, Role.RESIDUAL)
        recurrence = self.architecture.structure.recurrence
        assert recurrence is not None, "a shared block stands beside a recurrence"
        mixed = self.recurrent_mixer(recurrence, self.pre_norm(joined, "attention_norm", "mixer"))
        return self.elementwise("add", [x, mixed], "x_out", HIDDEN, Role.RESIDUAL)

    def shared_block(self, x: str) -> str:
        """Add attention to the hidden state beside the embedding and an MLP behind it, without residual sums, and the layer's own
        product of the result. Norms and matrices of the block are those of the layer that owns them."""
        pair = self.builder.tensor(f"{self.prefix}pair", (*TOKENS, "J"), Role.ACTIVATION)
        self.builder.add(Concatenate((x, self.read_carried(CARRIED_EMBEDDING, HIDDEN)), (pair,), ("D", "D")))
        with self.builder.borrowing(self.architecture.weights_of, (self.prefix, self.shared_prefix)):
            y = self.sub_layer_norm(pair, "pair_norm", NormDims((*TOKENS, "J"), ("J",), ("J",)))
            attended = self.attention(y)
            self.builder.set_role(
                attended, Role.RESIDUAL
            )  # summed where the residual stream rests, as its norm needs the sum
            out = self.feed_forward(self.norm(attended, "mlp_norm"))
        self.builder.set_role(out, Role.RESIDUAL)
        with self.builder.in_part(ModelPart.MLP):
            narrow = self.contract(out, "shared_out", ("d", "D"), "shared_narrow", (*TOKENS, "d"))
            result = self.builder.tensor(f"{self.prefix}shared_result", HIDDEN, Role.ACTIVATION)
            return self.builder.add(Concatenate((narrow,), (result,), ("d",)))

    def halves(self, x: str) -> str:
        """Add what mixes tokens and what follows it, each with its norms and the residual around it."""
        has_feed_forward = self.architecture.feed_forward != "none"
        if self.architecture.has_mixer:
            x = self.enter_half(x, "attention_norm")
            y = self.pre_norm(x, "attention_norm", "mixer")
            mixed = self.post_norm(self.mixer(y), "attention_post_norm", "mixer")
            x = self.elementwise("add", [x, mixed], "x_mid" if has_feed_forward else "x_out", HIDDEN, Role.RESIDUAL)
            x = self.add_laurel(x, y) if self.architecture.structure.laurel else x
            x = self.leave_half(x, "attention_norm")
        if not has_feed_forward:
            return x
        x = self.enter_half(x, "mlp_norm")
        if self.architecture.feed_forward == "mlp_and_experts":
            out = self.mlp_and_experts(x)
        else:
            out = self.feed_forward(self.pre_norm(x, "mlp_norm"))
        x = self.elementwise("add", [x, self.post_norm(out, "mlp_post_norm")], "x_out", HIDDEN, Role.RESIDUAL)
        return self.leave_half(x, "mlp_norm")

    def add_laurel(self, x: str, y: str) -> str:
        """Add what attention read and the norm of a product of low rank of it, over √2 with the residual stream `x` (Menghani et
        al. 2024, LAuReL)."""
        with self.builder.in_part(ModelPart.STREAMS):
            down = self.contract(y, "laurel_down", (LAUREL_RANK, "D"), "laurel_hidden", (*TOKENS, LAUREL_RANK))
            up = self.contract(down, "laurel_up", ("D", LAUREL_RANK), "laurel_out", HIDDEN)
        learned = self.elementwise("add", [y, self.norm(up, "laurel_norm")], "laurel", HIDDEN)
        return self.elementwise("scaled_add", [x, learned], "x_augmented", HIDDEN, Role.RESIDUAL)

    def alternate_streams(self, x: str) -> str:
        """Add the two halves of the block on the first of several streams, between the prediction of all streams and their
        correction; the others get the layer's embedding of the tokens (Gemma 3n)."""
        streams = AlternatingStreamBuilder(self.builder, self.prefix)
        predicted, active = streams.predict(x)
        x = streams.correct((predicted, active), self.halves(active))
        if not self.architecture.structure.layer_inputs:
            return x
        return streams.add_to_predicted(x, self.layer_input(streams.scaled_first(x)))

    def layer_input(self, x: str) -> str:
        """Add the layer's embedding of the tokens, gated by the hidden state, its product back to D, and a norm (Gemma 3n)."""
        with self.builder.in_part(ModelPart.MLP):
            gate = self.contract(x, "layer_input_gate", (INPUT_WIDTH, "D"), "layer_gate", LAYER_INPUT_DIMS)
            layer_input = self.read_carried(LAYER_INPUT, LAYER_INPUT_DIMS)
            gated = self.elementwise(self.architecture.mlp, [gate, layer_input], "layer_gated", LAYER_INPUT_DIMS)
            out = self.contract(gated, "layer_input_out", ("D", INPUT_WIDTH), "layer_out", HIDDEN)
        return self.norm(out, "layer_input_norm")

    def enter_half(self, x: str, name: str) -> str:
        """Add the norm of the residual stream before a half of the block, where the structure has one (MiniMax 2025)."""
        return self.stream_norm(x, name) if NORMS_BEFORE[self.architecture.stream_norms] else x

    def leave_half(self, x: str, name: str) -> str:
        """Add the norm of the sum behind a half of the block, where the structure has one (Vaswani et al. 2017)."""
        return self.stream_norm(x, name) if NORMS_BEHIND[self.architecture.stream_norms] else x

    def mlp_and_experts(self, x: str) -> str:
        """Add an MLP and experts side by side, each between norms of its own, and their sum (Gemma 4)."""
        y, z, router_input = (self.pre_norm(x, name) for name in ("mlp_norm", "experts_norm", "router_norm"))
        with self.builder.in_part(ModelPart.MLP):
            mlp, experts = self.mlp(y), self.experts(z, router_input)
        branches = [self.post_norm(mlp, "mlp_own_post_norm"), self.post_norm(experts, "experts_post_norm")]
        return self.elementwise("add", branches, "mlp_and_experts", HIDDEN)

    def update_streams(self, x: str) -> str:
        """Add what mixes tokens and what follows it, each between the reading and the writing of several residual streams."""
        streams = StreamBuilder(self.builder, self.prefix, mixed=self.architecture.mixed_streams)
        halves = (("attention", ("f", "g"), self.mixer, "x_mid"), ("mlp", ("g", "f"), self.feed_forward, "x_out"))
        for name, dims, half, result in halves:
            x = streams.update(x, name, dims, partial(self.normed_half, name, half), result)
        return x

    def normed_half(self, name: str, half: Callable[[str], str], x: str) -> str:
        """Add half a layer between its norms."""
        return self.post_norm(half(self.pre_norm(x, f"{name}_norm")), f"{name}_post_norm")

    def parallel_branches(self, x: str) -> str:
        """Add mixer and MLP side by side, from one norm or from one each."""
        y = self.pre_norm(x, "attention_norm", "mixer")
        mixed = self.post_norm(self.mixer(y), "attention_post_norm", "mixer")
        z = self.pre_norm(x, "mlp_norm") if self.architecture.separate_norms else y
        branches = self.sum_parallel_branches(mixed, self.feed_forward(z))
        return self.elementwise("add", [x, branches], "x_out", HIDDEN, Role.RESIDUAL)

    def mixer(self, y: str) -> str:
        """Add what mixes the tokens of the layer: attention, a recurrence, or the sum of both."""
        recurrence = self.architecture.structure.recurrence
        if recurrence is None:
            return self.attention(y)
        recurrent = self.recurrent_mixer(recurrence, y)
        if self.architecture.mixer == "none":
            return recurrent
        return self.elementwise("add", [self.attention(y), recurrent], "both_mixers", HIDDEN)

    def recurrent_mixer(self, recurrence: RecurrentStructure, y: str) -> str:
        """Add a recurrence over the tokens, with the adapters of its projections."""

        def adapt(out: str, x: str, weight: str, weight_dims: tuple[str, ...]) -> str:
            module = recurrence.modules.get(weight, "")
            if module not in self.architecture.structure.lora_targets:
                return out
            return self.add_adapter(out, x, (f"mixer.{weight}", module), weight_dims, f"mixer.{weight}")

        return add_recurrent_mixer(self.builder, recurrence, y, f"{self.prefix}mixer.", adapt)

    def sum_parallel_branches(self, attended: str, mlp_out: str) -> str:
        """Add the results of a parallel block's branches, and then their biases, so that one sum is reduced and not two.

        Source: Black et al. 2022 (GPT-NeoX-20B), section 2.1: both are added on each device before a single all-reduce.
        """
        role = Role.RESIDUAL if self.deferred_biases else Role.ACTIVATION
        branches = self.elementwise("add", [attended, mlp_out], "both", HIDDEN, role)
        for part, projection, name in self.deferred_biases:
            with self.builder.in_part(part):
                branches = self.add_bias(branches, projection, name, "D", HIDDEN)
        return branches

    def feed_forward(self, y: str) -> str:
        """Add the MLP, or the experts that the router chooses and the shared expert beside them."""
        with self.builder.in_part(ModelPart.MLP):
            if not self.architecture.structure.experts:
                return self.mlp(y)
            routed = self.experts(y)
            if not self.architecture.structure.shared_experts:
                return routed
            return self.elementwise("add", [routed, self.shared_expert(y)], "both_experts", HIDDEN)

    def mlp(self, y: str) -> str:
        hidden = (*TOKENS, "F")
        up = self.contract(y, "w_up", ("F", "D"), "up", hidden)
        inputs = [self.add_bias(up, "mlp", "up", "F", hidden)]
        if self.architecture.structure.has_gated_mlp:
            gate = self.contract(y, "w_gate", ("F", "D"), "gate", hidden)
            gate = self.add_bias(gate, "mlp", "gate", "F", hidden)
            inputs.insert(0, self.largest_gates(gate, hidden) if self.architecture.sparse_activation else gate)
        weights = ACTIVATION_WEIGHTS.get(self.architecture.mlp, ())
        inputs += [self.builder.weight(f"{self.prefix}act.{name}", "u") for name in weights]
        act = self.elementwise(self.architecture.mlp, inputs, "act", hidden)
        act = self.inner_norm(act, "mlp_inner_norm", hidden)
        return self.project_out(act, "w_down", ("F", "D"), "mlp_out")

    def largest_gates(self, gate: str, dims: tuple[str, ...]) -> str:
        """Add the choice of the largest gates of each token, from the mean and the variance of all, whose sums over devices are
        tensors of their own."""
        sums = [
            self.elementwise(function, [gate], f"gate.{name}", TOKENS, Role.STATISTIC)
            for function, name in (("sum", "sum"), ("sum_square", "squares"))
        ]
        return self.elementwise("gaussian_top_k", [gate, *sums], "largest_gates", dims, over=("F",))

    def experts(self, y: str, router_input: str | None = None) -> str:
        """Add dispatch, experts and combine; the AllToAlls follow from the resting specs of the routed rows. The router reads
        `y` if not `router_input`."""
        width = "e" if self.architecture.structure.latent_experts else "D"
        dims, rows, hidden_dims = (*TOKENS, "E"), ("E", *TOKENS, width), ("E", *TOKENS, "M")
        logits = self.contract(router_input or y, "router", ("D", "E"), "router_logits", dims)
        logits = self.add_bias(logits, "router", "router_logits", "E", dims)
        gates = self.builder.tensor(f"{self.prefix}gates", dims, Role.ACTIVATION)
        if self.architecture.hashed_experts:
            chosen = self.builder.input(f"{self.prefix}hashed_experts", (*TOKENS, "k"), Role.CONSTANT)
            self.builder.add(HashedRoute((logits, chosen), (gates,)))
        else:
            self.builder.add(Route((logits, *self.choice_bias()), (gates,)))
        x = self.contract(y, "expert_latent_down", ("e", "D"), "expert_latent", (*TOKENS, "e")) if width == "e" else y
        dispatched = self.elementwise("dispatch", [x, gates], "dispatched", rows, Role.ROUTED)
        dispatched = self.elementwise("handover", [dispatched], RECEIVED, rows, Role.ROUTED)
        inputs = [self.expert_product(dispatched, "up", hidden_dims)]
        if self.architecture.structure.has_gated_mlp:
            inputs.insert(0, self.expert_product(dispatched, "gate", hidden_dims))
        act = self.elementwise(self.architecture.mlp, inputs, "experts_act", hidden_dims, Role.ROUTED)
        returned = self.elementwise("handover", [self.expert_product(act, "down", rows)], RETURNED, rows, Role.ROUTED)
        if self.architecture.expert_scales:
            scales = self.builder.weight(f"{self.prefix}expert_scales", ("E",))
            gates = self.elementwise("multiply", [gates, scales], "gates_scaled", dims)
        combined = self.elementwise("combine", [gates, returned], "combined", (*TOKENS, width))
        if width == "D":
            return combined
        return self.contract(combined, "expert_latent_up", ("D", "e"), "experts_out", HIDDEN)

    def choice_bias(self) -> tuple[str, ...]:
        """Add the frozen bias of the choice of experts, where the structure has one; no gradient moves it."""
        has_bias = self.architecture.choice_bias
        return (self.builder.weight(f"{self.prefix}choice_bias", "E", frozen=True),) if has_bias else ()

    def expert_product(self, x: str, projection: str, dims: tuple[str, ...]) -> str:
        """Add a product of every expert, and its bias; sums that a bias is added to are reduced where the experts are."""
        width = "e" if self.architecture.structure.latent_experts else "D"
        bias_follows = "experts" in self.architecture.bias and dims[-1] == width
        name = f"experts_{projection}_{RECEIVED}" if bias_follows else f"experts_{projection}_out"
        out = self.contract(x, f"experts_{projection}", ("E", "M", width), name, dims, Role.ROUTED)
        return self.add_bias(out, "experts", f"experts_{projection}", ("E", dims[-1]), dims, Role.ROUTED)

    def shared_expert(self, y: str) -> str:
        """Add an expert that every token passes through, scaled by its gate if it has one."""
        hidden = (*TOKENS, "S")
        inputs = [self.contract(y, "shared_up", ("S", "D"), "shared_up_out", hidden)]
        if self.architecture.structure.has_gated_mlp:
            inputs.insert(0, self.contract(y, "shared_gate", ("S", "D"), "shared_gate_out", hidden))
        act = self.elementwise(self.architecture.mlp, inputs, "shared_act", hidden)
        if not self.architecture.shared_gate:
            return self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN)
        logit = self.contract(y, "shared_expert_gate", "D", "shared_logit", TOKENS)
        out = self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN, Role.RESIDUAL)
        return self.elementwise("sigmoid_gate", [out, logit], "shared_gated", HIDDEN)
