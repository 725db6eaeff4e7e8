"""Recompute policies: which results the forward pass saves for the backward pass. Layouts, searches and help read these
tables.

A policy decides for each result of a block. What it does not save is recomputed from what it saves, by the smallest slice of
the forward pass (`model/backward.py`); a block's input and its weights are always available. There are three kinds of policy.

- Names of the tables `POLICIES` and `OPTIONAL_POLICIES`: "none", "selective", "full", "alternate".
- Modules of a block that Megatron-Core recomputes one by one (--recompute-modules), joined by "+" in the order of `MODULES`:
  "layernorm+moe_act". What none of them discards is saved as under "none". Source: Megatron-Core 0.20.0 (d98e8a64),
  transformer/transformer_config.py (recompute_modules), transformer_layer.py, attention.py, multi_latent_attention.py,
  moe/moe_layer.py, moe/experts.py, models/gpt/gpt_layer_specs.py. Assumes Transformer Engine's layers: a norm before one
  matrix is part of that matrix's layer, whose normalised input is saved; before experts and in latent attention a norm stands
  alone, so that `layernorm` discards it. Differs: Megatron-Core recomputes `mlp`, `moe` and `shared_experts` up to their last
  product, which no gradient reads and which is not counted here.
- Sets of tensors to save, "keep:q,k,v", and a budget of bytes, "budget:20GB", which asks for the set that fits it. What is
  planned, run and written down is the set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.model.program import ModelPart, Program, Role, Tensor
from shardwise.values import InputError, describe_unknown, did_you_mean, parse_quantity

if TYPE_CHECKING:
    from shardwise.model.architecture import Architecture
    from shardwise.model.operations import Operation


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """A recompute policy; `summary` describes it for people.

    `keeps` says whether the results of an operation may be saved. Of a block's products, only the first and every
    `product_step`th after it may be; of the rest, what no module of `modules` discards. `keeps_grouped_products`: those of
    experts count among a block's products, and none of them is saved otherwise. `keeps_scores`: attention that writes its
    scores to memory keeps them for the backward pass.
    """

    summary: str
    keeps: Callable[[Operation], bool]
    product_step: int = 1
    keeps_grouped_products: bool = True
    modules: tuple[RecomputeModule, ...] = ()
    keeps_scores: bool = False

    @property
    def keeps_masks(self) -> bool:
        """True if masks of dropout are saved: where all elementwise results are; otherwise they are drawn again."""
        return self.keeps is _save_all

    def may_save(self, block: Program) -> Callable[[str], bool]:
        """Return a predicate on the names of a block's results: may this result be saved?"""
        products = [operation for operation in block.operations if operation.kind == "contract"]
        grouped = {id(product) for product in products if _is_grouped(block, product)}
        plain = [id(product) for product in products if id(product) not in grouped or self.keeps_grouped_products]
        skipped = {id(product) for product in products} - set(plain[:: self.product_step])
        saving = (operation for operation in block.operations if id(operation) not in skipped and self.keeps(operation))
        names = {name for operation in saving for name in operation.outputs}
        discarded = {name for name in names for module in self.modules if module.discards(block, block.tensors[name])}
        return (names - discarded).__contains__


def _is_grouped(block: Program, product: Operation) -> bool:
    """Return whether a product is one of experts: each multiplies its own tokens with its own weights."""
    return block.tensors[product.outputs[0]].role is Role.ROUTED


def _save_all(operation: Operation) -> bool:
    return True


def is_expensive_to_recompute(operation: Operation) -> bool:
    """Return whether an operation is a product, attention, a recurrence, or the AllToAll of routed tokens (`handover`)."""
    return (
        operation.kind in ("contract", "scan", "select", "recurrence")
        or getattr(operation, "function", "") == "handover"
    )


# From the policy that saves the most to the one that saves the least.
POLICIES: dict[str, RecomputePolicy] = {
    "none": RecomputePolicy("keep whatever the backward pass reads", _save_all, keeps_scores=True),
    # S0: "big matmuls only". Tokens that went to their experts or came back are kept too, as their AllToAll costs more
    # than their bytes.
    "selective": RecomputePolicy(
        "keep the results of matrix products and of attention, rebuild what is elementwise", is_expensive_to_recompute
    ),
    # S0: "block remat"
    "full": RecomputePolicy("keep a block's input alone, run the block again", lambda operation: False),
}

