"""Sizes at which the operations of a model are measured, with derived FLOPs and bytes. No torch here.

Letters: B sequences of T tokens, D, F, V as in model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.hardware import load_cluster
from shardwise.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model import Architecture, Job, Role
from shardwise.price import Pricing, Problem
from shardwise.price.estimate import estimate
from shardwise.step import Kernel

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
EXPERT_ROWS = 128
MODEL_LAYERS = 4  # of the model whose step the constants are checked against
MATMUL_FORMS = ("forward", "data", "weight")  # x·W, dy·W transposed, x transposed·dy


class MatmulShape(NamedTuple):
    """A product of a layer's weight [out, width] with `rows` tokens, in one of `MATMUL_FORMS`."""

    name: str
    form: str
    rows: int
    width: int
    out: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.width * self.out

    @property
    def summed(self) -> int:
        """Size of the dim that the product sums over."""
        return {"forward": self.width, "data": self.out, "weight": self.rows}[self.form]


@dataclass(frozen=True)
class SampleLayer:
    """A layer of a Llama at some sizes, and the head after it."""

    name: str
    architecture: Architecture
    num_seqs: int
    seq_len: int
    dtype: str = "fp32"
    has_loss: bool = False  # the head and its loss are measured too
    num_micro_batches: int = 1  # of a step

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone for other processes: the cached pricing has functions that cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_dtype(self, dtype: str) -> SampleLayer:
        """Return the layer in another number format."""
        return replace(self, dtype=dtype)

    @property
    def tokens(self) -> int:
        return self.num_seqs * self.seq_len

    @property
    def model(self) -> Architecture:
        """The layer `MODEL_LAYERS` times, with an embedding and a head."""
        return replace(self.architecture, num_layers=MODEL_LAYERS)

    def job_for(self, num_replicas: int) -> Job:
        """Return a job with this batch for each replica."""
        tokens = num_replicas * self.num_micro_batches * self.tokens
        return Job(global_batch_tokens=tokens, seq_len=self.seq_len, precision=self.dtype, loss="in_place")

    def steps(self, num_processes: int) -> tuple[SampleStep, ...]:
        """Return the steps that the constants are checked against: with gradients and optimizer state sharded over the processes,
        where little is sent, and with tensor parallelism over all of them, where processes wait for one another in each layer; of
        several micro-batches with a copy of the state on each process."""
        if num_processes == 1:
            return (SampleStep(self, "one process", self.layout, 1),)
        sharded = Layout(fsdp=num_processes, zero_stage=2, micro_batch_seqs=self.num_seqs)
        split = Layout(tp=num_processes, micro_batch_seqs=self.num_seqs)
        if self.num_micro_batches > 1:  # gradients are reduced once for all of them
            return (SampleStep(self, "dp", Layout(dp=num_processes, micro_batch_seqs=self.num_seqs), num_processes),)
        is_legal = not violations(self.model, self.job_for(1), num_processes, split)
        steps = [SampleStep(self, "fsdp", sharded, num_processes)]
        return (*steps, SampleStep(self, "tp", split, 1)) if is_legal else tuple(steps)

    @property
    def layout(self) -> Layout:
        return Layout(micro_batch_seqs=self.num_seqs)

    @cached_property
    def pricing(self) -> Pricing:
        return Pricing(Problem(self.architecture, load_cluster("local:1"), self.job_for(1)), self.layout)

    @property
    def products(self) -> tuple[MatmulShape, ...]:
        """Products of the layer and the head, forward and backward."""
        architecture = self.architecture
        sizes = {
            "projection": (architecture.d_model, architecture.num_heads * architecture.head_dim),
            "up": (architecture.d_model, architecture.d_ff),
            "down": (architecture.d_ff, architecture.d_model),
        }
        if self.has_loss:
            sizes["head"] = (architecture.d_model, architecture.vocab_size)
        return tuple(
            MatmulShape(f"{name} {form}", form, self.tokens, *size)
            for name, size in sizes.items()
            for form in MATMUL_FORMS
        )

    @property
    def expert(self) -> MatmulShape:
        """A product with as many rows as an expert gets of a few thousand tokens."""
        return MatmulShape("expert", "forward", EXPERT_ROWS, self.architecture.d_model, self.architecture.d_ff)

    def kernels(self, unit: str, is_selected: Callable[[Kernel], bool]) -> Iterator[tuple[Kernel, float]]:
        """Yield the selected kernels of a unit, each with the bytes that it moves."""
        pricing = self.pricing
        parts = pricing.pricer.parts(pricing.scheme, unit)
        for kernel in parts.kernels:
            if is_selected(kernel):
                yield kernel, float(pricing.pricer.kernel_bytes(kernel, parts, pricing.values))

    def num_kernels(self) -> int:
        """Return the number of kernels of a layer, forward and backward."""
        return sum(1 for _ in self.kernels("block", lambda kernel: kernel.phase != "update"))

    def elementwise_bytes(self) -> float:
        """Return the bytes of a layer's norms, rotations, activations and sums, forward and backward."""
        return sum(
            size for _, size in self.kernels("block", lambda kernel: kernel.kind == "map" and kernel.phase != "update")
        )

    def update_bytes(self) -> float:
        return sum(size for _, size in self.kernels("block", lambda kernel: kernel.phase == "update"))

    def loss_bytes(self) -> float:
        """Return the bytes of the head's kernels over logits, without products."""
        return sum(size for _, size in self.kernels("head", lambda kernel: _is_loss(kernel)))

    def memory_bytes(self, num_processes: int) -> float:
        """Return the bytes of memory that its models, one for each step, take on a device; they depend on no chip."""
        cluster = load_cluster(f"h100:{num_processes}")
        steps = self.steps(num_processes)
        return sum(estimate(Problem(self.model, cluster, step.job), step.layout).memory_bytes for step in steps)

    def attention_flops(self, phase: str) -> float:
        kernels = self.kernels("block", lambda kernel: kernel.kind == "scan" and kernel.phase == phase)
        return sum(float(kernel.flops.evaluate(self.pricing.values)) for kernel, _ in kernels)


