"""What sees every operation of PyTorch's as it is dispatched."""

from __future__ import annotations

from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # the documented way to see every operation; it has no other name


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's, which does not load torch._dynamo to keep it out of `__torch_dispatch__`: a second or two of a rank's time, and
    a call more for each operation. What torch.compile has compiled runs without it anyway."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
