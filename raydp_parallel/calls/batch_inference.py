"""Batch inference: several batches computed at once, while the driver loads more and takes outputs.

```
 caller's thread:   load, send, load, send ...  take an output, give it, load, send ...
                          │           │         ▲
 other threads:        forward     forward ─────┘   each an ordinary forward
```

[Note: threads of a map]
The caller's thread alone runs the loader and the consumer, and waits while another thread sends a
batch: so batches are loaded, seeds drawn and weights read in the order of a plain loop, and never
while the caller's code runs. The other threads read answers, so that a replica whose answer was
read gets its next batch, whatever the caller does. They are never interrupted: Ctrl-C ends the
caller's wait, and leaves no call half done.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch

from raydp_parallel import devices
from raydp_parallel.calls import forward
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import ParallelError, ReplicaDied, ReplicaExit, TransferError
from raydp_parallel.progress import BatchCount

OnError = Literal["raise", "skip"]

Compute = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a batch's output, on the replica with this number among those to choose from."""

_OF_A_BATCH = (ReplicaDied, ReplicaExit, TransferError)
"""Errors of this package that one batch can cause, and the next one need not meet."""


class MapSettings(NamedTuple):
    """How a map runs.

    Attributes:
        replicas: How many replicas there are to choose from for each batch; 1 where all compute
            each batch.
        in_flight: The most batches that are loaded, and whose outputs are not yet given.
        at_once: As in `forward.MapCall`.
        device: Where the master is.
        place: Where outputs go; None is where the master is.
        threads: Whether batches are sent ahead. If not, each is computed in the caller's thread.
        ordered: Whether outputs have the order of batches.
        on_error: What to do if a batch fails.
        progress: Whether to count batches on standard error.
    """

    replicas: int
    in_flight: int
    at_once: int | None
    device: torch.device
    place: torch.device | None
    threads: bool
    ordered: bool
    on_error: OnError
    progress: bool


