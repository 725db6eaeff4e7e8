"""The copy in which products give gradients, where these are added up in another format."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.engine.torch.scaled import Scaled
from shardwise.lowering.groups import Member
from shardwise.train.parallel.flat import FlatGroup


class GivenGradients:
    """That of a group: `values` [padded]; in a format of one byte each parameter's have a scale, that of the last pass.

    It rests, as S1's 20 bytes have it; recipes that keep fp32 gradients alone need none.
    """

    def __init__(self, flat: FlatGroup) -> None:
        self.flat = flat
        self.values = flat.zeros(flat.group.padded_size, flat.formats.gradients)
        self.scaled: dict[str, Scaled] = {}
        if self.values.element_size() == 1:
            self.scaled = {one.parameter.name: self._scaled(one) for one in flat.group.members}

    def _scaled(self, member: Member) -> Scaled:
        scale = torch.ones(1, device=self.values.device)
        return Scaled(self.values[member.start : member.stop], scale)

    def target(self, member: Member) -> Tensor | None:
        """Where products write a parameter's gradient; None: nowhere, for it is cast when all of it is known."""
        return None if self.scaled else self.flat.view(self.values, member)

    def take(self, member: Member, gradient: Tensor | None) -> Tensor:
        """A parameter's gradient is ready (None: at its target): as it rests here, to be added up."""
        if gradient is None:
            return self.flat.view(self.values, member)
        if self.scaled:
            kept = self.scaled[member.parameter.name].copy_(gradient.reshape(-1))
            return kept.to(torch.float32).view(member.shape)
        return self.flat.view(self.values, member).copy_(gradient)

    def resting(self) -> Iterator[Tensor]:
        """The values, and the scales of narrow ones."""
        yield self.values
        yield from (one.scale for one in self.scaled.values())
