"""A priced product with what running it and compiling it with XLA gave, its JSON, and its program as source.

This module loads neither NumPy nor a framework before a product is run or emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from shardwise import verify
from shardwise.price import ProductReport
from shardwise.price.product import ProductRecord
from shardwise.values import Flat, OmitEmpty, Payload, Progress, ignore_progress

if TYPE_CHECKING:
    from shardwise.verify.product_runs import Framework, RunResult
    from shardwise.verify.xla_compile import Backend, XlaReport

SourceFramework = Literal["jax", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProduct:
    """A priced product. `run` compares its program with the unsharded product, `xla` is the compiler's own program (None: not
    asked for). `is_reshard`: one tensor before and after, with the same dims.

    >>> import shardwise as sw
    >>> result = sw.matmul("A[I_X, J] * B[J, K] -> C[I_X, K]", mesh="X=4", sizes="I=64,J=64,K=64", run_with="numpy")
    >>> result.product.best.bytes_per_device, result.run.num_devices
    (0.0, 4)
    """

    product: ProductReport
    run: RunResult | None = None
    xla: XlaReport | None = None
    is_reshard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedProgram:
    """Source text that computes a priced product with a framework, and checks itself when it is run.

    >>> import shardwise as sw
    >>> "def product(" in sw.reshard("A[I_X] -> A[I]", mesh="X=2", sizes="I=64", emit="jax").source
    True
    """

    product: ProductReport
    framework: SourceFramework
    source: str


def check_product(
    product: ProductReport, *, framework: Framework | None = None, xla_backend: Backend | None = None,
    is_reshard: bool = False, progress: Progress = ignore_progress,
) -> CheckedProduct:  # fmt: skip
    """Run a product's cheapest program with a framework, and compile the product with XLA, as far as they are named.

    Raises `InputError` if the framework or jax is missing, `ShardwiseError` if the run fails.
    """
    run = xla = None
    if framework:
        progress(f"running with {framework}")
        run = verify.run_product(product.expression, product.steps, framework)
    if xla_backend:
        progress("compiling with XLA")
        xla = verify.compile_product(product.expression, backend=xla_backend)
    return CheckedProduct(product=product, run=run, xla=xla, is_reshard=is_reshard)


def emit_program(product: ProductReport, framework: SourceFramework) -> EmittedProgram:
    """Write the cheapest program of a product as source. Raises `InputError` for steps that no source is written for."""
    return EmittedProgram(
        product=product, framework=framework, source=verify.emit(product.expression, product.steps, framework)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaCollectiveRecord(Payload):
    """A collective of XLA's program; `axes` is null for groups that are not a set of mesh axes."""

    op: str
    axes: Sequence[str] | None
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaRecord(Payload):
    """The program that XLA's partitioner made of the product."""

    backend: str
    version: str
    collectives: Sequence[XlaCollectiveRecord]
    bytes_per_device: float
    flops_per_device: float
    multiplications_per_device: float

    @classmethod
    def of(cls, xla: XlaReport) -> XlaRecord:
        """Return the record of a compiled product."""
        collectives = [XlaCollectiveRecord.from_attributes(collective) for collective in xla.collectives]
        return cls.from_attributes(xla, collectives=collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRecord(Payload):
    """A priced product. Only with --run it has `max_relative_error` and `num_devices`, only with --verify `verify`."""

    SCHEMA = "shardwise.matmul/1"
    product: Annotated[ProductRecord, Flat]
    max_relative_error: Annotated[float | None, OmitEmpty]
    num_devices: Annotated[int | None, OmitEmpty]
    verify: Annotated[XlaRecord | None, OmitEmpty]

    @staticmethod
    def of(result: CheckedProduct) -> MatmulRecord:
        """Return the record of a product, of `reshard` where the result is one."""
        kind = ReshardRecord if result.is_reshard else MatmulRecord
        return kind.from_attributes(
            result.run,
            product=ProductRecord.of(result.product),
            verify=XlaRecord.of(result.xla) if result.xla else None,
        )


class ReshardRecord(MatmulRecord):
    """A priced resharding of one tensor."""

    __slots__ = ()
    SCHEMA = "shardwise.reshard/1"
