"""Elementwise operations (functions with or without a reduction, sums of gradients, concatenation), and operations that index.

`FUNCTIONS` has the elementwise functions of a transformer by name, each with the functions that its gradients need. A function
without operands in its gradient is linear in that input, so a partial sum may pass through it. The arithmetic itself is in the
kernels of `run`. Rows of a table are indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, LastInputShapeOnly, Operation, OperationKind, OperationSharding
from shardwise.sharding import Spec
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols


@dataclass(frozen=True, slots=True)
class FunctionGradient:
    """The gradient with respect to one input is `function(dy, *operands)`, summed over the dims that this input lacks.

    `operands` are positions among the inputs.
    """

    function: str
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ElementwiseFunction:
    """`gradients[i]` is None where no gradient flows into input i; `linear` lists inputs that may be partial sums.

    `additive`: linear in all inputs together, so that partial sums that lie alike may all stay partial. `runnable` says whether
    the engine has a kernel for it; without one, models that need it are planned and not run.
    """

    gradients: tuple[FunctionGradient | None, ...]
    linear: tuple[int, ...] = ()
    additive: bool = False
    flops_per_element: float = 1.0
    runnable: bool = True


PASS_GRADIENT_ON = FunctionGradient("identity", ())

FUNCTIONS: dict[str, ElementwiseFunction] = {
    "identity": ElementwiseFunction((PASS_GRADIENT_ON,), linear=(0,)),
    # The same values along a dim that the operand lacks
    "repeat": ElementwiseFunction((FunctionGradient("sum_to", ()),), linear=(0,), runnable=False),
    "add": ElementwiseFunction((PASS_GRADIENT_ON, PASS_GRADIENT_ON), additive=True),
    # RMSNorm: the sum of squares, then x / sqrt(sum/D + eps) * weight (Zhang & Sennrich 2019); over D, over the width of
    # one head for queries and keys (Henry et al. 2020; Qwen3, Gemma 3), or over a latent (DeepSeek-AI 2024)
    "sum_square": ElementwiseFunction((FunctionGradient("sum_square_dx", (0,)),), flops_per_element=2),
    "rms_norm": ElementwiseFunction(
        (
            FunctionGradient("rms_norm_dx", (1, 2)),
            FunctionGradient("rms_norm_dsquares", (0, 1, 2)),
            FunctionGradient("rms_norm_dweight", (0, 1)),
        ),
        flops_per_element=4,
    ),
    # LayerNorm from the sums of x and of its squares over D (Ba et al. 2016)
    "sum": ElementwiseFunction((FunctionGradient("sum_to", ()),), linear=(0,)),
    "layer_norm": ElementwiseFunction(
        (
            FunctionGradient("layer_norm_dx", (1, 2, 3)),
            FunctionGradient("layer_norm_dsum", (0, 1, 2, 3)),
            FunctionGradient("layer_norm_dsquares", (0, 1, 2, 3)),
            FunctionGradient("layer_norm_dweight", (0, 1, 2)),
        ),
        flops_per_element=6,
    ),
    # The same without a weight (Groeneveld et al. 2024, OLMo, 2.1: LayerNorm without parameters)
    "unit_rms_norm": ElementwiseFunction(
        (FunctionGradient("unit_rms_norm_dx", (1,)), FunctionGradient("unit_rms_norm_dsquares", (0, 1))),
        flops_per_element=3,
        runnable=False,
    ),
    "unit_layer_norm": ElementwiseFunction(
        (
            FunctionGradient("unit_layer_norm_dx", (1, 2)),
            FunctionGradient("unit_layer_norm_dsum", (0, 1, 2)),
            FunctionGradient("unit_layer_norm_dsquares", (0, 1, 2)),
        ),
        flops_per_element=5,
        runnable=False,
    ),
    # A vector added along some dims; its gradient is summed over the others
    "add_vector": ElementwiseFunction((PASS_GRADIENT_ON, FunctionGradient("sum_to", ()))),
    # Experts: each token's row for the experts that its gates chose, and their results weighted by the gates
    "dispatch": ElementwiseFunction((FunctionGradient("dispatch_dx", (1,)), None)),
    # The same values resting elsewhere: its gradient is a tensor of its own, which rests where the operand does
    "handover": ElementwiseFunction((FunctionGradient("handover", ()),), linear=(0,)),
    "combine": ElementwiseFunction(
        (FunctionGradient("combine_dgates", (1,)), FunctionGradient("combine_dx", (0,))),
        linear=(1,),
        flops_per_element=2,
    ),
    # A shared expert's result times the sigmoid of one logit of each token (Qwen team 2024, Qwen1.5-MoE)
    "sigmoid_gate": ElementwiseFunction(
        (FunctionGradient("sigmoid_gate_dx", (1,)), FunctionGradient("sigmoid_gate_dlogit", (0, 1))),
        flops_per_element=4,
    ),
    # The same with the softplus of a logit (Laguna's attention gates)
    "softplus_gate": ElementwiseFunction(
        (FunctionGradient("softplus_gate_dx", (1,)), FunctionGradient("softplus_gate_dlogit", (0, 1))),
        flops_per_element=5,
        runnable=False,
    ),
    # The first of two attentions minus the second times exp(a) - exp(b) + a constant, and one less that constant times its norm
    # (Ye et al. 2024, Differential Transformer, 2.1)
    "differential": ElementwiseFunction(
        (
            PASS_GRADIENT_ON,
            FunctionGradient("differential_dsecond", (2, 3)),
            FunctionGradient("differential_da", (1, 2)),
            FunctionGradient("differential_db", (1, 3)),
        ),
        flops_per_element=2,
        runnable=False,
    ),
    "differential_scale": ElementwiseFunction(
        (FunctionGradient("differential_scale", ()),), linear=(0,), runnable=False
    ),
    # The dot product of two weights: what its gradient is partial over, the gradients of both are partial over too
    "dot": ElementwiseFunction(
        (FunctionGradient("dot_gradient", (1,)), FunctionGradient("dot_gradient", (0,))),
        flops_per_element=2,
        runnable=False,
    ),
    # Rotary embedding of pairs along H at global positions (Su et al. 2021): linear, its transpose rotates back. Counted as if
    # all pairs turned (`Rotary.part`): the whole head is read and written, which is what it takes time for
    "rotary": ElementwiseFunction((FunctionGradient("rotary_back", (1,)), None), linear=(0,), flops_per_element=6),
    "rotary_back": ElementwiseFunction((FunctionGradient("rotary", (1,)), None), linear=(0,), flops_per_element=6),
    # Gated and plain MLP activations (Shazeer 2020; Hendrycks & Gimpel 2016, tanh form; Zhang et al. 2022)
    "swiglu": ElementwiseFunction(
        (FunctionGradient("swiglu_dgate", (0, 1)), FunctionGradient("swiglu_dup", (0,))), flops_per_element=6
    ),
    "geglu": ElementwiseFunction(
        (FunctionGradient("geglu_dgate", (0, 1)), FunctionGradient("geglu_dup", (0,))), flops_per_element=12
    ),
    # Gate and up clamped, a steeper sigmoid, and one more than up (OpenAI 2025, gpt-oss model card, section 2.2)
    "clamped_swiglu": ElementwiseFunction(
        (FunctionGradient("clamped_swiglu_dgate", (0, 1)), FunctionGradient("clamped_swiglu_dup", (0, 1))),
        flops_per_element=10,
    ),
    # Gate and up clamped (DeepSeek-AI 2026, DeepSeek-V4)
    "limited_swiglu": ElementwiseFunction(
        (FunctionGradient("limited_swiglu_dgate", (0, 1)), FunctionGradient("limited_swiglu_dup", (0, 1))),
        flops_per_element=8,
        runnable=False,
    ),
    "gelu": ElementwiseFunction((FunctionGradient("gelu_dx", (0,)),), flops_per_element=11),
    "relu": ElementwiseFunction((FunctionGradient("relu_dx", (0,)),)),
    # The square of ReLU (So et al. 2021, Primer, 3.1)
    "relu2": ElementwiseFunction((FunctionGradient("relu2_dx", (0,)),), flops_per_element=2),
    # A square above zero and an exponential below, each with a trained factor (Huang et al. 2024, xIELU)
    "xielu": ElementwiseFunction(
        (
            FunctionGradient("xielu_dx", (0, 1, 2)),
            FunctionGradient("xielu_dalpha_p", (0, 1)),
            FunctionGradient("xielu_dalpha_n", (0, 2)),
        ),
        flops_per_element=8,
        runnable=False,
    ),
    "silu": ElementwiseFunction((FunctionGradient("silu_dx", (0,)),), flops_per_element=4, runnable=False),
    "sigmoid": ElementwiseFunction((FunctionGradient("sigmoid_dx", (0,)),), flops_per_element=3, runnable=False),
    "multiply": ElementwiseFunction(
        (FunctionGradient("multiply", (1,)), FunctionGradient("multiply", (0,))), runnable=False
    ),
    # Recurrences: queries and keys of length one from their sums of squares, steps and the logarithms of decays,
    # -exp(rate) * step (Gu & Dao 2023; Yang et al. 2024, Gated DeltaNet)
    "l2_norm": ElementwiseFunction(
        (FunctionGradient("l2_norm_dx", (1,)), FunctionGradient("l2_norm_dsquares", (0, 1))),
        flops_per_element=3,
        runnable=False,
    ),
    "softplus": ElementwiseFunction((FunctionGradient("softplus_dx", (0,)),), flops_per_element=4, runnable=False),
    "log_decay": ElementwiseFunction(
        (FunctionGradient("log_decay_dstep", (1,)), FunctionGradient("log_decay_drate", (0, 1))),
        flops_per_element=3,
        runnable=False,
    ),
    # Gates of matrix memories, of logits capped at 15, and their division by at least one (Beck et al. 2024; xLSTM-7B's code)
    "capped_exp": ElementwiseFunction((FunctionGradient("capped_exp_dx", (0,)),), flops_per_element=6, runnable=False),
    "capped_log_sigmoid": ElementwiseFunction(
        (FunctionGradient("capped_log_sigmoid_dx", (0,)),), flops_per_element=8, runnable=False
    ),
    "bounded_divide": ElementwiseFunction(
        (FunctionGradient("bounded_divide_dx", (1,)), FunctionGradient("bounded_divide_dtotal", (0, 1))),
        flops_per_element=3,
        runnable=False,
    ),
    # Decays between 1 and the exponential of a bound: bound * sigmoid(exp(rate) * x) (Ling 3.0; its code's safe gate)
    "bounded_decay": ElementwiseFunction(
        (FunctionGradient("bounded_decay_dx", (0, 1)), FunctionGradient("bounded_decay_drate", (0, 1))),
        flops_per_element=5,
        runnable=False,
    ),
    # RG-LRU (De et al. 2024, Griffin, 2.4): decays -8 softplus(rate) sigmoid(x), and what is written, times sqrt(1 - decay²), but
    # for the first token
    "gated_decay": ElementwiseFunction(
        (FunctionGradient("gated_decay_dx", (0, 1)), FunctionGradient("gated_decay_drate", (0, 1))),
        flops_per_element=8,
        runnable=False,
    ),
    "normalised_write": ElementwiseFunction(
        (FunctionGradient("normalised_write_dx", (1, 2)), FunctionGradient("normalised_write_ddecay", (0, 1, 2)), None),
        flops_per_element=4,
        runnable=False,
    ),
    # The same of a gate (Wang et al. 2023, BitNet b1.58; its code has it in place of SiLU)
    "gated_relu2": ElementwiseFunction(
        (FunctionGradient("gated_relu2_dgate", (0, 1)), FunctionGradient("gated_relu2_dup", (0,))), flops_per_element=3
    ),
    # Cross-entropy over a vocabulary that may be sharded: max, sum of exponentials, then log(sum) + max - target.
    # The maximum is a shift that cancels, so no gradient flows into it.
    "maximum": ElementwiseFunction((None,)),
    "sum_exp": ElementwiseFunction((FunctionGradient("sum_exp_dx", (0, 1)), None), flops_per_element=3),
    "token_loss": ElementwiseFunction(
        (FunctionGradient("token_loss_dsum", (0,)), None, FunctionGradient("negate", ()))
    ),
    "scaled_sum": ElementwiseFunction((FunctionGradient("scale", (1,)), None)),
}
LINEAR_IN_FIRST_INPUT = ("negate", "scale", "identity", "rotary_back", "sum_to", "handover", "dot_gradient")


@dataclass(frozen=True, slots=True)
class Map(Operation):
    """`result = function(*inputs)` elementwise over the union of their dims, reduced over the dims the result lacks.

    `over` are the dims that a norm is taken over: their size is all that the function knows of them.
    """

    kind: ClassVar[OperationKind] = "map"
    function: str = "identity"
    reduction: str = "sum"
    over: Dims = ("D",)

    @property
    def missing_kernel(self) -> str:
        definition = FUNCTIONS.get(self.function)
        return "" if definition is None or definition.runnable else self.function

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        if self._adds_aligned_partial_sums(specs):
            return OperationSharding(tuple(specs), (specs[0],))
        partial_operand = next((position for position in self._linear_inputs() if specs[position].partial), None)
        if len(specs) == 1 or partial_operand is not None:
            anchor = specs[partial_operand or 0]
        else:
            movable = [s for s, name in zip(specs, self.inputs, strict=True) if not s.partial and not fixed(name)]
            anchor = max(movable or specs, key=lambda spec: len(spec.dims))
        linear = self._linear_inputs()
        aligned = []
        for position, spec in enumerate(specs):
            partial = spec.partial if position in linear and spec is anchor else ()
            axes = {d: anchor.axes_of(d) if d in anchor.dims else spec.axes_of(d) for d in spec.dims}
            aligned.append(Spec.of(spec.dims, axes, partial))
        return OperationSharding(tuple(aligned), (self._result(aligned, dims[self.outputs[0]]),))

    def _linear_inputs(self) -> tuple[int, ...]:
        if self.function in LINEAR_IN_FIRST_INPUT:
            return (0,)
        return FUNCTIONS[self.function].linear if self.function in FUNCTIONS else ()

    def _adds_aligned_partial_sums(self, specs: Sequence[Spec]) -> bool:
        """Return whether the function adds partial sums of one spec: their sum is reduced once, where it has to be."""
        additive = self.function in FUNCTIONS and FUNCTIONS[self.function].additive
        are_equal = all(spec == specs[0] for spec in specs)
        return additive and are_equal and bool(specs[0].partial) and specs[0].reduction == "sum"

    def _result(self, aligned: Sequence[Spec], dims: Dims) -> Spec:
        split: dict[str, tuple[str, ...]] = {}
        for spec in aligned:
            split.update({d: a for d, a in zip(spec.dims, spec.axes, strict=True) if a})
        partial = {axis for d, axes in split.items() if d not in dims for axis in axes}
        partial |= {axis for spec in aligned for axis in spec.partial}
        return Spec.of(dims, {d: a for d, a in split.items() if d in dims}).with_partial(partial, self.reduction)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        gradients: list[tuple[str, Operation]] = []
        for name, gradient in zip(self.inputs, FUNCTIONS[self.function].gradients, strict=True):
            if gradient is not None:
                operands = tuple(self.inputs[i] for i in gradient.operands)
                gradients.append((name, Map((dy, *operands), ("?",), gradient.function, over=self.over)))
        return gradients

    def flops(self, sharding: OperationSharding) -> Polynomial:
        sizes = {LocalDim(d, a) for spec in sharding.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        definition = FUNCTIONS.get(self.function)
        return multiply_symbols(sizes, definition.flops_per_element if definition else 1.0)


@dataclass(frozen=True, slots=True)
class Accumulate(LastInputShapeOnly):
    """The sum of the gradients from all uses of one tensor. The last input, the tensor, gives only the sharding to meet in.

    Gradients of equal specs are added as they are, partial or not; others are brought to the tensor's own sharding.
    """

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        *gradients, tensor = specs
        target = gradients[0] if all(gradient == gradients[0] for gradient in gradients) else tensor.with_partial(())
        return OperationSharding((*(target for _ in gradients), tensor), (target,))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return sharding.outputs[0].local_elements() * float(len(sharding.inputs) - 2)


@dataclass(frozen=True, slots=True)
class Concatenate(Operation):
    """The operands concatenated along a dim that only the result has; `parts` are their own dims, in order.

    An operand that lacks another dim of the result is repeated along it (a key's rotary part is one for all heads).
    """

    kind: ClassVar[OperationKind] = "map"
    parts: Dims = ()

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        fullest = max(specs, key=lambda spec: len(spec.dims))
        rows = {d: fullest.axes_of(d) for d in fullest.dims if d not in self.parts}
        aligned = tuple(Spec.of(s.dims, {d: a for d, a in rows.items() if d in s.dims}) for s in specs)
        return OperationSharding(aligned, (Spec.of(dims[self.outputs[0]], rows),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (result,) = self.outputs
        joined = next(d for d in dims[result] if all(d not in dims[name] for name in self.inputs))
        return [
            (name, ConcatenateGradient((cotangents[result], name), ("?",), self.parts, joined, position))
            for position, name in enumerate(self.inputs)
        ]


@dataclass(frozen=True, slots=True)
class ConcatenateGradient(LastInputShapeOnly):
    """The transpose of a concatenation: one operand's part along `joined`, summed over the dims that the operand lacks.

    The second input gives the shape only.
    """

    kind: ClassVar[OperationKind] = "map"
    parts: Dims
    joined: str
    position: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, like = specs
        summed = {a for d in dy.dims if d not in (*like.dims, self.joined) for a in dy.axes_of(d)}
        rows = {d: dy.axes_of(d) for d in like.dims if d in dy.dims}
        return OperationSharding((dy, like), (Spec.of(like.dims, rows, summed | set(dy.partial)),))


@dataclass(frozen=True, slots=True)
class Lookup(Operation):
    """`result[...] = table[index[...]]` along `dim`: an embedding, or the target's logit.

    Where `dim` is split, each device answers for its own rows and gives zero for the others: a partial sum.
    """

    kind: ClassVar[OperationKind] = "lookup"
    dim: str = "V"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        table, index = specs
        dim_axes = table.axes_of(self.dim)
        shared = {
            d: table.axes_of(d) if d in table.dims else index.gather_axes(dim_axes).axes_of(d) for d in index.dims
        }
        index = Spec.of(index.dims, shared)
        out = dims[self.outputs[0]]
        split = {d: index.axes_of(d) if d in index.dims else table.axes_of(d) for d in out}
        return OperationSharding((table, index), (Spec.of(out, split, dim_axes),))

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements of the index alone: the rows that are read of the table are as many as the result's."""
        return ZERO, sharding.inputs[1].local_elements()

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        table, index = self.inputs
        return [(table, Scatter((cotangents[self.outputs[0]], index, table), ("?",), self.dim))]


@dataclass(frozen=True, slots=True)
class Scatter(LastInputShapeOnly):
    """The transpose of a lookup: adds each row of `dy` at its index. The third input gives the shape and sharding only."""

    kind: ClassVar[OperationKind] = "scatter"
    dim: str = "V"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, index, table = specs
        dim_axes = table.axes_of(self.dim)
        dy = dy.gather_axes(dim_axes)
        index = Spec.of(index.dims, {d: dy.axes_of(d) for d in index.dims})
        summed = {a for d in dy.dims if d not in table.dims for a in dy.axes_of(d)}
        split = {d: dim_axes if d == self.dim else dy.axes_of(d) for d in table.dims}
        out = Spec.of(table.dims, split, summed | set(dy.partial))
        return OperationSharding((dy, index, table), (out,))
