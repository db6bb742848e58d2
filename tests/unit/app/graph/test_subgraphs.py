import json
from itertools import count
from pathlib import Path

import pytest

from app.graph import (
    Link,
    Registry,
    WorkflowError,
    compile_graph,
    load_registry,
    problems_of,
    save_ui,
    set_value,
    to_api,
    to_ui,
    workflow_of,
)

ROLLOUTS = "11111111-aaaa-4bbb-8ccc-000000000001"
TRAINER = "11111111-aaaa-4bbb-8ccc-000000000002"
QUICKSTART = Path(__file__).parents[4] / "workflows" / "quickstart.json"


@pytest.fixture
def drawn(training, registry):
    """The quick start of the toys as a drawing."""
    return to_ui(training, registry)


def card(document, number):
    return next(node for node in document["nodes"] if node["id"] == number)


def definition(document, key):
    return next(entry for entry in document["definitions"]["subgraphs"] if entry["id"] == key)


def row(number, origin, slot, target, place, kind="*"):
    """A link as it is written inside subgraphs."""
    return {
        "id": number,
        "origin_id": origin,
        "origin_slot": slot,
        "target_id": target,
        "target_slot": place,
        "type": kind,
    }


def wrap(document, ids, number, key, name, promote=()):
    """Move cards into a subgraph with one instance; `promote` lists widgets (card, name) that it shows."""
    fresh = count(500)
    ports, results, inner, outer = {}, {}, [], []
    for link, origin, slot, target, place, kind in document["links"]:
        if origin in ids and target in ids:
            inner.append(row(link, origin, slot, target, place, kind))
        elif target in ids:
            if (origin, slot) not in ports:
                ports[origin, slot] = (
                    f"{kind.lower()}_{len(ports)}",
                    kind,
                    link,
                    len(ports),
                )
                outer.append([link, origin, slot, number, len(ports) - 1, kind])
            inner.append(row(link, -10, ports[origin, slot][3], target, place, kind))
        elif origin in ids:
            if (origin, slot) not in results:
                results[origin, slot] = (kind, len(results))
                inner.append(row(next(fresh), origin, slot, -20, len(results) - 1, kind))
            outer.append([link, number, results[origin, slot][1], target, place, kind])
        else:
            outer.append([link, origin, slot, target, place, kind])
    inside = [node for node in document["nodes"] if node["id"] in ids]
    inputs = [{"name": n, "type": kind, "link": link} for n, kind, link, _ in ports.values()]
    for place, widget in promote:
        node = next(node for node in inside if node["id"] == place)
        link = next(fresh)
        inner.append(row(link, -10, len(inputs), place, len(node["inputs"])))
        entry = {"name": widget, "type": "*", "widget": {"name": widget}}
        node["inputs"].append({**entry, "link": link})
        inputs.append({**entry, "link": None})
    outputs = [
        {"name": f"out_{slot}", "type": kind, "links": []} for kind, slot in results.values()
    ]
    document["nodes"] = [node for node in document["nodes"] if node["id"] not in ids]
    document["nodes"].append(
        {"id": number, "type": key, "inputs": inputs, "outputs": outputs, "properties": {}}
    )
    document["links"] = outer
    document.setdefault("definitions", {"subgraphs": []})["subgraphs"].append(
        {
            "id": key,
            "name": name,
            "inputNode": {"id": -10, "bounding": [0, 0, 1, 1]},
            "outputNode": {"id": -20, "bounding": [0, 0, 1, 1]},
            "inputs": [
                {"id": f"i{slot}", "name": entry["name"], "type": entry["type"]}
                for slot, entry in enumerate(inputs)
            ],
            "outputs": [{"id": f"o{slot}", "name": o["name"]} for slot, o in enumerate(outputs)],
            "widgets": [],
            "nodes": inside,
            "links": inner,
        }
    )
    return document


def renamed(prompt, paths):
    """A prompt with other ids, and without titles."""
    return {
        paths.get(key, key): {
            "class_type": node["class_type"],
            "version": node["_meta"]["jagg_version"],
            "inputs": {
                name: [paths.get(value[0], value[0]), value[1]]
                if isinstance(value, list)
                else value
                for name, value in node["inputs"].items()
            },
        }
        for key, node in prompt.items()
    }


