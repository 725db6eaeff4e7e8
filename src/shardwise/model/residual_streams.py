"""Several residual streams, which each half of a layer reads, writes and mixes by weights of each token.

Dims: f streams, g the same number of streams after a half of a layer; l logits of a half's weights, (2 + f) f, or 2 f where
streams are not mixed; x scales, one for each kind of weight; i one. Source: DeepSeek-AI 2026 (DeepSeek-V4, section 2.2),
manifold-constrained hyper-connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.model.operations import Dims, StreamWeights
from shardwise.model.program import ModelPart, ProgramBuilder, Role

TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")
NUM_KINDS = 3  # of weights: of reading, writing and mixing


def stream_dims(num_streams: int, *, mixed: bool = True) -> Mapping[str, int]:
    """Return the sizes of the dims of streams, by letter.

    >>> stream_dims(4)["l"], stream_dims(0)
    (24, {})
    """
    if not num_streams:
        return {}
    num_kinds = NUM_KINDS if mixed else NUM_KINDS - 1
    return {"f": num_streams, "g": num_streams, "l": (2 + mixed * num_streams) * num_streams, "x": num_kinds, "i": 1}


def residual_dims(has_streams: bool) -> Dims:
    """Return the dims of the residual stream between layers."""
    return (*TOKENS, "f", "D") if has_streams else HIDDEN


class StreamBuilder:
    """Writes the operations of residual streams; names begin with `prefix`."""

    def __init__(self, builder: ProgramBuilder, prefix: str, *, mixed: bool = True) -> None:
        self.builder, self.prefix, self.mixed = builder, prefix, mixed

    def update(
        self, x: str, name: str, dims: tuple[str, str], part: Callable[[str], str], result: str
    ) -> str:  # fmt: skip
        """Add half a layer, `part`, between streams `x` along the first of `dims` and its results along the second. Streams that
        are not mixed stay as they are, and the half's result is added to each."""
        source, target = dims if self.mixed else ("f", "f")
        logits = self.logits(x, name, source, "l")
        shapes = {"read": (source,), "write": (target,), **({"mix": (source, target)} if self.mixed else {})}
        read, write, *mix = (self.tensor(f"{name}_{kind}", shape) for kind, shape in shapes.items())
        self.builder.add(StreamWeights((logits, *self.vectors(name, "l", "x")), (read, write, *mix)))
        y = part(self.builder.contract(read, x, f"{self.prefix}{name}_in", HIDDEN))
        self.builder.set_role(y, Role.RESIDUAL)  # its sums are reduced before the streams multiply them
        mixed = x
        for matrix in mix:
            mixed = self.builder.contract(matrix, x, f"{self.prefix}{name}_mixed", (*TOKENS, target, "D"))
        written = self.elementwise("multiply", [write, y], f"{name}_written", (target, "D"))
        return self.elementwise("add", [mixed, written], result, (target, "D"), Role.RESIDUAL)

    def split(self, x: str) -> str:
        """Add streams that all begin as the hidden state `x`."""
        return self.elementwise("repeat", [x], "streams", ("f", "D"), Role.RESIDUAL)

    def join(self, x: str) -> str:
        """Add the sum of the streams with which the last norm begins."""
        logits = self.logits(x, "head", "f", "g")
        (read,) = (self.tensor("head_read", ("f",)),)
        self.builder.add(StreamWeights((logits, *self.vectors("head", "g", "i")), (read,)))
        return self.builder.contract(read, x, f"{self.prefix}head_in", HIDDEN, Role.RESIDUAL)

    def logits(self, x: str, name: str, source: str, width: str) -> str:
        """Add the product of all streams together, normalised, to logits of each token."""
        squares = self.elementwise("sum_square", [x], f"{name}_streams.squares", (), Role.STATISTIC)
        y = self.elementwise("unit_rms_norm", [x, squares], f"{name}_streams.out", (source, "D"), over=(source, "D"))
        weight = self.weight(f"{name}_streams.weight", (width, source, "D"))
        return self.builder.contract(y, weight, f"{self.prefix}{name}_logits", (*TOKENS, width), Role.STATISTIC)

    def vectors(self, name: str, width: str, scales: str) -> tuple[str, str]:
        return self.weight(f"{name}_streams.bias", (width,)), self.weight(f"{name}_streams.scale", (scales,))

    def weight(self, name: str, dims: Dims) -> str:
        return self.builder.weight(f"{self.prefix}{name}", dims, part=ModelPart.STREAMS)

    def tensor(self, name: str, dims: Dims) -> str:
        return self.builder.tensor(f"{self.prefix}{name}", (*TOKENS, *dims), Role.STATISTIC)

    def elementwise(
        self, function: str, inputs: list[str], name: str, dims: Dims, role: Role = Role.ACTIVATION, over: Dims = ("D",)
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", (*TOKENS, *dims), role, over)
