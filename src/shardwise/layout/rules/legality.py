"""Rules of a model, a job and a cluster for a layout. Each states its requirement and the fix; searches apply the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.layout.context_parallel import ContextParallelVariant, cp_variant_names, get_cp_variant
from shardwise.layout.layers_per_stage import MAX_EMPTY_STAGES, has_equal_stages
from shardwise.layout.sharding_scheme import Degrees, num_micro_batches, seqs_per_replica
from shardwise.model import LAYER_UNITS, Architecture, Job, is_byte_budget, unit_counts
from shardwise.model.decoder import result_names
from shardwise.model.recompute_policies import is_tensor_set, parse_tensor_set
from shardwise.pipeline import get_schedule, natural_schedule
from shardwise.values import Value, describe_unknown, maximum


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """A rule: `legal` takes the degrees (numbers or arrays); `explain` says for one layout what is wrong and the fix.

    On arrays `legal` gives a truth value for each row, so it combines terms by `&` and `|`, never by `and` or `or`, and
    `(d["tp"] > 0) & flag` makes an array of one flag. The first rule that a candidate breaks is the one that counts it.
    """

    name: str
    legal: Callable[[Architecture, Job, int, Degrees], Value]
    explain: Callable[[Architecture, Job, int, Degrees], str]


def _tp_divides_heads(architecture: Architecture, tp: Value) -> Value:
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    # tp divides the key-value heads, or is a multiple of them that divides the query heads
    return (heads % tp == 0) & ((kv_heads % tp == 0) | (tp % kv_heads == 0))


def _legal_tp_degrees(architecture: Architecture) -> str:
    heads = architecture.num_heads
    legal_degrees = (
        n
        for n in range(1, heads + 1)
        if _tp_divides_heads(architecture, n) and all(width % n == 0 for width in _hidden_widths(architecture))
    )
    return ", ".join(map(str, legal_degrees))


def _hidden_widths(architecture: Architecture) -> tuple[int, ...]:
    """Return the hidden widths that tp splits: of the MLP or of an expert, of the shared expert, of the leading dense layers."""
    widths = (architecture.d_ff, architecture.shared_expert_width, architecture.dense_d_ff)
    return tuple(width for width in widths if width)


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


def _legal_ep_degrees(architecture: Architecture, degrees: Degrees) -> str:
    max_ep = degrees["fsdp"] * degrees["tp"] // degrees["etp"]
    legal_degrees = (n for n in range(1, max_ep + 1) if max_ep % n == 0 and architecture.num_experts % n == 0)
    return ", ".join(str(n) for n in legal_degrees if _borrows_evenly({**degrees, "ep": n})) or "none"


def no_experts_problem(architecture: Architecture, ep: Value) -> str:
    """Return what is wrong with a degree of ep, or with an etp, for a dense model."""
    return f"{architecture.name} has no experts for ep = {ep} or an etp to split; leave both out"


def _accepts_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Return whether a schedule can run so many micro-batches; a bidirectional one (two stages on each device) needs an even
    pp."""
    schedule, pp, number = get_schedule(degrees["schedule"]), degrees["pp"], num_micro_batches(job, degrees)
    stages = pp, degrees["num_virtual_stages"]
    even = pp % 2 == 0 if schedule.bidirectional else True
    return (
        (number >= schedule.min_micro_batches(*stages)) & (number % schedule.micro_batch_multiple(*stages) == 0) & even
    )


def _explain_micro_batches(job: Job, degrees: Degrees) -> str:
    schedule, pp, virtual = degrees["schedule"], degrees["pp"], degrees["num_virtual_stages"]
    definition = get_schedule(schedule)
    fewest, multiple = definition.min_micro_batches(pp, virtual), definition.micro_batch_multiple(pp, virtual)
    requirement = f"at least {fewest} micro-batches" if fewest > 1 else "micro-batches"
    requirement += f" in multiples of {multiple}" * (multiple > 1) + " and an even pp" * definition.bidirectional
    change = " num_virtual_stages=1" if virtual > 1 else ""
    return (
        f"{schedule} requires {requirement}; there are {num_micro_batches(job, degrees)} for pp = {pp}; change "
        f"micro_batch_seqs or pp, or set schedule={natural_schedule(pp, 1)}{change}"
    )


def _fitting_virtual_stages(degrees: Degrees) -> str:
    supports, pp = get_schedule(degrees["schedule"]).supports, degrees["pp"]
    fewest = next((virtual for virtual in (1, 2) if supports(pp, virtual)), None)
    return f", or num_virtual_stages={fewest}" if fewest else ""


