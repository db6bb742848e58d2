import random
from dataclasses import replace

import pytest

from app.graph import (
    Graph,
    GraphError,
    GraphNode,
    Link,
    ParamsError,
    Problem,
    Registry,
    compile_graph,
    problems_of,
)

MESSAGES = [
    (
        "3",
        {"stepz": 3},
        "unknown_input",
        "Sampler (3): no input named `stepz`. Inputs are `policy`, `prompts`, `steps`, `shift`, "
        "`noise_stop`, `shared`. Did you mean `steps`?",
    ),
    (
        "3",
        {"steps": 5.7},
        "invalid_input_type",
        "Sampler (3): `steps` is 5.7 (FLOAT), expected an INT.",
    ),
    (
        "3",
        {"steps": True},
        "invalid_input_type",
        "Sampler (3): `steps` is True (BOOLEAN), expected an INT.",
    ),
    (
        "3",
        {"shared": "False"},
        "invalid_input_type",
        "Sampler (3): `shared` is 'False' (STRING), expected a BOOLEAN.",
    ),
    (
        "3",
        {"shared": 1},
        "invalid_input_type",
        "Sampler (3): `shared` is 1 (INT), expected a BOOLEAN.",
    ),
    (
        "3",
        {"shift": float("nan")},
        "invalid_input_type",
        "Sampler (3): `shift` is nan, expected a finite number.",
    ),
    (
        "3",
        {"shift": None},
        "invalid_input_type",
        "Sampler (3): `shift` is None (null), expected a FLOAT.",
    ),
    (
        "3",
        {"shift": 10**400},
        "invalid_input_type",
        f"Sampler (3): `shift` is 1{'0' * 56}... (INT), expected a FLOAT.",
    ),
    (
        "3",
        {"steps": 201},
        "value_bigger_than_max",
        "Sampler (3): `steps` is 201, expected 200 or less.",
    ),
    ("3", {"steps": 0}, "value_smaller_than_min", "Sampler (3): `steps` is 0, expected 1 or more."),
    (
        "3",
        {"steps": 2},
        "custom_validation_failed",
        "Sampler (3): `noise_stop` = 4 is above `steps` = 2.",
    ),
    (
        "2",
        {"train": "loar"},
        "value_not_in_list",
        "DiT Loader (2): `train` is 'loar' (STRING), expected one of `full`, `match`, `lora`. Did you mean `lora`?",
    ),
    (
        "2",
        {"train": 3},
        "invalid_input_type",
        "DiT Loader (2): `train` is 3 (INT), expected one of `full`, `match`, `lora`.",
    ),
    (
        "3",
        {"policy": 5},
        "invalid_input_type",
        "Sampler (3): `policy` is 5 (INT), expected a link of type POLICY.",
    ),
    (
        "3",
        {"policy": Link("9", 0)},
        "bad_linked_input",
        "Sampler (3): `policy` is linked to node 9, which is not in the graph.",
    ),
    (
        "3",
        {"policy": Link("2", 1)},
        "bad_linked_input",
        "Sampler (3): `policy` is linked to output 1 of DiT Loader (2), which does not exist; "
        "its outputs are `policy`, counted from 0.",
    ),
    (
        "3",
        {"policy": Link("1", 0)},
        "return_type_mismatch",
        "Sampler (3): `policy` takes POLICY, but `prompts` of Prompt Source (1) gives PROMPT_BATCH. "
        "Did you mean input `prompts`?",
    ),
    (
        "4",
        {"rollout": Link("2", 0)},
        "return_type_mismatch",
        "Score (4): `rollout` takes ROLLOUT, but `policy` of DiT Loader (2) gives POLICY. "
        "It could be `rollout` of Sampler (3).",
    ),
    (
        "4",
        {"rollout": None},
        "required_input_missing",
        "Score (4): `rollout` is not linked; it needs a ROLLOUT. It could be `rollout` of Sampler (3).",
    ),
    (
        "1",
        {"iterations": Link("5", 1)},
        "invalid_input_type",
        "Prompt Source (1): `iterations` cannot be linked; type a value.",
    ),
    (
        "4",
        {"every": 2},
        "stale_value",
        "Optimizer (5): `reward` needs a fresh value at every tick, but Score (4) runs only every 2 ticks; "
        "set its `every` to 1.",
    ),
    (
        "6",
        {"policy": Link("2", 0)},
        "unordered_reader",
        "Evaluate (6) reads `policy` of DiT Loader (2) while Optimizer (5) changes it; "
        "take `policy` from Optimizer (5).",
    ),
    (
        "6",
        {"prompts": Link("1", 0)},
        "early_baseline",
        "Evaluate (6): `baseline` runs before tick 1, when `prompts` of Prompt Source (1) does not exist yet; "
        "turn `baseline` off or take a value that does not tick.",
    ),
]


