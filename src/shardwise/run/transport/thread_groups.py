"""Groups of ranks that are threads of one process: tensors are copied from thread to thread.

Reductions add in the order of the ranks, so that results are the same in every run. Ranks that issue different collectives, or
the same one with other sizes, fail with both names. Where `is_strict`, outputs are NaN until the wait, and an input that is
written before it is an error: a missing wait is found in every run, where processes find it only if the data comes late.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # no documented name

from shardwise.run.transport.interface import TIMEOUT, Observer, PeerTensor
from shardwise.run.transport.thread_scheduler import ThreadScheduler
from shardwise.sharding import CollectiveKind

REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda total, part: torch.maximum(total, part, out=total),
}


class MismatchError(RuntimeError):
    """Ranks of a group do not issue the same operations in the same order, or with sizes that belong together."""


class EarlyWriteError(RuntimeError):
    """A tensor was written between the issue of an operation that reads it and the wait for it."""


@dataclass
class SharedCall:
    """A collective of a group: what each rank contributes, by position. `signature` is the same for all ranks."""

    signature: tuple[Any, ...]
    contributions: dict[int, Any] = field(default_factory=dict)
    result: Tensor | None = None
    num_finished: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compute_once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what the first rank that waits computes, for all ranks."""
        with self.lock:
            if self.result is None:
                self.result = compute()
            return self.result


@dataclass
class SharedMessage:
    """A tensor on its way from one rank of a group to another."""

    values: Tensor | None = None
    has_receiver: bool = False


