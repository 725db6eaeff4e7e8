"""Bytes of one unit on one device: what it keeps, what it works with, and its state at rest. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.layout import ShardingScheme
from shardwise.model import Role, factor_bytes, is_layer, moment_bytes
from shardwise.model.recompute_policies import get_recompute_policy
from shardwise.price.tensor_formats import TensorFormats, elements_with_role
from shardwise.price.unit_inputs import (
    SAVED_SCORE_BYTES,
    LiveSetSizes,
    StateElements,
    UnitCostInputs,
    priced_scheme,
    state_elements,
    unit_cost_inputs,
    unit_live_sets,
)
from shardwise.step import UnitCollective
from shardwise.values import IssuePolicy, Precision, SymbolValues, Value, bytes_per_element, maximum, sum_values
from shardwise.values.engine_policies import LossKernel


class UnitMemory:
    """Bytes of units in the formats of a precision recipe, as a stack issues and frees them."""

    def __init__(
        self, formats: TensorFormats, precision: Precision, loss: LossKernel, policy: IssuePolicy, *, fused_attention: bool
    ) -> None:  # fmt: skip
        self.formats, self.precision, self.loss = formats, precision, loss
        self.policy, self.fused_attention = policy, fused_attention
        self.bytes_per_logit = loss.bytes_per_logit_at(bytes_per_element(precision.activations))

    @property
    def max_bucket_elements(self) -> float:
        """Largest number of gradient elements in a bucket."""
        return self.policy.max_bucket_bytes / bytes_per_element(self.precision.gradient_reduction)

    def parts(self, scheme: ShardingScheme, name: str) -> UnitCostInputs:
        return unit_cost_inputs(scheme, name, self.policy)

    def activation_bytes(
        self, name: str, scheme: ShardingScheme, values: SymbolValues
    ) -> tuple[UnitCostInputs, dict[str, Value]]:
        """Return a unit's cost inputs, and its bytes by column of `ActivationCost`."""
        scheme = priced_scheme(scheme, name)
        parts = self.parts(scheme, name)
        saved, logits = self.saved_bytes(parts, values)
        policy = get_recompute_policy(scheme.recompute)
        if policy.keeps_scores:
            saved = saved + self.saved_score_bytes(parts, values)
        if self.policy.dropout and policy.keeps_masks and is_layer(name):
            saved = saved + self.mask_bytes(parts, values)
        dequantized = self.formats.dequantized_bytes(parts.products, values)
        return parts, {
            "saved_bytes": saved, "logits_bytes": logits,
            "workspace_bytes": self.workspace_bytes(name, scheme, values) - saved + dequantized,
            "making_bytes": self.workspace_bytes(name, scheme, values, making=True) - saved + dequantized,
            "buffer_bytes": self.buffer_bytes(parts, values),
            "waiting_bytes": self.formats.saved_bytes(parts.weight_grad_inputs, values),
        }  # fmt: skip

    def state_at_rest(
        self, name: str, scheme: ShardingScheme, values: SymbolValues
    ) -> tuple[UnitCostInputs, StateElements, dict[str, Value]]:
        """Return a unit's cost inputs, the elements of its state, and its bytes by column of `StateCost`."""
        parts = self.parts(scheme, name)
        elements = state_elements(parts.arrays, values, self.max_bucket_elements)
        resting_bytes = self.state_bytes(parts, scheme, elements)
        of_update, deferred = self.update_bytes(parts, elements, values), self.deferred_bytes(scheme, elements, values)
        lent = parts.lent_gradients.evaluate(values) * self.unscattered_width(scheme)
        columns = {"update_bytes": of_update, "deferred_bytes": deferred, "lent_bytes": lent}
        return parts, elements, {**resting_bytes, **columns}

    def unscattered_width(self, scheme: ShardingScheme) -> float:
        """Return the bytes of an element of a gradient before it is scattered; 0 where gradients rest whole."""
        return bytes_per_element(self.precision.gradients) if scheme.zero_stage >= 2 else 0.0

    def deferred_bytes(self, scheme: ShardingScheme, elements: StateElements, values: SymbolValues) -> Value:
        """Return the bytes of gradients that stay whole until a step's last micro-batch, less those that rest in shards.

        Source: PyTorch, fully_shard: without gradient synchronisation, unsharded gradients are accumulated in the format of
        their reduction (FSDPParam.unsharded_accumulated_grad); torch/distributed/pipelining/stage.py synchronises in the last
        micro-batch only.
        """
        if scheme.zero_stage < 2 or self.policy.whole_gradients == "never":
            return 0.0
        unsharded = elements.trained * bytes_per_element(self.precision.gradient_reduction)
        extra = maximum(unsharded - elements.shard * self.precision.gradient_bytes, 0.0)
        return extra * (values["pp"] > 1) if self.policy.whole_gradients == "in_pipelines" else extra

    def update_bytes(self, parts: UnitCostInputs, elements: StateElements, values: SymbolValues) -> Value:
        """Return the bytes that whole-matrix updates need beside the state; 0 for elementwise updates.

        They are the array of update directions, in parts and together, and the operands and results of the largest
        matrix's products.
        """
        kernels = [kernel for kernel in parts.kernels if kernel.kind == "of_matrix"]
        if not kernels:
            return 0.0
        scratch = maximum(0.0, *(kernel.shape.scratch_elements.evaluate(values) for kernel in kernels))
        direction, factor = (self.formats.roles[role] for role in (Role.DIRECTION, Role.FACTOR))
        return elements.together * direction + scratch * max(direction, factor)

    def saved_bytes(self, parts: UnitCostInputs, values: SymbolValues) -> tuple[Value, Value]:
        """Return the bytes saved for the backward pass without the logits, and the bytes of the loss over the logits."""
        logits = elements_with_role(parts.products.saved, Role.LOGITS).evaluate(values) * self.bytes_per_logit
        return self.formats.saved_bytes(parts.products.saved, values), logits

    def workspace_bytes(
        self, name: str, scheme: ShardingScheme, values: SymbolValues, *, making: bool = False
    ) -> Value:
        """Return a unit's peak bytes in its backward pass, saved tensors included, without the logits.

        `making`: only from the node on that makes the first weight gradient.
        """
        if self.loss.stepwise:
            scores = self.written_scores(self.parts(scheme, name), values)
            live_sets = unit_live_sets(scheme, name, self.policy)
            candidates = [live_set for live_set in live_sets if live_set.has_weight_grads or not making]
            return peak_workspace_bytes(candidates, self.formats, scores, values, zero_stage=scheme.zero_stage)
        plain = self.parts(scheme.with_recompute("none"), name)
        unrecomputed = self.saved_bytes(plain, values)[0] + self.saved_score_bytes(plain, values)
        return (1.0 + GRADIENT_SHARE * (name != "head")) * unrecomputed

    def saved_score_bytes(self, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return the bytes of the scores that are saved, where they are written to memory."""
        return SAVED_SCORE_BYTES[self.policy.dropout] * self.written_scores(parts, values)

    def mask_bytes(self, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return the bytes of the masks of dropout on what is added to the residual: one for each of its saved sums.

        Source: Korthikanti et al. 2022, 4.1: 1 byte for an element, of attention's result and of the MLP's.
        """
        return elements_with_role(parts.products.saved, Role.RESIDUAL).evaluate(values)

    def written_scores(self, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return the scores that are written to memory, where attention is not fused; every recompute rebuilds them."""
        if self.fused_attention:
            return 0.0
        scans = (k for k in parts.kernels if k.phase == "forward" and k.kind == "scan")
        return sum((kernel.shape.scores.evaluate(values) for kernel in scans), start=0.0)

    def buffer_bytes(self, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return input and output of the largest activation collective; a chunked one holds one chunk in use and one in
        transit.

        A device alone has none. For stepwise engines the live sets count them.
        """
        if self.loss.stepwise:
            return 0.0
        sizes = [
            self.payload_bytes(collective, parts, values)
            * (values.group_degree(collective.axes) > 1)
            / (values.group_degree(collective.axes) if collective.chunked_with else 1)
            for collective in parts.collectives
            if collective.role in (Role.ACTIVATION, Role.RESIDUAL, Role.ROUTED)
        ]
        return 2.0 * maximum(0.0, *sizes)

    def payload_bytes(self, collective: UnitCollective, parts: UnitCostInputs, values: SymbolValues) -> Value:
        """Return the payload of a collective in bytes."""
        elements = collective.extent(values, self.max_bucket_elements).elements
        return elements * self.formats.collective_width(collective, parts.products)

    def state_bytes(self, parts: UnitCostInputs, scheme: ShardingScheme, elements: StateElements) -> dict[str, Value]:
        """Return the bytes of a unit's state, by column of `StateCost`."""
        return {
            column: sum_values(getattr(elements, name) * width for name, width in widths.items() if width)
            for column, widths in self.state_widths(parts, scheme).items()
        }

    def state_widths(self, parts: UnitCostInputs, scheme: ShardingScheme) -> dict[str, dict[str, float]]:
        """Return the bytes that each column of `StateCost` counts for an element, by field of the unit's `StateElements`.

        Where gradients rest in fp32 only, products give them in the format of the activations first. Source: Megatron-Core and
        Transformer Engine: fused accumulation allocates a bf16 gradient of each weight all the same (the latter keeps one of
        each shape), by which SimuMax's measured peaks are above the rest. Experts' come one expert at a time, which is little.
        """
        precision, gradient = self.precision, self.precision.gradient_bytes
        gathered = self.formats.weight_in_use(parts.products) if scheme.zero_stage == 3 else 0.0
        narrower = bytes_per_element(precision.frozen) - gathered if precision.frozen and gathered else 0.0
        unscattered = self.unscattered_width(scheme)
        passing = bytes_per_element(precision.activations)
        casts = scheme.zero_stage < 2 and passing < bytes_per_element(precision.gradients)
        stepwise = unscattered if self.loss.stepwise else 0.0
        arriving, leaving = {"shard": stepwise}, {"last": stepwise}
        if scheme.zero_stage == 1:  # whole gradients rest, and what comes of them is there until the step's end
            arriving = leaving = {"shard": bytes_per_element(precision.gradient_reduction) * self.loss.stepwise}
        optimizer = self.formats.optimizer
        moments = moment_bytes(precision, optimizer)
        return {
            "parameters_bytes": self.formats.resting_widths(),
            "gradients_bytes": {"shard" if scheme.zero_stage >= 2 else "trained": gradient},
            # with fp32 weights the weights are their own master copy
            "master_bytes": {"shard": precision.master_bytes},
            "optimizer_bytes": {
                "shard": moments,
                "apart": moment_bytes(precision, optimizer.for_weight(is_matrix=False)) - moments,
                "factors": factor_bytes(precision, optimizer),
            },
            "transient_bytes": {"used": gathered, "trained": unscattered, "gathered_quantized": narrower},
            "unscattered_bytes": {"trained": stepwise},
            "arriving_bytes": arriving,
            "leaving_bytes": leaving,
            "passing_bytes": {"passing": passing if casts else 0.0},
        }


# While a block runs backward, gradients of about half of its activations are alive beside them.
# Source: SimuMax's measured peaks (B200, allocated bytes): a block in its backward pass holds 1.5 times its activations.
GRADIENT_SHARE = 0.5


def peak_workspace_bytes(
    live_sets: Iterable[LiveSetSizes], formats: TensorFormats, scores: Value, values: SymbolValues, *, zero_stage: int
) -> Value:
    """Return the bytes of the largest live set, without the logits and their gradient."""
    width = formats.extra_gradient_bytes(zero_stage)
    sizes = (
        formats.saved_bytes(live_set.tensors, values)
        + sum((tensor.num_bytes(formats, values) for tensor in live_set.conditional), start=0.0)
        + width * live_set.gradients.evaluate(values)
        + live_set.score_bytes * scores
        for live_set in live_sets
    )
    return maximum(0.0, *sizes)
