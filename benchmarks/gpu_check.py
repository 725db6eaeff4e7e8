"""Everything that only a GPU can show, in one script: kernels, losses, training beside plain PyTorch, ladders,
benchmarks.

    make gpu-check               # all parts, on the first GPU: each at most 3 minutes, all at most 8
    python benchmarks/gpu_check.py --part train-1b --part ladder --out check.json
    python benchmarks/gpu_check.py --tiny            # the same script at sizes of a CPU, where its tests run it

It needs PyTorch from 2.9 on with its Triton and the package's own dependencies, and downloads nothing. Each part is a
process of its own: one that fails or takes too long is recorded, and the others go on. The results are one JSON file,
which `benchmarks/gpu/` keeps with date, card, versions and command.

At the end it says of each figure that a GPU must show whether it was reached, not reached, or not run. A part that would begin
after 8 minutes is not run, and is recorded so.

kernels: the tests of Triton's kernels on the GPU. captured: kernels and collectives of a step are those of the plan, and a
replayed CUDA graph gives the losses of issued steps. loss: cross-entropy with its gradient over logits in place, beside reading
and writing these once. losses: three steps of a small model on GPU and CPU. host-waits: a step
during which the host may not wait for the device. train-*: the engine's steps beside plain PyTorch (SDPA, fused AdamW,
torch.compile of each block and of the loss; fp32 weights under autocast, and bf16 weights), one after the other in one
process: seconds, tokens/s, MFU with causal attention counted half, peak memory, and the prediction. ladder: `shardwise
kernels`, and products: its ladders of products, of launches and of a layer against its batch. bench: `shardwise bench
all`, lines for `calibrate --bench`. machine: `shardwise bench machine`, the cluster file that it writes and whole steps
against it. fp8: products of FP8 and FP4 recipes beside bf16, and steps of four layers of a 3B model in those that this GPU's
tensor cores multiply. calibrate: a cluster fitted to what ladders measured. demo: the device that `make demo` chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PART_LIMIT_S, TOTAL_LIMIT_S = 180, 480
SCHEMA = "shardwise.gpu_check/1"
WARM_UPS, STEPS = 2, 5  # steps of each side before it is timed, and timed: four sides of a 3B model within the limit


@dataclass(frozen=True, slots=True)
class TrainingPart:
    """A model to train, its micro-batches and precision, and whether plain PyTorch trains it beside."""

    model: str
    micro_batch_seqs: int
    precision: str = "bf16"
    recompute: str = "none"
    beside_plain: bool = True
    num_micro_batches: int = 4
    seq_len: int = 4096


TRAINING: Mapping[str, TrainingPart] = {
    "train-1b": TrainingPart("llama-3.2-1b", 4),
    "train-3b": TrainingPart("llama-3.2-3b", 2, num_micro_batches=8),
    "train-3b-fp8": TrainingPart("llama-3.2-3b", 2, "fp8_torchao_rowwise", beside_plain=False, num_micro_batches=8),
    "train-moe": TrainingPart("olmoe-1b-7b", 8, recompute="full", beside_plain=False, num_micro_batches=2),
}


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def small(architecture: Any) -> Any:
    """A model with the structure of another at sizes of a CPU."""
    heads = min(architecture.num_heads, 4)
    return replace(
        architecture, num_layers=2, d_model=64, d_ff=96, num_heads=heads, num_kv_heads=min(architecture.num_kv_heads, heads),
        head_dim=16, vocab_size=384, num_experts=min(architecture.num_experts, 8),
        experts_per_token=min(architecture.experts_per_token, 2),
    )  # fmt: skip


def engine_step(architecture: Any, part: TrainingPart, where: str) -> Callable[[], float]:
    """Return a step of the engine on one device."""
    engine, batches, targets = build_engine(architecture, part, where)
    return lambda: float(engine.step(batches, targets, part.num_micro_batches, 0).loss)


def build_engine(architecture: Any, part: TrainingPart, where: str) -> tuple[Any, list[Any], int]:
    """Return an engine on one device, its micro-batches, and the number of their targets."""
    from shardwise.layout.layout import Layout
    from shardwise.run.engine.micro_batch import MicroBatch
    from shardwise.run.parallel.world import World
    from shardwise.run.recipe import TrainingRecipe
    from shardwise.run.trainer.engine_prediction import issue_policy
    from shardwise.run.trainer.training_engine import TrainingEngine
    from shardwise.step.rank_program import RankProgram
    from shardwise.values.precision import get_precision

    recipe = TrainingRecipe(steps=10**6, schedule="constant", learning_rate=1e-4)
    layout = Layout(micro_batch_seqs=part.micro_batch_seqs, recompute=part.recompute)
    instance = RankProgram(
        architecture=architecture, layout=layout, precision=get_precision(part.precision),
        policy=issue_policy(recipe, routed=architecture.num_experts > 0),
    )  # fmt: skip
    engine = TrainingEngine(instance, recipe, World(instance.mesh, where))
    engine.initialize(0)
    batches = [
        MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in token_ids(architecture, part, where)
    ]
    return engine, batches, part.num_micro_batches * part.micro_batch_seqs * part.seq_len


def token_ids(architecture: Any, part: TrainingPart, where: str) -> Any:
    import torch

    shape = (part.num_micro_batches, part.micro_batch_seqs, part.seq_len + 1)
    return torch.randint(architecture.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(where)


def plain_step(architecture: Any, part: TrainingPart, where: str, *, autocast: bool) -> Callable[[], float]:
    """Return a step of a decoder as one writes it in PyTorch, its blocks and its loss compiled."""
    import torch
    from plain_decoder import Decoder, rotary_tables, sum_of_losses

    model = Decoder(architecture).to(where, torch.float32 if autocast else torch.bfloat16)
    loss_of = sum_of_losses
    if where == "cuda":
        for block in model.blocks:
            block.compile()
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    cos, sin = rotary_tables(part.seq_len, architecture.head_dim, where)
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in token_ids(architecture, part, where)]
    targets = part.num_micro_batches * part.micro_batch_seqs * part.seq_len

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=where)
        for ids, labels in batches:
            with torch.autocast(where, torch.bfloat16, enabled=autocast):
                logits = model(ids, cos, sin)
            loss = loss_of(logits, labels) / targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(total)

    return step


def run_training(name: str, *, tiny: bool) -> dict[str, Any]:
    """Train by the engine and by plain PyTorch; return seconds, rates and memory of each, and the prediction."""
    from shardwise.model import load_model, model_flops_per_token
    from shardwise.run.kernels.attention_backends import chosen_backends

    part, where = TRAINING[name], device()
    architecture = load_model(part.model)
    if tiny:
        architecture, part = small(architecture), replace(part, seq_len=32, micro_batch_seqs=1, num_micro_batches=2)
    makers: dict[str, Callable[[], Callable[[], float]]] = {"shardwise": lambda: engine_step(architecture, part, where)}
    if part.beside_plain:
        makers |= {
            "plain, fp32 weights under autocast": lambda: plain_step(architecture, part, where, autocast=True),
            "plain, bf16 weights": lambda: plain_step(architecture, part, where, autocast=False),
        }
    # One after the other, since a GPU does not hold them side by side; the first again shows a drift of the clock.
    runs = [(side, measure_steps(make, where, tiny=tiny)) for side, make in makers.items()]
    runs += [("shardwise, again", measure_steps(makers["shardwise"], where, tiny=tiny))] if part.beside_plain else []
    tokens = part.num_micro_batches * part.micro_batch_seqs * part.seq_len
    peak_flops = peak_flops_per_s()
    flops = model_flops_per_token(architecture, part.seq_len) * tokens
    sides = {
        side: {
            **run, "tokens_per_s": tokens / run["seconds"],
            "mfu": flops / run["seconds"] / peak_flops if peak_flops else None,
        }
        for side, run in runs
    }  # fmt: skip
    prediction = None if tiny else predicted(part)
    return {
        "part": asdict(part),
        "chip": chip_name(),
        "predicted_s": prediction,
        "attention": chosen_backends(),
        "sides": sides,
    }


def measure_steps(make: Callable[[], Callable[[], float]], where: str, *, tiny: bool) -> dict[str, Any]:
    """Build a step, warm it up and time it; return seconds, losses and the peak memory of its process since it was built."""
    import torch

    if where == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make()
    losses = [step() for _ in range(WARM_UPS)]
    times = [timed(step) for _ in range(1 if tiny else STEPS)]
    peak = torch.cuda.max_memory_allocated() if where == "cuda" else None
    reserved = torch.cuda.max_memory_reserved() if where == "cuda" else None
    return {
        "seconds": statistics.median(times), "all_seconds": times, "losses": losses, "peak_bytes": peak,
        "reserved_bytes": reserved,
    }  # fmt: skip


def timed(step: Callable[[], float]) -> float:
    started = time.perf_counter()
    step()  # it returns the loss as a number, which waits for the device
    return time.perf_counter() - started


def chip_name() -> str | None:
    """Return the catalogue's name of this GPU, or None for one that it lacks."""
    import torch

    from shardwise.measure.microbenchmarks.machine_facts import match_chip

    if device() == "cpu":
        return None
    properties = torch.cuda.get_device_properties(0)
    return match_chip(properties.name, float(properties.total_memory))