@dataclass
class SharedGroup:
    """State that the ranks of a group have in common: its calls by number, and its messages by their ends and number."""

    name: str
    ranks: tuple[int, ...]
    calls: dict[int, SharedCall] = field(default_factory=dict)
    messages: dict[tuple[int, int], dict[int, SharedMessage]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(eq=False)
class ThreadWork:
    """An operation on its way. `finish` writes its outputs; `inputs` may not be written before, each with its version."""

    transport: ThreadTransport
    is_ready: Callable[[], bool]
    describe: Callable[[], str]
    finish: Callable[[], None]
    inputs: Sequence[tuple[Tensor, int]]
    has_future: bool
    is_done: bool = False
    future: torch.futures.Future[Any] | None = None

    def wait(self) -> None:
        """Block until all ranks have issued the operation, and write its outputs."""
        if self.is_done:
            return
        self.transport.scheduler.block(self.is_ready, self.describe)
        for tensor, version in self.inputs:
            if tensor._version != version:
                raise EarlyWriteError(f"an input was written before the wait for it: {self.describe()}")
        with _hidden_from_modes():
            self.finish()
        self.is_done = True
        self.transport.unfinished.pop(id(self), None)
        if self.future is not None:
            self.future.set_result(None)

    def is_completed(self) -> bool:
        """Return whether `wait` has returned, as with gloo."""
        return self.is_done

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when `wait` has returned. Messages have none, as with gloo."""
        if not self.has_future:
            raise RuntimeError("a message has no future")
        if self.future is None:
            self.future = torch.futures.Future()
        return self.future


class ThreadTransport:
    """A rank that is a thread: its number, its groups, and operations that it has not waited for."""

    def __init__(
        self, rank: int, scheduler: ThreadScheduler, shared: dict[str, SharedGroup], *, is_strict: bool
    ) -> None:
        self.rank, self.size, self.scheduler, self.is_strict = rank, len(scheduler.ranks), scheduler, is_strict
        self.unfinished: dict[int, ThreadWork] = {}
        self.observers: list[Observer] = []
        self._shared, self._num_groups = shared, 0
        self.world = self._group("of all ranks", range(self.size))

    def new_group(self, groups: Sequence[Sequence[int]], timeout: timedelta = TIMEOUT) -> ThreadGroup:
        """Return this rank's group; no timeout is needed where a deadlock is found at once."""
        self._num_groups += 1
        position, ranks = next((position, ranks) for position, ranks in enumerate(groups) if self.rank in ranks)
        return self._group(f"{self._num_groups}.{position}", ranks)

    def host_group(self, timeout: timedelta = TIMEOUT) -> ThreadGroup:
        """Return a further group of all ranks."""
        return self.new_group([range(self.size)])

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` for every collective of this rank over groups that it made, except those of the world."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def _group(self, name: str, ranks: Sequence[int]) -> ThreadGroup:
        with self.scheduler.lock:
            shared = self._shared.setdefault(name, SharedGroup(name, tuple(ranks)))
        if shared.ranks != tuple(ranks):
            raise MismatchError(f"group {name}: rank {self.rank} has ranks {list(ranks)}, another {list(shared.ranks)}")
        return ThreadGroup(shared, self)


class ThreadGroup:
    """A group of rank threads, as one of its ranks sees it; `position` is its own."""

    def __init__(self, shared: SharedGroup, transport: ThreadTransport) -> None:
        self.shared, self.transport, self.ranks = shared, transport, shared.ranks
        self.position = self.ranks.index(transport.rank)
        self._num_calls = 0
        self._num_messages: dict[tuple[int, int], int] = defaultdict(int)

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> ThreadWork:
        """Reduce `tensor` over all ranks, in place."""
        self._observe(CollectiveKind.ALL_REDUCE, tensor)

        def finish(call: SharedCall) -> None:
            tensor.copy_(
                call.compute_once(lambda: _reduce_in_rank_order(reduction, call.contributions)).view(tensor.shape)
            )

        signature = "all_reduce", reduction, *_format_and_size(tensor)
        return self._collective(signature, _copy(tensor), finish, writes=[tensor])

    def all_gather(self, full: Tensor, part: Tensor) -> ThreadWork:
        """Gather the parts of all ranks into `full`."""
        self._observe(CollectiveKind.ALL_GATHER, full)
        self._require_multiple(full, part)

        def finish(call: SharedCall) -> None:
            parts = [call.contributions[position] for position in range(len(self.ranks))]
            full.copy_(call.compute_once(lambda: torch.cat(parts)).view(full.shape))

        reads = [] if _share_storage(part, full) else [part]
        signature = "all_gather", *_format_and_size(part)
        return self._collective(signature, _copy(part).reshape(-1), finish, reads=reads, writes=[full])

    def reduce_scatter(self, part: Tensor, full: Tensor) -> ThreadWork:
        """Sum `full` over all ranks, and write this rank's part."""
        self._observe(CollectiveKind.REDUCE_SCATTER, full)
        self._require_multiple(full, part)

        def finish(call: SharedCall) -> None:
            total = call.compute_once(lambda: _reduce_in_rank_order("sum", call.contributions)).view(
                len(self.ranks), -1
            )
            part.copy_(total[self.position].view(part.shape))

        reads = [] if _share_storage(part, full) else [full]
        signature = "reduce_scatter", *_format_and_size(full)
        return self._collective(signature, _copy(full).reshape(-1), finish, reads=reads, writes=[part])

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: list[int] | None, sent_rows: list[int] | None
    ) -> ThreadWork:
        """Send each part of `sent` to its rank."""
        self._observe(CollectiveKind.ALL_TO_ALL, sent)
        size = len(self.ranks)
        sending = sent_rows or [len(sent) // size] * size
        receiving = received_rows or [len(received) // size] * size
        if sum(sending) != len(sent) or sum(receiving) != len(received):
            raise MismatchError(f"all_to_all: {sending} rows of {_shape(sent)} and {receiving} of {_shape(received)}")

        def finish(call: SharedCall) -> None:
            for peer, (num_rows, target) in enumerate(zip(receiving, torch.split(received, receiving), strict=True)):
                peer_tensor, rows = call.contributions[peer]
                if rows[self.position] != num_rows:
                    raise MismatchError(
                        f"all_to_all of {self}: rank {self.ranks[peer]} sends {rows[self.position]} rows to rank "
                        f"{self.transport.rank}, which expects {num_rows}"
                    )
                target.copy_(torch.split(peer_tensor, rows)[self.position])

        signature = "all_to_all", _dtype(sent), tuple(sent.shape[1:])
        return self._collective(signature, (_copy(sent), sending), finish, reads=[sent], writes=[received])

    def broadcast(self, tensor: Tensor, source: int) -> ThreadWork:
        """Copy the tensor of one rank to all."""
        contribution = _copy(tensor) if self.position == source else None

        def finish(call: SharedCall) -> None:
            tensor.copy_(call.contributions[source])

        return self._collective(("broadcast", source, *_format_and_size(tensor)), contribution, finish)

    def gather(self, parts: Sequence[Tensor] | None, part: Tensor) -> ThreadWork:
        """Gather the parts of all ranks on the first one."""

        def finish(call: SharedCall) -> None:
            for position, target in enumerate(parts or ()):
                target.copy_(call.contributions[position])

        return self._collective(("gather", *_format_and_size(part)), _copy(part), finish)

    def scatter(self, part: Tensor, parts: Sequence[Tensor] | None) -> ThreadWork:
        """Give each rank its part, from the first one."""
        contribution = None if parts is None else [_copy(peer_part) for peer_part in parts]

        def finish(call: SharedCall) -> None:
            part.copy_(call.contributions[0][self.position])

        return self._collective(("scatter", *_format_and_size(part)), contribution, finish)

    def exchange(self, sent: Sequence[PeerTensor], received: Sequence[PeerTensor]) -> list[ThreadWork]:
        """Send and receive tensors; no thread runs one operation of a batch after the other."""
        sending = [self.send(*message) for message in sent]
        return sending + [self.receive(*message) for message in received]

    def send(self, tensor: Tensor, peer: int) -> ThreadWork:
        """Send a tensor to a peer. The wait ends when that rank has issued its receive, as with gloo."""
        self._observe(CollectiveKind.SEND, tensor)
        message, number = self._message(self.position, peer)
        with self.transport.scheduler.lock:
            message.values = _copy(tensor)
            self.transport.scheduler.notify()

        def describe() -> str:
            return f"waits to send message {number} of {self}, {_shape(tensor)}, to rank {self.ranks[peer]}"

        return self._work(lambda: message.has_receiver, describe, lambda: None, reads=[tensor], has_future=False)

    def receive(self, tensor: Tensor, peer: int) -> ThreadWork:
        """Receive a tensor from a peer, in the order in which it sends."""
        self._observe(CollectiveKind.RECEIVE, tensor)
        message, number = self._message(peer, self.position)
        with self.transport.scheduler.lock:
            message.has_receiver = True
            self.transport.scheduler.notify()

        def describe() -> str:
            return f"waits to receive message {number} of {self}, {_shape(tensor)}, from rank {self.ranks[peer]}"

        def finish() -> None:
            assert message.values is not None
            if _format_and_size(message.values) != _format_and_size(tensor):
                raise MismatchError(
                    f"message {number} of {self}: rank {self.ranks[peer]} sent {_shape(message.values)}, "
                    f"rank {self.transport.rank} expects {_shape(tensor)}"
                )
            tensor.copy_(message.values.view(tensor.shape))
            del self.shared.messages[peer, self.position][number]

        return self._work(lambda: message.values is not None, describe, finish, writes=[tensor], has_future=False)

    def close(self) -> None:
        """Do nothing: a group ends with the world."""

    def __repr__(self) -> str:
        return f"group {self.shared.name} of ranks {list(self.ranks)}"

    def _collective(
        self, signature: tuple[Any, ...], contribution: Any, finish: Callable[[SharedCall], None], *,
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (),
    ) -> ThreadWork:  # fmt: skip
        """Issue a collective; tensors in `contribution` are copies, and `finish` writes this rank's outputs."""
        scheduler, number = self.transport.scheduler, self._num_calls
        self._num_calls += 1
        with scheduler.lock:
            scheduler.check()
            call = self.shared.calls.setdefault(number, SharedCall(signature))
            if call.signature != signature:
                first = self.ranks[next(iter(call.contributions))]
                error = MismatchError(
                    f"collective {number} of {self}: rank {first} issued {_call(call.signature)}, "
                    f"rank {self.transport.rank} {_call(signature)}"
                )
                scheduler.fail(error)
                raise error
            call.contributions[self.position] = contribution
            if len(call.contributions) == len(self.ranks):
                scheduler.notify()

        def describe() -> str:
            missing = [rank for position, rank in enumerate(self.ranks) if position not in call.contributions]
            return f"waits in {_call(signature)}, number {number} of {self}, for ranks {missing}"

        def finish_call() -> None:
            finish(call)
            with scheduler.lock:
                call.num_finished += 1
                if call.num_finished == len(self.ranks):
                    del self.shared.calls[number]

        def is_ready() -> bool:
            return len(call.contributions) == len(self.ranks)

        return self._work(is_ready, describe, finish_call, reads=reads, writes=writes)

    def _work(
        self, is_ready: Callable[[], bool], describe: Callable[[], str], finish: Callable[[], None], *,
        reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), has_future: bool = True,
    ) -> ThreadWork:  # fmt: skip
        inputs: list[tuple[Tensor, int]] = []
        if self.transport.is_strict:
            with _hidden_from_modes():
                for output in writes:
                    _fill_with_nan(output)
            inputs = [(tensor, tensor._version) for tensor in reads]
        work = ThreadWork(self.transport, is_ready, describe, finish, inputs, has_future)
        self.transport.unfinished[id(work)] = work
        return work

    def _message(self, source: int, target: int) -> tuple[SharedMessage, int]:
        number = self._num_messages[source, target]
        self._num_messages[source, target] += 1
        with self.transport.scheduler.lock:
            self.transport.scheduler.check()
            return self.shared.messages[source, target].setdefault(number, SharedMessage()), number

    def _observe(self, kind: CollectiveKind, payload: Tensor) -> None:
        if self is not self.transport.world:
            for observer in self.transport.observers:
                observer(kind, [payload], self)

    def _require_multiple(self, full: Tensor, part: Tensor) -> None:
        if full.numel() != part.numel() * len(self.ranks):
            raise MismatchError(f"{self}: {_shape(full)} is not {len(self.ranks)} times {_shape(part)}")


def _reduce_in_rank_order(reduction: str, contributions: Mapping[int, Tensor]) -> Tensor:
    """Reduce tensors in the order of the ranks, in their own dtype."""
    total = contributions[0].clone()
    for position in range(1, len(contributions)):
        REDUCTIONS[reduction](total, contributions[position])
    return total


def _hidden_from_modes() -> AbstractContextManager[object]:
    """Hide copies and sums from autograd, and from dispatch modes that count operations or memory."""
    if torch._C._len_torch_dispatch_stack():
        return _without_modes()
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch.no_grad(), _disable_current_modes():
        yield


def _fill_with_nan(output: Tensor) -> None:
    if output.is_floating_point() and output.element_size() > 1:
        output.fill_(float("nan"))
    elif output.dtype in (torch.int32, torch.int64):
        output.fill_(torch.iinfo(output.dtype).min)


def _copy(tensor: Tensor) -> Tensor:
    with _hidden_from_modes():
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def _share_storage(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _format_and_size(tensor: Tensor) -> tuple[str, int]:
    return _dtype(tensor), tensor.numel()


def _shape(tensor: Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}"


def _call(signature: tuple[Any, ...]) -> str:
    name, *sizes = signature
    return f"{name}({', '.join(map(str, sizes))})"
