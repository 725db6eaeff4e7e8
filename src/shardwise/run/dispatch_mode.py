"""A base class for modes that see every PyTorch operation as it is dispatched."""

from __future__ import annotations

# The documented way to see every operation; it has no public name.
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`TorchDispatchMode` without importing torch._dynamo.

    PyTorch's own class imports it to keep it out of `__torch_dispatch__`, which costs a rank a second or two at
    start-up and one call more for each operation. The engine compiles nothing with torch.compile.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
