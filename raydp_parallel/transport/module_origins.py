"""What replicas are told of the driver's modules, so that they run the same source. `loaded` finds
it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModuleSource(NamedTuple):
    """What a module was made of.

    Attributes:
        file: Its file.
        digest: Names the text; empty if the file has been changed since.
    """

    file: str
    digest: str


class Origins(NamedTuple):
    """Where the driver finds its modules, for replicas to find the same.

    Attributes:
        process: The driver's process.
        paths: Its search path, in its order.
        installed: What of that belongs to Python and to installed packages.
        sources: The modules that it has loaded, by name.
    """

    process: str
    paths: tuple[str, ...]
    installed: tuple[str, ...]
    sources: Mapping[str, ModuleSource]
