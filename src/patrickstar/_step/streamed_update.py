"""Updates on the host beside an accelerator, with copies in both directions in a pipeline (ZeRO-Offload §4.1)."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._hardware.job_queue import WorkerTransfer
from patrickstar._hardware.transfer import Transfer
from patrickstar._hardware.worker_pool import WorkerPool
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Span, joined
from patrickstar._step.update_queue import UpdateGroup
from patrickstar._tiers.host_tier import HostTier

# [Note: updates beside an accelerator]
# Worker threads run the updates whose masters are on the host, see [Note: running updates]. They copy gradients to the
# host piece by piece, on a stream of its own and once the device has computed them, wait for each copy, run the kernel,
# and copy the parameters back on another stream. So copies in both directions overlap with the kernel and with the
# device's compute, and the training thread does not wait. `StreamedUpdate.wait` waits for the update, and orders later
# work of the device after the last copy.
#
# The kernel is never without a piece. It has its next one before it ends one, so that a worker thread's work between
# two pieces, and its wait for the interpreter, pass beside it. And of the two worker threads one has the kernel, while
# the other has copied the first piece of the next update.
#
# The training thread may be far ahead of the device. An update whose gradients the device has yet to compute lets
# others go first, whatever their order: the worker thread would wait for all of backward. It does not begin before, so
# that a chunk can be moved and its update put off meanwhile.
#
# A buffer is filled again once its parameters have been copied to the device: the stream of the gradients waits for
# that.

PIECE_NUMEL = 1 << 24
"""Elements per copy. A host with 100 GB/s updates them in 5 ms: many times a worker thread's own work for a piece, and
the latency of a copy. Worker threads and backward's Python code take turns with the interpreter: beside pieces of 2^22
elements backward took three times as long (benchmarks/results/third-gpu-run.md)."""
THREADS = 2
"""One has the kernel, and one the first pieces of the next update."""
IN_KERNEL = 2
"""Pieces that the kernel has: one that runs, and the next one. A worker thread that lacks the interpreter waits for up
to its switch interval, 5 ms; meanwhile the kernel goes on with these."""
FIRST = 2
"""Pieces of the next update that are copied while this one has more to copy."""
BUFFERS = IN_KERNEL + 3 + FIRST
"""Page-locked buffers. Beside those of the kernel and of the next update one is copied back, one is filled, and one has
been, so that copies may take as long as the kernel, and some of them longer."""
WHOLE_BUFFERS = 3
"""The same, if they hold whole parameters: one is updated, one is copied back, and one is filled. Such updates take far
longer than their copies, so that one thread runs them; only one then needs workspaces for products of matrices."""


def buffer_count(by_pages: bool) -> int:
    """Return the number of buffers; `by_pages`: parameters may be cut."""
    return BUFFERS if by_pages else WHOLE_BUFFERS


def buffer_bytes(numel: int, itemsize: int, by_pages: bool) -> int:
    """Return the bytes of all buffers for parameters of at most `numel` elements; `by_pages`: they may be cut.

    No more than `WHOLE_BUFFERS` parameters: small ones are cut, too.
    """
    count = buffer_count(by_pages)
    return count * itemsize * (min(PIECE_NUMEL, -(-WHOLE_BUFFERS * numel // count)) if by_pages else numel)


@dataclass(eq=False)
class StreamedUpdate(Transfer):
    """Update in progress. It keeps its tensors alive until it is waited for."""

    label = "an update on the host"

    accelerator: TorchDevice
    spans: Sequence[Span]
    scales: Sequence[float]
    ready: torch.Event
    """Event behind the gradients and all earlier uses of the parameters."""
    copies: Sequence[Transfer] = ()
    """Copies that still read or write host memory of the spans."""
    bind: Callable[[], Sequence[Span] | None] | None = None
    """Called in the worker thread before the update; returns its spans, or None to leave it out."""
    job: WorkerTransfer | None = None
    uploaded: torch.Event | None = None
    """Event behind the parameters that were copied to the device last."""

    @property
    def done(self) -> bool:
        """True once it has ended, with or without an error."""
        assert self.job is not None, "the update has not been submitted"
        return self.job.done

    def prioritize(self) -> None:
        """Run it before updates that have not begun."""
        assert self.job is not None, "the update has not been submitted"
        self.job.prioritize()

    def withdraw(self) -> bool:
        """Cancel the update if it has not begun. Return True if it was cancelled."""
        assert self.job is not None, "the update has not been submitted"
        return self.job.withdraw()

    def cancel(self) -> None:
        """Cancel what has not begun, wait for the rest, and order later work of the current stream after it."""
        assert self.job is not None, "the update has not been submitted"
        self.job.cancel()
        self._order()

    def wait(self) -> None:
        """Wait for the update, and order later work of the current stream after it. Raises its error."""
        assert self.job is not None, "the update has not been submitted"
        self.job.wait()
        self._order()

    def _order(self) -> None:
        if self.uploaded is not None:
            self.accelerator.order(self.uploaded)
        self.spans, self.bind = (), None


@dataclass(eq=False)
class _Part:
    """Part of a span on its way through a buffer."""

    span: Span
    """The part, with the buffer in place of its gradient and parameter on the device."""
    param: torch.Tensor | None
    """The parameter on the device; None if the new one stays on the host."""
    number: int
    """The buffer's number."""
    arrived: torch.Event | None
    """Event behind the copy of the gradient, or of the parameter with a split master; None if both are on the host."""

    @property
    def has_arrived(self) -> bool:
        """True if the gradient is on the host."""
        return self.arrived is None or self.arrived.query()


