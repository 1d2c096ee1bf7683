"""The sources of the driver's modules: replicas run these, and no others of the same name.

A class travels by the name of its module, and one name may mean two files: the script's folder is
not where Ray's workers start, a file is edited while training runs, another machine has none. So
the driver sends the text of the user's own modules that it has loaded, and a replica imports those
texts. A replica that has already loaded another text is replaced by a new process. Installed
packages are left to the environment.

A text is read when its module is first sent. If the file was changed since the import, the module's
classes and functions are sent by value.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import site
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import cloudpickle

from raydp_parallel.errors import SourceMismatch, log, warn
from raydp_parallel.wire.messages import Source, Sources

_BEGUN = time.time()


_MARKS = {"site-packages", "dist-packages", "thirdparty_files"}  # the last one has Ray's own copies
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_INSTALLED += [*site.getsitepackages(), site.getusersitepackages()]
_INSTALLED += [*map(os.path.realpath, _INSTALLED), os.path.dirname(os.path.dirname(__file__))]
_FOLDERS = tuple(folder + os.sep for folder in _INSTALLED)


def _is_installed(path: str) -> bool:
    """Tell if a file is Python's, this package's or an installed package's."""
    return path.startswith(_FOLDERS) or not _MARKS.isdisjoint(path.split(os.sep))


# In the driver.

_read: dict[str, tuple[object, Source | None]] = {}
"""The source of each module, with the spec that it was read for: a reload makes another one."""


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def _file(name: str) -> str:
    return str(getattr(_spec(name), "origin", None))


def _source(name: str) -> Source | None:
    spec = _spec(name)
    if spec is None:
        return None
    known = _read.get(name)
    if known is not None and known[0] is spec:
        return known[1]
    module, file = sys.modules[name], spec.origin
    found: Source | None = None
    plain = isinstance(file, str) and file.endswith(".py") and spec.has_location
    if plain and not _is_installed(os.path.abspath(file)) and name.partition(".")[0] != "ray":
        with contextlib.suppress(OSError, AttributeError):
            folders = tuple(spec.submodule_search_locations or ())
            found = Source(file, folders, spec.loader.get_data(file))
        if found is not None and _is_outdated(module, file, found.text):
            log.warning("%s was changed after its import: its code is sent by value", file)
            cloudpickle.register_pickle_by_value(module)
            found = None
    _read[name] = spec, found
    return found


def _is_outdated(module: types.ModuleType, file: str, text: bytes) -> bool:
    """Tell if a file was changed since this process imported it."""
    try:
        if os.stat(file).st_mtime <= _BEGUN:
            return False
        there = {*_codes(compile(text, file, "exec", dont_inherit=True))}
    except (OSError, SyntaxError, ValueError):
        there = set()
    values = [*vars(module).values()]
    for kind in [value for value in values if isinstance(value, type)]:
        if kind.__module__ == module.__name__:
            values += vars(kind).values()
    for value in values:
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, types.CodeType) and code.co_filename == file and code not in there:
            return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


_latest = Sources((), {})
_loaded = 0  # how many modules there were


def current() -> Sources:
    """Collect the sources of this process."""
    global _latest, _loaded
    as_it_was = [_spec(name) is _read[name][0] for name in _latest.modules]
    found = [path for path in sys.path if isinstance(path, str)]
    paths = tuple(dict.fromkeys([p if p[:1] == os.sep else os.path.abspath(p) for p in found]))
    if len(sys.modules) != _loaded or paths != _latest.paths or not all(as_it_was):
        names = [name for name in [*sys.modules] if name not in ("__main__", "__mp_main__")]
        modules = {name: source for name in names if (source := _source(name)) is not None}
        _latest, _loaded = Sources(paths, modules), len(sys.modules)
    return _latest


def is_own(name: str) -> bool:
    """Tell if a module is the driver's own."""
    return name in _latest.modules or name in _FINDER.modules


# In a replica.


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):  # type: ignore[misc]
    """Imports the driver's modules from its texts."""

    def __init__(self) -> None:
        self.modules: dict[str, Source] = {}  # if loaded, then from these texts
        self.installed: set[str] = set()  # modules of installed places, loaded before all these

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find one of the driver's modules."""
        source = self.modules.get(name)
        if source is None:
            return None
        folders = [*source.folders] or None
        return importlib.util.spec_from_file_location(
            name, source.file, loader=self, submodule_search_locations=folders
        )

    def get_filename(self, fullname: str) -> str:
        """Return a module's file, which need not exist here."""
        return self.modules[fullname].file

    def get_data(self, path: str) -> bytes:
        """Return the text of a file."""
        return next(s.text for s in self.modules.values() if s.file == path)


_FINDER = _Finder()


def follow(sources: Sources) -> None:
    """Import the driver's modules from now on. A package that Ray loads from an installed place,
    as it does with some of its own, stays what it is.

    Raises:
        SourceMismatch: One of them is loaded already, from another text.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        _FINDER.installed = {name for name in sys.modules if _is_installed(_file(name))}
    for name, source in sources.modules.items():
        loaded = _FINDER.modules.get(name) or _source(name)
        if name.partition(".")[0] in _FINDER.installed:
            if "." not in name:
                warn(f"replicas use the {name!r} of {_file(name)}, not that of {source.file}")
            continue
        if name in sys.modules and (loaded is None or loaded.text != source.text):
            raise SourceMismatch(
                f"module {name!r} of a replica is {_file(name)}, not the driver's {source.file}: "
                "Ray's runtime_env or PYTHONPATH has it first. Let both find one, or rename it"
            )
        _FINDER.modules[name] = source
    sys.path += [path for path in sources.paths if path not in sys.path]