def changed(graph: Graph, node: str, inputs: dict) -> Graph:
    for name, value in inputs.items():
        graph = graph.with_input(node, name, value)
    return graph


@pytest.mark.parametrize(("node", "inputs", "code", "message"), MESSAGES)
def test_bad_graph_says_what_is_wrong(training, registry, node, inputs, code, message):
    graph = changed(training, node, inputs)
    if code == "unordered_reader":  # without other links Evaluate ticks only through its prompts
        graph = changed(graph, "6", {"prompts": Link("1", 0), "baseline": False})
    (problem,) = problems_of(graph, registry)
    assert (problem.code, problem.message) == (code, message)
    assert problem.node is not None
    assert problem.title in message
    with pytest.raises(GraphError) as caught:
        compile_graph(graph, registry)
    assert caught.value.problems == (problem,)
    assert str(caught.value) == message


def test_all_problems_are_reported_at_once(training, registry):
    graph = changed(training, "3", {"steps": 0, "shift": "x", "nope": 1})
    graph = changed(graph, "2", {"train": "all"})
    graph = graph.with_node(GraphNode(id="7", type="Evalute"))
    found = problems_of(graph, registry)
    assert [(problem.node, problem.field) for problem in found] == [
        ("7", None),
        ("2", "train"),
        ("3", "nope"),
        ("3", "steps"),
        ("3", "shift"),
    ]
    assert found[0].code == "missing_node_type"
    assert (
        found[0].message
        == "Evalute (7): no node of type `Evalute` is installed. Did you mean `Evaluate`?"
    )


def test_problems_found_while_reading_are_part_of_it(training, registry):
    read = Problem(
        code="missing_node_type", node="7", title="X", field=None, message="X (7): gone."
    )
    graph = replace(training.with_node(GraphNode(id="7", type="X")), problems=(read,))
    assert problems_of(graph, registry) == (read,)


def test_reader_of_an_unknown_node_is_not_blamed(training, registry):
    graph = training.with_node(GraphNode(id="2", type="Loadr"))
    assert [problem.node for problem in problems_of(graph, registry)] == ["2"]


def test_cycle_names_its_nodes_in_the_direction_of_the_links(make, registry):
    graph = make(
        n1=("Optimizer", {"policy": "@2.0", "rollout": "@3.0", "reward": "@4.0"}),
        n2=("Optimizer", {"policy": "@1.0", "rollout": "@3.0", "reward": "@4.0"}),
        n3=("Sampler", {"policy": "@5.0", "prompts": "@6.0"}),
        n4=("Score", {"rollout": "@3.0"}),
        n5=("Loader", {}),
        n6=("Prompts", {}),
        n7=("Evaluate", {"policy": "@1.0", "prompts": "@6.0"}),
    )
    (problem,) = problems_of(graph, registry)
    assert problem.code == "dependency_cycle"
    assert problem.message == (
        "The links form a cycle: Optimizer (2) → Optimizer (1) → Optimizer (2); remove one of them."
    )


def test_two_writers_of_one_value(training, registry, make):
    second = make(n8=("Optimizer", {"policy": "@5.0", "rollout": "@3.0", "reward": "@4.0"}))
    graph = training.with_node(second.nodes["8"])
    (problem,) = problems_of(graph, registry)
    assert (problem.code, problem.node, problem.field) == ("two_writers", "8", "policy")
    assert problem.message == (
        "Optimizer (5) and Optimizer (8) both change `policy` of DiT Loader (2); only one node may change it. "
        "Give each its own."
    )


def test_writers_of_two_values_and_readers_that_are_ordered_are_fine(training, registry, make):
    more = make(
        n8=("Loader", {}),
        n9=("Optimizer", {"policy": "@8.0", "rollout": "@3.0", "reward": "@4.0"}),
        n10=("Evaluate", {"policy": "@9.0", "prompts": "@1.0"}),
    )
    graph = training
    for node in more.nodes.values():
        graph = graph.with_node(node)
    assert problems_of(graph, registry) == ()


def test_a_reader_that_runs_once_comes_before_the_ticks(training, registry):
    early = {"policy": Link("2", 0), "prompts": Link("1", 1)}
    graph = training.with_node(GraphNode(id="7", type="Sampler", inputs=early))
    graph = graph.with_node(GraphNode(id="8", type="Score", inputs={"rollout": Link("7", 0)}))
    graph = graph.with_node(GraphNode(id="9", type="Note Down", inputs={"value": Link("8", 1)}))
    graph = changed(graph, "6", {"baseline": False})
    compiled = compile_graph(graph, registry)
    assert not compiled.node("7").ticking
    assert compiled.node("1").primed