# Policies that a layout may name and that are searched where they are asked for: engines have them by default, and others do as
# well for as much memory.
OPTIONAL_POLICIES: dict[str, RecomputePolicy] = {
    # torchtitan, distributed/activation_checkpoint.py and the models' parallelize.py (_op_sac_save_list): per-op selective
    # checkpointing saves aten.mm "except every second mm", attention and all_to_all_single. Experts run in _grouped_mm, which
    # is not in the list.
    "alternate": RecomputePolicy(
        "keep the results of every other product, of attention and of exchanges; rebuild the rest, with all of experts",
        is_expensive_to_recompute,
        product_step=2,
        keeps_grouped_products=False,
    )
}


def _policy_of_modules(names: tuple[str, ...]) -> RecomputePolicy:
    modules = tuple(MODULES[name] for name in names)
    summary = "run again " + "; ".join(module.summary for module in modules)
    return RecomputePolicy(summary, _save_all, modules=modules, keeps_scores="core_attn" not in names)


def _policy_of_tensor_set(name: str) -> RecomputePolicy:
    saved_names = frozenset(tensor for tensors in parse_tensor_set(name).values() for tensor in tensors)
    return RecomputePolicy(
        "keep what is named, rebuild the rest", lambda operation: not saved_names.isdisjoint(operation.outputs)
    )


def get_recompute_policy(name: str) -> RecomputePolicy:
    """Return the policy of a name of either table, of joined modules, or of a set of tensors. Raises `InputError` that lists
    the names.

    >>> get_recompute_policy("layernorm+moe_act").summary
    'run again norms in front of experts and of latent attention; activations of experts'
    """
    if is_tensor_set(name):
        return _policy_of_tensor_set(name)
    policy = {**POLICIES, **OPTIONAL_POLICIES}.get(name)
    if policy is None and not parse_modules(name):
        raise InputError(f"recompute: {describe_unknown(name, policy_names())}")
    return policy or _policy_of_modules(parse_modules(name))


class PolicyNames(Collection[str]):
    """The names that a layout may use. Modules may be joined too; those that are listed are single.

    >>> "mlp" in PolicyNames(), "layernorm+moe_act" in PolicyNames(), len(PolicyNames())
    (True, True, 11)
    """

    def __contains__(self, name: object) -> bool:
        return name in POLICIES or name in OPTIONAL_POLICIES or (isinstance(name, str) and bool(parse_modules(name)))

    def __iter__(self) -> Iterator[str]:
        return iter((*POLICIES, *OPTIONAL_POLICIES, *MODULES))

    def __len__(self) -> int:
        return len(POLICIES) + len(OPTIONAL_POLICIES) + len(MODULES)


def policy_names() -> PolicyNames:
    """Return the names that a layout may use."""
    return PolicyNames()


def required_abilities(name: str) -> tuple[str, ...]:
    """Return the abilities that a stack needs for a policy: each of its modules, or the policy itself.

    >>> required_abilities("layernorm+moe_act"), required_abilities("full")
    (('layernorm', 'moe_act'), ('full',))
    """
    return parse_modules(name) or (name,)


def policies_to_search(
    supported: Collection[str], architecture: Architecture, *, writes_scores: bool = False
) -> tuple[str, ...]:
    """Return the policies that a search for a model tries, from the one that saves the most; `supported` are those of the
    stack.

    They are policies of the tables, optional ones only if there is no `selective`, and then modules, cumulatively: attention
    first where it `writes_scores`.

    >>> import shardwise as sw
    >>> policies_to_search(("none", "core_attn", "mlp", "full"), sw.load_model("llama-3-8b"))
    ('none', 'mlp', 'full')
    """
    optional = () if "selective" in supported else OPTIONAL_POLICIES
    policies = [name for name in (*POLICIES, *optional) if name in supported and name != "full"]
    ladder = (*(("core_attn",),) * writes_scores, *SEARCHED_MODULES)
    groups = [
        [module for module in group if module in supported and MODULES[module].applies_to(architecture)]
        for group in ladder
    ]
    cumulated = [
        join_modules(module for earlier in groups[: index + 1] for module in earlier)
        for index, group in enumerate(groups)
        if group
    ]
    return (*policies, *cumulated, *(["full"] if "full" in supported else []))