def peak_flops_per_s() -> float | None:
    from shardwise.hardware import load_chip

    chip = chip_name()
    return load_chip(chip).peak("bf16") if chip else None


def predicted(part: TrainingPart, cluster: Any = None) -> float | None:
    """Return the planned step time on a cluster, or on this chip by published constants; None for an unknown chip."""
    import shardwise as sw

    chip = chip_name()
    if cluster is None and chip is None:
        return None
    cluster = cluster or sw.load_cluster(f"{chip}:1", stack="shardwise")
    batch = part.num_micro_batches * part.micro_batch_seqs * part.seq_len
    job = sw.Job(global_batch_tokens=batch, seq_len=part.seq_len, precision=part.precision)
    layout = sw.Layout(micro_batch_seqs=part.micro_batch_seqs, recompute=part.recompute)
    return float(sw.estimate(part.model, cluster, job, layout).step_time_s)


def run_losses(*, tiny: bool) -> dict[str, Any]:
    """Return losses of three steps of a small model in bf16 on this device, and on the CPU."""
    from shardwise.model import load_model

    part = TrainingPart("llama-3.2-1b", 2, seq_len=32 if tiny else 256, num_micro_batches=2)
    architecture = small(load_model(part.model))
    losses = {}
    for where in {device(), "cpu"}:
        step = engine_step(architecture, part, where)
        losses[where] = [step() for _ in range(3)]
    difference = max(abs(ours - cpu) for ours, cpu in zip(losses[device()], losses["cpu"], strict=True))
    if difference > 0.02:
        raise SystemExit(f"losses differ by {difference:.4f}: {losses}")
    return {"losses": losses, "largest_difference": difference}


