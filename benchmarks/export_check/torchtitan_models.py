"""Models of the catalogue, and all flavors of its registries, as torchtitan builds them of exported options.

    PYTHONPATH=src python benchmarks/export_check/torchtitan_models.py [--release torchtitan-toml] [MODEL...]

The flavor that a launch names is built on the meta device: names and shapes of its tensors are those of our table (of flavors
that the table lacks: the number of parameters), and norms, rotary angles, the scale of scores and the router are what reading the
options says. What differs from the catalogue's model is what the export lists. Prints a line for each; status 1 where anything
differs. Needs torchtitan (0.3.0, or 0.2.2 for torchtitan-toml) and what its models import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from model_verdicts import (
    NOT_EXPORTED,
    ModelVerdict,
    compare_shapes,
    describe_problems,
    model_arguments,
    print_verdicts,
)

from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.frameworks.torchtitan.models import list_flavors, torchtitan_model
from shardwise.interop.launches.launch import Launch, Machines, launch_from_fields
from shardwise.interop.launches.target import OptionReader
from shardwise.interop.launches.translate_launch import from_options, refusals, to_options
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, load_model, model_names, num_params
from shardwise.model.parameters_and_flops import num_mtp_params
from shardwise.values import InputError

TABLES = {"torchtitan": "torchtitan_models", "torchtitan-toml": "torchtitan_toml_models"}
NUM_ANGLES = 16  # positions whose angles are compared
TOLERANCE = 2e-5  # theirs are computed in float32
SEQ_LEN = 8192  # beyond the 4,096 positions from which release 0.2.2 scales angles


class BuiltModel(dataclasses.make_dataclass("BuiltModel", ["module", "attention", "config", "angles", "router"])):  # type: ignore
    """A model on the meta device: its module, an attention layer, its configuration, cos and sin by position, and its router."""


def build_flavor(name: str, flavor: str) -> BuiltModel:
    """Return a flavor of 0.3.0, built on the meta device."""
    import torch

    config = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor).model
    with torch.device("meta"):
        module = config.build()
    layers = list(module.layers.values())
    rope = dataclasses.replace(layers[0].attention.rope.config, max_seq_len=NUM_ANGLES)
    cache = type(layers[0].attention.rope)(rope).cache
    router = layers[-1].moe.router if getattr(layers[-1], "moe", None) is not None else None
    return BuiltModel(module, layers[0].attention, config, cosines_and_sines(cache), router)


def build_toml_flavor(name: str, flavor: str) -> BuiltModel:
    """Return a flavor of 0.2.2, built on the meta device for sequences of `SEQ_LEN`."""
    import torch

    spec = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
    config = dataclasses.replace(spec.model_args[flavor], max_seq_len=SEQ_LEN)
    config.moe_impl = "standard"  # update_from_config
    with torch.device("meta"):
        module = spec.model_cls(config)
    layers = list(module.layers.values())
    cache_of = getattr(module, "_precompute_freqs_cis", None) or getattr(module, "_precompute_rope_cache", None)
    cache = cache_of() if cache_of else sys.modules[type(module).__module__].precompute_freqs_cis(config)
    router = layers[-1].moe.router if getattr(layers[-1], "moe", None) is not None else None
    return BuiltModel(module, layers[0].attention, config, cosines_and_sines(cache), router)


def cosines_and_sines(cache: Any) -> tuple[Any, Any]:
    """Return cos and sin of positions and pairs from torchtitan's cache: complex numbers, or both halves of cos and of sin."""
    if cache.is_complex():
        return cache.real[:NUM_ANGLES].double(), cache.imag[:NUM_ANGLES].double()
    rows = cache.reshape(-1, cache.shape[-1])[:NUM_ANGLES].double()
    pairs = rows.shape[-1] // 4
    return rows[:, :pairs], rows[:, 2 * pairs : 3 * pairs]


def model_problems(model: Architecture, built: BuiltModel) -> Iterator[str]:
    """Yield how a built flavor differs from what its options say."""
    yield from _tensor_problems(model, built)
    yield from _norm_problems(model, built)
    yield from _rotary_problems(model, built)
    if model.num_experts:
        yield from _router_problems(model, built.router)


def _tensor_problems(model: Architecture, built: BuiltModel) -> Iterator[str]:
    from shardwise.interop.weights.stored_slices import list_slices

    theirs = {name: tuple(tensor.shape) for name, tensor in built.module.state_dict().items()}
    parameters = sum(parameter.numel() for parameter in built.module.parameters())
    if parameters != num_params(model) + num_mtp_params(model):
        yield f"{parameters - num_params(model) - num_mtp_params(model):+,} parameters to here"
    try:
        table = torchtitan_model(model).weight_table
    except InputError:
        return
    buffers = {
        name for name in theirs if name.rpartition(".")[2] in ("tokens_per_expert_E", "tokens_per_expert", "freqs_cis")
    }
    if get_chosen_release() == "torchtitan":  # the table is of its names
        entries = list_slices(model, table)
        ours = {entry.name: tuple(entry.tensor_shape) for entry in entries}
        yield from compare_shapes(ours, {name: shape for name, shape in theirs.items() if name not in buffers})


