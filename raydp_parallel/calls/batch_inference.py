"""Batch inference: several batches computed at once, while the driver loads more and takes outputs.

```
 caller's thread:   load, send, load, send ... take an output, give it, load, send ...
                          │           │          ▲
 replicas:                └ compute   └ compute ─┘   send and take: the halves of a forward
```

[Note: one thread]
The caller's thread does all of it, and nothing while the caller's code runs. So batches are
loaded, seeds drawn and weights read in the order of a plain loop. No thread has to get a core
before a replica begins its next batch: that lies in its socket already. Only where it cannot lie
there, another thread reads answers meanwhile, see `AnswerReader`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import os
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch

from raydp_parallel.calls import forward
from raydp_parallel.cluster.client import AnswerReader
from raydp_parallel.errors import ParallelError, ReplicaDied, ReplicaExit, TransferError
from raydp_parallel.progress import BatchCount

OnError = Literal["raise", "skip"]

Begin = Callable[[int, tuple[Any, ...], dict[str, Any]], Callable[[], Any]]
"""Sends a batch to the replica with this number among those to choose from. Returns what waits for
its output."""

_OF_A_BATCH = (ReplicaDied, ReplicaExit, TransferError)
"""Errors of this package that one batch can cause, and the next one need not meet."""


class MapSettings(NamedTuple):
    """How a map runs.

    Attributes:
        replicas: How many replicas there are to choose from for each batch; 1 where all compute
            each batch.
        in_flight: The most batches that are loaded and have not given their outputs.
        at_once: As in `forward.MapCall`.
        place: Where outputs go; None is where the master is.
        ordered: Whether outputs have the order of batches.
        on_error: What to do if a batch fails.
        progress: Whether to count batches on standard error.
    """

    replicas: int
    in_flight: int
    at_once: int | None
    place: torch.device | None
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
        calls: Its forwards: one, or none if it was computed when it was sent.
        ended: Whether its output is known to be there, or its error.
    """

    def __init__(self, number: int, replica: int, wanted: forward.Capture | None) -> None:
        self.number = number
        self.replica = replica
        self._wanted = wanted
        self.captured = None if wanted is None else forward.Capture(wanted.module, wanted.names)
        self.calls: list[forward.ForwardCall] = []
        self._finish: Callable[[], Any] | None = None
        self._error: Exception | None = None
        self.ended = False

    def send(self, begin: Callable[[], Callable[[], Any]], mapping: forward.MapCall) -> None:
        """Send it, in a context of its own."""
        forward.mapping.set(mapping)
        forward.capturing.set(self.captured)
        try:
            self._finish = begin()
        except Exception as error:
            self._error = error
        self.ended = not self.pending

    @property
    def pending(self) -> list[Any]:
        """Its calls that have an answer to come."""
        return [one for call in self.calls if call.sent is not None for one in call.sent.pending]

    def output(self) -> Any:
        """Wait for its output, once; what it captured is then what was captured last."""
        error, self._error = self._error, None
        finish, self._finish = self._finish, None
        try:
            if error is not None:
                raise error
            assert finish is not None
            output = finish()
        finally:
            del error, finish  # an exception's traceback holds this frame
            self.abandon()  # does nothing but after Ctrl-C
        if self._wanted is not None and self.captured is not None:
            self._wanted.parts, self._wanted.rows = self.captured.parts, self.captured.rows
        return output

    def drain(self) -> None:
        """Wait for its end, whatever comes of it."""
        finish, self._finish = self._finish, None
        if finish is not None:
            with contextlib.suppress(Exception):
                finish()

    def abandon(self) -> None:
        """Do not wait for it any more."""
        for call in self.calls:
            call.abandon()
        self.calls.clear()


class BatchPipeline:
    """The batches with outputs that were not taken yet.

    Args:
        begin: Sends a batch.
        settings: How the map runs.
    """

    def __init__(self, begin: Begin, settings: MapSettings) -> None:
        self._begin = begin
        self._settings = settings
        self._process = os.getpid()
        self._reader = AnswerReader()
        self._batches: list[SentBatch] = []
        self._count = 0
        # The garbage collector calls `put(phase, details)`, and details count as true. A function
        # in Python could meet Ctrl-C there, and Python would ignore that.
        self._phases: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.note_phase: Any = self._phases.put

    def __len__(self) -> int:
        return len(self._batches)

    def send(self, batch: Any) -> None:
        """Send a batch to the replica that has the fewest."""
        settings = self._settings
        if settings.replicas > 1:
            self._look()
        self._in_collection()  # lest phases pile up
        waiting = [0] * settings.replicas
        for other in self._batches:
            waiting[other.replica] += not other.ended
        at = waiting.index(min(waiting))
        one = SentBatch(self._count, at, forward.capturing.get())
        self._count += 1
        # Before it is sent: Ctrl-C may come at any moment.
        self._batches.append(one)
        mapping = forward.MapCall(settings.at_once, settings.place, one.calls)
        begin = functools.partial(self._begin, at, *arguments(batch))
        contextvars.copy_context().run(one.send, begin, mapping)
        self._reader.attend(one.pending)

    def _look(self, wait: bool = False) -> None:
        """Note which batches have ended.

        Args:
            wait: Whether to wait for one, for as long as a call may take.
        """
        left = [one for one in self._batches if not one.ended]
        if left:
            executor = left[0].calls[-1].spec.executor
            answered = executor.answered([one.pending for one in left], wait)
            for one, ended in zip(left, answered, strict=True):
                one.ended = ended

    def next(self) -> SentBatch:
        """The batch that is to be taken next."""
        if self._settings.ordered:
            return self._batches[0]
        if not any(one.ended for one in self._batches):
            self._look(wait=True)
        return next((one for one in self._batches if one.ended), self._batches[0])

    def remove(self, one: SentBatch) -> None:
        """Let go of a batch, once its output was taken."""
        self._batches.remove(one)

    def _in_collection(self) -> bool:
        """Whether a thread collects garbage."""
        phase = ""
        while not self._phases.empty():
            phase = self._phases.get()
        return phase == "start"

    def close(self) -> None:
        """Wait for all calls that run. A forked process has none: they are the parent's.

        If the map is garbage, this may be in the midst of another call of this thread, which has
        locks: another thread waits then.
        """
        if self.note_phase in gc.callbacks:
            gc.callbacks.remove(self.note_phase)
        if self._in_collection():
            threading.Thread(target=self._end, name="raydp-map", daemon=True).start()
        else:
            self._end()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            for one in self._batches:
                one.drain()
        finally:
            self._reader.close()
            for one in self._batches:
                one.abandon()
            self._batches.clear()


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
    batches: Iterable[Any], begin: Begin, settings: MapSettings
) -> Generator[Any, None, None]:
    """Compute batches and give their outputs. Nothing is loaded before the first is asked for.

    Args:
        batches: The loader.
        begin: Sends a batch.
        settings: How the map runs.
    """
    source, skipped, done = BatchSource(batches), SkippedBatches(), 0
    count = BatchCount(_length(batches)) if settings.progress else None
    pipeline = BatchPipeline(begin, settings)
    found: list[Any] = []  # emptied before the consumer has the output, so that nothing keeps it
    try:
        gc.callbacks.append(pipeline.note_phase)
        while True:
            source.fill(pipeline, settings.in_flight)
            if not len(pipeline):
                break
            one = pipeline.next()
            done += 1
            try:
                found.append(one.output())
            except Exception as error:
                if settings.on_error == "raise" or not _of_a_batch(error):
                    raise
                skipped.note(one.number, error)
            pipeline.remove(one)
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