class StreamedUpdates:
    """Worker threads and buffers of updates on the host. See [Note: updates beside an accelerator].

    Args:
        nbytes: Bytes of all buffers; see `buffer_bytes`.
        by_pages: Parameters may be cut.
    """

    def __init__(
        self, kernels: Kernels, accelerator: TorchDevice, host_tier: HostTier, nbytes: int, by_pages: bool = True
    ) -> None:
        self.kernels = kernels
        self.accelerator = accelerator
        self._host_tier = host_tier
        buffers = buffer_count(by_pages)
        self._ahead = buffers - FIRST if by_pages else buffers
        """Buffers for the update that has the kernel."""
        self._buffer_bytes = nbytes // buffers
        self._block = host_tier.allocate_block(nbytes, "buffers of the update on the host")
        self._pool = WorkerPool(THREADS if by_pages else 1, "update", begin=accelerator.enter_worker)
        self._down, self._up = accelerator.new_stream(), accelerator.new_stream()
        self._changed = threading.Condition()
        """Notified when one of the following changes."""
        self._turns: deque[deque[_Part]] = deque()
        """Pieces that arrive of the updates that have begun; the first of them has the kernel."""
        self._all_copied = False
        """True if no piece of that one is left to be copied."""
        self._free = deque(range(buffers))
        """Numbers of the buffers without a piece; the one that was used last is the last."""
        self._used: list[torch.Event | None] = [None] * buffers
        """For each buffer, an event behind its last copy."""

    def submit(
        self,
        spans: Sequence[Span],
        scales: Sequence[float],
        copies: Sequence[Transfer],
        urgent: bool = False,
        bind: Callable[[], Sequence[Span] | None] | None = None,
    ) -> StreamedUpdate:
        """Start to update spans whose masters are on the host. The caller finishes the update.

        Args:
            copies: Copies that still read or write host memory of these spans.
            urgent: Its gradients came last, and the next forward uses its parameters first: of urgent updates, run the
                last one whose gradients the device has computed.
            bind: Returns the spans when the update begins. Such an update is optional: it runs after all others, the
                last submitted one first.
        """
        update = StreamedUpdate(self.accelerator, spans, scales, self.accelerator.record(), copies, bind)
        update.job = self._pool.submit(
            [lambda stage: self._run(update)],
            update.label,
            ready=partial(_is_ready, update.ready, copies),
            wait_until_ready=partial(_wait_until_ready, self.accelerator, update.ready, copies),
            optional=urgent or bind is not None,
        )
        self._host_tier.copy_issued(self._block, update.job)
        return update

    def close(self) -> None:
        """Finish all updates and end the thread."""
        self._pool.close()

    def _run(self, update: StreamedUpdate) -> None:
        bound = update.spans if update.bind is None else update.bind()
        if bound is None:
            return
        _wait_until_ready(self.accelerator, update.ready, update.copies)
        on_host = [span for span in bound if _is_on_host(span)]
        pieces = deque(_cut(joined([span for span in bound if not _is_on_host(span)]), self._buffer_numel))
        arriving: deque[_Part] = deque()
        in_kernel: deque[tuple[_Part, UpdateGroup]] = deque()
        try:
            with self._kernel_turn(pieces, arriving), ExitStack() as record:
                self.kernels.update(on_host, update.scales)
                while pieces or arriving or in_kernel:
                    if arriving and arriving[0].has_arrived and self._takes(arriving[0], len(in_kernel)):
                        part = arriving[0]
                        if not in_kernel:
                            record.enter_context(self.kernels.observed([part.span]))
                        in_kernel.append((part, UpdateGroup(self.kernels.start([part.span], update.scales))))
                        arriving.popleft()
                    elif pieces and self._free and len(arriving) + len(in_kernel) < self._ahead:
                        self._download_next(pieces, arriving)
                        if not pieces:
                            self._let_next_copy()
                    elif in_kernel:
                        part, running = in_kernel[0]
                        running.wait()
                        record.close()
                        if len(in_kernel) > 1:  # it runs from now on
                            record.enter_context(self.kernels.observed([in_kernel[1][0].span]))
                        if part.param is not None:
                            update.uploaded = self._upload(part.param, part)
                        in_kernel.popleft()
                        self._give_back(part.number)
                    else:
                        assert arriving[0].arrived is not None, "what is on the host has arrived"
                        self.accelerator.wait(arriving[0].arrived)
        finally:  # after an error, too, no buffer is used again before its copy or its kernel has ended
            for part, running in in_kernel:
                running.cancel()
                arriving.append(part)
            for part in arriving:
                self._used[part.number] = part.arrived or self._used[part.number]
                self._give_back(part.number)

    @contextmanager
    def _kernel_turn(self, pieces: deque[Span], arriving: deque[_Part]) -> Iterator[None]:
        """Return a context in which an update has the kernel; before it, start to copy the first pieces."""
        with self._changed:
            self._turns.append(arriving)
        try:
            while not self._has_kernel(arriving):
                with self._changed:
                    self._changed.wait_for(lambda: self._has_kernel(arriving) or self._may_copy(pieces, arriving))
                self._download_next(pieces, arriving)
            self._all_copied = not pieces
            yield
        finally:
            with self._changed:
                self._turns = deque(turn for turn in self._turns if turn is not arriving)
                self._changed.notify_all()

    def _has_kernel(self, arriving: deque[_Part]) -> bool:
        return self._turns[0] is arriving

    def _may_copy(self, pieces: deque[Span], arriving: deque[_Part]) -> bool:
        """Return whether an update that waits for the kernel may copy another piece."""
        return bool(pieces) and bool(self._free) and len(arriving) < (self._ahead if self._all_copied else FIRST)

    def _let_next_copy(self) -> None:
        """Let the next update have all buffers that the one with the kernel gives back."""
        with self._changed:
            self._all_copied = True
            self._changed.notify_all()

    def _give_back(self, number: int) -> None:
        """Give a buffer back whose kernel has ended."""
        with self._changed:
            self._free.append(number)
            self._changed.notify_all()

    def _takes(self, part: _Part, in_kernel: int) -> bool:
        """Return whether the kernel takes another piece, beside those that it has."""
        return in_kernel < (IN_KERNEL if self.kernels.is_concurrent(part.span) else 1)

    def _buffer_numel(self, span: Span) -> int:
        return self._buffer_bytes // span.param.itemsize if span.rule.by_pages else span.numel

    def _download_next(self, pieces: deque[Span], arriving: deque[_Part]) -> None:
        """Start to copy the gradient of the next piece, if there are one and a buffer."""
        with self._changed:
            if not pieces or not self._free:
                return
            number = self._free.popleft()
        try:
            arriving.append(self._download(number, pieces[0]))
            pieces.popleft()
        except BaseException:
            self._give_back(number)
            raise

    def _download(self, number: int, span: Span) -> _Part:
        memory = self._host_tier.view(self._block, torch.uint8)[number * self._buffer_bytes :]
        buffer = memory[: span.numel * span.param.itemsize].view(span.param.dtype)
        used, grad, upper = self._used[number], span.grad, span.upper
        if span.param.device == span.master.device:
            param, target = span.param, None
        else:
            param, target = buffer, span.param
        source = grad.latest if upper is None or upper.device == span.master.device else upper
        if source.device == span.master.device:
            if used is not None:
                self.accelerator.wait(used)
            return _Part(replace(span, param=param), target, number, None)
        with self.accelerator.use(self._down, after_current=False):
            if used is not None:
                self.accelerator.order(used)
            buffer.copy_(source, non_blocking=True)
            arrived = self.accelerator.record()
        if source is upper:
            return _Part(replace(span, param=param, upper=buffer), target, number, arrived)
        return _Part(replace(span, param=param, grad=replace(grad, latest=buffer)), target, number, arrived)

    def _upload(self, param: torch.Tensor, part: _Part) -> torch.Event:
        """Start to copy updated parameters to the device."""
        with self.accelerator.use(self._up, after_current=False):
            param.copy_(part.span.param, non_blocking=True)
            uploaded = self._used[part.number] = self.accelerator.record()
        return uploaded


def _is_ready(gradients: torch.Event, copies: Sequence[Transfer]) -> bool:
    """Return whether the device has computed the gradients of an update, and copies have ended."""
    return gradients.query() and all(copy.done for copy in copies)


def _wait_until_ready(accelerator: TorchDevice, gradients: torch.Event, copies: Sequence[Transfer]) -> None:
    """Wait until an update is ready."""
    accelerator.wait(gradients)
    for copy in copies:
        copy.wait()


def _is_on_host(span: Span) -> bool:
    return span.param.device == span.grad.latest.device == span.master.device


def _cut(spans: Iterable[Span], length: Callable[[Span], int]) -> Iterator[Span]:
    """Yield the parts of spans that have elements, each of at most `length(span)` elements."""
    for span in spans:
        step = max(1, length(span))
        parts = (span.page(slice(first, first + step)) for first in range(0, span.numel, step))
        yield from [span] if span.numel <= step else parts