def prompt_of(document, registry):
    return to_api(workflow_of(document, registry).graph, registry)


def sampler_inputs(document, registry, path="20:3"):
    return workflow_of(document, registry).graph.nodes[path].inputs


@pytest.fixture
def wrapped(drawn):
    """Sampler (3) and score (4) in one instance (20), which shows `steps` and `shift` of the sampler."""
    return wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts", promote=[(3, "steps"), (3, "shift")])


def test_a_subgraph_is_the_same_graph_with_paths_as_ids(training, wrapped, registry):
    read = workflow_of(wrapped, registry)
    assert read.warnings == ()
    assert problems_of(read.graph, registry) == ()
    flat = renamed(prompt_of(to_ui(training, registry), registry), {"3": "20:3", "4": "20:4"})
    assert renamed(to_api(read.graph, registry), {}) == flat
    assert read.graph.nodes["20:4"].title == "Rollouts / Score"
    assert [node.id for node in compile_graph(read.graph, registry).ticking] != []


def test_links_cross_the_boundary_both_ways(wrapped, registry):
    nodes = workflow_of(wrapped, registry).graph.nodes
    assert nodes["20:3"].inputs["policy"] == Link("2", 0)
    assert nodes["5"].inputs["rollout"] == Link("20:3", 0)
    assert nodes["5"].inputs["reward"] == Link("20:4", 0)


def test_subgraphs_in_subgraphs(training, drawn, registry):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    wrap(drawn, {20, 5}, 30, TRAINER, "Trainer")
    card(drawn, 30)["title"] = "My Trainer"
    read = workflow_of(drawn, registry)
    paths = {"3": "30:20:3", "4": "30:20:4", "5": "30:5"}
    flat = renamed(prompt_of(to_ui(training, registry), registry), paths)
    assert renamed(to_api(read.graph, registry), {}) == flat
    assert problems_of(read.graph, registry) == ()
    assert read.graph.nodes["30:20:3"].title == "My Trainer / Rollouts / Sampler"
    assert (
        set_value(read.graph, "30:20:3.steps", "5", registry).nodes["30:20:3"].inputs["steps"] == 5
    )


def test_definitions_may_lie_in_the_subgraph_that_uses_them(drawn, registry):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    wrap(drawn, {20, 5}, 30, TRAINER, "Trainer")
    expected = prompt_of(drawn, registry)
    inner, outer = drawn["definitions"]["subgraphs"]
    drawn["definitions"] = {"subgraphs": [{**outer, "definitions": {"subgraphs": [inner]}}]}
    assert prompt_of(drawn, registry) == expected
    drawn["definitions"]["subgraphs"].append(json.loads(json.dumps(inner)))
    assert prompt_of(drawn, registry) == expected
    drawn["definitions"]["subgraphs"][-1]["name"] = "Another"
    with pytest.raises(WorkflowError, match=f"another subgraph has the id {ROLLOUTS}"):
        workflow_of(drawn, registry)


@pytest.mark.parametrize(
    ("stored", "steps", "shift"),
    [
        ({}, 8, 1.0),
        ({"widgets_values": []}, 8, 1.0),
        ({"widgets_values": [12, 2.5]}, 12, 2.5),
        ({"widgets_values": [None, 2.5]}, 8, 2.5),
        ({"widgets_values": {"shift": 2.5}}, 8, 2.5),
        ({"widgets_values_named": {"steps": 12}}, 12, 1.0),
        ({"widgets_values_named": {"steps": 12, "shift": None}}, 12, 1.0),
        ({"widgets_values": [12, 2.5], "widgets_values_named": {"steps": 12}}, 12, 2.5),
    ],
)
def test_widgets_of_an_instance_count_and_those_without_a_value_do_not(
    wrapped, registry, stored, steps, shift
):
    card(wrapped, 20).update(stored)
    read = workflow_of(wrapped, registry)
    found = read.graph.nodes["20:3"].inputs
    assert (found["steps"], found["shift"]) == (steps, shift)
    assert read.warnings == ()


