"""Rules of a model, a job and a cluster for a layout. Each states its requirement and the fix; searches apply the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.layout.context_parallel import Variant, variant_names, variant_of
from shardwise.layout.degrees import Degrees, num_micro_batches, seqs_per_replica
from shardwise.layout.layers_per_stage import MOST_EMPTY, are_alike
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, results, unit_counts
from shardwise.model.job import Job
from shardwise.model.recompute_policies import is_budget, is_set, kept_tensors
from shardwise.pipeline.registry import natural_schedule, schedule_of
from shardwise.values.elementwise import Value, maximum
from shardwise.values.errors import unknown


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: `legal` takes the degrees (numbers or arrays); `explain` says for one layout what is wrong and the fix."""

    name: str
    legal: Callable[[Architecture, Job, int, Degrees], Value]
    explain: Callable[[Architecture, Job, int, Degrees], str]


def _tp_kv_divides(architecture: Architecture, tp: Value) -> Value:
    heads, kv = architecture.num_heads, architecture.num_kv_heads
    # tp divides the key-value heads, or is a multiple of them that divides the query heads
    return (heads % tp == 0) & ((kv % tp == 0) | (tp % kv == 0))


def _possible_tp(architecture: Architecture) -> str:
    """Degrees of tp that divide heads and hidden width."""
    heads = architecture.num_heads
    possible = (
        n
        for n in range(1, heads + 1)
        if _tp_kv_divides(architecture, n) and all(width % n == 0 for width in _hidden_widths(architecture))
    )
    return ", ".join(map(str, possible))


def _hidden_widths(architecture: Architecture) -> tuple[int, ...]:
    """Hidden widths that tp splits: of the MLP or of an expert, of the shared expert, of the leading dense layers."""
    widths = (architecture.d_ff, architecture.shared_expert_width, architecture.dense_d_ff)
    return tuple(width for width in widths if width)


def _divides_widths(architecture: Architecture, tp: Value) -> Value:
    legal: Value = True
    for width in _hidden_widths(architecture):
        legal = legal & (width % tp == 0)
    return legal


def _pieces(degrees: Degrees) -> int:
    """Pieces of the sequence that a rank along cp takes: one in a plain ring, else one from either end."""
    return _variant(degrees).pieces


def _variant(degrees: Degrees) -> Variant:
    """The variant with this index among the choices."""
    return variant_of(variant_names()[degrees["cp_variant"]])


