"""Elementwise functions of a transformer by name, each with the functions that its gradients need.

A function without operands in its gradient is linear in that input, so a partial sum may pass through it. The arithmetic itself
is in the kernels of `run`.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    # Streams that layers predict (Baykal et al. 2023, AltUp): a projection with the root mean square of another tensor, what each
    # stream learns of the one that was computed, and sums over the streams beside that one
    "match_magnitude": ElementwiseFunction(
        (
            FunctionGradient("match_magnitude_dx", (1, 2)),
            FunctionGradient("match_magnitude_dsquares", (0, 1, 2)),
            FunctionGradient("match_magnitude_dgoal", (0, 1, 2)),
        ),
        flops_per_element=4,
        runnable=False,
    ),
    "stream_mean": ElementwiseFunction(
        (FunctionGradient("divide_by_width", ()), FunctionGradient("divide_by_width", ())),
        flops_per_element=2,
        runnable=False,
    ),
    "correct_streams": ElementwiseFunction(
        (
            PASS_GRADIENT_ON,
            FunctionGradient("correct_streams_dactive", (3,)),
            FunctionGradient("correct_streams_dcomputed", (3,)),
            FunctionGradient("correct_streams_dcoefficient", (1, 2)),
        ),
        flops_per_element=4,
        runnable=False,
    ),
    "add_to_predicted": ElementwiseFunction((PASS_GRADIENT_ON, FunctionGradient("sum_predicted", ())), runnable=False),
    "tanh": ElementwiseFunction((FunctionGradient("tanh_dx", (0,)),), flops_per_element=5, runnable=False),
    # Two sums over √2, so that the variance stays (LAuReL beside attention; Gemma 3n)
    "scaled_add": ElementwiseFunction(
        (FunctionGradient("divide_by_root_two", ()), FunctionGradient("divide_by_root_two", ())),
        flops_per_element=2,
        runnable=False,
    ),
    # Gates above a quantile of a normal distribution with their mean and variance, less that quantile (Gemma 3n)
    "gaussian_top_k": ElementwiseFunction(
        (
            FunctionGradient("gaussian_top_k_dx", (0, 1, 2)),
            FunctionGradient("gaussian_top_k_dsum", (0, 1, 2)),
            FunctionGradient("gaussian_top_k_dsquares", (0, 1, 2)),
        ),
        flops_per_element=8,
        runnable=False,
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
LINEAR_IN_FIRST_INPUT = (
    "negate", "scale", "identity", "rotary_back", "sum_to", "handover", "dot_gradient", "divide_by_width", "divide_by_root_two",
    "sum_predicted",
)  # fmt: skip