def test_widgets_count_where_the_instance_lists_no_slots_for_them(wrapped, registry):
    instance = card(wrapped, 20)
    instance["inputs"] = [entry for entry in instance["inputs"] if "widget" not in entry]
    instance["widgets_values"] = [12, 2.5]
    found = sampler_inputs(wrapped, registry)
    assert (found["steps"], found["shift"]) == (12, 2.5)
    assert found["policy"] == Link("2", 0)


def test_a_name_wins_over_a_position_and_a_wrong_number_is_not_used(wrapped, registry):
    card(wrapped, 20).update(widgets_values=[12, 2.5], widgets_values_named={"steps": 13})
    read = workflow_of(wrapped, registry)
    assert read.graph.nodes["20:3"].inputs["steps"] == 13
    assert [warning.message for warning in read.warnings] == [
        "Rollouts (20): `steps` is 13 (INT) by name, but 12 (INT) by position; the value by name is used."
    ]
    del card(wrapped, 20)["widgets_values_named"]
    card(wrapped, 20)["widgets_values"] = [12]
    read = workflow_of(wrapped, registry)
    assert read.graph.nodes["20:3"].inputs["steps"] == 8
    assert [warning.message for warning in read.warnings] == [
        "Rollouts (20): 1 values are stored for 2 widgets (`steps`, `shift`); none of them is used, and the cards "
        "inside keep theirs."
    ]


def test_what_front_ends_keep_after_a_seed_is_passed_over(drawn, registry):
    wrap(drawn, {1}, 20, ROLLOUTS, "Source", promote=[(1, "seed"), (1, "text")])
    card(drawn, 20)["widgets_values"] = [7, "randomize", "a cat"]
    found = sampler_inputs(drawn, registry, "20:1")
    assert (found["seed"], found["text"], found["iterations"]) == (7, "a cat", 20)


@pytest.mark.parametrize(
    ("proxies", "values", "steps", "shift"),
    [
        ([["3", "steps"], ["3", "shift"]], {}, 8, 1.0),
        ([["3", "steps"], ["3", "shift"]], {"widgets_values": [12, None]}, 12, 1.0),
        ([[3, "shift"]], {"widgets_values": [2.5]}, 8, 2.5),
        ([["3", "shift"]], {"widgets_values_named": {"shift": 2.5}}, 8, 2.5),
        ([["3", "steps"], ["3", "control_after_generate"]], {"widgets_values": [9, "x"]}, 9, 1.0),
        ("something else", {}, 8, 1.0),
    ],
)
def test_older_files_list_the_widgets_that_an_instance_shows(
    drawn, registry, proxies, values, steps, shift
):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    card(drawn, 20).update(values, properties={"proxyWidgets": proxies})
    read = workflow_of(drawn, registry)
    found = read.graph.nodes["20:3"].inputs
    assert (found["steps"], found["shift"]) == (steps, shift)
    assert read.warnings == ()
    assert problems_of(read.graph, registry) == ()


@pytest.mark.parametrize(
    ("proxies", "values"),
    [
        ([["3", "shared"]], [12, 2.5, True]),
        ([["-1", "shift"], ["3", "shared"], ["-1", "steps"]], [2.5, True, 12]),
    ],
)
def test_lists_of_widgets_and_inputs_go_together(wrapped, registry, proxies, values):
    card(wrapped, 20).update(properties={"proxyWidgets": proxies}, widgets_values=values)
    found = sampler_inputs(wrapped, registry)
    assert (found["steps"], found["shift"], found["shared"]) == (12, 2.5, True)


@pytest.mark.parametrize("third", [[], ["3"]])
def test_widgets_are_handed_on_through_two_levels_of_lists(drawn, registry, third):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    card(drawn, 20)["properties"] = {"proxyWidgets": [["3", "steps"]]}
    card(drawn, 20)["widgets_values"] = [11]
    wrap(drawn, {20, 5}, 30, TRAINER, "Trainer")
    assert sampler_inputs(drawn, registry, "30:20:3")["steps"] == 11
    card(drawn, 30)["properties"] = {"proxyWidgets": [["20", "steps", *third]]}
    card(drawn, 30)["widgets_values"] = [12]
    assert sampler_inputs(drawn, registry, "30:20:3")["steps"] == 12


