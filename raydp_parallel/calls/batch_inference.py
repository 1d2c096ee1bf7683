"""Batch inference: several batches computed at once, while the driver loads more and takes outputs.

```
 caller's thread:   load, send, load, send ...  take an output, give it, load, send ...
                          │           │         ▲
 a pool's threads:     forward     forward ─────┘   each an ordinary forward
```

[Note: threads of a map]
The caller's thread alone runs the loader and the consumer, and waits while a pool's thread sends a
batch: so batches are loaded, seeds drawn and weights read in the order of a plain loop, and never
while the caller's code runs. The pool's threads read answers, so that a replica whose answer was
read gets its next batch, whatever the caller does. They are never interrupted: Ctrl-C ends the
caller's wait, and leaves no call half done.
"""

from __future__ import annotations

import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
        future: Its output, once it was sent.
        captured: The outputs of submodules in this batch's forward.
    """

    def __init__(self, number: int, replica: int, wanted: forward.Capture | None) -> None:
        self.number = number
        self.replica = replica
        self.future: Future[Any] = Future()
        self._wanted = wanted
        self.captured = None if wanted is None else forward.Capture(wanted.module, wanted.names)

    def output(self) -> Any:
        """Its output; what it captured is then what was captured last."""
        output = self.future.result()
        if self._wanted is not None and self.captured is not None:
            self._wanted.parts = self.captured.parts
        return output


class BatchPipeline:
    """The batches whose outputs were not yet taken.

    Args:
        compute: Computes a batch.
        settings: How the map runs.
    """

    def __init__(self, compute: Compute, settings: MapSettings) -> None:
        self._compute = compute
        self._settings = settings
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        if settings.threads:
            self._pool = ThreadPoolExecutor(settings.in_flight, "raydp-map")
        self._batches: list[SentBatch] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._batches)

    def send(self, batch: Any) -> None:
        """Send a batch to the replica that has the fewest, and return once it was sent."""
        args, kwargs = arguments(batch)
        waiting = [0] * self._settings.replicas
        for one in self._batches:
            waiting[one.replica] += not one.future.done()
        one = SentBatch(self._count, waiting.index(min(waiting)), forward.capturing.get())
        self._count += 1
        sent = threading.Event()
        context, ambient = contextvars.copy_context(), ambient_state.capture()
        stream = devices.same_stream(self._settings.device)

        def run() -> Any:
            settings = self._settings
            forward.mapping.set(forward.MapCall(settings.at_once, sent.set, settings.place))
            forward.capturing.set(one.captured)
            try:
                with ambient_state.enter(ambient._replace(grad=False)), stream:
                    return self._compute(one.replica, args, kwargs)
            finally:
                sent.set()

        self._batches.append(one)
        if self._pool is not None:
            one.future = self._pool.submit(context.run, run)
            sent.wait()
            return
        try:
            one.future.set_result(context.run(run))
        except Exception as error:
            one.future.set_exception(error)

    def take(self) -> SentBatch:
        """Wait for the next batch that has ended, and let go of it."""
        if self._settings.ordered:
            wait([self._batches[0].future])
        else:
            wait([one.future for one in self._batches], return_when=FIRST_COMPLETED)
        ended = next(at for at, one in enumerate(self._batches) if one.future.done())
        return self._batches.pop(ended)

    def close(self) -> None:
        """Wait for all calls that run. A forked process has none: the threads are the parent's."""
        if self._pool is None or os.getpid() != self._process:
            return
        try:
            wait([one.future for one in self._batches])
        finally:
            self._batches.clear()
            self._pool.shutdown(wait=False)


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
