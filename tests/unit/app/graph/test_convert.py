import pytest

from app.graph import Link, problems_of, to_ui, workflow_of


@pytest.fixture
def drawn(training, registry):
    """The quick start as a drawing, with cards by id and helpers to rewire it."""
    document = to_ui(training, registry)
    for card in document["nodes"]:  # links are named by the inputs; this list is for front-ends
        for output in card["outputs"]:
            output["links"] = None
    return document


def card(document, number):
    return next(node for node in document["nodes"] if node["id"] == number)


def slot(document, number, name):
    return next(entry for entry in card(document, number)["inputs"] if entry["name"] == name)


def add(document, number, kind, **more):
    document["nodes"].append({"id": number, "type": kind, "inputs": [], "outputs": [], **more})
    return document["nodes"][-1]


def link(document, origin, origin_slot):
    number = len(document["links"]) + 1
    document["links"].append([number, origin, origin_slot, 0, 0, "*"])
    return number


def inputs(document, registry, number):
    return workflow_of(document, registry).graph.nodes[str(number)].inputs


def test_reroutes_and_notes_vanish(drawn, registry):
    add(drawn, 10, "Reroute", inputs=[{"name": "", "type": "*", "link": link(drawn, 2, 0)}])
    add(drawn, 11, "Reroute", inputs=[{"name": "", "type": "*", "link": link(drawn, 10, 0)}])
    add(drawn, 12, "Note", widgets_values=["hello"])
    add(drawn, 13, "MarkdownNote", widgets_values=["hello"])
    slot(drawn, 3, "policy")["link"] = link(drawn, 11, 0)
    graph = workflow_of(drawn, registry).graph
    assert graph.nodes["3"].inputs["policy"] == Link("2", 0)
    assert list(graph.nodes) == ["1", "2", "3", "4", "5", "6"]
    assert problems_of(graph, registry) == ()


def test_open_reroutes_and_notes_bring_nothing(drawn, registry):
    add(drawn, 10, "Reroute")
    add(drawn, 12, "Note", widgets_values=["hello"])
    for number in (10, 12, 99):
        slot(drawn, 3, "policy")["link"] = link(drawn, number, 0)
        assert "policy" not in inputs(drawn, registry, 3)


def test_reroutes_in_a_ring_are_a_problem(drawn, registry):
    add(drawn, 10, "Reroute", inputs=[{"name": "", "type": "*", "link": link(drawn, 11, 0)}])
    add(drawn, 11, "Reroute", inputs=[{"name": "", "type": "*", "link": link(drawn, 10, 0)}])
    slot(drawn, 3, "policy")["link"] = link(drawn, 11, 0)
    found = problems_of(workflow_of(drawn, registry).graph, registry)
    assert found[0].message == "Reroute (11): its links lead back to itself; remove one of them."
    assert "`policy` is not linked" in found[1].message


def test_a_link_that_does_not_exist_is_left_open_with_a_warning(drawn, registry):
    slot(drawn, 3, "policy")["link"] = 999
    read = workflow_of(drawn, registry)
    assert "policy" not in read.graph.nodes["3"].inputs
    assert [warning.message for warning in read.warnings] == [
        "Sampler (3): `policy` has link 999, which does not exist; it is left open."
    ]


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        ({"widgets_values": [77, "fixed"]}, 77),
        ({"widgets_values_named": {"value": 77}}, 77),
        ({"widgets_values": [{"__value__": [1, 2]}]}, [1, 2]),
        ({}, 8),
        ({"mode": 2, "widgets_values": [77]}, 8),
    ],
)
def test_a_primitive_writes_its_value_into_the_widget(drawn, registry, stored, value):
    add(drawn, 10, "PrimitiveNode", **stored)
    card(drawn, 3)["inputs"].append(
        {"name": "steps", "type": "INT", "widget": {"name": "steps"}, "link": link(drawn, 10, 0)}
    )
    graph = workflow_of(drawn, registry).graph
    assert graph.nodes["3"].inputs["steps"] == value
    assert "10" not in graph.nodes