def test_a_value_for_the_whole_run_does_not_feed_what_needs_every(make, registry, training):
    graph = changed(training, "3", {"prompts": Link("1", 1)})
    graph = changed(graph, "5", {"rollout": Link("7", 0)})
    graph = graph.with_node(
        GraphNode(id="7", type="Sampler", inputs={"policy": Link("2", 0), "prompts": Link("1", 0)})
    )
    (problem,) = problems_of(graph, registry)
    assert problem.message == (
        "Optimizer (5): `reward` needs a fresh value at every tick, but Score (4) gives one for the whole run."
    )


def test_stale_values_are_found_through_other_nodes(training, registry):
    graph = training.with_node(GraphNode(id="7", type="Mix", inputs={"reward_1": Link("4", 0)}))
    graph = changed(graph, "5", {"reward": Link("7", 0)})
    assert problems_of(graph, registry) == ()
    (problem,) = problems_of(changed(graph, "4", {"every": 3}), registry)
    assert problem.field == "reward"
    assert "Score (4) runs only every 3 ticks" in problem.message


def test_order_rates_and_run_values(training, registry):
    compiled = compile_graph(training, registry)
    assert [node.id for node in compiled.order] == ["1", "2", "3", "4", "5", "6"]
    assert [node.id for node in compiled.once] == ["2"]
    assert [node.id for node in compiled.ticking] == ["1", "3", "4", "5", "6"]
    assert [node.id for node in compiled.sources] == ["1"]
    assert (compiled.iterations, compiled.seed) == (20, 3)
    assert compiled.readers(Link("2", 0)) == ("3", "5")
    with pytest.raises(KeyError):
        compiled.node("77")


def test_baseline_reads_what_the_writer_will_change(training, registry):
    compiled = compile_graph(training, registry)
    evaluate = compiled.node("6")
    assert evaluate.links == {"policy": Link("5", 0), "prompts": Link("1", 1)}
    assert evaluate.baseline_links == {"policy": Link("2", 0), "prompts": Link("1", 1)}
    assert compiled.node("1").primed
    assert [tick for tick in range(21) if evaluate.runs_at(tick, 20)] == [0, 10, 20]
    assert [node.id for node in compiled.order if node.runs_at(0, 20)] == ["1", "2", "6"]
    assert [node.id for node in compiled.order if node.runs_at(1, 20)] == ["1", "3", "4", "5"]


def test_without_baseline_nothing_but_the_once_region_runs_at_tick_0(training, registry):
    compiled = compile_graph(changed(training, "6", {"baseline": False}), registry)
    assert [node.id for node in compiled.order if node.runs_at(0, 20)] == ["2"]
    assert [tick for tick in range(21) if compiled.node("6").runs_at(tick, 20)] == [1, 10, 20]


def test_two_sources_share_one_clock_and_the_shortest_ends_it(training, registry, make):
    graph = training.with_node(
        GraphNode(id="8", type="Prompts", inputs={"iterations": 7, "seed": 9})
    )
    graph = graph.with_node(
        GraphNode(id="9", type="Evaluate", inputs={"policy": Link("5", 0), "prompts": Link("8", 0)})
    )
    compiled = compile_graph(graph, registry)
    assert (compiled.iterations, compiled.seed) == (7, 3)


def test_only_what_outputs_need_is_checked_and_runs(training, registry):
    graph = training.with_node(GraphNode(id="8", type="Sampler", inputs={"steps": -1}))
    assert "8" not in [node.id for node in compile_graph(graph, registry).order]


def test_no_output_node(registry, make):
    (problem,) = problems_of(make(n2=("Loader", {})), registry)
    assert problem.code == "prompt_no_outputs"
    assert problem.message == (
        "The graph has no output node, so nothing would run; add one, such as Evaluate, Note Down, Optimizer."
    )
    (problem,) = problems_of(Graph(), registry)
    assert problem.message == "The graph is empty; add an output node to it."


def test_node_of_a_newer_version(training, registry):
    graph = training.with_node(replace(training.nodes["3"], version=5, title="Mine"))
    (problem,) = problems_of(graph, registry)
    assert problem.message == (
        "Mine (3): it was written by version 5 of Sampler, and version 2 is installed; update JAGG Studio."
    )


