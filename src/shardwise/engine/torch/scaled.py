"""Arrays at rest in a narrow format with one scale for all elements, as FP8 recipes keep gradients and moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Formats whose range moments do not fit in without a scale. (In bf16 and fp32 they do.)
SHORT_OF_RANGE = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float16})
# The least largest size that is brought to the format's largest number, so that scales stay finite: squares of small gradients
# are far below `floats.scaling.LEAST_AMAX`.
LEAST_AMAX = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """Elements [n] of a floating-point format, and the `scale` [1] that all of them are multiplied by.

    What the formulas of optimizers need of a tensor it has too: its values in a format, and other values in place. It has no
    parts, for a scale follows from all values.

    >>> found = Scaled.zeros(3, torch.float8_e4m3fn, torch.device("cpu")).copy_(torch.tensor([1.0, -4.0, 0.001]))
    >>> found.elements.tolist(), found.to(torch.float32).tolist()
    ([112.0, -448.0, 0.109375], [1.0, -4.0, 0.0009765625])
    """

    elements: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, size: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        """So many elements of 0."""
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.ones(1, device=device))

    def __len__(self) -> int:
        return len(self.elements)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The values [n]."""
        return (self.elements.float() * self.scale).to(dtype)

    def copy_(self, values: Tensor) -> Scaled:
        """Take on other values [n]: the largest size becomes the format's largest number, and what is not finite NaN."""
        values, largest = values.float(), torch.finfo(self.elements.dtype).max
        encode = torch.full_like(self.scale, largest) / values.abs().amax().clamp(min=LEAST_AMAX)
        self.scale.copy_(1.0 / encode)
        self.elements.copy_((values * encode).clamp(-largest, largest))
        return self
