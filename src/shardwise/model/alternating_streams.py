"""Several residual streams of which a layer computes one, and predicts and corrects the others (AltUp), and LAuReL's rank.

Before a layer each stream is predicted from all of them; the layer computes the first, and each stream then learns from the
difference to its prediction. The weights of both steps are linear in a router's results for each token. The streams begin as
projections of the embedding and end as the mean of their projections, each with the magnitude of the first stream.

Dims: f streams, g the same number after a prediction, l as many results of the router, x the streams but the first, i the first
alone; d the width of the model again. Constant factors are those of the weights. Source: Baykal et al. 2023 (Alternating Updates
for Efficient Transformers); Google 2025 (Gemma 3n), `Gemma3nTextAltUp` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.operations import Concatenate, Dims, DropIndex, TakeIndex
from shardwise.model.program import ModelPart, ProgramBuilder, Role
from shardwise.model.residual_streams import stream_dims

Architecture = Any  # `model.architecture` imports this module

TOKENS = ("B", "T")
STREAMS, LATER_STREAMS, FIRST_STREAM, ROUTED = "f", "x", "i", "l"
ACTIVE = 0  # index of the stream that layers compute
WIDE = (*TOKENS, STREAMS, "D")
LAUREL_RANK = "laurel"  # dim of the rank of a learned residual (Menghani et al. 2024, LAuReL)


def alternating_stream_dims(num_streams: int, d_model: int) -> Mapping[str, int]:
    """Return the sizes of the dims of alternating streams, by letter.

    >>> alternating_stream_dims(4, 64)
    {'f': 4, 'g': 4, 'l': 4, 'x': 3, 'i': 1, 'd': 64}
    """
    return {"f": num_streams, "g": num_streams, "l": num_streams, "x": num_streams - 1, "i": 1, "d": d_model}


def stream_sizes(model: Architecture) -> Mapping[str, int]:
    """Return the sizes of the dims of an architecture's residual streams, of either kind, and of a learned residual, by name."""
    rank = {LAUREL_RANK: model.laurel_rank} if model.laurel_rank else {}
    if model.alternating_streams:
        return {**rank, **alternating_stream_dims(model.num_streams, model.d_model)}
    return {**rank, **stream_dims(model.num_streams, mixed=model.mixed_streams)}


