"""AdamW with moments of matrices in 8 bits as its paper has it, a matrix at a time, in NumPy.

Source: Dettmers et al. 2022 (arXiv 2110.02861), section 2 and appendix F; blocks of 256 elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from plain.beside_adamw import BesideAdamW

BLOCK = 256


def table(signed: bool) -> np.ndarray:
    """Seven decades of numbers from the smallest on, of one bit of fraction more each, with 0 and 1."""
    sizes = []
    for fraction_bits in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (fraction_bits + (0 if signed else 1)) + 1)
        sizes += list((edges[:-1] + edges[1:]) / 2 * 10.0 ** (fraction_bits - 6))
    return np.array(sorted([0.0, 1.0, *sizes, *([-size for size in sizes] if signed else [])]), np.float32)


TABLES = {signed: table(signed) for signed in (True, False)}


def coded(values: np.ndarray, *, signed: bool, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """The code of each element by the distances from all numbers, and the largest size of each block."""
    numbers, values = TABLES[signed], values.astype(np.float32)
    codes, scales = np.zeros(len(values), np.uint8), []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = np.abs(part).max()
        scales.append(scale)
        share = (part / scale if scale else part).astype(np.float64)
        away = np.abs(share[:, None] - numbers.astype(np.float64))
        codes[start : start + block] = 255 - np.argmin(away[:, ::-1], axis=1)  # of two that are as near the larger
    return codes, np.array(scales, np.float32)


def decoded(codes: np.ndarray, scales: np.ndarray, *, signed: bool, block: int = BLOCK) -> np.ndarray:
    """In float32, as a device has it."""
    return np.array([TABLES[signed][code] * scales[place // block] for place, code in enumerate(codes)], np.float32)


class AdamW8bit(BesideAdamW):
    """Of a model's parameters by name: norms, biases and sinks by AdamW without decay, all else in 8 bits, with blocks that are
    counted from the first element of each of so many `parts` of a matrix."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        vectors: Iterable[Any],
        changes: Mapping[str, float],
        parts: int = 1,
    ) -> None:
        vectors = list(vectors)
        plain = {id(vector) for vector in vectors}
        self.matrices = [weight for weight in named.values() if id(weight) not in plain]
        super().__init__(named.values(), self.matrices, vectors, changes)
        self.parts = parts
        # of a matrix a moment with and one without a sign: codes and scales, part by part
        self.moments = {
            (weight, signed): self.coded(np.zeros(weight.numel()), signed)
            for weight in self.matrices
            for signed in TABLES
        }

    def coded(self, values: np.ndarray, signed: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        return [coded(part, signed=signed) for part in np.split(values, self.parts)]

    def update(self, rate: float) -> None:
        values = self.values
        for weight in self.matrices:
            gradient = weight.grad.numpy().reshape(-1)
            moments = []
            for signed, beta, of in ((True, values["beta1"], gradient), (False, values["beta2"], gradient**2)):
                old = np.concatenate([decoded(*part, signed=signed) for part in self.moments[weight, signed]])
                new = beta * old.astype(np.float64) + (1.0 - beta) * of
                moments.append(new / (1.0 - beta**self.num_steps))  # before it is coded
                self.moments[weight, signed] = self.coded(new, signed)
            step = torch.from_numpy(moments[0] / (np.sqrt(moments[1]) + values["epsilon"])).view_as(weight)
            weight.mul_(1.0 - rate * values["weight_decay"]).sub_(rate * step)
