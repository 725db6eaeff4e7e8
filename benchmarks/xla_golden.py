"""What the compilers of accelerators choose, kept as files, so that tests need neither the compilers nor the accelerators.

    python benchmarks/xla_golden.py products train-h100 train-v5e train-v5p

Needs jax 0.10.2 with jax-cuda12-plugin and jax-cuda12-pjrt 0.10.2 (installed with --no-deps; no GPU and no CUDA libraries) for
`products` and `train-h100`, libtpu 0.0.42.* (no TPU) for the others. Writes tests/crosscheck/golden/<name>.json.

`products`: S2's cases for eight H100. `train-*`: the peak memory of one device and the collectives of one step of Llama-3 8B with
ZeRO-3 over all devices: weights and gradients in bf16, master copy and moments in fp32, layers in a loop and all
rebuilt in the backward pass, attention in blocks of queries that are rebuilt too; one sequence of 2,048 tokens a device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.derive.sharded_einsum import shard_expression
from shardwise.model.load import load_model
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.verify import xla_compile, xla_worker
from shardwise.verify.hlo_program import HloProgram

GOLDEN = Path(__file__).parents[1] / "tests" / "crosscheck" / "golden"
MESH = {"X": 2, "Y": 4}
SIZES = {"I": 1024, "J": 2048, "K": 4096}
PRODUCTS = (
    "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]",
    "A[I, J_Y] * B[J, K] -> C[I, K]",
    "A[I, J_XY] * B[J, K] -> C[I, K]",
    "A[I, J_Y] * B[J_Y, K] -> C[I, K]",
    "A[I, J_XY] * B[J_XY, K] -> C[I, K]",
    "A[I, J_Y] * B[J_Y, K] -> C[I, K_Y]",
    "A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K_Y]",
    "A[I_Y, J] * B[J, K_Y] -> C[I_Y, K]",
    "A[I_X, J_Y] * B[J_X, K_Y] -> C[I_X, K_Y]",
    "A[I_X, J] * B[J_X, K_Y] -> C[I_X, K_Y]",
)
TRAIN = {"train-h100": ("gpu", "1x1x8", 8), "train-v5e": ("tpu", "v5e:4x4", 16), "train-v5p": ("tpu", "v5p:2x2x1", 4)}
MODEL, SEQ_LEN, QUERY_BLOCK = "llama-3-8b", 2048, 256


def versions() -> dict[str, str]:
    versions_by_package = {}
    for package in ("jax", "jaxlib", "jax-cuda12-pjrt", "libtpu"):
        try:
            versions_by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_by_package


def head(name: str, packages: Sequence[str]) -> dict[str, Any]:
    known = versions()
    return {
        "command": f"python benchmarks/xla_golden.py {name}",
        "versions": {package: known[package] for package in ("jax", "jaxlib", *packages)},
    }


def products(name: str) -> dict[str, Any]:
    """The H100 compiler's choice for each of the products."""
    cases = [shard_expression(parse_expression(text), Mesh.of(MESH), SIZES, "bf16") for text in PRODUCTS]
    reports = xla_compile.compile_products(cases, backend="gpu")
    rows = [
        {
            "expression": text,
            "collectives": [{"op": c.op, "axes": c.axes, "bytes": c.bytes} for c in report.collectives],
            "bytes_per_device": report.bytes_per_device,
            "flops_per_device": report.flops_per_device,
        }
        for text, report in zip(PRODUCTS, reports, strict=True)
    ]
    return head(name, ["jax-cuda12-pjrt"]) | {"mesh": MESH, "sizes": SIZES, "dtype": "bf16", "products": rows}