def test_the_outermost_widget_with_a_value_counts(wrapped, registry):
    card(wrapped, 20)["widgets_values"] = [11, 2.0]
    wrap(wrapped, {20, 5}, 30, TRAINER, "Trainer")
    outer, inner = card(wrapped, 30), definition(wrapped, TRAINER)["nodes"][-1]
    slot = next(entry for entry in inner["inputs"] if entry["name"] == "steps")
    place = len(outer["inputs"])
    definition(wrapped, TRAINER)["inputs"].append({"name": "count", "type": "INT"})
    definition(wrapped, TRAINER)["links"].append(row(900, -10, place, 20, 2))
    slot["link"] = 900
    del slot["widget"]  # that it is a widget shows only further inside
    assert sampler_inputs(wrapped, registry, "30:20:3")["steps"] == 11
    outer["widgets_values"] = [13]
    found = sampler_inputs(wrapped, registry, "30:20:3")
    assert (found["steps"], found["shift"]) == (13, 2.0)


def test_a_link_to_a_shown_widget_wins_until_its_start_is_muted(wrapped, registry):
    instance = card(wrapped, 20)
    instance["widgets_values"] = [12, 2.5]
    wrapped["nodes"].append({"id": 40, "type": "PrimitiveNode", "widgets_values": [33, "fixed"]})
    wrapped["links"].append([99, 40, 0, 20, 2, "INT"])
    next(entry for entry in instance["inputs"] if entry["name"] == "steps")["link"] = 99
    assert sampler_inputs(wrapped, registry)["steps"] == 33
    card(wrapped, 40)["mode"] = 2
    assert sampler_inputs(wrapped, registry)["steps"] == 12
    card(wrapped, 40)["mode"] = 0
    wrapped["links"][-1][1:3] = [5, 1]
    assert sampler_inputs(wrapped, registry)["steps"] == Link("5", 1)


def test_two_instances_keep_their_own_values(wrapped, registry):
    first = card(wrapped, 20)
    second = json.loads(json.dumps(first)) | {"id": 21, "title": "Again", "widgets_values": [5, 1]}
    first["widgets_values"] = [12, 2.5]
    wrapped["nodes"].append(second)
    graph = workflow_of(wrapped, registry).graph
    assert graph.nodes["20:3"].inputs["steps"] == 12
    assert graph.nodes["21:3"].inputs["steps"] == 5
    assert graph.nodes["20:4"].inputs["rollout"] == Link("20:3", 0)
    assert graph.nodes["21:4"].inputs["rollout"] == Link("21:3", 0)
    assert graph.nodes["21:3"].inputs["policy"] == Link("2", 0)
    assert (
        set_value(graph, "Again / Sampler.steps", "6", registry).nodes["21:3"].inputs["steps"] == 6
    )
    assert problems_of(graph, registry) == ()


def test_a_muted_instance_contributes_nothing(wrapped, registry):
    card(wrapped, 20)["mode"] = 2
    read = workflow_of(wrapped, registry)
    assert list(read.graph.nodes) == ["1", "2", "5", "6"]
    assert {warning.message for warning in read.warnings} == {
        f"Optimizer (5): `{name}` is linked to Rollouts (20), which is muted; it is left open."
        for name in ("rollout", "reward")
    }


def test_a_bypassed_instance_hands_on_what_fits(drawn, registry):
    wrap(drawn, {5}, 20, TRAINER, "Trainer")
    assert workflow_of(drawn, registry).graph.nodes["6"].inputs["policy"] == Link("20:5", 0)
    card(drawn, 20)["mode"] = 4
    graph = workflow_of(drawn, registry).graph
    assert list(graph.nodes) == ["1", "2", "3", "4", "6"]
    assert graph.nodes["6"].inputs["policy"] == Link("2", 0)
    assert problems_of(graph, registry) == ()


def test_modes_inside_are_kept_and_told_of_by_path(wrapped, registry):
    inner = definition(wrapped, ROLLOUTS)["nodes"]
    next(node for node in inner if node["id"] == 4)["mode"] = 2
    (warning,) = workflow_of(wrapped, registry).warnings
    assert warning.message == (
        "Optimizer (5): `reward` is linked to Rollouts / Score (20:4), which is muted; it is left open."
    )
    definition(wrapped, ROLLOUTS)["links"] = [
        link
        for link in definition(wrapped, ROLLOUTS)["links"]
        if (link["target_id"], link["target_slot"]) != (-20, 1)
    ]
    (warning,) = workflow_of(wrapped, registry).warnings
    assert "`reward` is linked to output 1 of Rollouts (20), which is linked to nothing inside" in (
        warning.message
    )


