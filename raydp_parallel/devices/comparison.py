"""Compares bytes with earlier bytes on the device that holds them; only a small result is fetched.

[Note: fingerprints]
The bytes that a module on CUDA sent are not kept on the GPU a second time, and fetching the weights
for a comparison would cost more than the step. So each run of bytes has a fingerprint, computed on
the device: two sums, modulo 2 to the 64th, of its 32-bit words times random 64-bit numbers. A
change of any words goes unseen with a probability of about 2 to the -64th. That includes changes
that only flip signs, because a word's highest bit is far below the highest bit of a product.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.devices.cuda import DeviceBytes, behind, on_device, upload, wait_for
from raydp_parallel.devices.ranges import MemoryRange, data_of, is_cpu

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_LARGE = 1 << 22
"""Bytes up to which runs are compared together, so that a model of many small tensors takes few
kernels.
"""

_AT_ONCE = 16 * _LARGE
"""Bytes of the host's that are brought to a GPU together to have fingerprints made of them."""

_SEED = 20261


def compare(pairs: Sequence[tuple[MemoryRange, MemoryRange]]) -> Callable[[], list[bool]]:
    """Whether the runs of each pair hold the same bytes.

    Returns:
        A function that gives the answers. A GPU begins at once; the function waits for it.
    """
    found = [one.size == other.size for one, other in pairs]
    on_gpu = []
    for i, (one, other) in enumerate(pairs):
        if not found[i] or not one.size:
            continue
        if one.origin is not None:
            on_gpu.append(i)
        else:
            found[i] = _libc.memcmp(one.address, other.address, one.size) == 0
    if not on_gpu:
        return lambda: found
    tensors = [(data_of(pairs[i][0]), data_of(pairs[i][1])) for i in on_gpu]
    answers = _Answer(torch.cat(_unlike(tensors)))

    def result() -> list[bool]:
        for i, unlike in zip(on_gpu, answers.fetch(), strict=True):
            found[i] = not unlike
        return found

    return result


