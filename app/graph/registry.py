"""The node classes that exist: found by name, never imported by `app`."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.graph.errors import NodeError, suggestion
from app.graph.node import Node, NodeSpec, spec_of
from app.graph.ports import accept_table

NODES_PACKAGE = "nodes"
EXTENSION_PREFIX = "jagg_ext"


class UnknownNodeError(LookupError):
    """No node of that type is installed."""


class Registry:
    """Node classes by type. Nothing is registered twice; what cannot be loaded is in `failures`."""

    def __init__(self) -> None:
        self._specs: dict[str, NodeSpec] = {}
        self._accepts: dict[str, frozenset[str]] | None = None
        self.failures: dict[str, str] = {}
        """For each module or file that could not be loaded the reason, as a sentence."""

    def __iter__(self) -> Iterator[NodeSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def add(self, cls: type[Node[Any]]) -> NodeSpec:
        """Register a node class and return its specification.

        Raises:
            NodeError: the class breaks a rule of the SDK, or its type is taken.
        """
        spec = spec_of(cls)
        other = self._specs.get(spec.type)
        if other is not None and other.cls is not cls:
            msg = (
                f"The node type `{spec.type}` is defined twice: by {_name(other.cls)} and by {_name(cls)}. "
                "Give one of them another `type`."
            )
            raise NodeError(msg)
        self._specs[spec.type] = spec
        self._accepts = None
        return spec

    def get(self, name: str) -> NodeSpec:
        """The specification of a type.

        Raises:
            UnknownNodeError: there is none; the message suggests the nearest name.
        """
        spec = self._specs.get(name)
        if spec is None:
            msg = f"no node of type `{name}` is installed.{suggestion(name, self._specs)}"
            raise UnknownNodeError(msg)
        return spec

    def find(self, name: str) -> NodeSpec | None:
        """The specification of a type, or None."""
        return self._specs.get(name)

    def accept_table(self) -> dict[str, frozenset[str]]:
        """For each wire name the wire names that may feed it."""
        if self._accepts is None:
            self._accepts = accept_table(
                dict.fromkeys(cls for spec in self for cls in spec.classes)
            )
        return self._accepts

    def add_module(self, module: types.ModuleType) -> list[NodeSpec]:
        """Register the node classes that a module defines itself.

        Raises:
            NodeError: one of them breaks a rule of the SDK, or its type is taken.
        """
        found = [
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, Node)
            and cls.__module__ == module.__name__
            and not cls.__name__.startswith("_")
        ]
        return [self.add(cls) for cls in found]

    def load_package(self, name: str = NODES_PACKAGE) -> None:
        """Import the modules that lie directly in a package and register their nodes; sub-packages are left alone.

        Raises:
            NodeError: the package does not exist, or a node breaks a rule. Errors of imports are passed on: shipped
                nodes must load.
        """
        if importlib.util.find_spec(name) is None:
            msg = f"There is no package `{name}` to load nodes from."
            raise NodeError(msg)
        package = importlib.import_module(name)
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
            if not info.ispkg and not info.name.startswith("_"):
                self.add_module(importlib.import_module(f"{name}.{info.name}"))

    def load_folder(self, folder: Path) -> None:
        """Load a user's own nodes: `*.py` files and packages of a folder, each on its own.

        Nothing of the folder joins `sys.path`; modules get private names. One that cannot be loaded is recorded in
        `failures` under its file name, and the others load.
        """
        if not folder.is_dir():
            return
        for entry in sorted(folder.iterdir()):
            file = entry / "__init__.py" if entry.is_dir() else entry
            if entry.name.startswith((".", "_")) or file.suffix != ".py" or not file.is_file():
                continue
            try:
                specs = self.add_module(_load_file(file, entry.stem))
            # The border to foreign code: whatever it raises, SystemExit included, must not stop the others.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self.failures[entry.name] = f"{entry.name}: {type(error).__name__}: {error}"
                continue
            if not specs:
                self.failures[entry.name] = (
                    f"{entry.name}: it defines no node (a subclass of app.graph.Node)."
                )


def load_registry(custom_nodes: Path | None = None, package: str = NODES_PACKAGE) -> Registry:
    """The shipped nodes, and those of a user's folder; importing them may take seconds (torch).

    Raises:
        NodeError: a shipped node breaks a rule of the SDK.
    """
    registry = Registry()
    registry.load_package(package)
    if custom_nodes is not None:
        registry.load_folder(custom_nodes)
    return registry


def _load_file(file: Path, stem: str) -> types.ModuleType:
    slug = re.sub(r"\W", "_", stem)
    name = f"{EXTENSION_PREFIX}.{slug}"
    if EXTENSION_PREFIX not in sys.modules:
        parent = types.ModuleType(EXTENSION_PREFIX)
        parent.__path__ = []  # a package without a place: nothing can be imported from it by accident
        sys.modules[EXTENSION_PREFIX] = parent
    search = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        msg = f"{file.name} cannot be loaded as a Python module."
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise
    return module


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
