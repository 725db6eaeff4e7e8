"""Child process of `verify.xla_compile` that compiles products with XLA.

Requests come as JSON on standard input; the HLO of each goes to standard output. jax is imported inside the functions,
so that the parent process can import this module without it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

TPU_SHAPES = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # of v5e, by devices


def compile_requests() -> None:
    """Compile the requests on standard input, and write the text of their modules to standard output."""
    import jax  # not above: the parent imports this module, and jax may be missing there

    job = json.load(sys.stdin)
    texts = [_compile_request(request, job["backend"]) for request in job["requests"]]
    json.dump({"version": f"jax {jax.__version__}", "hlo": texts}, sys.stdout)


def _compile_request(request: Mapping[str, Any], backend: str) -> str:
    import jax  # as in `compile_requests`
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    names, sizes = zip(*request["mesh"], strict=True) if request["mesh"] else ((), ())
    mesh = jax.sharding.Mesh(_devices(sizes, backend), names)

    def sharding(axes: Sequence[Sequence[str]]) -> NamedSharding:
        spec: Any = PartitionSpec
        return NamedSharding(mesh, spec(*(tuple(group) or None for group in axes)))

    product = jax.jit(
        lambda *operands: jnp.einsum(request["product"], *operands),
        in_shardings=tuple(map(sharding, request["operands"])),
        out_shardings=None if request["result"] is None else sharding(request["result"]),
    )
    array: Any = jax.ShapeDtypeStruct
    operands = [array(tuple(shape), request["dtype"]) for shape in request["shapes"]]
    options = _TPU_OPTIONS if backend == "tpu" else None
    return module_text(product.lower(*operands).compile(compiler_options=options))


def module_text(compiled: Any) -> str:
    """Return the HLO of a module that jax compiled, with every constant in full.

    The text of jax itself leaves out constants of more than ten elements (`{...}`). The table of where each device's
    part starts, which tells a ReduceScatter from an AllReduce, has an element per device.
    """
    options = import_module("jaxlib._hlo").HloPrintOptions()  # jax gives out no name of its own for it
    options.print_large_constants = True
    return "\n\n".join(module.to_string(options) for module in compiled.runtime_executable().hlo_modules())


# Without these the TPU compiler unrolls collectives into loops of permutes, which say less about the choice.
_TPU_OPTIONS: Any = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    "xla_tpu_enable_async_collective_fusion": "false",
}

H100_DESCRIPTION = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3" """


def _devices(sizes: Sequence[int], backend: str) -> Any:
    """Return the first devices of the backend, or those of a described machine, as an array of the mesh's shape."""
    import jax  # as in `compile_requests`
    import numpy as np
    from jax.experimental import mesh_utils, topologies

    count = math.prod(sizes)
    devices = jax.devices()
    if backend == "gpu":
        shape = f"1x{count // 8}x8" if count % 8 == 0 else f"1x1x{count}"
        devices = list(
            topologies.get_topology_desc("h100", "cuda", topology=shape, target_config=H100_DESCRIPTION).devices
        )
    if backend == "tpu":
        devices = list(topologies.get_topology_desc(f"v5e:{TPU_SHAPES[count]}", platform="tpu").devices)
        return mesh_utils.create_device_mesh(tuple(sizes), devices, allow_split_physical_axes=True)
    return np.array(devices[:count]).reshape(sizes)


if __name__ == "__main__":
    compile_requests()