class SentBatch:
    """A batch on its way.

    Args:
        number: Its number, from 0.
        replica: The replica that computes it.
        wanted: What `capture` asks for around the map.

    Attributes:
        captured: Takes the outputs of submodules in this batch's forward.
        ended: Whether it has an output or an error.
    """

    def __init__(self, number: int, replica: int, wanted: forward.Capture | None) -> None:
        self.number = number
        self.replica = replica
        self._wanted = wanted
        self.captured = None if wanted is None else forward.Capture(wanted.module, wanted.names)
        self._output: Any = None
        self._error: BaseException | None = None
        self.ended = False

    def run(self, compute: Callable[[], Any]) -> None:
        """Compute it, and keep what comes of it."""
        try:
            self._output = compute()
        except BaseException as error:
            self._error = error
        self.ended = True

    def output(self) -> Any:
        """Its output, once; what it captured is then what was captured last."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        if self._wanted is not None and self.captured is not None:
            self._wanted.parts = self.captured.parts
        output, self._output = self._output, None
        return output


class BatchPipeline:
    """The batches whose outputs were not yet taken.

    It waits by `SimpleQueue` alone. Events and futures are Python code, in which Ctrl-C may leave a
    lock held that a thread then waits for.

    Args:
        compute: Computes a batch.
        settings: How the map runs.
    """

    def __init__(self, compute: Compute, settings: MapSettings) -> None:
        self._compute = compute
        self._settings = settings
        self._process = os.getpid()
        self._threads = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._batches: list[SentBatch] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._batches)

    def send(self, batch: Any) -> None:
        """Send a batch to the replica that has the fewest, and return once it was sent."""
        waiting = [0] * self._settings.replicas
        for other in self._batches:
            waiting[other.replica] += not other.ended
        one = SentBatch(self._count, waiting.index(min(waiting)), forward.capturing.get())
        self._count += 1
        sent: SimpleQueue[None] = SimpleQueue()
        compute = self._job(one, *arguments(batch), sent)
        if not self._settings.threads:
            self._batches.append(one)
            one.run(compute)
            return

        def run() -> None:
            one.run(compute)
            sent.put(None)
            self._ended.put(None)

        if self._threads < self._settings.in_flight:
            self._threads += 1
            name, jobs = "raydp-map", (self._work,)
            threading.Thread(target=_work, args=jobs, name=name, daemon=True).start()
        self._work.put(run)
        self._batches.append(one)  # after that, so that `close` waits for nothing that never comes
        sent.get()

    def _job(
        self, one: SentBatch, args: tuple[Any, ...], kwargs: dict[str, Any], sent: SimpleQueue[None]
    ) -> Callable[[], Any]:
        """What computes a batch in any thread as the calling thread would, now."""
        settings = self._settings
        context, ambient = contextvars.copy_context(), ambient_state.capture()
        stream = devices.same_stream(settings.device)
        call = forward.MapCall(settings.at_once, functools.partial(sent.put, None), settings.place)

        def compute() -> Any:
            forward.mapping.set(call)
            forward.capturing.set(one.captured)
            with ambient_state.enter(ambient._replace(grad=False)), stream:
                return self._compute(one.replica, args, kwargs)

        return functools.partial(context.run, compute)

    def take(self) -> SentBatch:
        """Wait for the next batch that has ended, and let go of it."""
        candidates = self._batches[:1] if self._settings.ordered else self._batches
        while True:
            for one in candidates:
                if one.ended:
                    self._batches.remove(one)
                    return one
            self._ended.get()

    def close(self) -> None:
        """Wait for all calls that run. A forked process has none: the threads are the parent's."""
        if os.getpid() != self._process:
            return
        try:
            while not all(one.ended for one in self._batches):
                self._ended.get()
        finally:
            for _ in range(self._threads):
                self._work.put(None)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run jobs, until there is a None."""
    while (job := jobs.get()) is not None:
        job()
        del job


class BatchSource:
    """The batches of a loader.

    Args:
        batches: The loader.

    Attributes:
        ended: Whether there are no more.
        error: What the loader raised.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches: Iterator[Any] = iter(batches)
        self.ended = False
        self.error: Exception | None = None

    def fill(self, pipeline: BatchPipeline, in_flight: int) -> None:
        """Load and send batches until so many are on their way."""
        while not self.ended and len(pipeline) < in_flight:
            try:
                batch = next(self._batches)
            except StopIteration:
                self.ended = True
            except Exception as error:
                self.ended, self.error = True, error
            else:
                pipeline.send(batch)

    def raise_error(self) -> None:
        """Raise what the loader raised, if it did."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class SkippedBatches:
    """Counts the batches that failed, for one warning at the end."""

    def __init__(self) -> None:
        self._count = 0
        self._first = ""

    def note(self, number: int, error: Exception) -> None:
        """Count one."""
        if not self._count:
            self._first = f"number {number}, with {type(error).__name__}: {error}"
        self._count += 1

    def warn(self, done: int) -> None:
        """Say how many there were, if any."""
        if self._count:
            warnings.warn(
                f"map: {self._count} of {done} batches failed and were skipped; the first was "
                f"{self._first}",
                stacklevel=3,
            )


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a batch stands for: a tuple or a list its parts, a mapping its items as
    keyword arguments. All else, named tuples and packed sequences too, is one argument.
    """
    if type(batch) in (tuple, list):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}


def outputs(
    batches: Iterable[Any], compute: Compute, settings: MapSettings
) -> Generator[Any, None, None]:
    """Compute batches and give their outputs. Nothing is loaded before the first is asked for.

    Args:
        batches: The loader.
        compute: Computes a batch.
        settings: How the map runs.
    """
    source, skipped, done = BatchSource(batches), SkippedBatches(), 0
    count = BatchCount(_length(batches)) if settings.progress else None
    pipeline = BatchPipeline(compute, settings)
    found: list[Any] = []  # emptied before the consumer has the output, so that nothing keeps it
    try:
        while True:
            source.fill(pipeline, settings.in_flight)
            if not len(pipeline):
                break
            one = pipeline.take()
            done += 1
            try:
                found.append(one.output())
            except Exception as error:
                if settings.on_error == "raise" or not _of_a_batch(error):
                    raise
                skipped.note(one.number, error)
            del one
            if count is not None:
                count.advance()
            if found:
                yield found.pop()
        source.raise_error()
    finally:
        pipeline.close()
        if count is not None:
            count.close()
        skipped.warn(done)


def _of_a_batch(error: Exception) -> bool:
    """Whether an error concerns its batch only."""
    return isinstance(error, _OF_A_BATCH) or not isinstance(error, ParallelError)


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None
