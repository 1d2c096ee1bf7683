"""Modules that only the driver has: packed there, unpacked on the nodes of replicas that could not import them.

What a script or a notebook defines travels with the value that needs it, as cloudpickle does it. Everything else
travels by name, and the name means nothing on another machine if the module lies beside the script, is an editable
install, or on a path that the program added. A replica answers with ``ModuleNotFoundError`` then; the driver sends the
files of the module's package, and the call runs again. What is installed here and not there is another matter: nodes
whose packages differ need the same environment, and the error stands.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydp_parallel.messages import Failure, Package

log = logging.getLogger("raydp_parallel")

_MOST = 64 << 20
"""Bytes of a package that travels; what is larger is data, which a program should not send by accident."""

_LEFT_OUT = ("__pycache__", "node_modules")


def missing(failure: Failure | None) -> str | None:
    """The module that a replica could not import, if that is what it failed for."""
    if failure is None or not failure.name.endswith("ModuleNotFoundError"):
        return None
    found = re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", failure.text)
    return found[-1].partition(".")[0] if found else None


def pack(name: str) -> Package | None:
    """The files of a module that is here, and not installed; None if there is no such thing."""
    spec = _spec(name)
    if spec is None or name in sys.stdlib_module_names:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [Path(spec.origin)] if not folders and spec.has_location and spec.origin else folders
    if not paths or any(_installed(path) for path in paths):
        return None
    found = {path.name: path for path in paths} if not folders else _below(name, folders)
    size = sum(path.stat().st_size for path in found.values())
    if size > _MOST:
        log.warning(
            "the package %s is not sent to replicas: it has %.0f MB, files of data among them", name, size / 1e6
        )
        return None
    files = tuple((inside, path.read_bytes()) for inside, path in sorted(found.items()))
    digest = hashlib.sha256(b"".join(part for inside, data in files for part in (inside.encode(), b"\0", data)))
    return Package(name, digest.hexdigest()[:16], files)


def _spec(name: str) -> Any:
    found = getattr(sys.modules.get(name), "__spec__", None)
    try:
        return found or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _installed(path: Path) -> bool:
    places = (sysconfig.get_path(which) for which in ("purelib", "platlib", "stdlib", "platstdlib"))
    return any(path.resolve().is_relative_to(Path(place).resolve()) for place in places if place)


def _below(name: str, folders: list[Path]) -> dict[str, Path]:
    return {str(Path(name, path.relative_to(folder))): path for folder in folders for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    for here, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _LEFT_OUT and not name.startswith(".")]
        yield from (Path(here, file) for file in files if not file.startswith(".") and Path(here, file).is_file())


def unpack(package: Package, folder: Path) -> None:
    """Make a package importable in this process, behind all that is here already.

    Args:
        package: The package.
        folder: Where processes of this machine keep such files. One that was there before is not written again.
    """
    place = folder / f"{package.name}-{package.digest}"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
        for inside, data in package.files:
            path = fresh / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            fresh.rename(place)
        except OSError:  # another replica of this machine was faster
            shutil.rmtree(fresh, ignore_errors=True)
    if str(place) not in sys.path:
        sys.path.append(str(place))
    importlib.invalidate_caches()
