"""What every registered node must keep to; a node that breaks it fails here by name."""

import inspect
import json
import re

import pytest

from app.graph import (
    Graph,
    GraphNode,
    Link,
    Node,
    NodeSpec,
    Registry,
    build_params,
    load_registry,
    object_info,
    parse_workflow,
    spec_of,
    to_api,
    to_ui,
)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def _every_node() -> list:
    return [pytest.param(spec, id=spec.type) for spec in load_registry()]


SPECS = _every_node()


def test_there_are_nodes_and_none_failed(registry):
    assert len(registry) > 0
    assert registry.failures == {}


def test_the_catalogue_is_json(registry):
    info = object_info(registry)
    assert json.loads(json.dumps(info, allow_nan=False)) == info


@pytest.mark.parametrize("spec", SPECS)
def test_the_specification_is_read_off_the_class(spec: NodeSpec):
    assert spec_of(spec.cls) == spec


@pytest.mark.parametrize("spec", SPECS)
def test_defaults_are_valid(spec: NodeSpec):
    built = build_params(spec.params_class, {})
    assert {param.name: getattr(built, param.name) for param in spec.params} == {
        param.name: param.default for param in spec.params
    }
    explicit = {param.name: param.default for param in spec.params}
    assert build_params(spec.params_class, json.loads(json.dumps(explicit))) == built


@pytest.mark.parametrize("spec", SPECS)
def test_docs_are_present(spec: NodeSpec):
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", spec.type)
    assert spec.description.endswith(".")
    assert spec.title != spec.title.lower()
    assert inspect.getdoc(spec.cls)
    assert inspect.getdoc(spec.params_class)
    undocumented = [param.name for param in spec.params if not param.field.tooltip.strip()]
    assert undocumented == [], f"{spec.type}: these widgets have no tooltip"


@pytest.mark.parametrize("spec", SPECS)
def test_choices_hold_the_default_and_ranges_are_in_order(spec: NodeSpec):
    for param in spec.params:
        assert param.problem(param.default) is None
        if param.field.minimum is not None and param.field.maximum is not None:
            assert param.field.minimum < param.field.maximum
        for choice in param.field.choices:
            assert param.problem(choice) is None


@pytest.mark.parametrize("spec", SPECS)
def test_a_node_survives_both_file_formats(spec: NodeSpec, registry: Registry):
    graph = _graph_around(spec)
    ui = json.dumps(to_ui(graph, registry))
    api = json.dumps(to_api(graph, registry))
    for text in (ui, api):
        read = parse_workflow(text, registry)
        assert read.warnings == ()
        assert read.graph.problems == ()
        node = read.graph.nodes["1"]
        assert dict(node.inputs) == dict(graph.nodes["1"].inputs)
        assert (node.type, node.version) == (spec.type, spec.version)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_saved_can_be_loaded(spec: NodeSpec):
    saves = spec.cls.state is not Node.state
    loads = spec.cls.load_state is not Node.load_state
    assert saves == loads, f"{spec.type}: define both `state` and `load_state`, or neither"


@pytest.mark.parametrize("spec", SPECS)
def test_every_required_input_can_be_fed_by_some_node(spec: NodeSpec, registry: Registry):
    table = registry.accept_table()
    given = {output.wire for other in registry for output in other.outputs}
    for port in spec.inputs:
        assert table[port.wire] & given, f"{spec.type}: nothing gives `{port.name}` ({port.wire})"


def _graph_around(spec: NodeSpec) -> Graph:
    """The node with every widget set, and every port linked to a card that is not installed."""
    values = {param.name: param.default for param in spec.params}
    links = {port.name: Link("2", slot) for slot, port in enumerate(spec.inputs)}
    me = GraphNode(
        id="1", type=spec.type, title="Mine", version=spec.version, inputs={**values, **links}
    )
    return Graph(nodes={"1": me, "2": GraphNode(id="2", type="NotInstalled")})
