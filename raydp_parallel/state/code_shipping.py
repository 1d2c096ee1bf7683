"""Modules that only the driver has: packed there, unpacked on the nodes of replicas that could not
import them.

Classes of a script or a notebook are sent by value, by cloudpickle. All others are sent by name,
which another machine cannot import if the module lies beside the script, is an editable install, or
lies on a path that the program added. Then a replica answers with ``ModuleNotFoundError`` or, if it
finds another file of that name, with ``SourceMismatch``; the driver sends the files of the module's
package, with the text that it runs itself, and the call runs again. That costs nothing where the
code is installed. A package that is installed here and missing there, or of another version there,
stays an error: such nodes need the same environment. Files are sent and not values, so that data
beside the modules, relative imports and identities work.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydp_parallel.state import module_sources
from raydp_parallel.state.module_sources import is_installed
from raydp_parallel.transport.messages import Failure, Package

log = logging.getLogger("raydp_parallel")

_MOST = 64 << 20
"""Bytes of a package that travels; what is larger is data, which a program should not send by
accident.
"""

_LEFT_OUT = ("__pycache__", "node_modules")


_WANTED = {
    "ModuleNotFoundError": r"ModuleNotFoundError: No module named '([\w.]+)'",
    "SourceMismatch": r"SourceMismatch: module '([\w.]+)' of a replica",
}
"""Exceptions that the driver's files can remedy, and how they name the module."""


def wanted(failure: Failure | None) -> str | None:
    """The module or package that a replica could not import, or of which it found other files; None
    if it failed for another reason.
    """
    if failure is None:
        return None
    pattern = _WANTED.get(failure.name.rpartition(".")[2])
    found = re.findall(pattern, failure.text) if pattern is not None else ()
    return found[-1].partition(".")[0] if found else None


def pack(name: str) -> Package | None:
    """The files of a module that is here but not installed; None if it has none to send."""
    spec = _spec(name)
    if spec is None or name in sys.stdlib_module_names:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [Path(spec.origin)] if not folders and spec.has_location and spec.origin else folders
    if not paths:
        return None
    if any(is_installed(str(path)) or is_installed(os.path.realpath(path)) for path in paths):
        return None
    found = {path.name: path for path in paths} if not folders else _below(name, folders)
    size = sum(path.stat().st_size for path in found.values())
    if size > _MOST:
        log.warning(
            "the package %s is not sent to replicas: it has %.0f MB, files of data among them",
            name,
            size / 1e6,
        )
        return None
    texts = module_sources.texts(name)
    digest = hashlib.sha256()
    files = []
    for inside, path in sorted(found.items()):
        data = texts.get(str(path)) or path.read_bytes()
        digest.update(inside.encode() + b"\0" + data)
        files.append((inside, data))
    return Package(name, digest.hexdigest()[:16], tuple(files))


def _spec(name: str) -> Any:
    found = getattr(sys.modules.get(name), "__spec__", None)
    try:
        return found or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _below(name: str, folders: list[Path]) -> dict[str, Path]:
    return {
        str(Path(name, path.relative_to(folder))): path
        for folder in folders
        for path in _files(folder)
    }


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, without links to files elsewhere: the user did not ask to send
    those.
    """
    inside = folder.resolve()
    for here, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _LEFT_OUT and not name.startswith(".")]
        for path in (Path(here, file) for file in files if not file.startswith(".")):
            if path.is_file() and path.resolve().is_relative_to(inside):
                yield path


def place(session: str) -> Path:
    """A folder for such files that only this user can write to: its files run as this user's code.

    Args:
        session: The name of the cluster's session. The processes of a session share the folder.
    """
    # Not Ray's session folder: other users may rename files there.
    base = Path(tempfile.gettempdir(), f"raydp_parallel-{os.geteuid()}")
    with contextlib.suppress(OSError):
        base.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(base):
            folder = base / session
            folder.mkdir(mode=0o700, exist_ok=True)
            return folder
    log.warning(
        "%s belongs to another user, or others may write to it: sources are kept elsewhere", base
    )
    return Path(tempfile.mkdtemp(prefix="raydp_parallel-"))


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others_write


def unpack(package: Package, folder: Path) -> bool:
    """Make a package importable in this process, before all other folders.

    Args:
        package: The package.
        folder: Where processes of this machine keep such files. A package that is there already is
            not written again.

    Returns:
        Whether modules were unloaded, because some of that name had been loaded from elsewhere.
    """
    place = folder / f"{package.name}-{package.digest}"
    if not place.exists():
        fresh = Path(tempfile.mkdtemp(dir=folder))
        for inside, data in package.files:
            path = fresh / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            fresh.rename(place)
        except OSError:  # another replica of this machine was faster
            shutil.rmtree(fresh, ignore_errors=True)
    dropped = module_sources.prefer(package.name, str(place))
    importlib.invalidate_caches()
    return dropped
