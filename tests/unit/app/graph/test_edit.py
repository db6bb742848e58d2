from dataclasses import replace

import pytest

from app.graph import (
    Graph,
    GraphNode,
    Link,
    SetError,
    set_source_value,
    set_value,
    split_assignment,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("3.steps=8", ("3", "steps", "8")),
        ("My.Node.steps=a.b=c", ("My.Node", "steps", "a.b=c")),
        ("1:2.text=", ("1:2", "text", "")),
    ],
)
def test_split_assignment(text, parts):
    assert split_assignment(text) == parts


@pytest.mark.parametrize("text", ["3.steps", "steps=8", ".steps=8", "3.=8", "=", ""])
def test_split_assignment_refuses(text):
    with pytest.raises(SetError, match=r"expected NODE\.param=value, such as 3\.steps=8\."):
        split_assignment(text)


@pytest.mark.parametrize(
    ("target", "text", "value"),
    [
        ("3.steps", "12", 12),
        ("3.shift", "2", 2.0),
        ("3.shared", "true", True),
        ("Sampler.steps", "4", 4),
        ("DiT Loader.train", "lora", "lora"),
        ("1.text", "a=b, c.d", "a=b, c.d"),
    ],
)
def test_set_value_by_id_or_title(training, registry, target, text, value):
    graph = set_value(training, target, text, registry)
    node = {"Sampler": "3", "DiT Loader": "2"}.get(
        target.rpartition(".")[0], target.rpartition(".")[0]
    )
    found = graph.nodes[node].inputs[target.rpartition(".")[2]]
    assert found == value
    assert type(found) is type(value)
    assert graph.nodes[node].links() == training.nodes[node].links()


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("3.steps", "5.7", "Sampler (3): `steps` is 5.7 (FLOAT), expected an INT."),
        ("3.steps", "many", "Sampler (3): `steps` is 'many' (STRING), expected an INT."),
        ("3.steps", "900", "Sampler (3): `steps` is 900, expected 200 or less."),
        ("3.shared", "yes", "Sampler (3): `shared` is 'yes' (STRING), expected a BOOLEAN."),
        (
            "3.step",
            "5",
            "Sampler (3): no widget named `step`. Widgets are `steps`, `shift`, `noise_stop`, `shared`. "
            "Did you mean `steps`?",
        ),
        ("3.policy", "5", "Sampler (3): `policy` is fed by a link, it cannot be set."),
        ("Mix.x", "5", "Mix (8): no widget named `x`. It has no widgets."),
        (
            "Samplr.steps",
            "5",
            "There is no node with the id or title `Samplr`. Nodes are 1 (Prompt Source), 2 (DiT Loader), "
            "3 (Sampler), 4 (Score), 5 (Optimizer), 6 (Evaluate), 7 (Evalute), 8 (Mix). Did you mean `Sampler`?",
        ),
        (
            "7.x",
            "5",
            "Evalute (7): no node of type `Evalute` is installed, so its inputs are not known. "
            "Did you mean `Evaluate`?",
        ),
        ("steps", "5", "`steps`: expected NODE.param, such as 3.steps."),
    ],
)
def test_set_value_refuses(training, registry, target, text, message):
    graph = training.with_node(GraphNode(id="7", type="Evalute"))
    graph = graph.with_node(GraphNode(id="8", type="Mix", inputs={"reward_1": Link("4", 0)}))
    with pytest.raises(SetError) as caught:
        set_value(graph, target, text, registry)
    assert str(caught.value) == message
    assert caught.value.problem.message == message


def test_titles_that_are_not_unique_and_titles_of_users(training, registry):
    graph = training.with_node(replace(training.nodes["4"], id="9"))
    with pytest.raises(SetError) as caught:
        set_value(graph, "Score.every", "2", registry)
    assert str(caught.value) == "2 nodes have the title `Score`: 4, 9. Name one of them by its id."
    named = graph.with_node(replace(graph.nodes["9"], title="Second"))
    assert set_value(named, "Second.every", "2", registry).nodes["9"].inputs["every"] == 2
    assert set_value(named, "Score.every", "2", registry).nodes["4"].inputs["every"] == 2


def test_set_source_value(training, registry):
    assert (
        set_source_value(training, "iterations", 5, registry).nodes["1"].inputs["iterations"] == 5
    )
    assert set_source_value(training, "seed", 0, registry).nodes["1"].inputs["seed"] == 0
    with pytest.raises(SetError, match="`iterations` is 0, expected 1 or more"):
        set_source_value(training, "iterations", 0, registry)
    two = training.with_node(GraphNode(id="9", type="Prompts", title="Others"))
    with pytest.raises(SetError) as caught:
        set_source_value(two, "iterations", 5, registry)
    assert str(caught.value) == (
        "`iterations` cannot be set: the graph has 2 prompt sources, Prompt Source (1), Others (9). "
        "Name the one you mean: --set 1.iterations=5."
    )
    with pytest.raises(SetError, match="the graph has no prompt source"):
        set_source_value(Graph(), "seed", 5, registry)