def _borrows_evenly(degrees: Degrees) -> Value:
    """Expert parallelism takes whole parts of fsdp; with whole experts it takes all of tp first."""
    taken = degrees["ep"] * degrees["etp"]
    borrowed = maximum(taken // degrees["tp"], 1)
    return (taken % degrees["tp"] == 0) & (degrees["fsdp"] % borrowed == 0)


def _possible_ep(architecture: Architecture, degrees: Degrees) -> str:
    """Degrees of ep that divide both the experts and the axes that they are taken from."""
    most = degrees["fsdp"] * degrees["tp"] // degrees["etp"]
    fitting = (n for n in range(1, most + 1) if most % n == 0 and architecture.num_experts % n == 0)
    return ", ".join(str(n) for n in fitting if _borrows_evenly({**degrees, "ep": n})) or "none"


def no_experts(architecture: Architecture, ep: Value) -> str:
    """What is wrong with a degree of ep, or with an etp, for a dense model."""
    return f"{architecture.name} has no experts for ep = {ep} or an etp to split; leave both out"


def _takes_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Whether a schedule can run with so many micro-batches; from both ends each device has two stages."""
    schedule, pp, number = schedule_of(degrees["schedule"]), degrees["pp"], num_micro_batches(job, degrees)
    stages = pp, degrees["num_virtual_stages"]
    even = pp % 2 == 0 if schedule.both_ends else True
    return (number >= schedule.fewest(*stages)) & (number % schedule.multiple(*stages) == 0) & even


def _micro_batches_of(job: Job, degrees: Degrees) -> str:
    """A schedule's requirement on micro-batches, and the number found."""
    schedule, pp, virtual = degrees["schedule"], degrees["pp"], degrees["num_virtual_stages"]
    form = schedule_of(schedule)
    fewest, multiple = form.fewest(pp, virtual), form.multiple(pp, virtual)
    wanted = f"at least {fewest} micro-batches" if fewest > 1 else "micro-batches"
    wanted += f" in multiples of {multiple}" * (multiple > 1) + " and an even pp" * form.both_ends
    change = " num_virtual_stages=1" if virtual > 1 else ""
    return (
        f"{schedule} requires {wanted}; there are {num_micro_batches(job, degrees)} for pp = {pp}; change "
        f"micro_batch_seqs or pp, or set schedule={natural_schedule(pp, 1)}{change}"
    )


def _fitting_virtual_stages(degrees: Degrees) -> str:
    """The smallest number of virtual stages that a schedule allows; empty where there is none."""
    goes_with, pp = schedule_of(degrees["schedule"]).goes_with, degrees["pp"]
    fewest = next((virtual for virtual in (1, 2) if goes_with(pp, virtual)), None)
    return f", or num_virtual_stages={fewest}" if fewest else ""


def _fill(num_devices: int, degrees: Degrees) -> str:
    """The degree of fsdp that would use all devices, if there is one."""
    others = degrees["dp"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    if num_devices % others == 0:
        return f"with the other degrees as they are, fsdp = {num_devices // others} would fill it"
    return f"dp·tp·cp·pp = {others} must divide {num_devices}; change one of them, then fsdp takes the rest"


RULES: tuple[Rule, ...] = (
    Rule(
        "devices",
        lambda a, j, n, d: d["dp"] * d["fsdp"] * d["tp"] * d["cp"] * d["pp"] == n,
        lambda a, j, n, d: (
            f"dp·fsdp·tp·cp·pp = {d['dp'] * d['fsdp'] * d['tp'] * d['cp'] * d['pp']} "
            f"but the cluster has {n} devices; {_fill(n, d)}"
        ),
    ),
    Rule(
        "heads_by_tp",
        lambda a, j, n, d: _tp_kv_divides(a, d["tp"]),
        lambda a, j, n, d: (
            f"tp = {d['tp']} does not split the {a.num_heads} query heads ({a.num_kv_heads} key-value heads) evenly; "
            f"tp may be one of {_possible_tp(a)}"
        ),
    ),
    Rule(
        "d_ff_by_tp",
        lambda a, j, n, d: _divides_widths(a, d["tp"]),
        lambda a, j, n, d: (
            f"tp = {d['tp']} does not divide the hidden width F = {' or '.join(map(str, _hidden_widths(a)))}; "
            f"tp may be one of {_possible_tp(a)}"
        ),
    ),
    Rule(
        "experts",
        lambda a, j, n, d: (
            ((d["ep"] == 1) & (d["etp"] == d["tp"]))
            | (_borrows_evenly(d) & (a.num_experts % d["ep"] == 0) & bool(a.num_experts))
        ),
        lambda a, j, n, d: (
            f"ep = {d['ep']} splits the {a.num_experts} experts of {a.name} and is borrowed from fsdp = {d['fsdp']}"
            + (f" and tp = {d['tp']}, as experts are whole (etp = 1); " if d["etp"] != d["tp"] else "; ")
            + f"ep may be one of {_possible_ep(a, d)}"
            if a.num_experts
            else no_experts(a, d["ep"])
        ),
    ),
    Rule(
        "sequence_by_cp",
        lambda a, j, n, d: (d["cp"] == 1) | (j.seq_len % (_pieces(d) * d["cp"]) == 0),
        lambda a, j, n, d: (
            f"{_pieces(d)}·cp = {_pieces(d) * d['cp']} does not divide the sequence of {j.seq_len} "
            + (
                "(each rank takes a piece from either end, so that causal attention is even); choose a cp that divides half "
                "the sequence"
                if _pieces(d) == 2
                else "into a piece for each rank; choose a cp that does"
            )
        ),
    ),
    Rule(
        "cp_variant",
        lambda a, j, n, d: (d["cp_variant"] == 0) | (d["cp"] > 1),
        lambda a, j, n, d: (
            f"cp_variant = {variant_names()[d['cp_variant']]} is a way to split sequences over cp, which is 1; leave it out, or "
            "give a cp"
        ),
    ),
    Rule(
        "heads_by_cp",
        lambda a, j, n, d: (not _variant(d).exchanges_heads) | (a.num_kv_heads % (d["tp"] * d["cp"]) == 0),
        lambda a, j, n, d: (
            f"{variant_names()[d['cp_variant']]} splits the {a.num_kv_heads} key-value heads over tp·cp = {d['tp'] * d['cp']}, "
            "which does not divide them; choose other degrees, or cp_variant=zigzag"
        ),
    ),
    Rule(
        "async_tp",
        lambda a, j, n, d: (d["async_tp"] == 0) | ((d["tp"] > 1) & (d["sequence_parallel"] == 1)),
        lambda a, j, n, d: (
            f"async_tp needs tp > 1 and sequence_parallel=true, found tp = {d['tp']} and sequence_parallel = "
            f"{str(bool(d['sequence_parallel'])).lower()}; set async_tp=false or change them"
        ),
    ),
    Rule(
        "sequence_by_tp",
        lambda a, j, n, d: (d["sequence_parallel"] == 0) | (j.seq_len % (d["cp"] * d["tp"]) == 0),
        lambda a, j, n, d: (
            f"sequence parallelism splits {j.seq_len} positions over cp·tp = {d['cp'] * d['tp']}, which does not divide them; "
            "set sequence_parallel=false or choose other degrees"
        ),
    ),
    Rule(
        "stages",
        lambda a, j, n, d: d["pp"] * d["num_virtual_stages"] <= a.num_layers + MOST_EMPTY * (d["pp"] > 1),
        lambda a, j, n, d: (
            f"pp·num_virtual_stages = {d['pp'] * d['num_virtual_stages']} stages for {a.num_layers} blocks; "
            f"at most one stage for each block, and {MOST_EMPTY} for the embedding and the head alone, are possible"
        ),
    ),
    Rule(
        "virtual_stages",
        lambda a, j, n, d: (d["num_virtual_stages"] == 1) | (d["pp"] > 1),
        lambda a, j, n, d: (
            f"num_virtual_stages = {d['num_virtual_stages']} needs pp > 1; set num_virtual_stages=1, or give a pp"
        ),
    ),
    Rule(
        "micro_batch",
        lambda a, j, n, d: d["micro_batch_seqs"] <= seqs_per_replica(j, d),
        lambda a, j, n, d: (
            f"micro_batch_seqs = {d['micro_batch_seqs']} but a replica gets {seqs_per_replica(j, d)} sequences at most "
            f"({j.num_seqs} over dp·fsdp = {d['dp'] * d['fsdp']}); set it to {seqs_per_replica(j, d)} or less"
        ),
    ),
    Rule(
        "zero_axes",
        lambda a, j, n, d: (
            ((d["zero_stage"] > 0) | (d["fsdp"] == 1)) & ((d["zero_stage"] == 0) | (d["fsdp"] * d["cp"] > 1))
        ),
        lambda a, j, n, d: (
            f"zero_stage = {d['zero_stage']} with fsdp·cp = {d['fsdp'] * d['cp']}: ZeRO shards over fsdp and cp, and fsdp is for "
            "nothing else; use dp for replicas, or a zero_stage of 1 to 3 with fsdp > 1"
        ),
    ),
    Rule(
        "sequence_parallel_axis",
        lambda a, j, n, d: (d["sequence_parallel"] == 0) | (d["tp"] > 1),
        lambda a, j, n, d: "sequence_parallel splits over tp, which is 1; set sequence_parallel=false",
    ),
    Rule(
        "schedule",
        lambda a, j, n, d: schedule_of(d["schedule"]).goes_with(d["pp"], d["num_virtual_stages"]),
        lambda a, j, n, d: (
            f"{d['schedule']!r} with pp = {d['pp']} and num_virtual_stages = {d['num_virtual_stages']}; "
            f"{natural_schedule(d['pp'], d['num_virtual_stages'])!r} is required{_fitting_virtual_stages(d)}"
        ),
    ),
    Rule(
        "schedule_batch",
        lambda a, j, n, d: _takes_micro_batches(j, d),
        lambda a, j, n, d: _micro_batches_of(j, d),
    ),
)


# Asked for by `plan --divisible`; without it an uneven batch is legal and priced at the fullest replica.
EVEN_BATCH = Rule(
    "even_batch",
    lambda a, j, n, d: j.num_seqs % (d["dp"] * d["fsdp"] * d["micro_batch_seqs"]) == 0,
    lambda a, j, n, d: (
        f"dp·fsdp·micro_batch_seqs = {d['dp'] * d['fsdp'] * d['micro_batch_seqs']} does not divide the {j.num_seqs} sequences of "
        "a batch; choose other degrees, or leave out --divisible"
    ),
)


# Asked of a search that may choose among virtual stages; others are legal, and what they add is priced
# (`pipeline.uneven_stages`).
ALIKE_STAGES = Rule(
    "alike_stages",
    lambda a, j, n, d: are_alike(a, d["pp"], d["num_virtual_stages"]),
    lambda a, j, n, d: (
        f"{a.num_layers} layers over pp·num_virtual_stages = {d['pp'] * d['num_virtual_stages']} virtual stages are not alike, "
        "and some would wait for others; choose other numbers, or pin num_virtual_stages"
    ),
)


def wrong_set(architecture: Architecture, policy: str) -> list[str]:
    """What is wrong with a set of tensors to keep, which all have to be results of a model's layers; and with a budget, for which
    a set has not been chosen."""
    if is_budget(policy):
        return [
            f"recompute: {policy} asks for a set of tensors, which estimate, memory and plan choose; a set is required here"
        ]
    if not is_set(policy):
        return []
    made = {kind: results(architecture, kind) for kind in LAYERS if unit_counts(architecture).get(kind)}
    every = dict.fromkeys(name for names in made.values() for name in names)
    found = []
    for kind, tensors in kept_tensors(policy).items():
        if kind and kind not in made:
            found.append(
                f"recompute: {architecture.name} has no layers of kind {kind!r}; one of {', '.join(made)} is required"
            )
            continue
        known = made[kind] if kind else tuple(every)
        found += [f"recompute: {unknown(name, known)}" for name in tensors if name not in known]
    return found
