"""Plugins: a user's own classes, registered by name in a module that a recipe or cluster file names.

Each table that can be extended has one `Registry` beside it. A plugin registers a class there under a name, and a key
of the recipe names it:

    plugins: [my_plugin]                    # my_plugin.py beside the recipe, or an installed module
    train: {optimizer: {name: sgd, …}}      # what my_plugin registers

A plugin is one module file, or a package with all its `.py` files. Their source is hashed into the run id, kept with
the run and packed with the code that travels to a cluster. `load_plugins` runs the user's code: nothing here makes it
safe to name a module that one does not trust.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from trainshed.errors import InputError

MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
"""How a module is named: `my_plugin`, `my_package.my_module`."""
NAME_PATTERN = r"^[a-z][a-z0-9_-]*$"
"""How a registered class is named in a recipe."""
MOST_BYTES = 1 << 20
"""The source of one plugin. It travels with every job, and a ConfigMap of Kubernetes holds a mebibyte."""

Registered = TypeVar("Registered")


@dataclass(frozen=True)
class _Entry:
    """Something that a module has registered, and where."""

    value: Any
    module: str
    place: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


class Registry(Mapping[str, Registered], Generic[Registered]):
    """The classes of one kind by name: ours, and those that plugins have registered.

    A built-in one may be written as `module:Class`. It is imported when it is first asked for, so that a registry costs
    no import of torch.
    """

    def __init__(self, kind: str, built_in: Mapping[str, Registered | str]) -> None:
        self.kind = kind
        self._built_in: dict[str, Registered | str] = dict(built_in)
        self._entries: dict[str, _Entry] = {}
        _REGISTRIES[kind] = self

    def register(self, name: str, value: Any = None) -> Any:
        """Register a class under a name: as a decorator, or with the value."""
        caller = sys._getframe(1)
        module, place = str(caller.f_globals.get("__name__", "")), f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def add(item: Any) -> Any:
            self._add(name, item, module, place)
            return item

        return add if value is None else add(value)

    def _add(self, name: str, value: Any, module: str, place: str) -> None:
        if not re.fullmatch(NAME_PATTERN, name):
            raise InputError(
                f"`{name}` is not a name of {_a(self.kind)}", where=place, hint="use lower-case letters, digits and _"
            )
        owner = "it is built in" if name in self._built_in else None
        if name in self._entries:
            owner = f"{self._entries[name].place} has registered it"
        if owner is not None:
            raise InputError(
                f"the name `{name}` of {_a(self.kind)} is taken: {owner}", where=place, hint="choose another name"
            )
        self._entries[name] = _Entry(value, module, place)

    def find(self, name: str, where: str | None = None) -> Registered:
        """Return a class by its name; an unknown one is an error that names the known ones."""
        if name in self:
            return self[name]
        near = difflib.get_close_matches(name, list(self), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"a plugin may register it: plugins: [MODULE] ({PAGE})"
        raise InputError(f"there is no {self.kind} `{name}`; known are {', '.join(self)}", where=where, hint=hint)

    def owner(self, name: str) -> str | None:
        """Return the top-level module that has registered a name; None for a built-in or unknown one."""
        entry = self._entries.get(name)
        return None if entry is None else entry.package

    def place(self, name: str) -> str | None:
        """Return the file and line that has registered a name; None for a built-in or unknown one."""
        entry = self._entries.get(name)
        return None if entry is None else entry.place

    def __getitem__(self, name: str) -> Registered:
        if name in self._entries:
            return cast(Registered, self._entries[name].value)
        value = self._built_in[name]
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            value = self._built_in[name] = cast(Registered, getattr(importlib.import_module(module), attribute))
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._built_in

    def __iter__(self) -> Iterator[str]:
        return iter((*self._built_in, *self._entries))

    def __len__(self) -> int:
        return len(self._built_in) + len(self._entries)

    def forget(self, package: str) -> None:
        """Drop what the modules of a package have registered."""
        self._entries = {name: entry for name, entry in self._entries.items() if entry.package != package}

    def packages(self) -> set[str]:
        """Return the top-level modules that have registered something."""
        return {entry.package for entry in self._entries.values()}


PAGE = "docs/plugins.md"
_REGISTRIES: dict[str, Registry[Any]] = {}
_LOADED: dict[str, PluginSource] = {}
_UNCHECKED: ContextVar[bool] = ContextVar("names_unchecked", default=False)


def registry(kind: str) -> Registry[Any] | None:
    """Return the registry of a kind; None where no module that has one is imported, so that no plugin filled it."""
    return _REGISTRIES.get(kind)


def registered_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that plugins have registered."""
    known = registry(kind)
    return () if known is None else tuple(name for name in known if known.owner(name) is not None)


