"""How fast the trainer's step is beside what one would write by hand, and beside PyTorch's DistributedDataParallel.

    python benchmarks/train.py [--pairs 9] [--steps 3] [--dtype fp32] [--what one transformers ddp variants noise]

One process: the engine's step against a plain loop over a decoder with autograd (`tests/plain`: forward, backward,
clip_grad_norm_, fused AdamW, gradients set to None), against the same loop over `transformers`' Llama, and, for a model of
experts, against a plain loop over that. `compiled`: the engine with torch.compile against the decoder's layers with it. Two
processes: the engine's bucketed data parallelism against DistributedDataParallel (25 MiB buckets, gradients as views of them) in
a plain loop. Both sides run in turn in the same processes; a figure is the median over pairs of hand-written over engine time,
and the 80% range of the pairs: above 1 the engine is faster. Variants: the engine's own ways to reduce gradients against the
first of them, everything reduced after the backward pass. Noise: the engine's step against one that measures the gradient noise
scale, on one process whose micro-batches are the parts, and a run that measures every tenth step. Each part's gradient is read,
written and added once more, whatever its tokens: of longer micro-batches that is a smaller share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.optimizers.definition import get_optimizer
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import issue_policy
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import Precision, get_precision

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from plain import build, initialise  # the decoder that tests judge the engine by

REQUIRED = 0.98
MEASURING, MEASURED_EVERY = 0.99, 10  # measuring the noise scale every so many steps takes at most 1% of a run
MODEL = Architecture(
    name="benchmark", num_layers=6, d_model=384, d_ff=1024, num_heads=6, num_kv_heads=2, head_dim=64, vocab_size=4096
)
EXPERTS = replace(MODEL, name="experts", d_ff=512, num_experts=8, experts_per_token=2)
SEQ_LEN, SEQS, ACCUMULATION = 256, 2, 2  # sequences of a micro-batch on each process, micro-batches of a step
RECIPE = TrainingRecipe(steps=10**6, schedule="constant", learning_rate=1e-4)
FIELDS = get_optimizer("adamw").resolve_hyperparameters(RECIPE.optimizer)
WHAT = ("one", "experts", "compiled", "transformers", "ddp", "variants", "noise")
Step = Callable[[], float]


def micro_batches() -> list[MicroBatch]:
    ids = torch.randint(MODEL.vocab_size, (ACCUMULATION, SEQS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    return [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


VARIANTS: dict[str, dict[str, Any]] = {
    "as each parameter is ready": {"reduction": "per_parameter"},
    "in buckets as they are ready": {},
    "in buckets, in each micro-batch": {"reduce_each_micro_batch": True},
}


def engine_step(precision: Precision, num_processes: int, architecture: Architecture = MODEL, **choices: Any) -> Step:
    """The engine, data parallel; `choices` of its recipe."""
    recipe = replace(RECIPE, **choices)
    instance = RankProgram(
        architecture=architecture, layout=Layout(dp=num_processes, micro_batch_seqs=SEQS), precision=precision,
        policy=issue_policy(recipe, routed=architecture.num_experts > 0),
    )  # fmt: skip
    engine = TrainingEngine(instance, recipe, World(instance.mesh))
    engine.initialize(0)
    batches, targets = micro_batches(), num_processes * ACCUMULATION * SEQS * SEQ_LEN

    def step() -> float:
        result = engine.step(batches, targets, ACCUMULATION, 0)
        return float(result.loss) + 0.0 * float(result.norm)

    return step


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    kinds = [
        [parameter for parameter in model.parameters() if (parameter.dim() > 1) is matrix] for matrix in (True, False)
    ]
    return torch.optim.AdamW(
        [{"params": kinds[0], "weight_decay": FIELDS["weight_decay"]}, {"params": kinds[1], "weight_decay": 0.0}],
        lr=RECIPE.learning_rate, betas=(FIELDS["beta1"], FIELDS["beta2"]), eps=FIELDS["epsilon"], fused=True,
    )  # fmt: skip


def loop_step(
    model: torch.nn.Module, loss_of: Callable[[MicroBatch, int], torch.Tensor], batches: Sequence[MicroBatch] = ()
) -> Step:
    """What one writes by hand around a model; `loss_of` a micro-batch, and its number from 1."""
    optimizer, batches = optimizer_of(model), batches or micro_batches()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, batch in enumerate(batches, start=1):
            loss = loss_of(batch, number)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm or 1.0)
        optimizer.step()
        return total

    return step


def plain_step(
    dtype: torch.dtype, *, ddp: bool = False, architecture: Architecture = MODEL, compiled: bool = False
) -> Step:
    """A loop around the decoder with autograd, which DistributedDataParallel wraps where it is asked to."""
    model = build(architecture, dtype=dtype)
    initialise(model, 0)
    for layer in model.layers.values() if compiled else ():
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
    targets = ACCUMULATION * SEQS * SEQ_LEN  # DDP averages over processes

    def loss_of(batch: MicroBatch, number: int) -> torch.Tensor:
        if ddp:
            wrapped.require_backward_grad_sync = number == ACCUMULATION  # what its no_sync() sets
        output = wrapped(batch.ids_BT, batch.targets_BT, targets)
        loss: torch.Tensor = output.loss
        balance = output.auxiliary()
        return loss if balance is None else loss + RECIPE.balance_coefficient / ACCUMULATION * balance

    return loop_step(model, loss_of)


def transformers_step(dtype: torch.dtype) -> Step:
    """A loop around `transformers`' model of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=MODEL.vocab_size, hidden_size=MODEL.d_model, intermediate_size=MODEL.d_ff,
        num_hidden_layers=MODEL.num_layers, num_attention_heads=MODEL.num_heads, num_key_value_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)

    def loss_of(batch: MicroBatch, number: int) -> torch.Tensor:
        logits = model(input_ids=batch.ids_BT).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten()) / ACCUMULATION

    return loop_step(model, loss_of)


