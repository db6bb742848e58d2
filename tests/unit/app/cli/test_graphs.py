import pytest

from app.cli.graphs import first_difference, source_iterations
from app.graph import Graph, GraphNode, Link, Registry
from tests.integration.toy_graphs import toy_registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return toy_registry()


def graph(**trainer: object) -> Graph:
    return Graph(
        nodes={
            "1": GraphNode(id="1", type="ToyPrompts", inputs={"iterations": 3}),
            "2": GraphNode(id="2", type="ToyLoader"),
            "4": GraphNode(
                id="4", type="ToyTrainer", title="Mine", inputs={"policy": Link("2", 0), **trainer}
            ),
        }
    )


def test_defaults_titles_and_iterations_make_no_difference(registry: Registry) -> None:
    given = graph(rate=0.05).with_input("1", "iterations", 9)
    assert first_difference(given, graph(), registry) is None
    assert source_iterations(given, registry) == [9]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (graph(rate=0.1), "Mine (4): `rate` is 0.1, the run has 0.05."),
        (
            graph(policy=Link("2", 1)),
            "Mine (4): `policy` is linked to output 1 of node 2, the run has linked to output 0",
        ),
        (graph().with_input("1", "seed", 4), "Toy Prompts (1): `seed` is 4, the run has 0."),
        (
            graph().with_node(GraphNode(id="2", type="ToySaver")),
            "Toy Saver (2) is a ToySaver, the run has a ToyLoader.",
        ),
        (
            graph().with_node(GraphNode(id="8", type="ToySaver")),
            "Toy Saver (8) is not in the run's graph.",
        ),
        (
            Graph(nodes={"1": graph().nodes["1"], "2": graph().nodes["2"]}),
            "Toy Trainer (4) is missing",
        ),
    ],
)
def test_the_first_difference_is_named(registry: Registry, given: Graph, expected: str) -> None:
    difference = first_difference(given, graph(), registry)
    assert difference is not None
    assert difference.replace("Mine (4) is missing", "Toy Trainer (4) is missing").startswith(
        expected
    )
