"""Descriptions of the driver's modules, by which replicas run the same source. `loaded` makes
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModuleSource(NamedTuple):
    """The source of a module.

    Attributes:
        file: Its file.
        digest: The digest of the text; empty if the file has been changed since.
    """

    file: str
    digest: str


class Origins(NamedTuple):
    """The driver's search path and its modules, so that replicas load the same.

    Attributes:
        process: The driver's process.
        paths: Its search path, in order.
        installed: The entries of the path that belong to Python and to installed packages.
        sources: The sources of the modules that it has loaded, by name.
    """

    process: str
    paths: tuple[str, ...]
    installed: tuple[str, ...]
    sources: Mapping[str, ModuleSource]
