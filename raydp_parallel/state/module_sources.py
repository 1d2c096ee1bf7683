"""The sources of a process's modules: replicas run the driver's, and no others of the same name.

A class is sent by the name of its module, and one name may mean two files: `python exp/train.py`
imports `exp/nets.py`, and Ray gives its workers the working folder before the script's; a file is
edited while training runs, and the replica that replaces a dead one imports the new text; a module
is reloaded in a notebook. So the driver sends, with each structure, its search path and, of each
module that it has loaded, the file and a digest of the text. A replica searches in that order, and
checks each of these modules before it runs it, and those that it has loaded already. A module that
differs is never run: `SourceMismatch` names it, the driver sends its own files (see
``code_shipping``), and the call runs again.

The user's own modules (not installed ones) are compared, and the installed ones that define a class
of the model. This package itself, torch and NumPy are compared by version; extension modules are
not compared.

Known limit: the text is read when a module is first sent, not when it was imported. A file that was
changed in between is noticed if its functions are not those that run here; then the module's
classes and functions are sent by value.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import logging
import os
import site
import sys
import sysconfig
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from raydp_parallel.errors import SourceMismatch
from raydp_parallel.transport.messages import ModuleSource, Origins

log = logging.getLogger("raydp_parallel")

PROCESS = uuid.uuid4().hex
"""The name of this process."""

_BEGUN = time.time()
_SUFFIXES = (*importlib.machinery.SOURCE_SUFFIXES, *importlib.machinery.BYTECODE_SUFFIXES)
_BY_VERSION = ("raydp_parallel", "torch", "ray", "numpy", "cloudpickle")


NOWHERE = Origins("", (), (), {})
"""The origins of no module."""


class _Known(NamedTuple):
    """What is known about a module; a module that is loaded again has another spec. It is sent by
    value if its file changed after the import.
    """

    spec: Any
    source: ModuleSource | None
    data: bytes
    by_value: bool = False


_known: dict[str, _Known] = {}


def _homes() -> tuple[str, ...]:
    """The folders of Python and of what is installed."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({folder for path in paths if path for folder in (path, os.path.realpath(path))})


_HOMES = _homes()


def is_installed(path: str) -> bool:
    """Whether a file or a folder is Python's own, or belongs to an installed package."""
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(path == home or path.startswith(home + os.sep) for home in _HOMES)


def spec_of(name: str) -> Any:
    """The spec of a loaded module; None if it has none or is not loaded. This loads nothing."""
    try:
        return object.__getattribute__(sys.modules[name], "__dict__").get("__spec__")
    except (KeyError, AttributeError):
        return None


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """The versions that must be equal in the driver and its replicas: of this package with its
    sources, torch and NumPy.
    """
    folder = Path(__file__).parents[1]
    text = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    own = f"{sys.modules[folder.name].__version__} ({text.hexdigest()[:8]})"
    return (folder.name, own), *(
        (name, str(sys.modules[name].__version__)) for name in ("torch", "numpy")
    )


def specs(names: Iterable[str]) -> list[Any]:
    """The specs of some modules: compared by identity, they show whether a module was reloaded."""
    return [spec_of(name) for name in names]


def texts(package: str) -> dict[str, bytes]:
    """The texts of a package's loaded modules, by file, as they were when they were first read."""
    found = {}
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        known = _look(name)
        if known is not None and known.source is not None and known.data:
            found[known.source.file] = known.data
    return found


def source_of(name: str) -> ModuleSource | None:
    """The source of a loaded module; None if it has no file of its own."""
    known = _look(name)
    return known.source if known is not None else None


def _look(name: str) -> _Known | None:
    spec = spec_of(name)
    if spec is None:
        return None
    known = _known.get(name)
    if known is None or known.spec is not spec:
        known = _known[name] = _read(spec)
    return known


def _read(spec: Any) -> _Known:
    file = spec.origin
    if not spec.has_location or not isinstance(file, str) or not file.endswith(_SUFFIXES):
        return _Known(spec, None, b"")
    try:
        data = spec.loader.get_data(file)
    except (OSError, AttributeError):
        return _Known(spec, ModuleSource(file, ""), b"")
    return _Known(spec, ModuleSource(file, hashlib.sha256(data).hexdigest()[:32]), data)


# In the driver.


def origins(kinds: Sequence[type]) -> Origins:
    """What replicas must know of this process's modules.

    Args:
        kinds: The classes of a model that replicas import.
    """
    used = {kind.__module__ for kind in kinds}
    sources = {}
    for name in [*sys.modules]:
        file = _file(name)
        if file is not None and _is_compared(name, file, name in used):
            found = _checked(name)
            if found is not None:
                sources[name] = found
    absolute = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    paths = tuple(dict.fromkeys(absolute))
    return Origins(PROCESS, paths, tuple(filter(is_installed, paths)), sources)