def run_captured(*, tiny: bool) -> dict[str, Any]:
    """Compare what is run with what is planned: on all GPUs with sharded state, on a CPU in two processes."""
    import torch
    from gpu_capture import CapturedCase, capture

    from shardwise.layout import Layout
    from shardwise.model import load_model

    num_ranks = torch.cuda.device_count() if device() == "cuda" else 2
    layout = Layout(fsdp=num_ranks, zero_stage=2 if num_ranks > 1 else 3, micro_batch_seqs=2)
    case = CapturedCase(small(load_model("llama-3.2-1b")), layout, num_ranks, 32 if tiny else 512)
    result = capture(case, device())
    if not result["equal"]:
        raise SystemExit(f"what ran is not what was planned: {json.dumps(result)}")
    return result


def run_loss(*, tiny: bool) -> dict[str, Any]:
    """Time the loss with its gradient over logits in place (16,384 words of 128,256 in bf16), and a copy that reads and writes as
    much."""
    import torch

    from shardwise.measure.microbenchmarks.device_timers import device_timer
    from shardwise.measure.microbenchmarks.timing import make_copy, time_cold_kernel
    from shardwise.run.kernels.cross_entropy import cross_entropy

    where, (rows, words) = device(), (64, 512) if tiny else (16_384, 128_256)
    logits = torch.randn(rows, words, device=where, dtype=torch.bfloat16)
    targets = torch.randint(words, (rows,), device=where)
    timer = device_timer(where)
    loss = time_cold_kernel(lambda: cross_entropy(logits, targets, 1.0 / rows, None, replace=True), timer)
    copy = time_cold_kernel(make_copy(2 * logits.numel() * logits.element_size(), where), timer)
    return {"loss": asdict(loss), "copy": asdict(copy), "ratio": loss.seconds / copy.seconds}