def policy_problem(name: str) -> str:
    """Return what is wrong with a layout's policy, which may be a set or a budget too; empty where nothing is."""
    if isinstance(name, str) and (is_tensor_set(name) or is_byte_budget(name)):
        try:
            parse_tensor_set(name) if is_tensor_set(name) else budget_bytes(name)
        except InputError as error:
            return error.problems[0]
        return ""
    names = policy_names()
    if name in names:
        return ""
    allowed = ", ".join((*names, *POLICY_FORMS))
    return f"layout: recompute is {name!r}{did_you_mean(name, names)}; one of {allowed} is required"


# What of latent attention is made before or after what its up-projections make.
NOT_UP_PROJECTED = ("q_latent", "kv_latent", "k_rotary_flat", "attended", "lse", "attention_out")


@dataclass(frozen=True, slots=True)
class RecomputeModule:
    """Part of a block that is recomputed as one.

    `discards`: whether a tensor of a block is recomputed; `applies_to`: whether a model has any such tensor.
    """

    summary: str
    discards: Callable[[Program, Tensor], bool]
    applies_to: Callable[[Architecture], bool]


def _is_routed(block: Program) -> bool:
    return any(tensor.role is Role.ROUTED for tensor in block.tensors.values())


def _is_latent(block: Program) -> bool:
    return any(name.endswith("kv_latent") for name in block.tensors)


