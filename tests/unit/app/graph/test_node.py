import typing
from typing import Annotated, Any, NamedTuple, Protocol

import pytest

from app.graph import (
    Changes,
    Field,
    NeedsEvery,
    Node,
    NodeError,
    NoParams,
    Params,
    RunContext,
    Ticks,
    params,
    spec_of,
    wire_name,
)
from app.graph.ports import accept_table, accepts


class Value:
    pass


class Narrow(Value):
    pass


class Shape(Protocol):
    pass


def node(run: Any, outputs: Any = None, **attributes: Any) -> type[Node]:
    body = {
        "type": "Toy",
        "title": "Toy",
        "category": "toys",
        "description": "A   toy\n of tests.",
        "run": run,
        **attributes,
    }
    if outputs is not None:
        body["Outputs"] = outputs
    return type("Toy", (Node,), body)


class Out(NamedTuple):
    value: Annotated[Value, "What comes out."]
    fresh: Annotated[int, Ticks()]


def test_ports_flags_and_texts_come_from_annotations():
    def run(
        self,
        ctx: RunContext,
        *,
        value: Annotated[Value, Changes(), "What goes in."],
        maybe: Value | None = None,
        other: Annotated[Value | None, NeedsEvery()] = None,
        third: typing.Optional[Annotated[Value, NeedsEvery]] = None,  # noqa: UP045
    ) -> Out: ...

    spec = spec_of(node(run, Out))
    assert spec.description == "A toy of tests."
    assert [(port.name, port.wire, port.required) for port in spec.inputs] == [
        ("value", "VALUE", True),
        ("maybe", "VALUE", False),
        ("other", "VALUE", False),
        ("third", "VALUE", False),
    ]
    assert [port.changes for port in spec.inputs] == [True, False, False, False]
    assert [port.needs_every for port in spec.inputs] == [False, False, True, True]
    assert spec.inputs[0].tooltip == "What goes in."
    assert [(port.name, port.wire, port.ticks, port.tooltip) for port in spec.outputs] == [
        ("value", "VALUE", False, "What comes out."),
        ("fresh", "INT", True, ""),
    ]
    assert spec.source
    assert spec.params_class is NoParams
    assert (spec.same_object(0), spec.same_object(1)) == ("value", None)
    assert spec.input_names() == ["value", "maybe", "other", "third"]
    assert spec.input("nope") is None
    assert spec.param("nope") is None


def test_a_node_keeps_params_and_has_empty_hooks(registry):
    spec = registry.get("Score")
    made = spec.cls(spec.params_class(every=3))
    assert made.params.every == 3
    assert made.state() == {}
    made.load_state({})
    made.open(None)
    made.close()


@pytest.mark.parametrize(
    ("cls", "wire"),
    [(Value, "VALUE"), (int, "INT"), (bool, "BOOLEAN"), (float, "FLOAT"), (str, "STRING")]
    + [
        (type(name, (), {}), wire)
        for name, wire in [
            ("PromptBatch", "PROMPT_BATCH"),
            ("ODESamples", "ODE_SAMPLES"),
            ("Image", "IMAGE"),
        ]
    ],
)
def test_wire_names(cls, wire):
    assert wire_name(cls) == wire


def test_accept_table():
    table = accept_table([Value, Narrow, int])
    assert accepts(table, "VALUE", "NARROW")
    assert not accepts(table, "NARROW", "VALUE")
    assert accepts(table, "FLOAT", "INT")
    assert not accepts(table, "INT", "FLOAT")
    assert not accepts(table, "INT", "BOOLEAN")
    assert not accepts(table, "FLOAT", "BOOLEAN")
    assert accepts(table, "STRING", "COMBO")
    assert accepts(table, "NEW", "NEW")


def _plain(self, ctx: RunContext) -> None: ...


def _positional(self, ctx: RunContext, value: Value) -> None: ...


def _untyped(self, ctx: RunContext, *, value) -> None: ...


def _two_types(self, ctx: RunContext, *, value: int | str) -> None: ...


def _half_optional(self, ctx: RunContext, *, value: Value | None) -> None: ...


def _generic(self, ctx: RunContext, *, value: list[int]) -> None: ...


def _protocol(self, ctx: RunContext, *, value: Shape) -> None: ...


def _hidden(self, ctx: RunContext, *, value: "Absent") -> None: ...  # noqa: F821


def _no_context(self) -> None: ...


def _clash(self, ctx: RunContext, *, steps: Value) -> None: ...


@params
class StepsParams(Params):
    steps: int = 1
    every: Annotated[int, Field(minimum=1)] = 1


class Clash(Node[StepsParams]):
    type = title = category = description = "x"
    run = _clash


class SlowSource(Node[StepsParams]):
    type = title = category = description = "x"
    run = _plain
    Outputs = Out


class WrongParams(Node[int]):
    type = title = category = description = "x"
    run = _plain


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (node(_plain, title=""), "class attribute `title`"),
        (node(_plain, type=None), "class attribute `type`"),
        (node(_plain, version=0), "`version` is 0"),
        (node(_plain, version=3, migrations={1: dict}), "needs a migration from version 2"),
        (node(None), "define the method `run"),
        (node(_positional), "one keyword per port"),
        (node(_no_context), "one keyword per port"),
        (node(_untyped), "`value` of `run` has no type"),
        (node(_two_types), "has several types"),
        (node(_half_optional), r"write an optional input as `value: Type \| None = None`"),
        (node(_generic), "concrete class"),
        (node(_protocol), "the protocol Shape"),
        (node(_hidden), "import it outside TYPE_CHECKING"),
        (node(_plain, Value), "`Outputs` must be a NamedTuple"),
        (node(_plain, NamedTuple("Bad", [("x", list[int])])), "concrete class"),
        (Clash, "both a port of `run` and a widget"),
        (SlowSource, "cannot have the widget `every`"),
        (WrongParams, "needs a class decorated"),
    ],
)
def test_mistakes_of_authors(cls, message):
    with pytest.raises(NodeError, match=message):
        spec_of(cls)
