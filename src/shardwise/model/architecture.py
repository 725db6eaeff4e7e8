"""The shape of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import require

MlpKind = Literal["swiglu", "geglu", "gelu", "relu"]
GATED = ("swiglu", "geglu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a dense decoder, in the books' letters: L, D, F, N query heads, K key-value heads, H, V."""

    name: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp: MlpKind = "swiglu"
    tied_embeddings: bool = False
    nominal_num_params: float | None = None  # the round figure in the model's name, used by the books' rules
    source: str = ""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        problems = [
            f"model {self.name}: {name} is {getattr(self, name)!r}; a whole number of at least 1 is required"
            for name in sizes
            if not isinstance(getattr(self, name), int)
            or isinstance(getattr(self, name), bool)
            or getattr(self, name) < 1
        ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"model {self.name}: num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.mlp not in (*GATED, "gelu", "relu"):
            problems.append(f"model {self.name}: mlp is {self.mlp!r}; one of swiglu, geglu, gelu, relu is required")
        require(problems)

    @classmethod
    def structure(cls, mlp: MlpKind) -> Architecture:
        """An architecture of which only the structure counts: derivations do not read its sizes."""
        return cls(
            name=mlp, num_layers=1, d_model=1, d_ff=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1, mlp=mlp
        )

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named dims of the program that do not depend on the job."""
        return {
            "D": self.d_model,
            "F": self.d_ff,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "H": self.head_dim,
            "V": self.vocab_size,
        }
