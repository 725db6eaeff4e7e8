"""Recompute policies: whose results the forward pass saves for the backward pass. One table; layouts, search and help read it.

A policy decides for each result of a block. What it does not save is recomputed from what it saves, by the minimal slice of
the forward pass (`model/backward.py`); a block's input and its weights are always available.
A set of tensors is a policy too (`model/kept_sets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import InputError
from shardwise.model.kept_sets import FORMS, budget_bytes, is_budget, is_set, kept_tensors
from shardwise.model.recompute_modules import LADDER, MODULES, Module, joined, modules_in
from shardwise.names import did_you_mean, unknown

if TYPE_CHECKING:
    from shardwise.model.architecture import Architecture
    from shardwise.model.operations import Operation
    from shardwise.model.program import Program


@dataclass(frozen=True, slots=True)
class Policy:
    """`keeps` says whether the results of an operation may be saved; `summary` describes the policy for people.

    Of a block's products, only the first and every `product_step`th after it may be saved; of the rest, what no module of
    `modules` discards. `keeps_scores`: attention that writes its scores to memory keeps them for the backward pass.
    """

    summary: str
    keeps: Callable[[Operation], bool]
    product_step: int = 1
    modules: tuple[Module, ...] = ()
    keeps_scores: bool = False

    def of(self, block: Program) -> Callable[[str], bool]:
        """Of the name of a block's result, whether it may be saved."""
        products = [id(operation) for operation in block.operations if operation.kind == "contract"]
        passed = set(products) - set(products[:: self.product_step])
        kept = (operation for operation in block.operations if id(operation) not in passed and self.keeps(operation))
        names = {name for operation in kept for name in operation.outputs}
        discarded = {name for name in names for one in self.modules if one.discards(block, block.tensors[name])}
        return (names - discarded).__contains__


def _keeps_all(operation: Operation) -> bool:
    return True


def _hands_over(operation: Operation) -> bool:
    return getattr(operation, "function", "") == "handover"


# From the policy that saves the most to the one that saves the least.
POLICIES: dict[str, Policy] = {
    "none": Policy("keep whatever the backward pass reads", _keeps_all, keeps_scores=True),
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
}


def _of_modules(names: tuple[str, ...]) -> Policy:
    """Save all but what some modules discard."""
    modules = tuple(MODULES[name] for name in names)
    summary = "run again " + "; ".join(module.summary for module in modules)
    return Policy(summary, _keeps_all, modules=modules, keeps_scores="core_attn" not in names)


def _of_set(name: str) -> Policy:
    """Save what is named."""
    kept = frozenset(tensor for tensors in kept_tensors(name).values() for tensor in tensors)
    return Policy("keep what is named, rebuild the rest", lambda operation: not kept.isdisjoint(operation.outputs))


def policy_named(name: str) -> Policy:
    """A policy of either table, of modules, or of a set of tensors. Raises `InputError` that lists the names.

    >>> policy_named("layernorm+moe_act").summary
    'run again norms in front of experts and of latent attention; activations of experts'
    """
    if is_set(name):
        return _of_set(name)
    policy = {**POLICIES, **FURTHER}.get(name)
    if policy is None and not modules_in(name):
        raise InputError(f"recompute: {unknown(name, policy_names())}")
    return policy or _of_modules(modules_in(name))


class PolicyNames(Collection[str]):
    """The names that a layout may use. Modules may be joined too; those that are listed are single.

    >>> "mlp" in PolicyNames(), "layernorm+moe_act" in PolicyNames(), len(PolicyNames())
    (True, True, 11)
    """

    def __contains__(self, name: object) -> bool:
        return name in POLICIES or name in FURTHER or (isinstance(name, str) and bool(modules_in(name)))

    def __iter__(self) -> Iterator[str]:
        return iter((*POLICIES, *FURTHER, *MODULES))

    def __len__(self) -> int:
        return len(POLICIES) + len(FURTHER) + len(MODULES)


def policy_names() -> PolicyNames:
    """The names that a layout may use."""
    return PolicyNames()


def parts_of_policy(name: str) -> tuple[str, ...]:
    """What software has to have for a policy: each of its modules, or the policy itself.

    >>> parts_of_policy("layernorm+moe_act"), parts_of_policy("full")
    (('layernorm', 'moe_act'), ('full',))
    """
    return modules_in(name) or (name,)


def searched_policies(has: Collection[str], model: Architecture, *, writes_scores: bool = False) -> tuple[str, ...]:
    """Of the policies and modules that software has, what a search for a model tries, from the one that saves the most.

    Policies of either table, the further ones where there is no `selective`; and its modules, cumulatively: attention first
    where it `writes_scores`.

    >>> import shardwise as sw
    >>> searched_policies(("none", "core_attn", "mlp", "full"), sw.load_model("llama-3-8b"))
    ('none', 'mlp', 'full')
    """
    further = () if "selective" in has else FURTHER
    kept = [name for name in (*POLICIES, *further) if name in has and name != "full"]
    ladder = (*(("core_attn",),) * writes_scores, *LADDER)
    steps = [[one for one in step if one in has and MODULES[one].of(model)] for step in ladder]
    cumulated = [
        joined(one for up_to in steps[: number + 1] for one in up_to) for number, step in enumerate(steps) if step
    ]
    return (*kept, *cumulated, *(["full"] if "full" in has else []))


def policy_problem(name: str) -> str:
    """What is wrong with a layout's policy, which may be a set or a budget too; empty where nothing is."""
    if isinstance(name, str) and (is_set(name) or is_budget(name)):
        try:
            kept_tensors(name) if is_set(name) else budget_bytes(name)
        except InputError as error:
            return error.problems[0]
        return ""
    names = policy_names()
    if name in names:
        return ""
    allowed = ", ".join((*names, *FORMS))
    return f"layout: recompute is {name!r}{did_you_mean(name, names)}; one of {allowed} is required"