class AlternatingStreamBuilder:
    """Writes the operations of alternating streams; names begin with `prefix`. Weights of the model's ends have no prefix."""

    def __init__(self, builder: ProgramBuilder, prefix: str) -> None:
        self.builder, self.prefix = builder, prefix

    def split(self, x: str) -> str:
        """Add streams [B,T,f,D] of the embedding [B,T,D]: itself, and its projections with its magnitude."""
        renamed = self.concatenate((x,), "embedded_again", (*TOKENS, "d"), ("D",))
        projections = self.project(renamed, x, "stream_projections")
        first = self.elementwise("repeat", [x], "first_stream", (*TOKENS, FIRST_STREAM, "D"))
        return self.concatenate((first, projections), "streams", WIDE, (FIRST_STREAM, LATER_STREAMS), Role.RESIDUAL)

    def join(self, x: str) -> str:
        """Add the mean [...,D] of the first of the streams [...,f,D] and of the others' projections with its magnitude."""
        rows = self.builder.tensors[x].dims[:-2]
        first = self.take_first(x, "head_first")
        later = self.tensor("head_later", (*rows, LATER_STREAMS, "d"))
        self.builder.add(DropIndex((x,), (later,), STREAMS, ACTIVE))
        projected = self.project(later, first, "stream_unembeddings")
        total = self.elementwise("sum", [projected], "head_sum", (*rows, "D"))
        return self.elementwise("stream_mean", [first, total], "head_in", (*rows, "D"), Role.RESIDUAL, (STREAMS,))

    def predict(self, x: str) -> tuple[str, str]:
        """Add the predictions of all streams, each a sum of all that the token weights, and return them and the first one."""
        routed = self.route(self.take_first(x, "active"), "predict")
        matrix = self.weight("stream_prediction", ("g", STREAMS, ROUTED))
        coefficients = self.builder.contract(
            routed, matrix, f"{self.prefix}prediction_coefficients", (*TOKENS, "g", STREAMS), Role.STATISTIC
        )
        change = self.builder.contract(coefficients, x, f"{self.prefix}prediction_change", (*TOKENS, "g", "D"))
        renamed = self.concatenate((change,), "prediction_change_again", WIDE, ("g",))
        predicted = self.elementwise("add", [renamed, x], "predicted", WIDE, Role.RESIDUAL)
        return predicted, self.take_first(predicted, "predicted_active")

    def correct(self, predicted: tuple[str, str], computed: str) -> str:
        """Add to the predictions of all streams, and of the first, what the layer `computed` beyond the latter, by weights of the
        token."""
        routed = self.route(computed, "correct")
        matrix = self.weight("stream_correction", (STREAMS, ROUTED))
        coefficients = self.builder.contract(
            routed, matrix, f"{self.prefix}correction_coefficients", (*TOKENS, STREAMS), Role.STATISTIC
        )
        operands = [*predicted, computed, coefficients]
        return self.elementwise("correct_streams", operands, "corrected", WIDE, Role.RESIDUAL)

    def scaled_first(self, x: str) -> str:
        """Add the first stream times a weight of each channel."""
        scale = self.weight("stream_scale", ("D",))
        return self.elementwise(
            "multiply", [self.take_first(x, "corrected_first"), scale], "first_scaled", (*TOKENS, "D")
        )

    def add_to_predicted(self, x: str, y: str) -> str:
        """Add `y` to all streams but the first."""
        return self.elementwise("add_to_predicted", [x, y], "x_next_layer", WIDE, Role.RESIDUAL)

    def route(self, y: str, name: str) -> str:
        """Add the router's results for each token, between -1 and 1; prediction and correction share its weights."""
        squares = self.elementwise("sum_square", [y], f"{name}_norm.squares", TOKENS, Role.STATISTIC)
        norm = self.weight("stream_router_norm.weight", ("D",))
        normed = self.elementwise("rms_norm", [y, squares, norm], f"{name}_norm.out", (*TOKENS, "D"))
        matrix = self.weight("stream_router", (ROUTED, "D"))
        logits = self.builder.contract(normed, matrix, f"{self.prefix}{name}_logits", (*TOKENS, ROUTED), Role.STATISTIC)
        return self.elementwise("tanh", [logits], f"{name}_routed", (*TOKENS, ROUTED), Role.STATISTIC)

    def project(self, x: str, goal: str, name: str) -> str:
        """Add projections of `x` for each stream but the first, with the root mean square of `goal`."""
        rows = self.builder.tensors[goal].dims[:-1]
        dims = (*rows, LATER_STREAMS, "D")
        matrices = self.builder.weight(name, (LATER_STREAMS, "D", "d"), part=ModelPart.STREAMS)
        projected = self.builder.contract(x, matrices, f"{self.prefix}{name}.out", dims)
        sums = [
            self.elementwise("sum_square", [y], f"{name}.{suffix}", self.builder.tensors[y].dims[:-1], Role.STATISTIC)
            for y, suffix in ((projected, "squares"), (goal, "goal_squares"))
        ]
        return self.elementwise("match_magnitude", [projected, *sums], f"{name}.scaled", dims)

    def take_first(self, x: str, name: str) -> str:
        """Add the stream that layers compute."""
        dims = tuple(dim for dim in self.builder.tensors[x].dims if dim != STREAMS)
        return self.builder.add(TakeIndex((x,), (self.tensor(name, dims, Role.RESIDUAL),), STREAMS, ACTIVE))

    def concatenate(
        self, operands: tuple[str, ...], name: str, dims: Dims, parts: Dims, role: Role = Role.ACTIVATION
    ) -> str:  # fmt: skip
        return self.builder.add(Concatenate(operands, (self.tensor(name, dims, role),), parts))

    def weight(self, name: str, dims: Dims) -> str:
        return self.builder.weight(f"{self.prefix}{name}", dims, part=ModelPart.STREAMS)

    def tensor(self, name: str, dims: Dims, role: Role = Role.ACTIVATION) -> str:
        return self.builder.tensor(f"{self.prefix}{name}", dims, role)

    def elementwise(
        self, function: str, inputs: list[str], name: str, dims: Dims, role: Role = Role.ACTIVATION, over: Dims = ("D",)
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", dims, role, over)