def test_linked_widgets(training, registry):
    graph = changed(training, "3", {"steps": Link("5", 1)})
    (problem,) = problems_of(graph, registry)
    assert problem.code == "dependency_cycle"
    note = GraphNode(
        id="7", type="Note Down", inputs={"value": Link("5", 1), "scale": Link("4", 1)}
    )
    compiled = compile_graph(training.with_node(note), registry).node("7")
    assert compiled.links == {"value": Link("5", 1)}  # an INT feeds a FLOAT
    assert compiled.widget_links == {"scale": Link("4", 1)}
    assert compiled.params.scale == 1.0
    assert compiled.params_with({"scale": 3}).scale == 3.0
    with pytest.raises(ParamsError, match="`scale` is 'x'"):
        compiled.params_with({"scale": "x"})


def test_rules_between_fields_wait_for_linked_ones(make, registry):
    graph = make(
        n1=("Prompts", {}),
        n2=("Loader", {}),
        n3=("Sampler", {"policy": "@2.0", "prompts": "@1.0", "steps": "@4.0", "noise_stop": 100}),
        n4=("Counter", {}),
        n5=("Score", {"rollout": "@3.0"}),
        n6=("Note Down", {"value": "@5.1"}),
    )
    assert [problem.code for problem in problems_of(graph, registry)] == ["missing_node_type"]


def test_long_chains_compile(registry):
    nodes = {"0": GraphNode(id="0", type="Prompts"), "1": GraphNode(id="1", type="Loader")}
    nodes["2"] = GraphNode(
        id="2", type="Sampler", inputs={"policy": Link("1", 0), "prompts": Link("0", 0)}
    )
    nodes["3"] = GraphNode(id="3", type="Score", inputs={"rollout": Link("2", 0)})
    for number in range(4, 3000):
        nodes[str(number)] = GraphNode(
            id=str(number), type="Mix", inputs={"reward_1": Link(str(number - 1), 0)}
        )
    nodes["end"] = GraphNode(
        id="end",
        type="Optimizer",
        inputs={"policy": Link("1", 0), "rollout": Link("2", 0), "reward": Link("2999", 0)},
    )
    assert len(compile_graph(Graph(nodes=nodes), registry).order) == 3001


def test_any_random_wiring_gives_problems_or_a_valid_order(registry):
    """No wiring of the toys crashes the compiler, and what compiles has every node after what it reads."""
    source = random.Random(7)
    compiled_ones = 0
    for _ in range(400):
        graph = _random_graph(source, registry)
        found = problems_of(graph, registry)
        if found:
            assert all(problem.message.endswith((".", "?")) for problem in found)
            continue
        compiled = compile_graph(graph, registry)
        compiled_ones += 1
        place = {node.id: number for number, node in enumerate(compiled.order)}
        for node in compiled.order:
            for link in (*node.links.values(), *node.widget_links.values()):
                assert place[link.node] < place[node.id]
                if compiled.node(link.node).ticking and not compiled.node(link.node).spec.source:
                    assert node.ticking
    assert compiled_ones > 5


def _random_graph(source: random.Random, registry: Registry) -> Graph:
    kinds = [source.choice(list(registry)) for _ in range(source.randint(4, 14))]
    nodes = {}
    for key, spec in enumerate(kinds):
        inputs = {}
        for port in spec.inputs:
            links = [
                Link(str(giver), slot)
                for giver, other in enumerate(kinds)
                for slot, output in enumerate(other.outputs)
                if output.wire == port.wire and (giver < key or source.random() < 0.05)
            ]
            anywhere = Link(str(source.randrange(len(kinds))), source.randrange(2))
            inputs[port.name] = (
                source.choice(links) if links and source.random() < 0.97 else anywhere
            )
        nodes[str(key)] = GraphNode(id=str(key), type=spec.type, inputs=inputs)
    return Graph(nodes=nodes)


def test_a_card_with_every_that_reads_the_unchanged_value_would_run_only_once(training, registry):
    graph = changed(training, "6", {"policy": Link("2", 0)})
    (problem,) = problems_of(graph, registry)
    assert (problem.code, problem.node) == ("unordered_reader", "6")
    assert problem.message.endswith("take `policy` from Optimizer (5).")
    alone = Graph(nodes={key: node for key, node in graph.nodes.items() if key in "126"})
    assert problems_of(alone, registry) == ()


def test_what_reads_the_second_of_two_writers_is_not_a_problem_of_its_own(training, registry):
    graph = training.with_node(
        GraphNode(id="7", type="Optimizer", inputs=training.nodes["5"].inputs)
    )
    graph = changed(graph, "6", {"policy": Link("7", 0)})
    assert [problem.code for problem in problems_of(graph, registry)] == ["two_writers"]
