"""Rules of a model, a job and a cluster for a layout. Each states its requirement and the fix; searches apply the same rules."""

from __future__ import annotations

from shardwise.layout.layers_per_stage import MAX_EMPTY_STAGES, has_equal_stages
from shardwise.layout.layout import ContextParallelVariant, cp_variant_names, get_cp_variant
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.sharding_scheme import Degrees, num_micro_batches, seqs_per_replica, shared_kv_heads
from shardwise.model import Architecture, Job, is_byte_budget
from shardwise.model.carried_tensors import describe_carried_tensors, has_carried_tensors
from shardwise.model.decoder import result_names
from shardwise.model.recompute_policies import is_tensor_set, parse_tensor_set
from shardwise.pipeline import get_schedule, natural_schedule
from shardwise.values import Value, describe_unknown, maximum
from shardwise.values.symbolic import gcd


def _attention_layers(architecture: Architecture) -> list[Architecture]:
    """Return the model with all layers of one kind, for each kind with attention; one of those with equal heads."""
    layers = [layer for layer in architecture.layer_architectures.values() if layer.mixer == "attention"]
    return list({(layer.num_heads, layer.num_kv_heads): layer for layer in layers}.values())


def _tp_divides_heads(architecture: Architecture, tp: Value) -> Value:
    legal: Value = True
    shared = shared_kv_heads(architecture)
    for layer in _attention_layers(architecture):
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        # tp divides the key-value heads, or is a multiple of them that divides the query heads
        legal = legal & (heads % tp == 0) & ((kv_heads % tp == 0) | (tp % kv_heads == 0))
        if kv_heads != shared:  # devices that share a head of the kind with the fewest share these as well
            legal = legal & (heads // kv_heads % (tp // gcd(tp, shared)) == 0)
    return legal


def _divides_kv_heads(architecture: Architecture, num_devices: Value) -> Value:
    legal: Value = True
    for layer in _attention_layers(architecture):
        legal = legal & (layer.num_kv_heads % num_devices == 0)
    return legal


def _describe_kv_heads(architecture: Architecture) -> str:
    return " and ".join(str(layer.num_kv_heads) for layer in _attention_layers(architecture))


def _describe_heads(architecture: Architecture) -> str:
    heads = [(layer.num_heads, layer.num_kv_heads) for layer in _attention_layers(architecture)]
    return " and ".join(f"{queries} query heads ({keys} key-value heads)" for queries, keys in heads)


def _legal_tp_degrees(architecture: Architecture) -> str:
    heads = min((layer.num_heads for layer in _attention_layers(architecture)), default=architecture.num_heads)
    legal_degrees = (
        n
        for n in range(1, heads + 1)
        if _tp_divides_heads(architecture, n) and all(width % n == 0 for width in _hidden_widths(architecture))
    )
    return ", ".join(map(str, legal_degrees))


def _hidden_widths(architecture: Architecture) -> tuple[int, ...]:
    """Return the hidden widths that tp splits: of the MLP or of an expert, of the shared expert, of the leading dense layers."""
    widths: list[int] = []
    for layer in reversed(architecture.layer_architectures.values()):
        widths += (layer.d_ff, layer.dense_d_ff, layer.shared_expert_width) if layer.feed_forward != "none" else ()
    return tuple(dict.fromkeys(filter(None, widths)))


def _tp_divides_mlp_widths(architecture: Architecture, tp: Value) -> Value:
    legal: Value = True
    for width in _hidden_widths(architecture):
        legal = legal & (width % tp == 0)
    return legal


def _sequence_pieces(degrees: Degrees) -> int:
    """Return the pieces of the sequence that a rank along cp takes: one in a plain ring, else one from either end."""
    return _cp_variant(degrees).sequence_pieces


def _cp_variant(degrees: Degrees) -> ContextParallelVariant:
    return get_cp_variant(cp_variant_names()[degrees["cp_variant"]])


def _borrows_evenly(degrees: Degrees) -> Value:
    """Return whether ep takes whole parts of fsdp; with whole experts (etp = 1) it takes all of tp first."""
    expert_devices = degrees["ep"] * degrees["etp"]
    fsdp_part = maximum(expert_devices // degrees["tp"], 1)
    return (expert_devices % degrees["tp"] == 0) & (degrees["fsdp"] % fsdp_part == 0)


def _legal_ep_degrees(c: RuleContext) -> str:
    max_ep = c["fsdp"] * c["tp"] // c["etp"]
    legal_degrees = (n for n in range(1, max_ep + 1) if max_ep % n == 0 and _ep_divides_experts(c.model, n))
    return ", ".join(str(n) for n in legal_degrees if _borrows_evenly({**c.degrees, "ep": n})) or "none"


def _ep_divides_experts(architecture: Architecture, ep: Value) -> Value:
    legal: Value = True
    for count in _expert_counts(architecture):
        legal = legal & (count % ep == 0)
    return legal


def _expert_counts(architecture: Architecture) -> tuple[int, ...]:
    """Return the numbers of experts that layers have."""
    counts = (layer.num_experts for layer in architecture.layer_architectures.values())
    return tuple(dict.fromkeys(filter(None, counts)))


def _describe_experts(architecture: Architecture) -> str:
    return " and ".join(map(str, _expert_counts(architecture)))


def no_experts_problem(architecture: Architecture, ep: Value) -> str:
    """Return what is wrong with a degree of ep, or with an etp, for a dense model."""
    return f"{architecture.name} has no experts for ep = {ep} or an etp to split; leave both out"


def _accepts_micro_batches(c: RuleContext) -> Value:
    """Return whether a schedule can run so many micro-batches; a bidirectional one (two stages on each device) needs an even
    pp."""
    schedule, pp, number = get_schedule(c["schedule"]), c["pp"], num_micro_batches(c.job, c.degrees)
    stages = pp, c["num_virtual_stages"]
    even = pp % 2 == 0 if schedule.bidirectional else True
    return (
        (number >= schedule.min_micro_batches(*stages)) & (number % schedule.micro_batch_multiple(*stages) == 0) & even
    )


def _explain_micro_batches(c: RuleContext) -> str:
    schedule, pp, virtual = c["schedule"], c["pp"], c["num_virtual_stages"]
    definition = get_schedule(schedule)
    fewest, multiple = definition.min_micro_batches(pp, virtual), definition.micro_batch_multiple(pp, virtual)
    requirement = f"at least {fewest} micro-batches" if fewest > 1 else "micro-batches"
    requirement += f" in multiples of {multiple}" * (multiple > 1) + " and an even pp" * definition.bidirectional
    change = " num_virtual_stages=1" if virtual > 1 else ""
    return (
        f"{schedule} requires {requirement}; there are {num_micro_batches(c.job, c.degrees)} for pp = {pp}; change "
        f"micro_batch_seqs or pp, or set schedule={natural_schedule(pp, 1)}{change}"
    )


def _fitting_virtual_stages(degrees: Degrees) -> str:
    supports, pp = get_schedule(degrees["schedule"]).supports, degrees["pp"]
    fewest = next((virtual for virtual in (1, 2) if supports(pp, virtual)), None)
    return f", or num_virtual_stages={fewest}" if fewest else ""


def _suggest_fsdp(c: RuleContext) -> str:
    """Return the degree of fsdp that would use all devices, or which degrees to change."""
    other_degrees = c["dp"] * c["tp"] * c["cp"] * c["pp"]
    if c.num_devices % other_degrees == 0:
        return f"with the other degrees as they are, fsdp = {c.num_devices // other_degrees} would fill it"
    return f"dp·tp·cp·pp = {other_degrees} must divide {c.num_devices}; change one of them, then fsdp takes the rest"


LEGALITY_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "devices", "cluster", ("dp", "fsdp", "tp", "cp", "pp"),
        lambda c: c["dp"] * c["fsdp"] * c["tp"] * c["cp"] * c["pp"] == c.num_devices,
        lambda c: (
            f"dp·fsdp·tp·cp·pp = {c['dp'] * c['fsdp'] * c['tp'] * c['cp'] * c['pp']} "
            f"but the cluster has {c.num_devices} devices; {_suggest_fsdp(c)}"
        ),
    ),
    LayoutRule(
        "heads_by_tp", "model", ("tp",),
        lambda c: _tp_divides_heads(c.model, c["tp"]),
        lambda c: (
            f"tp = {c['tp']} does not split the {_describe_heads(c.model)} evenly; "
            f"tp may be one of {_legal_tp_degrees(c.model)}"
        ),
    ),
    LayoutRule(
        "d_ff_by_tp", "model", ("tp",),
        lambda c: _tp_divides_mlp_widths(c.model, c["tp"]),
        lambda c: (
            f"tp = {c['tp']} does not divide the hidden width F = {' or '.join(map(str, _hidden_widths(c.model)))}; "
            f"tp may be one of {_legal_tp_degrees(c.model)}"
        ),
    ),
    LayoutRule(
        "experts", "model", ("ep", "etp"),
        lambda c: (
            ((c["ep"] == 1) & (c["etp"] == c["tp"]))
            | (_borrows_evenly(c.degrees) & _ep_divides_experts(c.model, c["ep"]) & bool(c.model.num_experts))
        ),
        lambda c: (
            f"ep = {c['ep']} splits the {_describe_experts(c.model)} experts of {c.model.name} and is borrowed from fsdp = "
            f"{c['fsdp']}"
            + (f" and tp = {c['tp']}, as experts are whole (etp = 1); " if c["etp"] != c["tp"] else "; ")
            + f"ep may be one of {_legal_ep_degrees(c)}"
            if c.model.num_experts
            else no_experts_problem(c.model, c["ep"])
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "sequence_by_cp", "job", ("cp", "cp_variant"),
        lambda c: (c["cp"] == 1) | (c.job.seq_len % (_sequence_pieces(c.degrees) * c["cp"]) == 0),
        lambda c: (
            f"{_sequence_pieces(c.degrees)}·cp = {_sequence_pieces(c.degrees) * c['cp']} does not divide the sequence of "
            f"{c.job.seq_len} "
            + (
                "(each rank takes a piece from either end, so that causal attention is even); choose a cp that divides half "
                "the sequence"
                if _sequence_pieces(c.degrees) == 2
                else "into a piece for each rank; choose a cp that does"
            )
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "cp_variant", "layout", ("cp_variant", "cp"),
        lambda c: (c["cp_variant"] == 0) | (c["cp"] > 1),
        lambda c: (
            f"cp_variant = {cp_variant_names()[c['cp_variant']]} is a way to split sequences over cp, which is 1; leave it out, "
            "or give a cp"
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "heads_by_cp", "model", ("cp_variant", "cp", "tp"),
        lambda c: (not _cp_variant(c.degrees).exchanges_heads) | _divides_kv_heads(c.model, c["tp"] * c["cp"]),
        lambda c: (
            f"{cp_variant_names()[c['cp_variant']]} splits the {_describe_kv_heads(c.model)} key-value heads over tp·cp = "
            f"{c['tp'] * c['cp']}, which does not divide them; choose other degrees, or cp_variant=zigzag"
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "async_tp", "layout", ("async_tp", "tp", "sequence_parallel"),
        lambda c: (c["async_tp"] == 0) | ((c["tp"] > 1) & (c["sequence_parallel"] == 1)),
        lambda c: (
            f"async_tp needs tp > 1 and sequence_parallel=true, found tp = {c['tp']} and sequence_parallel = "
            f"{str(bool(c['sequence_parallel'])).lower()}; set async_tp=false or change them"
        ),
        reads_mode=True,
    ),
    LayoutRule(
        "sequence_by_tp", "job", ("sequence_parallel", "tp", "cp"),
        lambda c: (c["sequence_parallel"] == 0) | (c.job.seq_len % (c["cp"] * c["tp"]) == 0),
        lambda c: (
            f"sequence parallelism splits {c.job.seq_len} positions over cp·tp = {c['cp'] * c['tp']}, which does not divide "
            "them; set sequence_parallel=false or choose other degrees"
        ),
    ),
    LayoutRule(
        "carried_tensors_by_pp", "model", ("pp",),
        lambda c: (c["pp"] == 1) | (not has_carried_tensors(c.model)),
        lambda c: (
            f"pp = {c['pp']}, but {c.model.name} has {describe_carried_tensors(c.model)}, which pass between layers beside the "
            "residual stream; stages hand each other the residual stream alone here, so pp=1 is required"
        ),
    ),
    LayoutRule(
        "stages", "model", ("pp", "num_virtual_stages"),
        lambda c: c["pp"] * c["num_virtual_stages"] <= c.model.num_layers + MAX_EMPTY_STAGES * (c["pp"] > 1),
        lambda c: (
            f"pp·num_virtual_stages = {c['pp'] * c['num_virtual_stages']} stages for {c.model.num_layers} blocks; "
            f"at most one stage for each block, and {MAX_EMPTY_STAGES} for the embedding and the head alone, are possible"
        ),
    ),
    LayoutRule(
        "virtual_stages", "layout", ("num_virtual_stages", "pp"),
        lambda c: (c["num_virtual_stages"] == 1) | (c["pp"] > 1),
        lambda c: (
            f"num_virtual_stages = {c['num_virtual_stages']} needs pp > 1; set num_virtual_stages=1, or give a pp"
        ),
    ),
    LayoutRule(
        "micro_batch", "job", ("micro_batch_seqs", "dp", "fsdp"),
        lambda c: c["micro_batch_seqs"] <= seqs_per_replica(c.job, c.degrees),
        lambda c: (
            f"micro_batch_seqs = {c['micro_batch_seqs']} but a replica gets {seqs_per_replica(c.job, c.degrees)} sequences at "
            f"most ({c.job.num_seqs} over dp·fsdp = {c['dp'] * c['fsdp']}); set it to {seqs_per_replica(c.job, c.degrees)} or "
            "less"
        ),
    ),
    LayoutRule(
        # Experts are borrowed from fsdp, with ZeRO or without it.
        "zero_axes", "layout", ("zero_stage", "fsdp", "cp"),
        lambda c: (
            ((c["zero_stage"] > 0) | (c["fsdp"] == 1) | bool(c.model.num_experts))
            & ((c["zero_stage"] == 0) | (c["fsdp"] * c["cp"] > 1))
        ),
        lambda c: (
            f"zero_stage = {c['zero_stage']} with fsdp·cp = {c['fsdp'] * c['cp']}: ZeRO shards over fsdp and cp, and fsdp is for "
            "nothing else; use dp for replicas, or a zero_stage of 1 to 3 with fsdp > 1"
        ),
    ),
    LayoutRule(
        "sequence_parallel_axis", "layout", ("sequence_parallel", "tp"),
        lambda c: (c["sequence_parallel"] == 0) | (c["tp"] > 1),
        lambda c: "sequence_parallel splits over tp, which is 1; set sequence_parallel=false",
    ),
    LayoutRule(
        "schedule", "layout", ("schedule", "pp", "num_virtual_stages"),
        lambda c: get_schedule(c["schedule"]).supports(c["pp"], c["num_virtual_stages"]),
        lambda c: (
            f"{c['schedule']!r} with pp = {c['pp']} and num_virtual_stages = {c['num_virtual_stages']}; "
            f"{natural_schedule(c['pp'], c['num_virtual_stages'])!r} is required{_fitting_virtual_stages(c.degrees)}"
        ),
    ),
    LayoutRule(
        "schedule_batch", "job", ("schedule", "micro_batch_seqs", "pp", "num_virtual_stages"),
        _accepts_micro_batches,
        _explain_micro_batches,
    ),
)  # fmt: skip


def has_even_batch(job: Job, degrees: Degrees) -> Value:
    """Return whether no replica is idle and every micro-batch is full."""
    return job.num_seqs % (degrees["dp"] * degrees["fsdp"] * degrees["micro_batch_seqs"]) == 0


# Asked for by `plan --divisible`; without it an uneven batch is legal and priced at the fullest replica.
EVEN_BATCH = LayoutRule(
    "even_batch", "job", ("dp", "fsdp", "micro_batch_seqs"),
    lambda c: has_even_batch(c.job, c.degrees),
    lambda c: (
        f"dp·fsdp·micro_batch_seqs = {c['dp'] * c['fsdp'] * c['micro_batch_seqs']} does not divide the {c.job.num_seqs} "
        "sequences of a batch; choose other degrees, or leave out --divisible"
    ),
)  # fmt: skip


# Asked of a search that may choose among virtual stages; others are legal, and what they add is priced
# (`pipeline.uneven_stage_costs`).
EQUAL_STAGES = LayoutRule(
    "alike_stages", "model", ("pp", "num_virtual_stages"),
    lambda c: has_equal_stages(c.model, c["pp"], c["num_virtual_stages"]),
    lambda c: (
        f"{c.model.num_layers} layers over pp·num_virtual_stages = {c['pp'] * c['num_virtual_stages']} virtual stages are not "
        "alike, and some would wait for others; choose other numbers, or pin num_virtual_stages"
    ),
)  # fmt: skip


# Asked of a search that may choose the ZeRO stage: without ZeRO, replicas that lend to ep repeat a state that ZeRO-1 would shard
# at no cost.
SHARDED_REPLICAS = LayoutRule(
    "sharded_replicas", "layout", ("zero_stage", "fsdp", "ep"),
    lambda c: (c["zero_stage"] > 0) | (c["fsdp"] == 1),
    lambda c: f"zero_stage = 0 with ep = {c['ep']} repeats a state that ZeRO-1 shards at no cost; pin zero_stage=0 for it",
)  # fmt: skip


def tensor_set_problems(architecture: Architecture, policy: str) -> list[str]:
    """Return the problems of a policy: tensors of a set that are no results of the model's layers, or a byte budget without a
    set."""
    if is_byte_budget(policy):
        return [
            f"recompute: {policy} asks for a set of tensors, which estimate, memory and plan choose; a set is required here"
        ]
    if not is_tensor_set(policy):
        return []
    results = {kind: result_names(architecture, kind) for kind in architecture.layer_counts}
    all_names = dict.fromkeys(name for names in results.values() for name in names)
    problems = []
    for kind, tensors in parse_tensor_set(policy).items():
        if kind and kind not in results:
            problems.append(
                f"recompute: {architecture.name} has no layers of kind {kind!r}; one of {', '.join(results)} is required"
            )
            continue
        known_names = results[kind] if kind else tuple(all_names)
        problems += [f"recompute: {describe_unknown(name, known_names)}" for name in tensors if name not in known_names]
    return problems
