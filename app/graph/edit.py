"""Values that a command line or a request sets in a graph before it is compiled."""

from app.graph.errors import Problem, nearest, quoted, suggestion
from app.graph.model import Graph, GraphNode
from app.graph.registry import Registry
from app.graph.validate import title_of
from app.graph.widgets import ParamsError, Value, parse_value


class SetError(ValueError):
    """A value cannot be set; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.message)


def split_assignment(text: str) -> tuple[str, str, str]:
    """Node, widget and value of `NODE.param=value`: split at the last `.` before the first `=`.

    Raises:
        SetError: the text has another form.
    """
    target, equals, value = text.partition("=")
    node, dot, name = target.rpartition(".")
    if not equals or not dot or not node or not name:
        raise _error(None, None, f"`{text}`: expected NODE.param=value, such as 3.steps=8.")
    return node, name, value


def set_value(graph: Graph, target: str, text: str, registry: Registry) -> Graph:
    """The graph with the widget `target` = `NODE.param` set to what `text` says.

    NODE is the id of a node, or its title where only one node has it. The text is read by the widget's type.

    Raises:
        SetError: there is no such node or widget, the title is not unique, or the value does not fit.
    """
    name, dot, field = target.rpartition(".")
    if not dot or not name or not field:
        raise _error(None, None, f"`{target}`: expected NODE.param, such as 3.steps.")
    node = _find(graph, name, registry)
    spec = registry.find(node.type)
    if spec is None:
        text = f"no node of type `{node.type}` is installed, so its inputs are not known.{suggestion(node.type, [s.type for s in registry])}"
        raise _error(node, None, text, registry)
    param = spec.param(field)
    if param is None:
        known = [param.name for param in spec.params]
        if spec.input(field) is not None:
            raise _error(node, field, f"`{field}` is fed by a link, it cannot be set.", registry)
        widgets = f"Widgets are {quoted(known)}." if known else "It has no widgets."
        text = f"no widget named `{field}`. {widgets}{suggestion(field, known)}"
        raise _error(node, field, text, registry)
    try:
        value = parse_value(param, text)
    except ParamsError as error:
        raise _error(node, field, error.issues[0].text, registry) from error
    return graph.with_input(node.id, field, value)


def set_source_value(graph: Graph, field: str, value: Value, registry: Registry) -> Graph:
    """The graph with `iterations` or `seed` of its only prompt source set.

    Raises:
        SetError: there is no source, or several (the message names them), or the value does not fit.
    """
    sources = [
        node
        for node in graph.nodes.values()
        if (spec := registry.find(node.type)) is not None and spec.source and spec.param(field)
    ]
    if not sources:
        raise _error(None, field, f"`{field}` cannot be set: the graph has no prompt source.")
    if len(sources) > 1:
        names = [f"{title_of(node, registry.find(node.type))} ({node.id})" for node in sources]
        raise _error(
            None,
            field,
            f"`{field}` cannot be set: the graph has {len(sources)} prompt sources, {', '.join(names)}. "
            f"Name the one you mean: --set {sources[0].id}.{field}={value}.",
        )
    return set_value(graph, f"{sources[0].id}.{field}", str(value), registry)


def _find(graph: Graph, name: str, registry: Registry) -> GraphNode:
    if name in graph.nodes:
        return graph.nodes[name]
    titles = {key: title_of(node, registry.find(node.type)) for key, node in graph.nodes.items()}
    found = [key for key, title in titles.items() if title == name]
    if len(found) == 1:
        return graph.nodes[found[0]]
    if found:
        text = f"{len(found)} nodes have the title `{name}`: {', '.join(found)}. Name one of them by its id."
        raise _error(None, None, text)
    known = ", ".join(f"{key} ({title})" for key, title in titles.items())
    close = nearest(name, titles.values())
    text = f"There is no node with the id or title `{name}`. Nodes are {known}."
    raise _error(None, None, text + (f" Did you mean `{close}`?" if close else ""))


def _error(
    node: GraphNode | None, field: str | None, text: str, registry: Registry | None = None
) -> SetError:
    if node is None or registry is None:
        return SetError(Problem(code="invalid_set", node=None, title="", field=field, message=text))
    title = title_of(node, registry.find(node.type))
    message = f"{title} ({node.id}): {text}"
    return SetError(
        Problem(code="invalid_set", node=node.id, title=title, field=field, message=message)
    )