def compare_runs(
    one: Tensor, other: Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> Callable[[], list[bool]]:
    """Whether two tensors of bytes, on one device, are equal in each run that ``offsets`` and
    ``sizes`` give.

    Returns:
        A function that gives the answers. A GPU begins at once; the function waits for it.
    """
    if not sizes:
        return list
    if not is_cpu(one.device):
        begin, end = _edges(tuple(offsets), tuple(sizes), one.device)
        counts = torch.nn.functional.pad(torch.ne(one, other).cumsum(0, dtype=torch.int64), (1, 0))
        answers = _Answer(counts[end.here()] != counts[begin.here()])
        return lambda: [not unlike for unlike in answers.fetch()]
    here, there = one.data_ptr(), other.data_ptr()
    if _libc.memcmp(here, there, one.nbytes) == 0:
        return lambda: [True] * len(sizes)
    rows = zip(offsets, sizes, strict=True)
    found = [_libc.memcmp(here + start, there + start, size) == 0 for start, size in rows]
    return lambda: found


class _Answer:
    """A small tensor of a GPU that is being copied to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = DeviceBytes(tensor.to(torch.uint8))
        self._host = torch.empty(tensor.numel(), dtype=torch.uint8, device="cpu")
        self._bytes.copy_to(self._host.data_ptr())
        # The event is recorded now, so that `fetch` does not wait for later work of the device.
        self._copied = behind(tensor.device)
        self._fetched = False

    def fetch(self) -> list[int]:
        """Wait for the copy; returns the tensor's values."""
        if not self._fetched:
            wait_for(self._copied)
            self._bytes.settle()
            self._fetched = True
        return self._host.tolist()


def _unlike(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """For each pair, in order, whether it differs, in tensors on the device."""
    found: list[Tensor] = []
    for group in _groups([len(one) for one, _ in pairs]):
        chosen = pairs[group.start : group.stop]
        if len(chosen) == 1:
            found.append(torch.ne(*chosen[0]).any().view(1))
            continue
        now, then = (torch.cat(row) for row in zip(*chosen, strict=True))
        found.append(_per_run(torch.ne(now, then), [len(one) for one, _ in chosen]) != 0)
    return found


def _groups(sizes: Sequence[int], most: int = _LARGE) -> list[range]:
    """Ranges of neighbours that have at most so many bytes together; a larger one is alone."""
    groups, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            groups.append(range(start, i))
            start, total = i, 0
        total += size
    return [*groups, range(start, len(sizes))] if sizes else []


def _per_run(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sums of values over neighbouring runs."""
    ends = _ends(tuple(sizes), values.device)
    totals = values.cumsum(0, dtype=torch.int64)[ends.here()]
    return torch.cat([totals[:1], totals[1:] - totals[:-1]])


class _Table:
    """Numbers on a GPU that later calls use too, on whichever stream they run.

    Args:
        numbers: The numbers, on the CPU. They are copied on the current stream.
        device: The GPU.
    """

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self._numbers = numbers.to(device, non_blocking=True)
        self._stream = torch.cuda.current_stream(device)
        self._copied = behind(device)

    def here(self) -> Tensor:
        """The numbers. The current stream waits for them, and they are not freed before it has
        read them.
        """
        stream = torch.cuda.current_stream(self._numbers.device)
        if stream != self._stream:
            self._copied.wait(stream)
            self._numbers.record_stream(stream)
        return self._numbers


@functools.lru_cache(maxsize=64)
def _edges(
    offsets: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[_Table, _Table]:
    """The offsets at which each run begins and ends."""
    begin = torch.tensor(offsets, device="cpu")
    end = begin + torch.tensor(sizes, device="cpu")
    return _Table(begin, device), _Table(end, device)


@functools.lru_cache(maxsize=64)
def _ends(sizes: tuple[int, ...], device: torch.device) -> _Table:
    """The index of the last element of each run."""
    return _Table(torch.tensor(sizes, device="cpu").cumsum(0) - 1, device)


def copied(piece: MemoryRange) -> MemoryRange:
    """A copy of the bytes, on the same device."""
    if piece.origin is not None:
        return on_device(data_of(piece).clone())
    contents = ctypes.string_at(piece.address, piece.size)
    copy = ctypes.create_string_buffer(contents, max(1, piece.size))
    return MemoryRange(ctypes.addressof(copy), piece.size, copy)


class Prints(NamedTuple):
    """Fingerprints of some runs of bytes on a GPU.

    Attributes:
        keys: The key of the run that each fingerprint belongs to; a large run has several.
        values: Two numbers for each fingerprint, on the device.
    """

    keys: tuple[int, ...]
    values: Tensor | None

    def of(self, keys: Sequence[int]) -> Prints:
        """The fingerprints of some runs, in the order that they have here."""
        if not self.keys:
            return self
        wanted = {*keys}
        rows = [i for i, key in enumerate(self.keys) if key in wanted]
        if len(rows) == len(self.keys) or self.values is None:
            return self
        index = torch.tensor(rows, dtype=torch.int64, device="cpu")
        chosen = self.values[index.to(self.values.device, non_blocking=True)]
        return Prints(tuple(self.keys[row] for row in rows), chosen)

    def joined(self, newer: Prints) -> Prints:
        """These fingerprints and newer ones, which replace those of the same runs."""
        if self.values is None or newer.values is None:
            return newer if self.values is None else self
        again = {*newer.keys}
        kept = self.of([key for key in self.keys if key not in again])
        assert kept.values is not None
        return Prints((*kept.keys, *newer.keys), torch.cat([kept.values, newer.values]))

    def without(self, keys: Sequence[int]) -> Prints:
        """These fingerprints without those of some runs."""
        gone = {*keys}
        left = [key for key in self.keys if key not in gone]
        return self.of(left) if left else Prints((), None)

    def unlike(self, now: Prints) -> list[int]:
        """The keys of runs that differ in ``now``, which must be of the same runs. This waits for
        the device.
        """
        if self.values is None or now.values is None:
            return []
        answers = _Answer((self.values != now.values).any(1)).fetch()
        differing = [key for key, unlike in zip(self.keys, answers, strict=True) if unlike]
        return list(dict.fromkeys(differing))


def prints(runs: Mapping[int, MemoryRange]) -> Prints:
    """The fingerprints of the runs that lie on a GPU."""
    parts: list[tuple[int, Tensor]] = []
    for key, piece in runs.items():
        if piece.origin is not None and piece.size:
            parts += [(key, part) for part in data_of(piece).split(_LARGE)]
    if not parts:
        return Prints((), None)
    tensors = [part for _, part in parts]
    groups = _groups([-(-len(part) // 4) * 4 for part in tensors])
    rows = [_print(tensors[group.start : group.stop]) for group in groups]
    return Prints(tuple(key for key, _ in parts), torch.cat(rows))


def prints_of_host(runs: Mapping[int, MemoryRange], device: torch.device) -> Prints:
    """The fingerprints of runs that lie in the machine's memory, made on a GPU.

    The runs are brought there a few at a time, and large ones in parts, so that this takes no more
    of the GPU's memory for a larger model.
    """
    parts: list[tuple[int, MemoryRange]] = []
    for key, run in runs.items():
        for start in range(0, run.size, _AT_ONCE):
            parts.append((key, run.part(start, min(_AT_ONCE, run.size - start))))
    made = [
        _prints_of_host(parts[group.start : group.stop], device)
        for group in _groups([part.size for _, part in parts], _AT_ONCE)
    ]
    values = [each.values for each in made if each.values is not None]
    keys = tuple(key for each in made for key in each.keys)
    return Prints(keys, torch.cat(values) if values else None)


def _prints_of_host(parts: Sequence[tuple[int, MemoryRange]], device: torch.device) -> Prints:
    """The fingerprints of one group. What was brought for it is free again afterwards."""
    # Each part of a larger run but its last one fills a group: no key comes twice.
    return prints({key: on_device(upload(part, device)) for key, part in parts})


def _print(group: Sequence[Tensor]) -> Tensor:
    """Two numbers for each run of a group; the runs are small together."""
    device = group[0].device
    padded = []
    for run in group:
        missing = -len(run) % 4
        padded.append(torch.cat([run, run.new_zeros(missing)]) if missing else run)
    # A single run is cloned: torch does not show bytes as words if they do not begin on a word.
    whole = torch.cat(padded) if len(padded) > 1 else padded[0].clone()
    words = whole.view(torch.int32).to(torch.int64)
    sizes = [len(run) // 4 for run in padded]
    # Each run begins with the first factor: its fingerprint must not depend on its neighbours.
    sums = [
        _per_run(words * torch.cat([f[:size] for size in sizes]), sizes) for f in _factors(device)
    ]
    return torch.stack(sums, 1)


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Random numbers, the same in every process."""
    random = torch.Generator(device="cpu").manual_seed(_SEED)
    count = _LARGE // 4
    low, high = -(1 << 63), (1 << 63) - 1
    one, other = (
        torch.randint(low, high, (count,), generator=random, device="cpu") for _ in range(2)
    )
    return one.to(device), other.to(device)