def test_a_converted_widget_takes_the_link_or_keeps_its_value(drawn, registry):
    entry = {"name": "steps", "type": "INT", "widget": {"name": "steps"}, "link": link(drawn, 5, 1)}
    card(drawn, 3)["inputs"].insert(0, entry)
    assert inputs(drawn, registry, 3)["steps"] == Link("5", 1)
    card(drawn, 5)["mode"] = 2
    assert inputs(drawn, registry, 3)["steps"] == 8
    entry["link"] = None
    assert inputs(drawn, registry, 3)["steps"] == 8


def test_muted_cards_vanish_with_their_links(drawn, registry):
    card(drawn, 4)["mode"] = 2
    read = workflow_of(drawn, registry)
    graph = read.graph
    (warning,) = read.warnings
    assert warning.message.endswith(
        ": `reward` is linked to Score (4), which is muted; it is left open."
    )
    assert "4" not in graph.nodes
    assert "reward" not in graph.nodes["5"].inputs
    (problem,) = problems_of(graph, registry)
    assert problem.message == "Optimizer (5): `reward` is not linked; it needs a REWARD."


def test_a_bypassed_optimizer_hands_on_the_policy(drawn, registry):
    card(drawn, 5)["mode"] = 4
    graph = workflow_of(drawn, registry).graph
    assert "5" not in graph.nodes
    assert graph.nodes["6"].inputs["policy"] == Link("2", 0)
    assert problems_of(graph, registry) == ()


def bypass(drawn, types, given, wanted):
    """A bypassed card with inputs of these types, input i fed by slot i of card 77, read through output 1."""
    entries = [
        {"name": f"in_{place}", "type": kind, "link": link(drawn, 77, place)}
        for place, kind in enumerate(types)
    ]
    add(drawn, 77, "Foreign")
    add(
        drawn,
        10,
        "Foreign",
        mode=4,
        inputs=entries,
        outputs=[{"name": "o", "type": t} for t in given],
    )
    add(drawn, 11, "Foreign", inputs=[{"name": "x", "type": wanted, "link": link(drawn, 10, 1)}])


@pytest.mark.parametrize(
    ("types", "given", "wanted", "place"),
    [
        (["A", "B", "C"], ["A", "B"], "*", 1),
        (["A"], ["A", "B"], "*", 0),
        ([], ["A", "B"], "*", None),
        (["B", "B", "C"], ["A", "B"], "B", 1),
        (["B", "A"], ["A", "B"], "B", 0),
        (["A", "A", "B"], ["A", "B"], "B", 2),
        (["A", "A", "b,c"], ["A", "B"], "B", 2),
        (["A", "A", "*"], ["A", "B"], "B", 2),
        (["A", "A", "C"], ["A", "B"], "B", None),
        (["A", "B"], ["A"], "B", 1),
    ],
)
def test_which_input_a_bypassed_card_hands_on(drawn, registry, types, given, wanted, place):
    bypass(drawn, types, given, wanted)
    expected = {} if place is None else {"x": Link("77", place)}
    assert inputs(drawn, registry, 11) == expected


def test_cards_of_unknown_types_stay_with_named_values_and_links(drawn, registry):
    add(drawn, 10, "Foreign", widgets_values=[1, 2])
    add(drawn, 11, "Foreign", widgets_values_named={"a": {"__value__": [1]}, "b": None})
    graph = workflow_of(drawn, registry).graph
    assert graph.nodes["10"].inputs == {}
    assert graph.nodes["11"].inputs == {"a": [1], "b": None}
    assert [problem.node for problem in problems_of(graph, registry)] == ["10", "11"]


def test_a_link_from_a_card_that_is_not_there_is_told_of(drawn, registry):
    link = next(entry for entry in drawn["links"] if entry[3] == 5 and entry[5] == "REWARD")
    link[1] = 99
    (warning,) = workflow_of(drawn, registry).warnings
    assert "`reward` is linked to node 99, which is not in the file" in warning.message
