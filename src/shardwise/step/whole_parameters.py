"""Names and shapes of a stored model: each whole parameter, and the biases of its routers. Loads no PyTorch."""

from shardwise.layout import Layout
from shardwise.model import MTP_UNITS, Architecture
from shardwise.step.parameters import Parameter, unit_paths
from shardwise.step.rank_program import RankProgram
from shardwise.values import get_precision


def balance_biases(architecture: Architecture) -> dict[str, str]:
    """Return the name of each router's balance bias, by the path of its unit."""
    routed = ("block", *MTP_UNITS) if architecture.num_experts else ()
    return {path: f"{path}.balance_bias" for path, kind in unit_paths(architecture) if kind in routed}


def single_device_instance(architecture: Architecture) -> RankProgram:
    """Return the program of the whole model on one device."""
    return RankProgram(architecture=architecture, layout=Layout(), precision=get_precision("fp32"))


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by its full name.

    >>> tiny = Architecture(name="tiny", num_layers=1, d_model=4, d_ff=6, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=7)
    >>> parameter_shapes(tiny)["layers.0.wq"]
    (1, 2, 2, 4)
    """
    program = single_device_instance(architecture)
    return {parameter.name: shape_of(parameter, architecture) for parameter in program.parameters}


def shape_of(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of a whole parameter."""
    return tuple(architecture.dims[dim] for dim in parameter.use.dims)
