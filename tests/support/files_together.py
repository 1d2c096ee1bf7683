"""Which test files one process runs, where several do: those that need the same executors with
options of their own, each of which takes seconds to start.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

TOGETHER = {
    "sums among replicas, and deaths": (
        "test_compile.py",
        "test_train_combined.py",
        "test_train_in_replicas.py",
        "test_faults.py",
        "test_call_and_run.py",
        "test_compile_option.py",
        "test_no_sync.py",
        "test_no_sync_combined.py",
        "test_collective.py",
        "test_nccl.py",
    ),
    "other links, calls of Ray, and GPUs": (
        "test_bad_input.py",
        "test_chunk_refs.py",
        "test_contract_apply.py",
        "test_contract_autograd.py",
        "test_contract_replicate.py",
        "test_contract_wrapper.py",
        "test_training_parity.py",
        "test_forks.py",
        "test_review.py",
        "test_threads.py",
        "test_executor.py",
        "test_map.py",
        "test_line.py",
        "test_shared.py",
        "test_wire_limits.py",
    ),
}
"""Names of files, by what they share. Each set takes a third of the time of all files; they come
first, and what is left is for the process that is done with its set.
"""

_SETS = {file: name for name, files in TOGETHER.items() for file in files}


def set_of(file: str) -> str:
    """What the process of a test file runs as a whole: a set of files, or the file alone."""
    return _SETS.get(PurePosixPath(file).name, file)


def scheduler(config: Any, log: Any) -> Any:
    """What `--dist loadfile` gives to processes, with sets of files in place of files, first."""
    from xdist.scheduler import LoadFileScheduling

    class TogetherScheduling(LoadFileScheduling):  # type: ignore[misc]
        """Splits tests by `set_of` their file."""

        def _split_scope(self, nodeid: str) -> str:
            return set_of(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            for name in TOGETHER:
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

    return TogetherScheduling(config, log)
