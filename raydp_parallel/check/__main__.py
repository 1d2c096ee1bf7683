"""``python -m raydp_parallel.check`` is the command ``raydp-parallel check``."""

from __future__ import annotations

import sys

from raydp_parallel.check.program import main

if __name__ == "__main__":
    sys.exit(main())