class SampleStep(NamedTuple):
    """A whole step of a sample's model in a layout, whose `num_replicas` each have the sample's batch."""

    sample: SampleLayer
    kind: str
    layout: Layout
    num_replicas: int

    @property
    def name(self) -> str:
        return f"{self.sample.name}/{self.kind} step"

    @property
    def job(self) -> Job:
        return self.sample.job_for(self.num_replicas)


def _is_loss(kernel: Kernel) -> bool:
    return kernel.kind != "contract" and Role.LOGITS in kernel.elements


def _llama_layer(d_model: int, heads: int, head_dim: int, vocab: int) -> Architecture:
    return Architecture(
        name=f"sample of {d_model}", num_layers=1, d_model=d_model, d_ff=3 * d_model, num_heads=heads,
        num_kv_heads=heads // 2, head_dim=head_dim, vocab_size=vocab,
    )  # fmt: skip


# Wide and narrow layers with short and long sequences: what a model of a few million parameters has. A thousand tokens at once
# are what a process holds of a batch.
SAMPLES = (
    SampleLayer("256", _llama_layer(256, 4, 64, 4096), 4, 256, has_loss=True),
    SampleLayer("512", _llama_layer(512, 8, 64, 4096), 4, 256),
    SampleLayer("128", _llama_layer(128, 4, 32, 4096), 2, 512),
)
# Micro-batches with so few rows that starting kernels takes a good part of a step: steps of several.
SHORT_SAMPLES = (
    SampleLayer("short 256", _llama_layer(256, 4, 64, 4096), 1, 64, num_micro_batches=8),
    SampleLayer("short 128", _llama_layer(128, 4, 32, 4096), 1, 64, num_micro_batches=8),
)
# Layers of models of 1 to 8 billion parameters. 16 thousand tokens at once are what a GPU holds of a batch: hidden states of
# 64 MB and more are beyond its L2 cache.
GPU_SAMPLES = (
    SampleLayer("4096", _llama_layer(4096, 32, 128, 32_768), 4, 4096, "bf16", has_loss=True),
    SampleLayer("2048", _llama_layer(2048, 32, 64, 32_768), 4, 4096, "bf16"),
)
# So small that nothing but starting an operation takes time.
TINY = SampleLayer("tiny", _llama_layer(16, 2, 8, 16), 1, 2)
MEMORY_SHARE = 0.8  # of a device's memory that samples may take together: kernels and their workspaces take some


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSizes:
    """Sizes at which a machine is measured: samples in the format of the constants, formats of which only the best rate of a
    product is measured, and bytes of a copy and of collectives, the largest beyond caches. Of `short_samples` only whole steps
    are measured, for the time between kernels inside a step."""

    samples: tuple[SampleLayer, ...]
    other_dtypes: tuple[str, ...]
    copy_bytes: int  # read and written
    collective_bytes: tuple[int, ...]
    overlapped_bytes: int  # of an AllReduce beside products
    tiny: SampleLayer = TINY
    short_samples: tuple[SampleLayer, ...] = ()

    @property
    def dtype(self) -> str:
        """Format of the samples."""
        return self.samples[0].dtype

    def steps(self, num_processes: int) -> tuple[SampleStep, ...]:
        """Return the whole steps that are measured."""
        return tuple(step for sample in (*self.samples, *self.short_samples) for step in sample.steps(num_processes))

    def within(self, memory_bytes: float, num_processes: int = 1) -> MachineSizes:
        """Return the sizes without the samples whose models, one for each step, do not fit side by side; the last one stays."""
        samples: list[SampleLayer] = []
        total_bytes = 0.0
        for sample in reversed(self.samples):
            total_bytes += sample.memory_bytes(num_processes)
            if not samples or total_bytes <= MEMORY_SHARE * memory_bytes:
                samples.append(sample)
        largest, *smaller = reversed(samples)
        return replace(self, samples=(replace(largest, has_loss=True), *smaller))


MACHINE_SIZES = {
    "cpu": MachineSizes(
        samples=SAMPLES, other_dtypes=("bf16",), copy_bytes=2**27, collective_bytes=(2**12, 2**20, 2**24),
        overlapped_bytes=2**24, short_samples=SHORT_SAMPLES,
    ),
    "cuda": MachineSizes(
        samples=GPU_SAMPLES, other_dtypes=("fp16", "tf32", "fp8"), copy_bytes=2**31,
        collective_bytes=(2**12, 2**20, 2**24, 2**28), overlapped_bytes=2**28, tiny=TINY.with_dtype("bf16"),
    ),
}  # fmt: skip
