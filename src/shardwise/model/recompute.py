"""Recompute policies: whose results the forward pass saves for the backward pass. One table; layouts, search and help read it.

A policy decides for each operation of a block. What it does not save is recomputed from what it saves, by the minimal slice of
the forward pass (`model/backward.py`); a block's input and its weights are always available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import chosen

if TYPE_CHECKING:
    from shardwise.model.operations import Operation


@dataclass(frozen=True, slots=True)
class Policy:
    """`keeps` says whether the results of an operation may be saved; `summary` describes the policy for people.

    Of a block's products, only the first and every `product_step`th after it may be saved.
    """

    summary: str
    keeps: Callable[[Operation], bool]
    product_step: int = 1

    def of(self, operations: Iterable[Operation]) -> Callable[[Operation], bool]:
        """The same for the operations of one block, which it counts."""
        products = [id(operation) for operation in operations if operation.kind == "contract"]
        passed = set(products) - set(products[:: self.product_step])
        return lambda operation: id(operation) not in passed and self.keeps(operation)


def _hands_over(operation: Operation) -> bool:
    return getattr(operation, "function", "") == "handover"


def _reads_latent(operation: Operation) -> bool:
    """A product with a normalised latent of multi-head latent attention."""
    return operation.kind == "contract" and any(name.endswith("latent_norm.out") for name in operation.inputs)


# From the policy that saves the most to the one that saves the least.
POLICIES: dict[str, Policy] = {
    "none": Policy("keep whatever the backward pass reads", lambda operation: True),
    # S0: "big matmuls only". Tokens that went to their experts or came back are kept too, as their AllToAll costs more
    # than their bytes.
    "selective": Policy(
        "keep the results of matrix products and of attention, rebuild what is elementwise",
        lambda operation: operation.kind in ("contract", "scan") or _hands_over(operation),
    ),
    # S0: "block remat"
    "full": Policy("keep a block's input alone, run the block again", lambda operation: False),
}

# Policies that a layout may name and that are searched where they are asked for: engines have them by default, and others do as
# well for as much memory.
FURTHER: dict[str, Policy] = {
    # torchtitan, parallelize_llama.py: per-op selective checkpointing saves products and attention, "except every second mm"
    "alternate": Policy(
        "keep the results of every other product and of attention, rebuild the rest",
        lambda operation: operation.kind in ("contract", "scan"),
        product_step=2,
    ),
    # DeepSeek-AI 2024, DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2.3: all norms and MLA's up-projections are run
    # again, and of SwiGLU the inputs are kept; Megatron-Core, --recompute-modules layernorm mla_up_proj moe_act.
    "mla_up_proj": Policy(
        "as selective, and rebuild what latent attention makes of its latents too",
        lambda operation: POLICIES["selective"].keeps(operation) and not _reads_latent(operation),
    ),
}


def policy_named(name: str) -> Policy:
    """A policy of either table. Raises `InputError` that lists the names."""
    return chosen({**POLICIES, **FURTHER}, name, "recompute")


def policy_names() -> tuple[str, ...]:
    """The names that a layout may use."""
    return (*POLICIES, *FURTHER)