def test_an_optimizer_that_is_bypassed_inside_hands_on_across_the_boundary(drawn, registry):
    wrap(drawn, {5}, 20, TRAINER, "Trainer")
    definition(drawn, TRAINER)["nodes"][0]["mode"] = 4
    assert workflow_of(drawn, registry).graph.nodes["6"].inputs["policy"] == Link("2", 0)


def test_reroutes_inside_and_across_the_boundary(wrapped, registry):
    part = definition(wrapped, ROLLOUTS)
    sampler = next(node for node in part["nodes"] if node["id"] == 3)
    link = next(entry for entry in part["links"] if entry["id"] == sampler["inputs"][0]["link"])
    link["target_id"] = 50
    part["nodes"].append(
        {"id": 50, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": link["id"]}]}
    )
    part["links"].append(row(600, 50, 0, 3, 0))
    sampler["inputs"][0]["link"] = 600
    outer = next(entry for entry in wrapped["links"] if entry[1] == 2 and entry[3] == 20)
    wrapped["nodes"].append(
        {"id": 51, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": 601}]}
    )
    wrapped["links"].append([601, 2, 0, 51, 0, "*"])
    outer[1:3] = [51, 0]
    graph = workflow_of(wrapped, registry).graph
    assert graph.nodes["20:3"].inputs["policy"] == Link("2", 0)
    assert problems_of(graph, registry) == ()


def test_a_primitive_inside_feeds_widgets_inside_and_outside(wrapped, registry):
    part = definition(wrapped, ROLLOUTS)
    part["nodes"].append({"id": 50, "type": "PrimitiveNode", "widgets_values": [17, "fixed"]})
    part["links"].append(row(600, 50, 0, 3, 0))
    part["links"].append(row(601, 50, 0, -20, 2))
    sampler = next(node for node in part["nodes"] if node["id"] == 3)
    sampler["inputs"].append(
        {"name": "noise_stop", "type": "INT", "widget": {"name": "noise_stop"}, "link": 600}
    )
    wrapped["links"].append([99, 20, 2, 6, 2, "INT"])
    card(wrapped, 6)["inputs"].append(
        {"name": "every", "type": "INT", "widget": {"name": "every"}, "link": 99}
    )
    nodes = workflow_of(wrapped, registry).graph.nodes
    assert nodes["20:3"].inputs["noise_stop"] == 17
    assert nodes["6"].inputs["every"] == 17
    card(wrapped, 20)["properties"] = {"proxyWidgets": [["50", "value"]]}
    card(wrapped, 20)["widgets_values"] = [18]
    assert sampler_inputs(wrapped, registry)["noise_stop"] == 18


def test_an_input_may_lead_straight_to_an_output_but_not_in_a_ring(wrapped, registry):
    part = definition(wrapped, ROLLOUTS)
    part["links"].append(row(600, -10, 0, -20, 2))
    wrapped["links"].append([99, 20, 2, 6, 0, "POLICY"])
    card(wrapped, 6)["inputs"][0]["link"] = 99
    assert workflow_of(wrapped, registry).graph.nodes["6"].inputs["policy"] == Link("2", 0)
    card(wrapped, 20)["inputs"][0]["link"] = 99
    messages = [p.message for p in workflow_of(wrapped, registry).graph.problems]
    assert messages == ["Rollouts (20): its links lead back to itself; remove one of them."]


def test_an_open_input_is_a_problem_of_the_card_inside(wrapped, registry):
    card(wrapped, 20)["inputs"][0]["link"] = None
    (problem,) = problems_of(workflow_of(wrapped, registry).graph, registry)
    assert problem.message.startswith(
        "Rollouts / Sampler (20:3): `policy` is not linked; it needs a POLICY."
    )
    assert problem.node == "20:3"


def test_links_from_inputs_that_do_not_exist_bring_nothing(wrapped, registry):
    definition(wrapped, ROLLOUTS)["inputs"] = definition(wrapped, ROLLOUTS)["inputs"][:1]
    wrap(wrapped, {20, 5}, 30, TRAINER, "Trainer")
    nodes = workflow_of(wrapped, registry).graph.nodes
    assert nodes["30:20:3"].inputs["policy"] == Link("2", 0)
    assert nodes["30:20:3"].inputs["steps"] == 8
    assert "prompts" not in nodes["30:20:3"].inputs


def test_a_subgraph_that_contains_itself_is_named(drawn, registry):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    wrap(drawn, {20, 5}, 30, TRAINER, "Trainer")
    definition(drawn, ROLLOUTS)["nodes"].append({"id": 60, "type": TRAINER})
    graph = workflow_of(drawn, registry).graph
    (problem,) = graph.problems
    assert problem.code == "circular_subgraph"
    assert problem.node == "30:20:60"
    assert problem.message == (
        "Trainer / Rollouts / Trainer (30:20:60): the subgraph `Trainer` contains itself "
        "(`Trainer` → `Rollouts` → `Trainer`); remove one of these instances."
    )
    assert problem in problems_of(graph, registry)
    definition(drawn, ROLLOUTS)["nodes"][-1]["mode"] = 2
    assert workflow_of(drawn, registry).graph.problems == ()


def test_a_subgraph_that_is_not_in_the_file_is_named(drawn, registry):
    wrap(drawn, {3, 4}, 20, ROLLOUTS, "Rollouts")
    wrap(drawn, {20, 5}, 30, TRAINER, "Trainer")
    drawn["definitions"]["subgraphs"] = [definition(drawn, TRAINER)]
    graph = workflow_of(drawn, registry).graph
    (problem,) = problems_of(graph, registry)[:1]
    assert problem.code == "missing_node_type"
    assert problem.message == (
        f"Trainer / {ROLLOUTS} (30:20): it is an instance of the subgraph `{ROLLOUTS}`, which is not in the file; "
        "save the workflow again in the editor that made it."
    )
    assert graph.nodes["30:5"].inputs["rollout"] == Link("30:20", 0)
    assert save_ui(workflow_of(drawn, registry), registry)["nodes"] == drawn["nodes"]


def test_cards_of_unknown_types_inside_stay(wrapped, registry):
    part = definition(wrapped, ROLLOUTS)
    unknown = {
        "id": 70,
        "type": "SomeonesNode",
        "inputs": [{"name": "x", "type": "POLICY", "link": 700}],
        "widgets_values": [1, {"deep": [None, "x"]}],
        "widgets_values_named": {"a": {"__value__": [1]}},
        "properties": {"cnr_id": "pack", "ver": "1.2"},
        "mystery": {"a": [1]},
    }
    part["nodes"].append(unknown)
    part["links"].append(row(700, -10, 0, 70, 0))
    read = workflow_of(wrapped, registry)
    assert read.graph.nodes["20:70"].inputs == {"a": [1], "x": Link("2", 0)}
    (problem,) = problems_of(read.graph, registry)
    assert problem.message.startswith("Rollouts / SomeonesNode (20:70): no node of type")
    saved = save_ui(read, registry)
    assert definition(saved, ROLLOUTS)["nodes"][-1] == unknown


@pytest.mark.parametrize("version", [0.4, 1])
def test_saving_loses_nothing_of_subgraphs(wrapped, registry, version):
    wrap(wrapped, {20, 5}, 30, TRAINER, "Trainer")
    card(wrapped, 30).update(widgets_values=[], mystery=1, properties={"proxyWidgets": []})
    definition(wrapped, TRAINER).update(
        revision=3,
        category="mine",
        groups=[{"title": "g"}],
        extra={"x": 1},
        state={"lastLinkId": 9},
    )
    if version == 1:
        wrapped["version"] = 1
        wrapped["links"] = [row(*entry) for entry in wrapped["links"]]
    before = json.loads(json.dumps(wrapped))
    read = workflow_of(wrapped, registry)
    saved = save_ui(read, registry)
    assert wrapped == before
    assert saved["definitions"] == before["definitions"]
    assert saved["nodes"] == before["nodes"]
    assert saved["version"] == 0.4
    assert workflow_of(saved, registry).graph == read.graph
    assert save_ui(workflow_of(saved, registry), registry) == saved


def test_saving_brings_cards_inside_up_to_date(wrapped, registry):
    sampler = next(node for node in definition(wrapped, ROLLOUTS)["nodes"] if node["id"] == 3)
    sampler["properties"] = {"jagg_version": 1}
    sampler["widgets_values_named"] = {"count": 6}
    sampler["inputs"][2] |= {"name": "count", "widget": {"name": "count"}}
    card(wrapped, 20)["widgets_values"] = [12, 2.5]
    read = workflow_of(wrapped, registry)
    assert read.graph.nodes["20:3"].inputs["steps"] == 12
    saved = save_ui(read, registry)
    sampler = next(node for node in definition(saved, ROLLOUTS)["nodes"] if node["id"] == 3)
    assert sampler["widgets_values_named"]["steps"] == 6
    assert sampler["inputs"][2]["name"] == "steps"
    assert sampler["properties"] == {"jagg_version": 2}
    assert workflow_of(saved, registry).graph.nodes["20:3"].inputs["steps"] == 12


@pytest.mark.parametrize(
    ("definitions", "message"),
    [
        ([1], "w: `definitions` is a list, expected an object"),
        ({"subgraphs": 3}, "w: `definitions.subgraphs` is a int, expected a list"),
        ({"subgraphs": [3]}, "w: subgraph number 1 is a int, expected an object"),
        ({"subgraphs": [{}]}, "w: subgraph number 1: `id` is None"),
        ({"subgraphs": [{"id": "a", "name": "A"}]}, "w: subgraph `A`: `nodes` is missing"),
        (
            {"subgraphs": [{"id": "a", "nodes": [], "inputs": [{}]}]},
            "w: subgraph `a`: input number 1: `name` is None",
        ),
        (
            {"subgraphs": [{"id": "a", "nodes": [], "links": [row(1, 2, 0, -20, None)]}]},
            "w: subgraph `a`: link number 1 of `links`: the slot that it ends at is None",
        ),
    ],
)
def test_broken_definitions_are_said(registry, definitions, message):
    with pytest.raises(WorkflowError) as error:
        workflow_of({"nodes": [], "definitions": definitions}, registry, name="w")
    assert str(error.value).startswith(message)


def chain(depth, copies):
    """Subgraphs of which each holds the next one several times."""
    parts = [
        {"id": f"s{n}", "nodes": [{"id": i, "type": f"s{n + 1}"} for i in range(copies)]}
        for n in range(depth)
    ]
    parts.append({"id": f"s{depth}", "nodes": []})
    return {"nodes": [{"id": 1, "type": "s0"}], "definitions": {"subgraphs": parts}}


@pytest.mark.parametrize(
    ("depth", "copies", "message"),
    [(5000, 1, "more than 100 levels deep"), (60, 2, "more than 20000 cards")],
)
def test_absurd_nesting_ends_in_words(registry, depth, copies, message):
    with pytest.raises(WorkflowError, match=message):
        workflow_of(chain(depth, copies), registry)


def test_two_cards_with_the_same_path_are_refused(wrapped, registry):
    wrapped["nodes"].append({"id": "20:3", "type": "Sampler"})
    with pytest.raises(WorkflowError, match="20:3 too"):
        workflow_of(wrapped, registry)


@pytest.fixture(scope="module")
def shipped() -> Registry:
    return load_registry()


@pytest.mark.parametrize("ids", [{3, 4, 5}, {1, 2, 3}, {6, 7, 9}, {5, 6}])
def test_cards_of_the_quick_start_in_a_subgraph_give_the_same_prompt(shipped, ids):
    flat = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    wrapped = wrap(json.loads(json.dumps(flat)), ids, 20, ROLLOUTS, "Part")
    read = workflow_of(wrapped, shipped)
    assert read.warnings == ()
    assert problems_of(read.graph, shipped) == ()
    paths = {str(number): f"20:{number}" for number in ids}
    expected = renamed(prompt_of(flat, shipped), paths)
    assert renamed(to_api(read.graph, shipped), {}) == expected
