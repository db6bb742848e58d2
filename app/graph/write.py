"""Graphs as files: API JSON, and UI JSON 0.4 with a plain layout from left to right."""

import copy
import uuid
from collections.abc import Mapping
from typing import Any, Final

from app.graph.drawing import DrawnNode, definitions_of, read_cards
from app.graph.links import cycles, topological_order
from app.graph.model import Graph, GraphNode, Link
from app.graph.node import NodeSpec
from app.graph.registry import Registry
from app.graph.stored_values import migrate, positional, read_values, wrap
from app.graph.workflow import Workflow

UI_VERSION: Final = 0.4

# Sizes in pixels of the canvas; a card is as high as its rows, so that cards of a column do not overlap.
CARD_WIDTH: Final = 320
ROW_HEIGHT: Final = 26
HEAD_HEIGHT: Final = 46
TEXT_HEIGHT: Final = 90
COLUMN_GAP: Final = 80
ROW_GAP: Final = 60

# Names the ids of documents that are made from graphs: the same graph gives the same file.
ID_SPACE: Final = uuid.UUID("5b1f6d3e-92a4-5d0c-8f27-3a6c1e9b7d40")


def to_api(graph: Graph, registry: Registry) -> dict[str, Any]:
    """The graph as API ("prompt") JSON, with titles and node versions in `_meta`."""
    prompt = {}
    for node in graph.nodes.values():
        spec = registry.find(node.type)
        meta: dict[str, Any] = {"title": node.title or (spec.title if spec else node.type)}
        version = node.version or (spec.version if spec else None)
        if version is not None:
            meta["jagg_version"] = version
        prompt[node.id] = {
            "class_type": node.type,
            "inputs": {
                name: [value.node, value.slot] if isinstance(value, Link) else wrap(value)
                for name, value in node.inputs.items()
            },
            "_meta": meta,
        }
    return prompt