def origins_of(function: Callable[..., Any]) -> Origins | None:
    """What replicas must know of the module that a function is imported from; None if it is sent
    by value, or if its module is compared by version. The model's own origins need not have it,
    because it may have been loaded since.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None)
    if not isinstance(name, str):
        return None
    file = _file(name)
    if file is None or not _is_compared(name, file, True):
        return None
    found = _checked(name)
    if found is None or not found.digest:
        return None
    return Origins(PROCESS, (), (), {name: found})


def _file(name: str) -> str | None:
    """The file of a loaded module."""
    file = getattr(spec_of(name), "origin", None)
    return file if isinstance(file, str) else None


@functools.cache  # a program has loaded thousands, and each new model asks for all
def _is_compared(name: str, file: str, used: bool) -> bool:
    """Whether replicas compare a module's text: not where the version says enough, nor that of an
    installed module that a model does not use.
    """
    if name.startswith("__") or name.partition(".")[0] in _BY_VERSION:
        return False
    return used or not is_installed(file)


def _checked(name: str) -> ModuleSource | None:
    """A module's source. If its file no longer has the text that runs here, the module is
    registered to be sent by value.
    """
    before, known = _known.get(name), _look(name)
    if known is None or known is before:
        return known.source if known is not None else None
    module = sys.modules[name]
    registered = name in cloudpickle.list_registry_pickle_by_value()
    if registered and before is not None and before.by_value:
        cloudpickle.unregister_pickle_by_value(module)
    if known.source is not None and _is_outdated(module, known):
        log.warning(
            "%s was changed after it was imported: what was imported is sent to replicas",
            known.source.file,
        )
        known = _known[name] = _Known(known.spec, ModuleSource(known.source.file, ""), b"", True)
        cloudpickle.register_pickle_by_value(module)
    return known.source


def _is_outdated(module: Any, known: _Known) -> bool:
    """Whether a module's file was changed after this process began, and no longer has some of the
    module's functions.
    """
    file = known.spec.origin
    try:
        if os.stat(file).st_mtime <= _BEGUN or not file.endswith(".py"):
            return False
        there = {*_codes(compile(known.data, file, "exec", dont_inherit=True))}
    except (OSError, SyntaxError, ValueError):
        return True
    here = [function.__code__ for function in _functions(module)]
    return any(code not in there for code in here if code.co_filename == file)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _functions(module: Any) -> Iterator[types.FunctionType]:
    """The functions of a module and of its classes."""
    values = [*vars(module).values()]
    kinds = [
        value
        for value in values
        if issubclass(type(value), type) and value.__module__ == module.__name__
    ]
    for value in [*values, *(part for kind in kinds for part in vars(kind).values())]:
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            yield function


# In a replica.


class _Guard:
    """What the driver has told this process of its modules; a finder before Python's own ones that
    checks what they find.

    Attributes:
        wanted: The sources that the driver has loaded, by the name of the module.
        sent: The folders of packages that the driver sent, by name. They are searched before all
            others.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, ModuleSource] = {}
        self.sent: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module that the driver has loaded too, if the source is the same."""
        if name not in self.wanted:
            return None
        for finder in [*sys.meta_path]:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                known = _read(spec)
                if known.source is not None:
                    _compare(name, known.source)
                    _known[name] = known
                return spec
        return None


_GUARD = _Guard()


def follow(origins: Origins) -> None:
    """Search for modules as the driver does, and refuse those that differ from the driver's.

    Raises:
        SourceMismatch: A module that differs is loaded already.
    """
    if origins.process == PROCESS:
        return  # a replica in the driver's process
    sys.path[:] = dict.fromkeys([*_GUARD.sent.values(), *_in_order(sys.path, origins)])
    _GUARD.wanted.clear()
    expect(origins)


def expect(origins: Origins) -> None:
    """Refuse further modules that differ from the driver's.

    Raises:
        SourceMismatch: A module that differs is loaded already.
    """
    if origins.process == PROCESS:
        return
    _GUARD.wanted.update(origins.sources)
    if _GUARD not in sys.meta_path:
        sys.meta_path.insert(0, _GUARD)
    for name in origins.sources:
        found = source_of(name)
        if found is not None:
            _compare(name, found)


def _in_order(own: Sequence[str], origins: Origins) -> list[str]:
    """A search path in the driver's order, with this process's folders of installed packages in the
    place of the driver's.
    """
    others = [path for path in own if path not in origins.paths]
    installed = [path for path in others if is_installed(path)]
    missing = {path for path in origins.installed if path not in own}
    found: list[str] = []
    for path in origins.paths:
        if path in missing:
            found += installed
        else:
            found.append(path)
    return [*dict.fromkeys([*found, *installed, *sorted(missing), *others])]


def _compare(name: str, found: ModuleSource) -> None:
    wanted = _GUARD.wanted.get(name)
    if wanted is None or (found.digest == wanted.digest and found.digest):
        return
    if not wanted.digest:
        why = (
            f"{wanted.file} was changed after the driver had imported it, so that it is not what "
            "the driver runs: start the program again, or importlib.reload() the module"
        )
    else:
        why = (
            f"the driver has imported {wanted.file}, and this process would run {found.file}, "
            "which differs: give one of them another name, or install the same version of it on "
            "every node"
        )
    raise SourceMismatch(f"module {name!r} of a replica is not the driver's: {why}")


def prefer(name: str, folder: str) -> bool:
    """Import a module from a folder that the driver sent, from now on.

    Args:
        name: The module, or the package.
        folder: The folder that holds it.

    Returns:
        Whether it had been loaded from elsewhere. Then all of the user's modules are unloaded,
        because others may hold parts of it, and models built from them must be built again.
    """
    before, _GUARD.sent[name] = _GUARD.sent.get(name), folder
    sys.path[:] = [folder, *(path for path in sys.path if path not in (folder, before))]
    if not any(key.partition(".")[0] == name for key in sys.modules):
        return False
    own = {key for key, source in _GUARD.wanted.items() if not is_installed(source.file)}
    for key in [key for key in sys.modules if key in own or key.partition(".")[0] == name]:
        del sys.modules[key]
    return True
