"""Key-value stores of `torch.distributed`, which its type hints do not export."""

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["PrefixStore", "Store", "TCPStore"]