def run_casts(*, tiny: bool) -> dict[str, Any]:
    """Time norms and gated activations that cast their results to MXFP8 in both orders, and the kernels with a cast behind each
    (16,384 tokens of Llama 3.2 3B's widths); their numbers are the same."""
    import torch

    from shardwise.measure.microbenchmarks.device_timers import device_timer
    from shardwise.measure.microbenchmarks.timing import time_cold_kernel
    from shardwise.run.kernels.activation_casts import OutputCast
    from shardwise.run.kernels.elementwise import FUNCTIONS, gated_forms, gated_gradient_forms, gated_gradients
    from shardwise.run.kernels.norms import NORMS
    from shardwise.values.dtypes import NUMBER_FORMATS
    from shardwise.values.scalings import SCALINGS

    where, (tokens, width, hidden) = device(), (128, 64, 96) if tiny else (16_384, 3072, 8192)
    cast = OutputCast(("rows", "columns"), NUMBER_FORMATS["e4m3"], SCALINGS["mx"].block, SCALINGS["mx"].kind)
    generator, norm, timer = torch.Generator().manual_seed(0), NORMS["rms_norm"], device_timer(where)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(where, torch.bfloat16)

    terms, weight = (random(1, tokens, width), random(1, tokens, width)), random(width)
    dy, gate, up = (random(1, tokens, hidden) for _ in range(3))
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "norm": (
            lambda: norm.forward_of_sum(terms, weight, 1e-5, cast)[1],
            lambda: cast.of(norm.forward_of_sum(terms, weight, 1e-5)[1][0]),
        ),
        "gated activation": (
            lambda: gated_forms("swiglu", cast, gate, up), lambda: cast.of(FUNCTIONS["swiglu"](gate, up))
        ),
        "its gradients": (
            lambda: gated_gradient_forms("swiglu", (cast, cast), dy, gate, up),
            lambda: tuple(form for result in gated_gradients("swiglu", dy, gate, up) for form in cast.of(result)),
        ),
    }  # fmt: skip
    seconds: dict[str, dict[str, float]] = {}
    for name, (in_kernel, behind) in ways.items():
        for computed, expected in zip(in_kernel(), behind(), strict=True):
            pairs = zip(computed.quantized.widen(), expected.quantized.widen(), strict=True)
            if not all(torch.equal(*pair) for pair in pairs):
                raise SystemExit(f"{name}: casts in the kernel are not those behind it")
        fused, apart = (time_cold_kernel(way, timer).seconds for way in (in_kernel, behind))
        seconds[name] = {"in_kernel": fused, "behind": apart, "ratio": fused / apart}
    total = {way: sum(times[way] for times in seconds.values()) for way in ("in_kernel", "behind")}
    return {"kernels": seconds, **total, "ratio": total["in_kernel"] / total["behind"]}


def run_fp8(*, tiny: bool) -> dict[str, Any]:
    """Compare recipes of narrow products with bf16: products of a layer, and steps of four layers where tensor cores run them."""
    from gpu_products import RECIPES, SIZES, TINY_SIZES, measure_products

    from shardwise.model import load_model
    from shardwise.run.kernels.tensor_cores import product_kernels

    where, part = device(), TrainingPart("llama-3.2-3b", 2, num_micro_batches=4, beside_plain=False)
    architecture = replace(load_model(part.model), num_layers=4, vocab_size=8192)  # products of blocks alone are narrow
    if tiny:
        architecture, part = small(architecture), replace(part, seq_len=32, micro_batch_seqs=1, num_micro_batches=2)

    def step(precision: str) -> dict[str, Any]:
        return measure_steps(
            lambda: engine_step(architecture, replace(part, precision=precision), where), where, tiny=tiny
        )

    plain, recipes = step("bf16"), {}
    for name in RECIPES:
        try:
            products = measure_products(name, where, TINY_SIZES if tiny else SIZES)
            recipes[name] = {"products": products}
            if tiny or all(product["on_tensor_cores"] for product in products.values()):
                recipes[name]["step"] = narrow = step(name)
                recipes[name]["gain"] = plain["seconds"] / narrow["seconds"]
        except (RuntimeError, ValueError, SystemExit) as error:  # of one recipe: the others go on
            recipes[name] = {"error": str(error)[:1000]}
    failed = [name for name, result in recipes.items() if "error" in result]
    if len(failed) == len(RECIPES):
        raise SystemExit(json.dumps(recipes))
    return {"bf16": plain, "recipes": recipes, "failed": failed, "product_kernels": product_kernels()}


