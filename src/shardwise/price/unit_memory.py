"""Bytes of one unit on one device: what it keeps, what it works with, and its state at rest. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.layout.sharding_scheme import Family
from shardwise.model.architecture import Structure
from shardwise.model.optimizer_state import factor_bytes, moment_bytes
from shardwise.model.program import Role
from shardwise.model.recompute_policies import policy_named
from shardwise.price.number_formats import Formats, elements_of
from shardwise.price.unit_inputs import SCORES, Held, Parts, State, elements_at, held_in, parts_of, priced_family
from shardwise.step.instructions import Traffic
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.elementwise import Value, added, maximum
from shardwise.values.issue_policy import IssuePolicy
from shardwise.values.loss_kernels import Loss
from shardwise.values.precision import Precision
from shardwise.values.symbolic import Values


class UnitMemory:
    """Counts the bytes of units in the formats of a precision recipe, as a stack issues and frees them.

    Families have the facts of the model and the job (`UnitPricer.of_structure`).
    """

    def __init__(
        self, structure: Structure, formats: Formats, precision: Precision, loss: Loss, policy: IssuePolicy, *,
        fused_attention: bool,
    ) -> None:  # fmt: skip
        self.structure, self.formats, self.precision, self.loss = structure, formats, precision, loss
        self.policy, self.fused_attention = policy, fused_attention
        self.bytes_per_logit = loss.bytes_at(bytes_per_element(precision.activations))

    @property
    def most_elements(self) -> float:
        """Elements of gradients that a bucket holds at most."""
        return self.policy.most_bytes / bytes_per_element(self.precision.gradient_reduction)

    def parts(self, family: Family, name: str) -> Parts:
        return parts_of(self.structure, family, name, self.policy)

    def activation_bytes(self, name: str, family: Family, values: Values) -> tuple[Parts, dict[str, Value]]:
        """A unit's parts, and its bytes by column of `ActivationCost`."""
        family = priced_family(self.structure, family, name)
        parts = self.parts(family, name)
        saved, logits = self.saved_bytes(parts, values)
        if policy_named(family.recompute).keeps_scores:
            saved = saved + SCORES * self.written_scores(parts, values)
        return parts, {
            "saved_bytes": saved, "logits_bytes": logits,
            "workspace_bytes": self.workspace_bytes(name, family, values) - saved,
            "making_bytes": self.workspace_bytes(name, family, values, making=True) - saved,
            "buffer_bytes": self.buffer_bytes(parts, values),
            "waiting_bytes": self.formats.saved_bytes(parts.waiting, values),
        }  # fmt: skip

    def state_at_rest(self, name: str, family: Family, values: Values) -> tuple[Parts, State, dict[str, Value]]:
        """A unit's parts, the elements of its state, and its bytes by column of `StateCost`."""
        parts = self.parts(family, name)
        elements = elements_at(parts.arrays, values, self.most_elements)
        of_rest = self.state_bytes(parts, family, elements)
        return parts, elements, {**of_rest, "update_bytes": self.update_bytes(parts, elements, values)}

    def update_bytes(self, parts: Parts, elements: State, values: Values) -> Value:
        """Bytes that the update of matrices as a whole needs beside the state: the array of what is made of their gradients, in
        parts and together, and for the largest of them what its products take and give. None of elementwise updates."""
        kernels = [one for one in parts.kernels if one.kind == "of_matrix"]
        if not kernels:
            return 0.0
        own = maximum(0.0, *(one.shape.passing.evaluate(values) for one in kernels))
        direction, factor = (self.formats.roles[role] for role in (Role.DIRECTION, Role.FACTOR))
        return elements.together * direction + own * max(direction, factor)

    def saved_bytes(self, parts: Parts, values: Values) -> tuple[Value, Value]:
        """Bytes saved for the backward pass without the logits, and bytes of the loss over the logits."""
        logits = elements_of(parts.products.saved, Role.LOGITS).evaluate(values) * self.bytes_per_logit
        return self.formats.saved_bytes(parts.products.saved, values), logits

    def workspace_bytes(self, name: str, family: Family, values: Values, *, making: bool = False) -> Value:
        """Bytes of a unit when it is the fullest in its backward pass, with what it saved, without the logits; `making`: from
        when it makes the first gradient of a weight."""
        if self.loss.stepwise:
            scores = self.written_scores(self.parts(family, name), values)
            held = [one for one in held_in(self.structure, family, name, self.policy) if one.makes or not making]
            return fullest_bytes(held, self.formats, scores, values, zero_stage=family.zero_stage)
        plain = self.parts(replace(family, recompute="none"), name)
        kept = self.saved_bytes(plain, values)[0] + SCORES * self.written_scores(plain, values)
        return (1.0 + GRADIENT_SHARE * (name != "head")) * kept

    def written_scores(self, parts: Parts, values: Values) -> Value:
        """Scores of a unit that are written to memory, where attention is not fused; every recompute rebuilds them."""
        if self.fused_attention:
            return 0.0
        scans = (k for k in parts.kernels if k.phase == "forward" and k.kind == "scan")
        return sum((kernel.shape.scores.evaluate(values) for kernel in scans), start=0.0)

    def buffer_bytes(self, parts: Parts, values: Values) -> Value:
        """Input and output of the largest activation collective; in pieces it holds one that is used and one that moves.

        A device alone has none. Of stepwise engines they are among what is there at each moment.
        """
        if self.loss.stepwise:
            return 0.0
        sizes = [
            self.moved_bytes(one, parts, values)
            * (values.degree(one.axes) > 1)
            / (values.degree(one.axes) if one.beside else 1)
            for one in parts.collectives
            if one.role in (Role.ACTIVATION, Role.RESIDUAL, Role.ROUTED)
        ]
        return 2.0 * maximum(0.0, *sizes)

    def moved_bytes(self, one: Traffic, parts: Parts, values: Values) -> Value:
        """The payload of a collective in bytes."""
        return one.extent(values, self.most_elements).elements * self.formats.moved_width(one, parts.products)

    def state_bytes(self, parts: Parts, family: Family, elements: State) -> dict[str, Value]:
        """Bytes of a unit's state, by column of `StateCost`."""
        return {
            column: added(getattr(elements, name) * width for name, width in widths.items() if width)
            for column, widths in self.state_widths(parts, family).items()
        }

    def state_widths(self, parts: Parts, family: Family) -> dict[str, dict[str, float]]:
        """What the columns of `StateCost` count: bytes of each element of the parts of a unit's `State`.

        Where gradients rest in fp32 only, products give them in the format of the activations first. Source: Megatron-Core and
        Transformer Engine: fused accumulation allocates a bf16 gradient of each weight all the same (the latter keeps one of
        each shape), by which SimuMax's measured peaks are above the rest. Experts' come one expert at a time, which is little.
        """
        precision, gradient = self.precision, self.precision.gradient_bytes
        gathered = self.formats.weight_in_use(parts.products) if family.zero_stage == 3 else 0.0
        unscattered = bytes_per_element(precision.gradients) if family.zero_stage >= 2 else 0.0
        passing = bytes_per_element(precision.activations)
        casts = family.zero_stage < 2 and passing < bytes_per_element(precision.gradients)
        stepwise = unscattered if self.loss.stepwise else 0.0
        arriving, leaving = {"shard": stepwise}, {"last": stepwise}
        if family.zero_stage == 1:  # whole gradients rest, and what comes of them is there until the step's end
            arriving = leaving = {"shard": bytes_per_element(precision.gradient_reduction) * self.loss.stepwise}
        optimizer = self.formats.optimizer
        moments = moment_bytes(precision, optimizer)
        return {
            "parameters_bytes": self.formats.resting_widths(),
            "gradients_bytes": {"shard" if family.zero_stage >= 2 else "trained": gradient},
            # with fp32 weights the weights are their own master copy
            "master_bytes": {"shard": precision.master_bytes},
            "optimizer_bytes": {
                "shard": moments,
                "apart": moment_bytes(precision, optimizer.of(matrix=False)) - moments,
                "factors": factor_bytes(precision, optimizer),
            },
            "transient_bytes": {"used": gathered, "trained": unscattered},
            "unscattered_bytes": {"trained": stepwise},
            "arriving_bytes": arriving,
            "leaving_bytes": leaving,
            "passing_bytes": {"passing": passing if casts else 0.0},
        }


# While a block runs backward, gradients of about half of its activations are alive beside them.
# Source: SimuMax's measured peaks (B200, allocated bytes): a block in its backward pass holds 1.5 times its activations.
GRADIENT_SHARE = 0.5


def fullest_bytes(held: Iterable[Held], formats: Formats, scores: Value, values: Values, *, zero_stage: int) -> Value:
    """Bytes of the fullest of some moments, without the logits and their gradient."""
    width = formats.made_beside_bytes(zero_stage)
    sizes = (
        formats.saved_bytes(one.tensors, values)
        + sum((some.num_bytes(formats, values) for some in one.some), start=0.0)
        + width * one.gradients.evaluate(values)
        + one.score_bytes * scores
        for one in held
    )
    return maximum(0.0, *sizes)