def _suggest_fsdp(num_devices: int, degrees: Degrees) -> str:
    """Return the degree of fsdp that would use all devices, or which degrees to change."""
    other_degrees = degrees["dp"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    if num_devices % other_degrees == 0:
        return f"with the other degrees as they are, fsdp = {num_devices // other_degrees} would fill it"
    return f"dp·tp·cp·pp = {other_degrees} must divide {num_devices}; change one of them, then fsdp takes the rest"


RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "devices",
        lambda a, j, n, d: d["dp"] * d["fsdp"] * d["tp"] * d["cp"] * d["pp"] == n,
        lambda a, j, n, d: (
            f"dp·fsdp·tp·cp·pp = {d['dp'] * d['fsdp'] * d['tp'] * d['cp'] * d['pp']} "
            f"but the cluster has {n} devices; {_suggest_fsdp(n, d)}"
        ),
    ),
    LayoutRule(
        "heads_by_tp",
        lambda a, j, n, d: _tp_divides_heads(a, d["tp"]),
        lambda a, j, n, d: (
            f"tp = {d['tp']} does not split the {a.num_heads} query heads ({a.num_kv_heads} key-value heads) evenly; "
            f"tp may be one of {_legal_tp_degrees(a)}"
        ),
    ),
    LayoutRule(
        "d_ff_by_tp",
        lambda a, j, n, d: _tp_divides_mlp_widths(a, d["tp"]),
        lambda a, j, n, d: (
            f"tp = {d['tp']} does not divide the hidden width F = {' or '.join(map(str, _hidden_widths(a)))}; "
            f"tp may be one of {_legal_tp_degrees(a)}"
        ),
    ),
    LayoutRule(
        "experts",
        lambda a, j, n, d: (
            ((d["ep"] == 1) & (d["etp"] == d["tp"]))
            | (_borrows_evenly(d) & (a.num_experts % d["ep"] == 0) & bool(a.num_experts))
        ),
        lambda a, j, n, d: (
            f"ep = {d['ep']} splits the {a.num_experts} experts of {a.name} and is borrowed from fsdp = {d['fsdp']}"
            + (f" and tp = {d['tp']}, as experts are whole (etp = 1); " if d["etp"] != d["tp"] else "; ")
            + f"ep may be one of {_legal_ep_degrees(a, d)}"
            if a.num_experts
            else no_experts_problem(a, d["ep"])
        ),
    ),
    LayoutRule(
        "sequence_by_cp",
        lambda a, j, n, d: (d["cp"] == 1) | (j.seq_len % (_sequence_pieces(d) * d["cp"]) == 0),
        lambda a, j, n, d: (
            f"{_sequence_pieces(d)}·cp = {_sequence_pieces(d) * d['cp']} does not divide the sequence of {j.seq_len} "
            + (
                "(each rank takes a piece from either end, so that causal attention is even); choose a cp that divides half "
                "the sequence"
                if _sequence_pieces(d) == 2
                else "into a piece for each rank; choose a cp that does"
            )
        ),
    ),
    LayoutRule(
        "cp_variant",
        lambda a, j, n, d: (d["cp_variant"] == 0) | (d["cp"] > 1),
        lambda a, j, n, d: (
            f"cp_variant = {cp_variant_names()[d['cp_variant']]} is a way to split sequences over cp, which is 1; leave it out, "
            "or give a cp"
        ),
    ),
    LayoutRule(
        "heads_by_cp",
        lambda a, j, n, d: (not _cp_variant(d).exchanges_heads) | (a.num_kv_heads % (d["tp"] * d["cp"]) == 0),
        lambda a, j, n, d: (
            f"{cp_variant_names()[d['cp_variant']]} splits the {a.num_kv_heads} key-value heads over tp·cp = "
            f"{d['tp'] * d['cp']}, which does not divide them; choose other degrees, or cp_variant=zigzag"
        ),
    ),
    LayoutRule(
        "async_tp",
        lambda a, j, n, d: (d["async_tp"] == 0) | ((d["tp"] > 1) & (d["sequence_parallel"] == 1)),
        lambda a, j, n, d: (
            f"async_tp needs tp > 1 and sequence_parallel=true, found tp = {d['tp']} and sequence_parallel = "
            f"{str(bool(d['sequence_parallel'])).lower()}; set async_tp=false or change them"
        ),
    ),
    LayoutRule(
        "sequence_by_tp",
        lambda a, j, n, d: (d["sequence_parallel"] == 0) | (j.seq_len % (d["cp"] * d["tp"]) == 0),
        lambda a, j, n, d: (
            f"sequence parallelism splits {j.seq_len} positions over cp·tp = {d['cp'] * d['tp']}, which does not divide them; "
            "set sequence_parallel=false or choose other degrees"
        ),
    ),
    LayoutRule(
        "stages",
        lambda a, j, n, d: d["pp"] * d["num_virtual_stages"] <= a.num_layers + MAX_EMPTY_STAGES * (d["pp"] > 1),
        lambda a, j, n, d: (
            f"pp·num_virtual_stages = {d['pp'] * d['num_virtual_stages']} stages for {a.num_layers} blocks; "
            f"at most one stage for each block, and {MAX_EMPTY_STAGES} for the embedding and the head alone, are possible"
        ),
    ),
    LayoutRule(
        "virtual_stages",
        lambda a, j, n, d: (d["num_virtual_stages"] == 1) | (d["pp"] > 1),
        lambda a, j, n, d: (
            f"num_virtual_stages = {d['num_virtual_stages']} needs pp > 1; set num_virtual_stages=1, or give a pp"
        ),
    ),
    LayoutRule(
        "micro_batch",
        lambda a, j, n, d: d["micro_batch_seqs"] <= seqs_per_replica(j, d),
        lambda a, j, n, d: (
            f"micro_batch_seqs = {d['micro_batch_seqs']} but a replica gets {seqs_per_replica(j, d)} sequences at most "
            f"({j.num_seqs} over dp·fsdp = {d['dp'] * d['fsdp']}); set it to {seqs_per_replica(j, d)} or less"
        ),
    ),
    LayoutRule(
        "zero_axes",
        lambda a, j, n, d: (
            ((d["zero_stage"] > 0) | (d["fsdp"] == 1)) & ((d["zero_stage"] == 0) | (d["fsdp"] * d["cp"] > 1))
        ),
        lambda a, j, n, d: (
            f"zero_stage = {d['zero_stage']} with fsdp·cp = {d['fsdp'] * d['cp']}: ZeRO shards over fsdp and cp, and fsdp is for "
            "nothing else; use dp for replicas, or a zero_stage of 1 to 3 with fsdp > 1"
        ),
    ),
    LayoutRule(
        "sequence_parallel_axis",
        lambda a, j, n, d: (d["sequence_parallel"] == 0) | (d["tp"] > 1),
        lambda a, j, n, d: "sequence_parallel splits over tp, which is 1; set sequence_parallel=false",
    ),
    LayoutRule(
        "schedule",
        lambda a, j, n, d: get_schedule(d["schedule"]).supports(d["pp"], d["num_virtual_stages"]),
        lambda a, j, n, d: (
            f"{d['schedule']!r} with pp = {d['pp']} and num_virtual_stages = {d['num_virtual_stages']}; "
            f"{natural_schedule(d['pp'], d['num_virtual_stages'])!r} is required{_fitting_virtual_stages(d)}"
        ),
    ),
    LayoutRule(
        "schedule_batch",
        lambda a, j, n, d: _accepts_micro_batches(j, d),
        lambda a, j, n, d: _explain_micro_batches(j, d),
    ),
)