def train(name: str) -> dict[str, Any]:
    """Compile the step in a process of its own: what jax reads when it is imported depends on the target."""
    backend, topology, devices = TRAIN[name]
    environment = {**os.environ, **xla_compile._environment("gpu" if backend == "gpu" else "tpu", devices)}
    command = [sys.executable, __file__, "--compile", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    compiled = json.loads(done.stdout)
    setting = {"target": topology, "devices": devices, "model": MODEL, "seq_len": SEQ_LEN, "global_batch_seqs": devices}
    return head(name, ["libtpu" if backend == "tpu" else "jax-cuda12-pjrt"]) | setting | compiled


# The step


def shapes() -> dict[str, tuple[tuple[int, ...], int]]:
    """Every weight's shape, and the position of its D, over which ZeRO shards it."""
    m = load_model(MODEL)
    layers, d, f, n, k, h = m.num_layers, m.d_model, m.d_ff, m.num_heads, m.num_kv_heads, m.head_dim
    return {
        "embed": ((m.vocab_size, d), 1), "head": ((m.vocab_size, d), 1), "norm": ((d,), 0),
        "q": ((layers, d, n, h), 1), "k": ((layers, d, k, h), 1), "v": ((layers, d, k, h), 1), "o": ((layers, n, h, d), 3),
        "up": ((layers, d, f), 1), "gate": ((layers, d, f), 1), "down": ((layers, f, d), 2),
        "norm_attention": ((layers, d), 1), "norm_mlp": ((layers, d), 1),
    }  # fmt: skip


WHOLE = ("embed", "head", "norm")  # weights that are not stacked by layer


def compile_step(name: str) -> dict[str, Any]:
    """Peak memory and collectives of the compiled step. Runs in the process that `train` starts."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import NamedSharding, PartitionSpec

    backend, topology, count = TRAIN[name]
    jax.devices()
    if backend == "gpu":
        described_devices = topologies.get_topology_desc(
            "h100", "cuda", topology=topology, target_config=xla_worker.H100_DESCRIPTION
        ).devices
        grid = np.array(list(described_devices))
    else:
        described_devices = topologies.get_topology_desc(topology, platform="tpu").devices
        grid = mesh_utils.create_device_mesh((count,), list(described_devices), allow_split_physical_axes=True)
    mesh = jax.sharding.Mesh(grid, ("fsdp",))

    def sharding(ndim: int, position: int) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if i == position else None for i in range(ndim))))

    def state(dtype: Any) -> dict[str, Any]:
        return {w: jax.ShapeDtypeStruct(s, dtype, sharding=sharding(len(s), p)) for w, (s, p) in shapes().items()}

    fp32 = jnp.float32
    arguments = (state(jnp.bfloat16), state(fp32), state(fp32), state(fp32))
    tokens = jax.ShapeDtypeStruct((count, SEQ_LEN), jnp.int32, sharding=sharding(2, 0))
    step = jax.jit(
        lambda *inputs: train_step(sharding, *inputs),
        donate_argnums=(0, 1, 2, 3),
        out_shardings=tuple({w: a.sharding for w, a in part.items()} for part in arguments),
    )
    done = step.lower(*arguments, tokens).compile(
        compiler_options=xla_worker._TPU_OPTIONS if backend == "tpu" else None
    )
    memory = done.memory_analysis()
    return {
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": collectives_of(xla_worker.module_text(done)),
    }


def collectives_of(text: str) -> dict[str, dict[str, float]]:
    """How many collectives of each kind the step's text has, and the elements that a device receives: a loop's body once."""
    rows: dict[str, dict[str, float]] = {}
    for collective in HloProgram(text).collectives():
        row = rows.setdefault(collective.kind, {"count": 0, "received_elements": 0.0})
        row["count"] += 1
        row["received_elements"] += collective.received_elements
    return dict(sorted(rows.items()))


def train_step(sharding: Any, weights: Any, master: Any, first: Any, second: Any, tokens: Any) -> Any:
    """One step of AdamW on the mean loss of the batch."""
    import jax
    import jax.numpy as jnp

    gradients = jax.grad(lambda w: loss(sharding, w, tokens))(weights)
    g = {w: a.astype(jnp.float32) for w, a in gradients.items()}
    first = {w: 0.9 * first[w] + 0.1 * g[w] for w in g}
    second = {w: 0.95 * second[w] + 0.05 * g[w] * g[w] for w in g}
    master = {w: master[w] - 3e-4 * (first[w] / (jnp.sqrt(second[w]) + 1e-8) + 0.1 * master[w]) for w in g}
    return {w: a.astype(jnp.bfloat16) for w, a in master.items()}, master, first, second


def loss(sharding: Any, weights: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def gathered(array: Any) -> Any:
        return jax.lax.with_sharding_constraint(array, sharding(array.ndim, -1))

    def split(array: Any) -> Any:
        return jax.lax.with_sharding_constraint(array, sharding(array.ndim, 0))

    def layer(x_BTD: Any, layer_weights: Mapping[str, Any]) -> tuple[Any, None]:
        return split(block(x_BTD, {w: gathered(a) for w, a in layer_weights.items()})), None

    stacked = {w: a for w, a in weights.items() if w not in WHOLE}
    rebuilt = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    x_BTD, _ = jax.lax.scan(rebuilt, split(gathered(weights["embed"])[tokens]), stacked)
    y_BTD = normalised(x_BTD, gathered(weights["norm"]))
    logits_BTV = split(jnp.einsum("btd,vd->btv", y_BTD, gathered(weights["head"]))).astype(jnp.float32)
    targets_BT = jnp.roll(tokens, -1, axis=1)
    at_target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - at_target_BT)


def normalised(x: Any, weight: Any) -> Any:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight


def block(x_BTD: Any, w: Mapping[str, Any]) -> Any:
    """One layer of the decoder (the rotary embedding left out: it keeps nothing)."""
    import jax
    import jax.numpy as jnp

    y_BTD = normalised(x_BTD, w["norm_attention"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", y_BTD, w[name]) for name in "qkv")
    x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", attention(q, k, v), w["o"])
    y_BTD = normalised(x_BTD, w["norm_mlp"])
    up, gate = (jnp.einsum("btd,df->btf", y_BTD, w[name]) for name in ("up", "gate"))
    return x_BTD + jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, w["down"])


def attention(q_BTNH: Any, k_BSKH: Any, v_BSKH: Any) -> Any:
    """Causal attention, a block of queries at a time, each rebuilt in the backward pass: no T·S array is kept."""
    import jax
    import jax.numpy as jnp

    b, t, n, h = q_BTNH.shape
    groups, blocks = n // k_BSKH.shape[2], t // QUERY_BLOCK
    q = q_BTNH.reshape(b, blocks, QUERY_BLOCK, n // groups, groups, h).swapaxes(0, 1)

    @jax.checkpoint
    def attend_block(carry: None, item: Any) -> tuple[None, Any]:
        queries, number = item
        scores = jnp.einsum("bqkgh,bskh->bkgqs", queries, k_BSKH).astype(jnp.float32) * h**-0.5
        row = number * QUERY_BLOCK + jnp.arange(QUERY_BLOCK)
        masked = jnp.where(row[:, None] >= jnp.arange(t), scores, -1e30)
        return None, jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(masked).astype(queries.dtype), v_BSKH)

    _, out = jax.lax.scan(attend_block, None, (q, jnp.arange(blocks)))
    return out.swapaxes(0, 1).reshape(b, t, n, h)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(["products", *TRAIN]))
    parser.add_argument("--compile", choices=list(TRAIN), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        json.dump(compile_step(arguments.compile), sys.stdout)
    unknown = [name for name in arguments.names if name not in ("products", *TRAIN)]
    if unknown:
        parser.error(f"found {unknown[0]!r}; one of products, {', '.join(TRAIN)} is required")
    for name in arguments.names:
        recorded = products(name) if name == "products" else train(name)
        (GOLDEN / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{name}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