def to_ui(
    graph: Graph, registry: Registry, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The graph as UI JSON 0.4; `settings` are run settings for `extra.jagg`.

    Cards are laid out in columns, each to the right of all that it reads. Nodes of types that are not installed keep
    their values and links.
    """
    places = _layout(graph, registry)
    numbers = {key: number for number, key in enumerate(places)}
    cards = {key: _card(graph, node, registry) for key, node in graph.nodes.items()}
    links: list[list[Any]] = []
    for key, node in graph.nodes.items():
        slots = {entry["name"]: entry for entry in cards[key]["inputs"]}
        for name, link in node.links().items():
            if link.node not in cards:
                continue
            outputs = cards[link.node]["outputs"]
            if not 0 <= link.slot < len(outputs):
                continue
            number = len(links) + 1
            slots[name]["link"] = number
            outputs[link.slot]["links"].append(number)
            target = list(slots).index(name)
            row = [number, ui_id(link.node), link.slot, ui_id(key), target]
            links.append([*row, outputs[link.slot]["type"]])
    for key, card in cards.items():
        card["pos"], card["order"] = list(places[key]), numbers[key]
    numeric = [card["id"] for card in cards.values() if isinstance(card["id"], int)]
    return {
        "id": str(uuid.uuid5(ID_SPACE, repr(graph.nodes))),
        "revision": 0,
        "last_node_id": max(numeric, default=0),
        "last_link_id": len(links),
        "nodes": list(cards.values()),
        "links": links,
        "groups": [],
        "config": {},
        "extra": {"jagg": dict(settings)} if settings else {},
        "version": UI_VERSION,
    }


def save_ui(workflow: Workflow, registry: Registry) -> dict[str, Any]:
    """The workflow as UI JSON 0.4, with values by name and node versions brought up to date.

    A drawing keeps everything else as it was read: cards of types that are not installed, subgraphs, positions, groups,
    colours, and whatever other programs put into it. API JSON gets a layout.

    Raises:
        WorkflowError: a card of an older version cannot be brought to the current one.
    """
    if workflow.kind == "api":
        return to_ui(workflow.graph, registry, workflow.settings)
    document = copy.deepcopy(dict(workflow.document))
    parts = [("workflow", document)]
    parts += [(where, raw) for where, _, raw in definitions_of(document, "workflow")]
    for where, part in parts:
        cards = read_cards(part, where)
        for raw in part["nodes"]:
            node = cards.nodes[str(raw["id"])]
            spec = registry.find(node.type)
            if spec is not None and (node.version is None or node.version <= spec.version):
                _refresh(raw, node, spec)
    if document.get("version") == 1:
        _from_version_1(document)
    document["version"] = UI_VERSION
    return document


def ui_id(key: str) -> int | str:
    """A node id as UI files write it: a number where it is one."""
    return int(key) if key.isdecimal() and str(int(key)) == key else key


def _refresh(raw: dict[str, Any], node: DrawnNode, spec: NodeSpec) -> None:
    values = read_values(node, spec).values
    ports = {entry.name: Link(node.id, number) for number, entry in enumerate(node.inputs)}
    moved, _ = migrate({**values, **ports}, node.version, spec, node.label)
    names = {value.slot: name for name, value in moved.items() if isinstance(value, Link)}
    for number, entry in enumerate(raw.get("inputs") or []):
        name = names.get(number, entry["name"])
        if name != entry["name"] and isinstance(entry.get("widget"), dict):
            entry["widget"]["name"] = name
        entry["name"] = name
    known = {param.name for param in spec.params}
    kept = {name: value for name, value in moved.items() if not isinstance(value, Link)}
    # What a linked widget holds under its link must move to its new name as well.
    beneath, _ = migrate({**ports, **values}, node.version, spec, node.label)
    kept |= {
        name: value
        for name, value in beneath.items()
        if name in known and name not in kept and not isinstance(value, Link)
    }
    named = {param.name: kept.get(param.name, param.default) for param in spec.params}
    raw["widgets_values"] = positional(spec, named)
    raw["widgets_values_named"] = named | {
        name: value for name, value in kept.items() if name not in known
    }
    properties = raw.get("properties")
    raw["properties"] = {**(properties or {}), "jagg_version": spec.version}


def _from_version_1(document: dict[str, Any]) -> None:
    state = document.pop("state", None) or {}
    targets = {
        str(entry["link"]): (raw["id"], number, entry.get("type", "*"))
        for raw in document["nodes"]
        for number, entry in enumerate(raw.get("inputs") or [])
        if entry.get("link") is not None
    }
    extra = dict(document.get("extra") or {})
    links, extensions = [], []
    for link in document.get("links") or []:
        target = targets.get(str(link["id"]), (link.get("target_id"), link.get("target_slot"), "*"))
        kind = link.get("type", target[2])
        links.append(
            [link["id"], link["origin_id"], link["origin_slot"], target[0], target[1], kind]
        )
        if link.get("parentId") is not None:
            extensions.append({"id": link["id"], "parentId": link["parentId"]})
    reroutes = document.pop("reroutes", None)
    if reroutes:
        extra["reroutes"] = reroutes
    if extensions:
        extra["linkExtensions"] = extensions
    numeric = [raw["id"] for raw in document["nodes"] if type(raw["id"]) is int]
    document["links"] = links
    document["extra"] = extra
    document["last_node_id"] = state.get("lastNodeId", max(numeric, default=0))
    document["last_link_id"] = state.get("lastLinkId", max((link[0] for link in links), default=0))
    document.setdefault("groups", [])
    document.setdefault("config", {})


def _card(graph: Graph, node: GraphNode, registry: Registry) -> dict[str, Any]:
    spec = registry.find(node.type)
    values = node.values()
    inputs: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    if spec is None:
        named: dict[str, Any] = values
        row = list(values.values())
        inputs = [{"name": name, "type": "*", "link": None} for name in node.links()]
        used = [
            link.slot
            for other in graph.nodes.values()
            for link in other.links().values()
            if link.node == node.id
        ]
        outputs = [
            {"name": f"output_{slot}", "type": "*", "links": []}
            for slot in range(max(used, default=-1) + 1)
        ]
    else:
        known = {param.name: param for param in spec.params}
        named = {name: values.get(name, param.default) for name, param in known.items()}
        named |= {name: value for name, value in values.items() if name not in named}
        row = positional(spec, named)
        inputs = [{"name": port.name, "type": port.wire, "link": None} for port in spec.inputs]
        inputs += [
            {
                "name": name,
                "type": known[name].wire if name in known else "*",
                "link": None,
                **({"widget": {"name": name}} if name in known else {}),
            }
            for name in node.links()
            if spec.input(name) is None
        ]
        outputs = [{"name": port.name, "type": port.wire, "links": []} for port in spec.outputs]
    version = node.version or (spec.version if spec else None)
    card = {
        "id": ui_id(node.id),
        "type": node.type,
        "pos": [0, 0],
        "size": [CARD_WIDTH, _height(node, spec)],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {} if version is None else {"jagg_version": version},
        "widgets_values": row,
        "widgets_values_named": named,
    }
    return card | ({"title": node.title} if node.title else {})


def _height(node: GraphNode, spec: NodeSpec | None) -> int:
    if spec is None:
        return HEAD_HEIGHT + ROW_HEIGHT * max(1, len(node.inputs))
    rows = max(len(spec.inputs), len(spec.outputs)) + len(spec.params)
    texts = sum(param.field.multiline for param in spec.params)
    return HEAD_HEIGHT + ROW_HEIGHT * rows + TEXT_HEIGHT * texts


def _layout(graph: Graph, registry: Registry) -> dict[str, tuple[int, int]]:
    wiring = {
        key: {name: link for name, link in node.links().items() if link.node in graph.nodes}
        for key, node in graph.nodes.items()
    }
    for loop in cycles(wiring):
        for key in loop:
            wiring[key] = {
                name: link for name, link in wiring[key].items() if link.node not in loop
            }
    order = list(wiring) if cycles(wiring) else topological_order(wiring)
    columns: dict[str, int] = {}
    bottoms: dict[int, int] = {}
    places = {}
    for key in order:
        column = 1 + max((columns.get(link.node, -1) for link in wiring[key].values()), default=-1)
        columns[key] = column
        node = graph.nodes[key]
        top = bottoms.get(column, 0)
        places[key] = (column * (CARD_WIDTH + COLUMN_GAP), top)
        bottoms[column] = top + _height(node, registry.find(node.type)) + ROW_GAP
    return places
