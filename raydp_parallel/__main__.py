"""``python -m raydp_parallel`` is the command ``raydp-parallel``."""

from __future__ import annotations

import sys

from raydp_parallel.command import main

if __name__ == "__main__":
    sys.exit(main())
