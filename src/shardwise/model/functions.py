"""The elementwise functions of a transformer by name, and the functions that their gradients need.

`Gradient(function, operands)` says that the gradient with respect to one input is `function(dy, *operands)`, summed over
the dims that this input lacks; `operands` are positions among the inputs. A function without operands in its gradient
is linear in that input, so a partial sum may pass through it. The arithmetic itself is in `engine/numpy/kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gradient:
    function: str
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """`gradients[i]` is None where no gradient flows into input i; `linear` lists inputs that may be partial sums.

    `additive`: linear in all inputs together, so that partial sums that lie alike may all stay partial.
    """

    gradients: tuple[Gradient | None, ...]
    linear: tuple[int, ...] = ()
    additive: bool = False
    flops_per_element: float = 1.0


PASS = Gradient("identity", ())

FUNCTIONS: dict[str, Function] = {
    "identity": Function((PASS,), linear=(0,)),
    "add": Function((PASS, PASS), additive=True),
    # RMSNorm: the sum of squares, then x / sqrt(sum/D + eps) * weight (Zhang & Sennrich 2019); over D, over the width of
    # one head for queries and keys (Henry et al. 2020; Qwen3, Gemma 3), or over a latent (DeepSeek-AI 2024)
    "sum_square": Function((Gradient("sum_square_dx", (0,)),), flops_per_element=2),
    "rms_norm": Function(
        (
            Gradient("rms_norm_dx", (1, 2)),
            Gradient("rms_norm_dsquares", (0, 1, 2)),
            Gradient("rms_norm_dweight", (0, 1)),
        ),
        flops_per_element=4,
    ),
    # LayerNorm from the sums of x and of its squares over D (Ba et al. 2016)
    "sum": Function((Gradient("sum_to", ()),), linear=(0,)),
    "layer_norm": Function(
        (
            Gradient("layer_norm_dx", (1, 2, 3)),
            Gradient("layer_norm_dsum", (0, 1, 2, 3)),
            Gradient("layer_norm_dsquares", (0, 1, 2, 3)),
            Gradient("layer_norm_dweight", (0, 1, 2)),
        ),
        flops_per_element=6,
    ),
    # A vector added along some dims; its gradient is summed over the others
    "add_vector": Function((PASS, Gradient("sum_to", ()))),
    # Experts: each token's row for the experts that its gates chose, and their results weighted by the gates
    "dispatch": Function((Gradient("dispatch_dx", (1,)), None)),
    # The same values resting elsewhere: its gradient is a tensor of its own, which rests where the operand does
    "handover": Function((Gradient("handover", ()),), linear=(0,)),
    "combine": Function((Gradient("combine_dgates", (1,)), Gradient("combine_dx", (0,))), flops_per_element=2),
    # A shared expert's result times the sigmoid of one logit of each token (Qwen team 2024, Qwen1.5-MoE)
    "sigmoid_gate": Function(
        (Gradient("sigmoid_gate_dx", (1,)), Gradient("sigmoid_gate_dlogit", (0, 1))), flops_per_element=4
    ),
    # Rotary embedding of pairs along H at global positions (Su et al. 2021): linear, its transpose rotates back. Counted as if
    # all pairs turned (`Rotary.part`): the whole head is read and written, which is what it takes time for
    "rotary": Function((Gradient("rotary_back", (1,)), None), linear=(0,), flops_per_element=6),
    "rotary_back": Function((None, None), linear=(0,), flops_per_element=6),
    # Gated and plain MLP activations (Shazeer 2020; Hendrycks & Gimpel 2016, tanh form; Zhang et al. 2022)
    "swiglu": Function((Gradient("swiglu_dgate", (0, 1)), Gradient("swiglu_dup", (0,))), flops_per_element=6),
    "geglu": Function((Gradient("geglu_dgate", (0, 1)), Gradient("geglu_dup", (0,))), flops_per_element=12),
    # Gate and up clamped, a steeper sigmoid, and one more than up (OpenAI 2025, gpt-oss model card, section 2.2)
    "clamped_swiglu": Function(
        (Gradient("clamped_swiglu_dgate", (0, 1)), Gradient("clamped_swiglu_dup", (0, 1))), flops_per_element=10
    ),
    "gelu": Function((Gradient("gelu_dx", (0,)),), flops_per_element=11),
    "relu": Function((Gradient("relu_dx", (0,)),)),
    # Cross-entropy over a vocabulary that may be sharded: max, sum of exponentials, then log(sum) + max - target.
    # The maximum is a shift that cancels, so no gradient flows into it.
    "maximum": Function((None,)),
    "sum_exp": Function((Gradient("sum_exp_dx", (0, 1)), None), flops_per_element=3),
    "token_loss": Function((Gradient("token_loss_dsum", (0,)), None, Gradient("negate", ()))),
    "scaled_sum": Function((Gradient("scale", (1,)), None)),
}
LINEAR_IN_FIRST = ("negate", "scale", "identity", "rotary_back", "sum_to", "handover")