def run_host_waits(*, tiny: bool) -> dict[str, Any]:
    """Run a step in which PyTorch refuses to wait for the device before the step ends, after one that chooses kernels."""
    import torch

    from shardwise.model import load_model

    part = TrainingPart("llama-3.2-1b", 2, seq_len=32 if tiny else 512, num_micro_batches=2)
    engine, batches, targets = build_engine(small(load_model(part.model)), part, device())
    engine.step(batches, targets, part.num_micro_batches, 0)
    read_outcome = engine._read_outcome

    def end(*arguments: Any) -> Any:
        set_sync_debug_mode("default")
        return read_outcome(*arguments)

    set_sync_debug_mode: Callable[[str], None] = (
        torch.cuda.set_sync_debug_mode if device() == "cuda" else lambda mode: None  # type: ignore[assignment]
    )
    engine._read_outcome = end
    set_sync_debug_mode("error")
    result = engine.step(batches, targets, part.num_micro_batches, 1)
    return {"loss": float(result.loss), "refused_to_wait": device() == "cuda"}


def run_tests(*, tiny: bool) -> dict[str, Any]:
    """Run the tests of Triton's kernels on the GPU; those that need the interpreter are left out."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if tiny else "0", "SHARDWISE_TEST_DEVICE": device()}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/train/test_triton_kernels.py"),
    ]
    command += ["-k", "scales or rotation"] if tiny else ["-k", "not traffic and not compile"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if finished.returncode:
        raise SystemExit(finished.stdout[-4000:] + finished.stderr[-1000:])
    return {"outcome": finished.stdout.strip().splitlines()[-1]}


def run_verb(*arguments: str) -> dict[str, Any]:
    """Return the payload of a verb."""
    command = [sys.executable, "-m", "shardwise", *arguments, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(finished.stderr[-2000:])
    payload: dict[str, Any] = json.loads(finished.stdout)
    return payload


LADDERS = ("elu", "divergence", "softmax", "norm", "gated-cast", "attention", "attention-gradient")
PRODUCT_LADDERS = ("product", "deep-product", "batched-product", "launches", "layer-batch", "int8-layer-batch")
CALIBRATING_LADDERS = ("product", "softmax", "attention", "attention-gradient")


def run_ladders(names: tuple[str, ...], *, tiny: bool) -> dict[str, Any]:
    """Return ladders of kernels: measured on a GPU, by their closed forms alone without one."""
    return run_verb("kernels", *names, "--device", "none" if tiny else "cuda", "--chip", chip_name() or "h100")


def run_machine(*, tiny: bool) -> dict[str, Any]:
    """Measure this machine, write its cluster file and read it; return the file and the seconds that measuring took."""
    from shardwise.hardware import load_cluster
    from shardwise.measure.microbenchmarks.benchmark_layers import MACHINE_SIZES, TINY
    from shardwise.measure.microbenchmarks.machine_benchmark import MachineRecord, measure_machine, write_cluster_file
    from shardwise.values import to_json

    sizes = MACHINE_SIZES[device()]
    if tiny:
        sample = replace(TINY, name="small", has_loss=True, dtype=sizes.dtype)
        sizes = replace(sizes, samples=(sample,), short_samples=(), copy_bytes=2**16)
    started = time.perf_counter()
    result = measure_machine(1, device(), sizes)
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        write_cluster_file(result, path)
        # Rates of a CPU's tiny products may be below what a cluster file takes.
        if not tiny and load_cluster(str(path)).calibration != result.calibration:
            raise SystemExit("the cluster file gives another calibration than the one written")
        text = path.read_text()
        predicted_s = None if tiny else predicted(TRAINING["train-1b"], load_cluster(str(path)))
    if seconds > 60.0 and not tiny:
        raise SystemExit(f"measuring took {seconds:.0f} s; 60 at most are required")
    return {
        "seconds": seconds,
        "machine": to_json(MachineRecord.of(result)),
        "cluster_file": text,
        "predicted_1b_s": predicted_s,
    }


def run_calibration(*, tiny: bool) -> dict[str, Any]:
    """Return a cluster of this GPU fitted to measured ladders; without a GPU to rungs at twice their rooflines."""
    chip = chip_name() or "h100"
    ladders = run_ladders(CALIBRATING_LADDERS, tiny=tiny)
    for rung in (rung for ladder in ladders["ladders"] if tiny for rung in ladder["rungs"]):
        rung["seconds"] = 2.0 * rung["roofline_s"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        path.write_text(json.dumps(ladders))
        return run_verb("calibrate", f"{chip}:1", "--stack", "shardwise", "--bench", str(path))


def run_demo_choice() -> dict[str, Any]:
    """Return the device that the demo chooses, and its commands."""
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    chosen = demo["choose_device"]()
    if chosen != device():
        raise SystemExit(f"the demo chose {chosen}; {device()} is required")
    return {"device": chosen, "commands": list(demo["commands"](chosen))}


PARTS: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "kernels": lambda tiny: run_tests(tiny=tiny),
    "captured": lambda tiny: run_captured(tiny=tiny),
    "loss": lambda tiny: run_loss(tiny=tiny),
    "losses": lambda tiny: run_losses(tiny=tiny),
    "host-waits": lambda tiny: run_host_waits(tiny=tiny),
    "casts": lambda tiny: run_casts(tiny=tiny),
    "fp8": lambda tiny: run_fp8(tiny=tiny),
    **{name: lambda tiny, name=name: run_training(name, tiny=tiny) for name in TRAINING},  # type: ignore[misc]
    "machine": lambda tiny: run_machine(tiny=tiny),
    "ladder": lambda tiny: run_ladders(LADDERS, tiny=tiny),
    "products": lambda tiny: run_ladders(PRODUCT_LADDERS, tiny=tiny),
    "bench": lambda tiny: run_verb("bench", "memory" if tiny else "all", "--device", "cpu" if tiny else "cuda"),
    "calibrate": lambda tiny: run_calibration(tiny=tiny),
    "demo": lambda tiny: run_demo_choice(),
}


def run_part(name: str, *, tiny: bool, limit_s: float) -> dict[str, Any]:
    """Run a part in a process of its own, and return its state, seconds and result."""
    started = time.perf_counter()
    if limit_s <= 0.0:
        return {"state": "not run", "seconds": 0.0, "error": f"the parts before it took {TOTAL_LIMIT_S} s"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--result", str(result), "--part", name, *(["--tiny"] if tiny else [])]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"state": "timeout", "seconds": time.perf_counter() - started}
        seconds = time.perf_counter() - started
        if finished.returncode:
            return {"state": "failed", "seconds": seconds, "error": (finished.stdout + finished.stderr)[-4000:]}
        return {"state": "ok", "seconds": seconds, "result": json.loads(result.read_text())}


def versions() -> dict[str, str]:
    names = ("torch", "triton", "shardwise")
    installed = {}
    for name in names:
        try:
            installed[name] = version(name)
        except ImportError:  # a checkout on the path, or a CPU without Triton
            installed[name] = "not installed"
    return installed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    parser.add_argument("--tiny", action="store_true", help="at sizes of a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    source = str(ROOT / "src")
    sys.path[:0] = [source, str(ROOT / "benchmarks")]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), source))
    )  # of verbs and tests
    if arguments.result:
        arguments.result.write_text(json.dumps(PARTS[arguments.part[0]](arguments.tiny)))
        return 0
    import torch

    if device() == "cpu" and not arguments.tiny:
        parser.error("PyTorch finds no GPU; --tiny runs the script on a CPU")
    card = torch.cuda.get_device_name() if device() == "cuda" else "CPU"
    record: dict[str, Any] = {
        "schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "card": card, "versions": versions(),
        "command": " ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]), "parts": {},
    }  # fmt: skip
    from gpu_verdicts import describe, judge, to_records

    started = time.perf_counter()
    for name in arguments.part or PARTS:
        left_s = TOTAL_LIMIT_S - (time.perf_counter() - started)
        record["parts"][name] = outcome = run_part(name, tiny=arguments.tiny, limit_s=min(PART_LIMIT_S, left_s))
        verdicts = judge(record["parts"], has_gpu=device() == "cuda")
        record |= {"seconds": time.perf_counter() - started, "verdicts": to_records(verdicts)}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name:<14} {outcome['state']:<8} {outcome['seconds']:6.1f} s", flush=True)
    print(f"{'all':<14} {'':<8} {record['seconds']:6.1f} s")
    print(*describe(verdicts), sep="\n")
    return int(any(outcome["state"] != "ok" for outcome in record["parts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
