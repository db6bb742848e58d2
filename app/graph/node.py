"""The node base class, and the specification that is read off a node class."""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from app.graph.context import RunContext
from app.graph.errors import NodeError
from app.graph.ports import InputSpec, OutputSpec, input_spec, output_spec
from app.graph.widgets import NoParams, Params, ParamSpec, param_specs

P = TypeVar("P", bound=Params)

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""From the widget values of one version to those of the next."""


class Node(Generic[P]):
    """Base of every node: subclasses set the class attributes, `Outputs` and `run`.

    `run(self, ctx, *, port: Type, optional_port: Type | None = None) -> Outputs` is called once, or once per tick;
    `Outputs` is a NamedTuple with a field per output, and a node without outputs has neither it nor a result.
    One instance lives as long as the run; `params` is frozen and may be replaced between two calls of `run`.
    """

    type: ClassVar[str]
    """Stable name of the class in files; never changes."""
    version: ClassVar[int] = 1
    """Rises when names or meanings of widgets change; each step has a migration."""
    title: ClassVar[str]
    category: ClassVar[str]
    """Slash path of the menu."""
    description: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other words to find the node by."""
    output: ClassVar[bool] = False
    """Whether the node is a root of execution: it and what it needs run, the rest does not."""
    cacheable: ClassVar[bool] = True
    """Whether a later run may reuse the outputs by content; False for a node that makes something trainable."""
    deprecated: ClassVar[bool] = False
    experimental: ClassVar[bool] = False
    migrations: ClassVar[Mapping[int, Migration]] = {}
    """For each old version the function that takes widget values to the version after it."""

    def __init__(self, params: P) -> None:
        self.params = params

    def open(self, ctx: RunContext) -> None:
        """Called once before the first `run`."""

    def close(self) -> None:
        """Called once at the end of the run, also after an error."""

    def refuse_live(self, params: P) -> str | None:  # noqa: ARG002 - subclasses look at it
        """Why the run cannot go on with these params, in which a live widget was changed; None where it can.

        Called between ticks; if it can, `params` become the node's.
        """
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this node: nested dicts and lists of tensors and JSON values.

        Called between ticks, after `open`.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave.

        Called before the first tick of a resumed run: after `open`, and for a node that runs once after its `run`.
        """


NodeClass = type[Node[Any]]
ParamsClass = type[Params]
PortClasses = tuple[type, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """A node class as validators, the page and the scheduler see it."""

    cls: NodeClass
    type: str
    version: int
    title: str
    category: str
    description: str
    aliases: tuple[str, ...]
    output: bool
    cacheable: bool
    deprecated: bool
    experimental: bool
    inputs: tuple[InputSpec, ...]
    params: tuple[ParamSpec, ...]
    params_class: ParamsClass
    outputs: tuple[OutputSpec, ...]
    classes: PortClasses
    """The classes of all ports, for the table of what accepts what."""
    module: str

    @property
    def source(self) -> bool:
        """Whether the node has a clock."""
        return any(output.ticks for output in self.outputs)

    def input(self, name: str) -> InputSpec | None:
        """The port of that name, or None."""
        return next((port for port in self.inputs if port.name == name), None)

    def param(self, name: str) -> ParamSpec | None:
        """The widget of that name, or None."""
        return next((param for param in self.params if param.name == name), None)

    def input_names(self) -> list[str]:
        """Names of ports and widgets, in the order of the card."""
        return [port.name for port in self.inputs] + [param.name for param in self.params]

    def same_object(self, slot: int) -> str | None:
        """Name of the input that output `slot` hands on as the same, changed object; None for a new value."""
        port = self.input(self.outputs[slot].name)
        return port.name if port is not None and port.changes else None


def spec_of(cls: NodeClass) -> NodeSpec:
    """The specification of a node class, read off its attributes and the annotations of `run`.

    Raises:
        NodeError: the class breaks a rule of the SDK.
    """
    where = f"{cls.__module__}.{cls.__name__}"
    for attribute in ("type", "title", "category", "description"):
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value.strip():
            msg = f"{where}: set the class attribute `{attribute}` to a text."
            raise NodeError(msg)
    _check_versions(where, cls)
    params_class = _params_class(where, cls)
    params = param_specs(params_class)
    inputs, input_classes = _inputs(where, cls)
    outputs, output_classes = _outputs(where, cls)
    shared = {port.name for port in inputs} & {param.name for param in params}
    if shared:
        msg = f"{where}: `{min(shared)}` is both a port of `run` and a widget; rename one."
        raise NodeError(msg)
    if any(output.ticks for output in outputs) and any(param.name == "every" for param in params):
        msg = f"{where}: a source has a clock of its own and cannot have the widget `every`."
        raise NodeError(msg)
    return NodeSpec(
        cls=cls,
        type=cls.type,
        version=cls.version,
        title=cls.title,
        category=cls.category,
        description=" ".join(cls.description.split()),
        aliases=tuple(cls.aliases),
        output=cls.output,
        cacheable=cls.cacheable,
        deprecated=cls.deprecated,
        experimental=cls.experimental,
        inputs=inputs,
        params=params,
        params_class=params_class,
        outputs=outputs,
        classes=(*input_classes, *output_classes),
        module=cls.__module__,
    )


def _check_versions(where: str, cls: NodeClass) -> None:
    if type(cls.version) is not int or cls.version < 1:
        msg = f"{where}: `version` is {cls.version!r}, expected an int of 1 or more."
        raise NodeError(msg)
    missing = [old for old in range(1, cls.version) if old not in cls.migrations]
    if missing:
        msg = f"{where}: version {cls.version} needs a migration from version {missing[0]} in `migrations`."
        raise NodeError(msg)


def _params_class(where: str, cls: NodeClass) -> ParamsClass:
    for ancestor in cls.__mro__:
        for base in ancestor.__dict__.get("__orig_bases__", ()):
            if typing.get_origin(base) is not Node:
                continue
            (found,) = typing.get_args(base)
            if isinstance(found, type) and issubclass(found, Params):
                return found
            msg = f"{where}: Node[...] needs a class decorated with `@params`, got {found!r}."
            raise NodeError(msg)
    return NoParams


def _inputs(where: str, cls: NodeClass) -> tuple[tuple[InputSpec, ...], PortClasses]:
    run = cls.__dict__.get("run") or getattr(cls, "run", None)
    if not inspect.isfunction(run):
        msg = f"{where}: define the method `run(self, ctx, *, port: Type) -> Outputs`."
        raise NodeError(msg)
    hints = _hints(where, run)
    names = list(inspect.signature(run).parameters.values())
    if len(names) < 2 or any(p.kind is not p.KEYWORD_ONLY for p in names[2:]):
        msg = f"{where}: `run` takes `self, ctx, *` and then one keyword per port."
        raise NodeError(msg)
    pairs = []
    for parameter in names[2:]:
        if parameter.name not in hints:
            msg = f"{where}: input `{parameter.name}` of `run` has no type."
            raise NodeError(msg)
        has_default = parameter.default is not parameter.empty
        pairs.append(
            input_spec(where, parameter.name, hints[parameter.name], has_default=has_default)
        )
    return tuple(spec for spec, _ in pairs), tuple(port for _, port in pairs)


def _outputs(where: str, cls: NodeClass) -> tuple[tuple[OutputSpec, ...], PortClasses]:
    outputs = getattr(cls, "Outputs", None)
    if outputs is None:
        return (), ()
    if not (
        isinstance(outputs, type) and issubclass(outputs, tuple) and hasattr(outputs, "_fields")
    ):
        msg = f"{where}: `Outputs` must be a NamedTuple."
        raise NodeError(msg)
    hints = _hints(where, outputs)
    pairs = [output_spec(where, name, hints[name]) for name in outputs._fields]
    return tuple(spec for spec, _ in pairs), tuple(port for _, port in pairs)


def _hints(where: str, described: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(described, include_extras=True)
    except NameError as error:
        msg = f"{where}: the type `{error.name}` of a port is not known at run time; import it outside TYPE_CHECKING."
        raise NodeError(msg) from error