def _norm_problems(model: Architecture, built: BuiltModel) -> Iterator[str]:
    epsilons = {module.eps for module in built.module.modules() if type(module).__name__ == "RMSNorm"}
    if get_chosen_release() == "torchtitan-toml" and model.kv_lora_rank:
        epsilons.discard(None)  # of latents, as the export's README says
    if epsilons != {model.numerics.norm_epsilon}:
        yield f"norms have epsilon {epsilons} for {model.numerics.norm_epsilon}"


def _rotary_problems(model: Architecture, built: BuiltModel) -> Iterator[str]:
    """Yield other angles, and another scale of scores: with the magnitude of cos and sin, which counts twice."""
    import torch

    from shardwise.run.kernels.positions_and_masks import frequencies

    numerics, width = model.numerics, model.rope_head_dim or model.head_dim
    angles = torch.arange(NUM_ANGLES)[:, None] * frequencies(width, numerics.rotary, torch.float64, torch.device("cpu"))
    cos, sin = built.angles
    magnitude = float((cos**2 + sin**2).mean().sqrt())
    pairs = ((cos, angles.cos()), (sin, angles.sin()))
    if cos.shape != angles.shape or any(
        not torch.allclose(theirs / magnitude, ours, atol=TOLERANCE, rtol=0) for theirs, ours in pairs
    ):
        yield "other rotary angles"
    scale = (numerics.attention_scale or model.head_dim**-0.5) * numerics.rotary.amplitude**2
    theirs = (getattr(built.attention, "softmax_scale", None) or model.head_dim**-0.5) * magnitude**2
    if not math.isclose(scale, theirs, rel_tol=1e-5):
        yield f"scores are multiplied by {theirs} for {scale}"


def _router_problems(model: Architecture, router: Any) -> Iterator[str]:
    gating = model.numerics.gating
    expected = {
        "top_k": model.experts_per_token, "score_func": gating.scores, "route_norm": model.numerics.normalised_gates,
        "route_scale": gating.scale, "num_expert_groups": gating.groups if gating.groups > 1 else None,
        "num_limited_groups": gating.chosen_groups if gating.groups > 1 else None,
    }  # fmt: skip
    for name, value in expected.items():
        theirs = getattr(router, name)
        if theirs != value:
            yield f"router: {name} is {theirs!r} for {value!r}"


_release: list[str] = ["torchtitan"]


def get_chosen_release() -> str:
    """Return the target whose models are built."""
    return _release[0]


def flavor_verdict(label: str) -> ModelVerdict:
    """Return the verdict on a flavor, NAME FLAVOR."""
    name, flavor = label.split(" ")
    entry = next(entry for entry in list_flavors(TABLES[get_chosen_release()]) if entry[:2] == (name, flavor))
    job = {"job.seq_len": SEQ_LEN, "job.global_batch_seqs": 1}
    machines = Machines(num_devices=1, devices_per_node=1)
    return _judge(launch_from_fields({**entry.fields, **job}, machines).model, name, flavor)


def _judge(model: Architecture, name: str, flavor: str) -> ModelVerdict:
    build = build_flavor if get_chosen_release() == "torchtitan" else build_toml_flavor
    with contextlib.redirect_stdout(io.StringIO()):
        problems = list(model_problems(model, build(name, flavor)))
    return describe_problems(
        problems, f"{name} {flavor}: {num_params(model):,} parameters, tensors and constants as here"
    )


def verdict(name: str) -> ModelVerdict:
    """Return the verdict on a model of the catalogue: on the flavor that its launch names."""
    model, target = load_model(name), get_target(get_chosen_release())
    if get_chosen_release() == "torchtitan-toml" and model.num_predict_layers:
        model = dataclasses.replace(model, num_predict_layers=0)
    job = Job(global_batch_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, precision="bf16_fp32_reduction")
    machines = Machines(num_devices=1, devices_per_node=1)
    launch = Launch(model=model, job=job, layout=Layout(), machines=machines)
    reasons = refusals(launch, target)
    if reasons:
        return ModelVerdict(NOT_EXPORTED, f"not exported: {reasons[0][:80]}")
    options = to_options(target, launch)
    read = launch_from_fields(from_options(target, OptionReader(options, machines)), machines).model
    read = dataclasses.replace(read, num_predict_layers=0)  # which the registry takes as an argument
    return _judge(read, options["model.name"], options["model.flavor"])


def main() -> int:
    parser = model_arguments(__doc__)
    parser.add_argument("--release", choices=TABLES, default="torchtitan", help="the target (default: torchtitan)")
    options = parser.parse_args()
    _release[0] = options.release
    del sys.path[0]  # this folder, whose files have the frameworks' names
    warnings.simplefilter("ignore")
    if options.models:
        return print_verdicts((options.models, verdict))
    flavors = [f"{entry.name} {entry.flavor}" for entry in list_flavors(TABLES[options.release])]
    return print_verdicts((model_names(), verdict), (flavors, flavor_verdict))


if __name__ == "__main__":
    sys.exit(main())
