"""All benchmarks, and their summary: `python -m benchmarks`, or with `--quick` in some
minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import summary
from benchmarks.measure import RESULTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, keep, summarize. Those that fail do not keep the others from running."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=summary.NAMES, help="by default all")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rounds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to keep the results")
    options = parser.parse_args(arguments)
    flags = [*(["--quick"] if options.quick else []), "--results", str(options.results)]
    failed = [name for name in options.names if not ran(name, flags)]
    for written in summary.write(options.results):
        print(f"wrote {written}")
    if failed:
        print(f"failed, so that the summary has no new numbers of them: {', '.join(failed)}")
    return len(failed)


def ran(name: str, flags: Sequence[str]) -> bool:
    """Run one benchmark in a process and a Ray of its own."""
    print(f"== {name}", end="\n\n", flush=True)
    start = time.perf_counter()
    code = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags], check=False
    ).returncode
    print(f"  took {time.perf_counter() - start:.0f} s", end="\n\n", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