# Asked for by `plan --divisible`; without it an uneven batch is legal and priced at the fullest replica.
EVEN_BATCH = LayoutRule(
    "even_batch",
    lambda a, j, n, d: j.num_seqs % (d["dp"] * d["fsdp"] * d["micro_batch_seqs"]) == 0,
    lambda a, j, n, d: (
        f"dp·fsdp·micro_batch_seqs = {d['dp'] * d['fsdp'] * d['micro_batch_seqs']} does not divide the {j.num_seqs} sequences of "
        "a batch; choose other degrees, or leave out --divisible"
    ),
)


# Asked of a search that may choose among virtual stages; others are legal, and what they add is priced
# (`pipeline.uneven_stage_costs`).
EQUAL_STAGES = LayoutRule(
    "alike_stages",
    lambda a, j, n, d: has_equal_stages(a, d["pp"], d["num_virtual_stages"]),
    lambda a, j, n, d: (
        f"{a.num_layers} layers over pp·num_virtual_stages = {d['pp'] * d['num_virtual_stages']} virtual stages are not alike, "
        "and some would wait for others; choose other numbers, or pin num_virtual_stages"
    ),
)


def tensor_set_problems(architecture: Architecture, policy: str) -> list[str]:
    """Return the problems of a policy: tensors of a set that are no results of the model's layers, or a byte budget without a
    set."""
    if is_byte_budget(policy):
        return [
            f"recompute: {policy} asks for a set of tensors, which estimate, memory and plan choose; a set is required here"
        ]
    if not is_tensor_set(policy):
        return []
    results = {kind: result_names(architecture, kind) for kind in LAYER_UNITS if unit_counts(architecture).get(kind)}
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
