"""Workflow files: what they are, what is in them, and clear words for those that cannot be read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from app.graph.carriers import carried_text
from app.graph.convert import to_graph
from app.graph.drawing import read_drawing
from app.graph.errors import Problem, WorkflowError, suggestion
from app.graph.model import Graph, GraphNode, Link
from app.graph.registry import Registry
from app.graph.stored_values import migrate, unwrap

# Far above any real graph, and small enough to be read without harm.
LARGEST_TEXT: Final = 32 * 2**20
DEEPEST_NESTING: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Workflow:
    """A workflow as it was read."""

    kind: Literal["ui", "api"]
    document: Mapping[str, Any]
    """The JSON as it was read; saving starts from it, so that nothing is lost."""
    graph: Graph
    warnings: tuple[Problem, ...]
    settings: Mapping[str, Any]
    """The run settings that the file states (`extra.jagg`)."""


class _DoubleKeyError(Exception):
    """A JSON object has a key twice; the message is the key."""


def read_workflow(path: Path, registry: Registry) -> Workflow:
    """The workflow of a file: UI or API JSON, or a PNG or safetensors file that carries one.

    Raises:
        WorkflowError: there is no such file, or it holds no workflow.
    """
    name = path.name
    try:
        if path.is_dir():
            msg = f"{name} is a folder, expected a workflow file (.json, .png or .safetensors)."
            raise WorkflowError(msg)
        carried = carried_text(path)
        if carried is None:
            if path.stat().st_size > LARGEST_TEXT:
                raise WorkflowError(_too_large(name))
            carried = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        beside = [entry.name for entry in path.parent.glob("*") if entry.is_file()]
        msg = f"There is no file {path}.{suggestion(path.name, beside)}"
        raise WorkflowError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{name} is no text in UTF-8 (byte {error.start}), expected workflow JSON."
        raise WorkflowError(msg) from error
    except OSError as error:
        msg = f"{name} cannot be read: {error.strerror or error}."
        raise WorkflowError(msg) from error
    return parse_workflow(carried, registry, name=name)


def parse_workflow(text: str, registry: Registry, *, name: str = "workflow") -> Workflow:
    """The workflow of a JSON text; `name` is how messages call it.

    Raises:
        WorkflowError: it is no JSON, or no workflow.
    """
    if len(text) > LARGEST_TEXT:
        raise WorkflowError(_too_large(name))
    if not text.strip():
        msg = f"{name} is empty, expected workflow JSON."
        raise WorkflowError(msg)
    try:
        document = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        msg = f"{name} is no valid JSON: line {error.lineno}, column {error.colno}: {error.msg}."
        raise WorkflowError(msg) from error
    except _DoubleKeyError as error:
        msg = f"{name} is not clear: `{error}` occurs twice in the same object, and only one of them could count."
        raise WorkflowError(msg) from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        msg = f"{name} cannot be read as JSON: it is nested too deeply, or holds a number that is too long."
        raise WorkflowError(msg) from error
    return workflow_of(document, registry, name=name)


def workflow_of(document: Any, registry: Registry, *, name: str = "workflow") -> Workflow:
    """The workflow of JSON that was parsed already, such as the body of a request.

    Raises:
        WorkflowError: it is no workflow.
    """
    if not isinstance(document, dict):
        msg = f"{name} holds {_kind(document)}, expected a JSON object with a workflow."
        raise WorkflowError(msg)
    _check_depth(document, name)
    if "nodes" in document:
        converted = to_graph(read_drawing(document, name), registry)
        return Workflow(
            kind="ui",
            document=document,
            graph=converted.graph,
            warnings=converted.warnings,
            settings=_settings(document.get("extra"), name),
        )
    prompt = document
    settings: Mapping[str, Any] = {}
    if isinstance(document.get("prompt"), dict) and "class_type" not in document["prompt"]:
        prompt = document["prompt"]  # the body of POST /prompt
        settings = _settings(document.get("extra_data"), name)
    graph = _read_api(prompt, registry, name)
    return Workflow(kind="api", document=prompt, graph=graph, warnings=(), settings=settings)


def _read_api(prompt: Mapping[str, Any], registry: Registry, name: str) -> Graph:
    if not prompt:
        msg = f"{name} is an empty object, expected a workflow: `nodes` (UI format), or nodes by id (API format)."
        raise WorkflowError(msg)
    nodes = {}
    for key, raw in prompt.items():
        if not isinstance(raw, dict) or not ({"class_type", "inputs"} & set(raw)):
            msg = (
                f"{name} is no workflow: it has no `nodes` (UI format), and `{key}` is not a node with `class_type` "
                "and `inputs` (API format)."
            )
            raise WorkflowError(msg)
        nodes[key] = _read_api_node(key, raw, prompt, registry, name)
    return Graph(nodes=nodes)


def _read_api_node(
    key: str, raw: Mapping[str, Any], prompt: Mapping[str, Any], registry: Registry, name: str
) -> GraphNode:
    kind = raw.get("class_type")
    meta = raw.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    title = meta.get("title")
    title = title if isinstance(title, str) else ""
    if not isinstance(kind, str) or not kind:
        msg = f"{name}: node {key}{f' ({title})' if title else ''} has no `class_type`; its node type was not installed where the file was made."
        raise WorkflowError(msg)
    inputs = raw.get("inputs", {})
    if not isinstance(inputs, dict):
        msg = f"{name}: node {key}: `inputs` holds {_kind(inputs)}, expected an object."
        raise WorkflowError(msg)
    version = meta.get("jagg_version")
    if version is not None and type(version) is not int:
        msg = f"{name}: node {key}: `_meta.jagg_version` is {version!r}, expected an integer."
        raise WorkflowError(msg)
    where = f"{title or kind} ({key})"
    read = {field: _read_input(value, prompt) for field, value in inputs.items()}
    read, version = migrate(read, version, registry.find(kind), where)
    return GraphNode(id=key, type=kind, title=title, version=version, inputs=read)


def _read_input(value: Any, prompt: Mapping[str, Any]) -> Any:
    if isinstance(value, list) and len(value) == 2:
        source, slot = value
        named = isinstance(source, str) or (type(source) is int and str(source) in prompt)
        if named and type(slot) is int:
            return Link(str(source), slot)
    return unwrap(value)


def _settings(holder: Any, name: str) -> Mapping[str, Any]:
    found = holder.get("jagg") if isinstance(holder, dict) else None
    if found is None:
        return {}
    if not isinstance(found, dict):
        msg = f"{name}: the run settings `jagg` hold {_kind(found)}, expected an object."
        raise WorkflowError(msg)
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise _DoubleKeyError(next(key for key in names if names.count(key) > 1))
    return found


def _check_depth(document: Any, name: str) -> None:
    level = [document]
    for _ in range(DEEPEST_NESTING):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    msg = f"{name} is nested more than {DEEPEST_NESTING} levels deep; that is no workflow."
    raise WorkflowError(msg)


def _too_large(name: str) -> str:
    return f"{name} is larger than {LARGEST_TEXT // 2**20} MiB; that is no workflow."


def _kind(value: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