def source_hash(kind: str, name: str) -> str | None:
    """Return the hash of the plugin that has registered a name; None for a built-in one."""
    known = registry(kind)
    owner = None if known is None else known.owner(name)
    return next((source.sha256 for source in _LOADED.values() if source.package == owner), None)


@contextmanager
def plugins_not_run() -> Iterator[None]:
    """Read a recipe to look at it: its plugins are not imported and may be missing, and any name is taken."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


def names_are_checked() -> bool:
    """Whether the names that a recipe uses must be registered."""
    return not _UNCHECKED.get()


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


@dataclass(frozen=True)
class PluginSource:
    """A module that `plugins` names: its files, and the hash of their source."""

    name: str
    """As it is written."""
    root: Path
    """The folder that the top-level module or package is in."""
    files: tuple[str, ...]
    """Paths below it."""
    sha256: str

    @property
    def package(self) -> str:
        """The top-level module or package."""
        return self.name.partition(".")[0]

    @property
    def place(self) -> str:
        """Where the top-level module or package is, for people."""
        return str(self.root / (self.files[0] if len(self.files) == 1 else self.package))

    def read(self) -> dict[str, bytes]:
        """Return the files by their path below `root`."""
        return {name: (self.root / name).read_bytes() for name in self.files}

    def text(self) -> str:
        """Say which code it is."""
        return f"plugin {self.name}: {self.place}, sha256 {self.sha256[:12]}"


def find_plugin(name: str, folder: Path, where: str | None = None) -> PluginSource:
    """Find a plugin's files beside the recipe or where Python would import it from; nothing is run."""
    package = name.partition(".")[0]
    if package == "trainshed" or package in sys.stdlib_module_names:
        raise InputError(f"`{package}` is not a plugin's own name: Python or Trainshed has it", where=where)
    root, files = _files_beside(package, folder) or _installed_files(package) or (None, ())
    if root is None:
        raise InputError(
            f"there is no module `{package}`: neither {package}.py nor {package}/__init__.py is in "
            f"{folder.absolute()}, and it is not installed",
            where=where,
            hint=f"write the plugin's module name without .py ({PAGE})",
        )
    digest, size = hashlib.sha256(), 0
    for file in files:
        source = (root / file).read_bytes()
        size += len(source)
        digest.update(f"{file}\0{len(source)}\0".encode() + source)
    if size > MOST_BYTES:
        raise InputError(
            f"the source of the plugin `{package}` has {size:,} bytes, and it travels with every job",
            where=where,
            hint=f"put the registered classes into a module of their own, below {MOST_BYTES:,} bytes",
        )
    return PluginSource(name, root, files, digest.hexdigest())


def _files_beside(package: str, folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    root = folder.absolute()
    if (root / package / "__init__.py").is_file():
        return root, _package_files(root, package)
    return (root, (f"{package}.py",)) if (root / f"{package}.py").is_file() else None


def _installed_files(package: str) -> tuple[Path, tuple[str, ...]] | None:
    # Not `importlib.util.find_spec`: it answers with what is loaded, which may be from beside another recipe.
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (finder(package, None) for finder in finders if finder is not None)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    if spec.submodule_search_locations:
        return file.parents[1], _package_files(file.parents[1], package)
    return file.parent, (file.name,)


def _package_files(root: Path, package: str) -> tuple[str, ...]:
    files = (path.relative_to(root) for path in (root / package).rglob("*.py"))
    return tuple(sorted(path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts)))


