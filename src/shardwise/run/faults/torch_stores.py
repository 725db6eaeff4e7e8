"""The key-value stores through which processes meet, which `torch.distributed` has and its type hints do not export."""

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["PrefixStore", "Store", "TCPStore"]