def _is_norm_result(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is the result of the norm in front of attention or of the MLP."""
    return tensor.part is ModelPart.NORM and f"{name}_norm." in tensor.name


def _is_standalone_norm_result(block: Program, tensor: Tensor) -> bool:
    return (_is_latent(block) and _is_norm_result("attention", tensor)) or (
        _is_routed(block) and _is_norm_result("mlp", tensor)
    )


def _is_up_projection_result(block: Program, tensor: Tensor) -> bool:
    return _is_latent(block) and tensor.part is ModelPart.ATTENTION and not tensor.name.endswith(NOT_UP_PROJECTED)


def _is_dense_mlp_result(block: Program, tensor: Tensor) -> bool:
    return not _is_routed(block) and (tensor.part is ModelPart.MLP or _is_norm_result("mlp", tensor))


def _has_experts(architecture: Architecture) -> bool:
    return architecture.num_experts > 0


def _has_latent_attention(architecture: Architecture) -> bool:
    return any(layer.kv_lora_rank for layer in architecture.layer_architectures.values())


# In the order of their names in a policy.
MODULES: dict[str, RecomputeModule] = {
    "core_attn": RecomputeModule(
        "attention between its products: of a fused kernel it frees the sums of softmax alone",
        lambda block, tensor: tensor.name.endswith("lse"), lambda architecture: True,
    ),
    "layernorm": RecomputeModule(
        "norms in front of experts and of latent attention", _is_standalone_norm_result,
        lambda architecture: _has_experts(architecture) or _has_latent_attention(architecture),
    ),
    "moe_act": RecomputeModule(
        "activations of experts", lambda block, tensor: tensor.name.endswith("experts_act"), _has_experts,
    ),
    "mla_up_proj": RecomputeModule(
        "what latent attention makes of its latents", _is_up_projection_result,
        _has_latent_attention,
    ),
    "mlp": RecomputeModule(
        "MLPs of dense layers, with the norm in front of them", _is_dense_mlp_result,
        lambda architecture: any(
            layer.feed_forward != "none" and not layer.num_experts for layer in architecture.layer_architectures.values()
        ),
    ),
    "moe": RecomputeModule(
        "routers, experts and shared experts, with the exchange of tokens",
        lambda block, tensor: _is_routed(block) and tensor.part is ModelPart.MLP, _has_experts,
    ),
    "shared_experts": RecomputeModule(
        "shared experts", lambda block, tensor: tensor.name.rpartition(".")[2].startswith("shared_"),
        lambda architecture: any(layer.shared_expert_width for layer in architecture.layer_architectures.values()),
    ),
}  # fmt: skip
# Joint policies that a search tries: from the modules that cost least time for what they free, each with those before it. `moe`
# exchanges tokens once more, and `core_attn` frees nothing of fused attention: both are for those who ask.
SEARCHED_MODULES = (("layernorm", "moe_act"), ("mla_up_proj",), ("mlp", "shared_experts"))


def parse_modules(policy: str) -> tuple[str, ...]:
    """Return the modules of a policy; none where it is not made of modules.

    >>> parse_modules("layernorm+moe_act"), parse_modules("moe_act+layernorm"), parse_modules("full")
    (('layernorm', 'moe_act'), (), ())
    """
    names = tuple(policy.split("+"))
    return names if names == tuple(name for name in MODULES if name in names) else ()


def join_modules(modules: Iterable[str]) -> str:
    """Return the policy of some modules, in the order of the table; "none" of none.

    >>> join_modules({"moe_act", "layernorm"}), join_modules(())
    ('layernorm+moe_act', 'none')
    """
    names = set(modules)
    return "+".join(name for name in MODULES if name in names) or "none"


KEEP_PREFIX, BUDGET_PREFIX = "keep:", "budget:"
POLICY_FORMS = ("keep:TENSOR,...", "budget:BYTES")  # how they are written
KIND_MARK, KIND_SEPARATOR = ":", "/"  # behind the name of a kind of layer, and between kinds


def is_tensor_set(policy: str) -> bool:
    """Return whether a policy names the tensors that it keeps."""
    return policy.startswith(KEEP_PREFIX)


def is_byte_budget(policy: str) -> bool:
    """Return whether a policy is a budget, for which a set is still to be chosen."""
    return policy.startswith(BUDGET_PREFIX)


def budget_bytes(policy: str) -> float:
    """Return the bytes of a budget. Raises `InputError` for text that is not a number of bytes.

    >>> budget_bytes("budget:20GB")
    20000000000.0
    """
    return parse_quantity(policy.removeprefix(BUDGET_PREFIX), label="layout: recompute: budget", unit="B")


def parse_tensor_set(policy: str) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a set by kind of layer; those of "" are of every kind that is not named. Raises `InputError`.

    >>> parse_tensor_set("keep:q,k")
    {'': ('q', 'k')}
    >>> parse_tensor_set("keep:block:q,gates/dense_block:q")
    {'block': ('q', 'gates'), 'dense_block': ('q',)}
    """
    tensors_by_kind: dict[str, tuple[str, ...]] = {}
    for part in policy.removeprefix(KEEP_PREFIX).split(KIND_SEPARATOR):
        kind, _, names = part.rpartition(KIND_MARK)
        tensors = tuple(name for name in names.split(",") if name)
        if kind in tensors_by_kind or (not tensors and not kind):
            raise InputError(
                f"layout: recompute is {policy!r}; names of tensors with commas between them are required, such as "
                f"{KEEP_PREFIX}q,k,v, "
                f"or for each kind of layer once, such as {KEEP_PREFIX}block{KIND_MARK}q,k{KIND_SEPARATOR}dense_block{KIND_MARK}q"
            )
        tensors_by_kind[kind] = tensors
    return tensors_by_kind


def format_tensor_set(tensors_by_kind: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a set, from tensors by kind of layer as `parse_tensor_set` returns them.

    >>> format_tensor_set({"": ("q", "k")}), format_tensor_set({"block": ("q",), "dense_block": ()})
    ('keep:q,k', 'keep:block:q/dense_block:')
    """
    return KEEP_PREFIX + KIND_SEPARATOR.join(
        (f"{kind}{KIND_MARK}" if kind else "") + ",".join(names) for kind, names in tensors_by_kind.items()
    )


def policy_for_layer(policy: str, kind: str) -> str:
    """Return the policy for one kind of layer: the same text for all kinds that a policy treats alike.

    >>> policy_for_layer("keep:block:q/dense_block:", "block"), policy_for_layer("keep:block:q/dense_block:", "dense_block")
    ('keep:q', 'full')
    """
    if not is_tensor_set(policy):
        return policy
    tensors_by_kind = parse_tensor_set(policy)
    tensors = tensors_by_kind.get(kind, tensors_by_kind.get("", ()))
    return format_tensor_set({"": tensors}) if tensors else "full"