def load_plugins(
    names: Sequence[str], folder: Path, where: Callable[[int], str] = lambda number: f"plugins.{number}"
) -> tuple[PluginSource, ...]:
    """Import plugins, each once: beside the recipe first, then from the environment. Returns their source.

    A plugin whose source has changed since, or that lies elsewhere, is imported again in place of the old one.
    """
    if not names_are_checked():
        return tuple(_files_that_are_here(names, folder))
    sources = tuple(find_plugin(name, folder, where(number)) for number, name in enumerate(names))
    for number, source in enumerate(sources):
        _load(source, where(number))
    return sources


def _files_that_are_here(names: Sequence[str], folder: Path) -> Iterator[PluginSource]:
    """Yield the plugins of a recipe that is only looked at: those of a run elsewhere are not here."""
    for name in names:
        with suppress(InputError):
            yield find_plugin(name, folder)


PLUGINS_VARIABLE = "TRAINSHED_PLUGINS"
"""Names plugins, with commas between them, to commands that read weights and no recipe: serve, generate, model."""


def load_environment_plugins(environment: Mapping[str, str] = os.environ) -> None:
    """Load the plugins that the environment names, from the current folder or where they are installed."""
    names = [name.strip() for name in environment.get(PLUGINS_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(MODULE_PATTERN, name):
            raise InputError(f"`{name}` is not the name of a module", where=PLUGINS_VARIABLE)
    load_plugins(names, Path(), lambda number: PLUGINS_VARIABLE)


def fault_place(error: BaseException) -> str | None:
    """Return the line of a plugin that an error was raised in or through; None where no plugin was."""
    frames = traceback.extract_tb(error.__traceback__)
    sources = _LOADED.values()
    own = [frame for frame in frames if any(_is_of(frame.filename, source) for source in sources)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _load(source: PluginSource, where: str) -> None:
    package = source.package
    loaded = _LOADED.get(source.name)
    if loaded is not None and loaded.sha256 == source.sha256 and source.name in sys.modules:
        return
    ours = [other for other in _LOADED.values() if other.package == package]
    if any(other.sha256 != source.sha256 for other in ours):
        _forget(package)
    elif not ours and package in sys.modules:
        _check_same_file(sys.modules[package], source, where)
    try:
        if package not in sys.modules:
            _import_top(source)
        importlib.import_module(source.name)
    except InputError:
        _forget(package)
        raise
    except Exception as error:
        _forget(package)
        raise _import_error(source, error, where) from error
    if not any(package in table.packages() for table in _REGISTRIES.values()):
        _forget(package)
        raise InputError(
            f"the plugin `{source.name}` registers nothing",
            where=source.place,
            hint=f"{where} names it; {PAGE} shows how each kind of class is registered",
        )
    _LOADED[source.name] = source


def _check_same_file(module: ModuleType, source: PluginSource, where: str) -> None:
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() not in {(source.root / name).resolve() for name in source.files}:
        raise InputError(
            f"another module called `{source.package}` is imported already, from {file}",
            where=where,
            hint="give the plugin another name",
        )


def _import_top(source: PluginSource) -> None:
    """Import the top-level module from its file. The path of Python stays as it is: what lies beside does not count."""
    package = source.package
    is_package = (source.root / package / "__init__.py").is_file() and f"{package}.py" not in source.files
    file = source.root / package / "__init__.py" if is_package else source.root / f"{package}.py"
    spec = importlib.util.spec_from_file_location(
        package, file, submodule_search_locations=[str(file.parent)] if is_package else None
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


def _import_error(source: PluginSource, error: Exception, where: str) -> InputError:
    place = source.place
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    else:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of(frame.filename, source)]
        if own:
            place = f"{own[-1].filename}:{own[-1].lineno}"
    hint = f"{where} names it"
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        if (source.root / f"{top}.py").is_file():
            hint += f"; {top}.py does not travel with it: make both modules of one package"
        elif top in ("torch", "numpy"):
            hint += f"; import {top} inside the methods: a machine that only plans may be without it"
    what = f"the plugin `{source.name}` cannot be imported: {type(error).__name__}: {error}"
    return InputError(what, where=place, hint=hint)


def _is_of(filename: str, source: PluginSource) -> bool:
    return any(Path(filename) == source.root / name for name in source.files)


def _forget(package: str) -> None:
    for table in _REGISTRIES.values():
        table.forget(package)
    for name in [name for name, loaded in _LOADED.items() if loaded.package == package]:
        del _LOADED[name]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