def timed(step: Step, num_steps: int) -> float:
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return time.perf_counter() - started


def paired(ours: Step, baseline: Step, pairs: int, num_steps: int) -> list[float]:
    """Ratios of the other's time to ours, in turn first and second; two steps of each are not counted."""
    for step in (ours, baseline):
        timed(step, 2)
    ratios = []
    for number in range(pairs):
        order = (ours, baseline) if number % 2 else (baseline, ours)
        seconds = {step: timed(step, num_steps) for step in order}
        ratios.append(seconds[baseline] / seconds[ours])
    return ratios


def report(name: str, ratios: list[float], required: float | None) -> bool:
    ratios = sorted(ratios)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    middle = statistics.median(ratios)
    limit = "" if required is None else f"  (at least {required}: {'met' if middle >= required else 'missed'})"
    print(f"{name:<58} {middle:.3f}  [{low:.3f}, {high:.3f}]{limit}", flush=True)
    return required is None or middle >= required


def on_rank(rank: int, folder: str, arguments: argparse.Namespace, queue: Any) -> None:
    """Whatever takes two processes; the first one hands over names and ratios, and at the end None."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    dtype, precision = DTYPES[arguments.dtype], precision_of(arguments.dtype)
    ours = engine_step(precision, 2)
    if "ddp" in arguments.what:
        ratios = paired(ours, plain_step(dtype, ddp=True), arguments.pairs, arguments.steps)
        queue.put(("two processes, DistributedDataParallel", ratios, REQUIRED)) if rank == 0 else None
    if "variants" in arguments.what:
        after = engine_step(precision, 2, reduction="after")
        for name, choices in VARIANTS.items():
            ratios = paired(engine_step(precision, 2, **choices), after, arguments.pairs, arguments.steps)
            queue.put((f"two processes, reduced {name}", ratios, None)) if rank == 0 else None
    queue.put(None) if rank == 0 else None
    dist.barrier()
    dist.destroy_process_group()


def precision_of(dtype: str) -> Precision:
    """Weights and state in one format: a plain loop has no master copy."""
    return get_precision("fp32") if dtype == "fp32" else Precision(
        name="bf16", weights="bf16", gradients="bf16", master=None, moments="bf16"
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dtype, precision = DTYPES[arguments.dtype], precision_of(arguments.dtype)
    good = True
    if "one" in arguments.what:
        ours = engine_step(precision, 1)
        ratios = paired(ours, plain_step(dtype), arguments.pairs, arguments.steps)
        good &= report("one process, a plain loop", ratios, REQUIRED)
    if "experts" in arguments.what:
        ours, baseline = engine_step(precision, 1, EXPERTS), plain_step(dtype, architecture=EXPERTS)
        good &= report(
            "one process, experts, a plain loop", paired(ours, baseline, arguments.pairs, arguments.steps), REQUIRED
        )
    if "compiled" in arguments.what:
        ours, baseline = engine_step(precision, 1), plain_step(dtype, compiled=True)
        report(
            "one process, a plain loop that is compiled", paired(ours, baseline, arguments.pairs, arguments.steps), None
        )
    if "transformers" in arguments.what:
        ratios = paired(engine_step(precision, 1), transformers_step(dtype), arguments.pairs, arguments.steps)
        report("one process, a plain loop over transformers' Llama", ratios, None)
    if "noise" in arguments.what:
        measuring, step = (engine_step(precision, 1, noise_scale_every=every) for every in (1, 0))
        ratios = paired(measuring, step, arguments.pairs, arguments.steps)
        report("one process, a step that does not measure the noise scale", ratios, None)
        rarely = [1.0 / (1.0 + (1.0 / ratio - 1.0) / MEASURED_EVERY) for ratio in ratios]
        good &= report(f"the same, measuring every {MEASURED_EVERY} steps", rarely, MEASURING)
    if {"ddp", "variants"} & set(arguments.what):
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").SimpleQueue()
            ranks = mp.spawn(on_rank, (folder, arguments, queue), nprocs=2, join=False)
            for name, ratios, required in iter(queue.get, None):
                good &= report(name, ratios, required)
            ranks.join()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
