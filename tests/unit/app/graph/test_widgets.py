import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from app.graph import (
    Field,
    NodeError,
    NoParams,
    Params,
    ParamsError,
    build_params,
    default_of,
    doc_of,
    params,
)
from app.graph.widgets import param_specs, parse_value


@dataclass(frozen=True, kw_only=True)
class Config:
    """A library's config."""

    rate: float = 6e-4
    """How fast
    it learns."""
    betas: list = dataclasses.field(default_factory=lambda: [0.9])
    needed: int


@params
class Widgets(Params):
    rate: Annotated[float, Field(minimum=0.0, tooltip=doc_of(Config, "rate"))] = default_of(
        Config, "rate"
    )
    steps: Annotated[int, Field(minimum=1, maximum=10)] = 2
    kind: Annotated[str, Field(choices=("a", "b"))] = "a"
    mode: Literal["x", "y"] = "x"
    name: str = ""
    on: bool = False
    scale: float = 1

    def __post_init__(self) -> None:
        if self.steps == 9:
            msg = f"`steps` = 9 does not go with `kind` = {self.kind}"
            raise ValueError(msg)
        if self.steps == 8:
            msg = "`steps` = 8 is bad luck, see `nothing`."
            raise ValueError(msg)


SPECS = {spec.name: spec for spec in param_specs(Widgets)}


def test_specs_follow_annotations():
    assert [(spec.name, spec.wire, spec.default) for spec in SPECS.values()] == [
        ("rate", "FLOAT", 6e-4),
        ("steps", "INT", 2),
        ("kind", "COMBO", "a"),
        ("mode", "COMBO", "x"),
        ("name", "STRING", ""),
        ("on", "BOOLEAN", False),
        ("scale", "FLOAT", 1.0),
    ]
    assert SPECS["rate"].field.tooltip == "How fast it learns."
    assert SPECS["mode"].field.choices == ("x", "y")
    assert type(SPECS["scale"].default) is float


def test_params_are_frozen_keyword_only_and_have_slots():
    built = Widgets(steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.steps = 4
    with pytest.raises(TypeError):
        Widgets(0.1)
    assert not hasattr(built, "__dict__")
    assert dataclasses.replace(built, on=True).steps == 3
    assert NoParams() == NoParams()


def test_an_int_feeds_a_float_and_becomes_one():
    built = build_params(Widgets, {"rate": 1})
    assert built.rate == 1.0
    assert type(built.rate) is float


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("steps", 5.0, "invalid_input_type"),
        ("steps", "5", "invalid_input_type"),
        ("steps", True, "invalid_input_type"),
        ("steps", None, "invalid_input_type"),
        ("steps", 0, "value_smaller_than_min"),
        ("steps", 11, "value_bigger_than_max"),
        ("rate", "1", "invalid_input_type"),
        ("rate", True, "invalid_input_type"),
        ("rate", math.nan, "invalid_input_type"),
        ("rate", math.inf, "invalid_input_type"),
        ("rate", -0.1, "value_smaller_than_min"),
        ("rate", 10**400, "invalid_input_type"),
        ("on", "False", "invalid_input_type"),
        ("on", 0, "invalid_input_type"),
        ("name", 3, "invalid_input_type"),
        ("name", [1], "invalid_input_type"),
        ("kind", "c", "value_not_in_list"),
        ("kind", 1, "invalid_input_type"),
        ("mode", "X", "value_not_in_list"),
    ],
)
def test_values_are_never_converted(name, value, code):
    for build in (lambda: build_params(Widgets, {name: value}), lambda: Widgets(**{name: value})):
        with pytest.raises(ParamsError) as caught:
            build()
        (issue,) = caught.value.issues
        assert (issue.code, issue.fields) == (code, (name,))
        assert f"`{name}`" in issue.text


def test_every_issue_is_reported_with_unknown_names():
    with pytest.raises(ParamsError) as caught:
        build_params(Widgets, {"step": 1, "steps": 0, "rate": "x"})
    assert [issue.code for issue in caught.value.issues] == [
        "unknown_input",
        "invalid_input_type",
        "value_smaller_than_min",
    ]
    assert caught.value.issues[0].text.endswith("Did you mean `steps`?")
    with pytest.raises(ParamsError, match="There are no inputs"):
        build_params(NoParams, {"x": 1})
    with pytest.raises(ParamsError, match="no input named `x`"):
        build_params(Widgets, {"x": 1})


def test_rules_between_fields_name_them():
    with pytest.raises(ParamsError) as caught:
        build_params(Widgets, {"steps": 9})
    (issue,) = caught.value.issues
    assert issue.fields == ("steps", "kind")
    assert issue.text == "`steps` = 9 does not go with `kind` = a."
    with pytest.raises(ParamsError) as caught:
        build_params(Widgets, {"steps": 8, "x": 1})
    assert [issue.fields for issue in caught.value.issues] == [("x",), ("steps",)]
    with pytest.raises(ValueError, match="does not go with"):
        Widgets(steps=9)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7),
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("on", "true", True),
        ("on", "False", False),
        ("name", "true", "true"),
        ("name", "12", "12"),
        ("kind", "b", "b"),
    ],
)
def test_parse_value_reads_by_type(name, text, value):
    parsed = parse_value(SPECS[name], text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps", "5.7"),
        ("steps", "x"),
        ("steps", ""),
        ("steps", "1_0"),
        ("steps", " 4 "),
        ("rate", "1_0.5"),
        ("rate", "nan"),
        ("on", "1"),
        ("on", "yes"),
        ("kind", "c"),
    ],
)
def test_parse_value_refuses(name, text):
    with pytest.raises(ParamsError, match=f"`{name}` is"):
        parse_value(SPECS[name], text)


def test_default_of_and_doc_of():
    assert default_of(Config, "rate") == 6e-4
    assert default_of(Config, "betas") == [0.9]
    assert doc_of(Config, "betas") == ""
    assert doc_of(Config, "needed") == ""
    with pytest.raises(NodeError, match="has no default"):
        default_of(Config, "needed")
    with pytest.raises(NodeError, match="Did you mean `rate`"):
        default_of(Config, "rates")
    with pytest.raises(NodeError, match="no dataclass"):
        doc_of(int, "rate")


def _bad_list() -> None:
    @params
    class Bad(Params):
        x: list = ()


def _bad_number_choices() -> None:
    @params
    class Bad(Params):
        x: Literal[1, 2] = 1


def _bad_int_choices() -> None:
    @params
    class Bad(Params):
        x: Annotated[int, Field(choices=("1",))] = 1


def _bad_default() -> None:
    @params
    class Bad(Params):
        x: Annotated[int, Field(minimum=1)] = 0


def _no_default() -> None:
    @params
    class Bad(Params):
        x: int


def _bad_every() -> None:
    @params
    class Bad(Params):
        every: int = 1


def _bad_seed() -> None:
    @params
    class Bad(Params):
        seed: str = ""


def _undecorated() -> None:
    class Bad(Params):
        x: int = 1

    param_specs(Bad)


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (_bad_list, "is no widget type"),
        (_bad_number_choices, "must be strings"),
        (_bad_int_choices, "only a str may have choices"),
        (_bad_default, "Bad: the default of `x` is 0, expected 1 or more"),
        (_no_default, "needs a plain default"),
        (_bad_every, r"needs Field\(minimum=1\)"),
        (_bad_seed, "must be an INT"),
        (_undecorated, "decorate it with `@params`"),
    ],
)
def test_mistakes_of_authors(define, message):
    with pytest.raises(NodeError, match=message):
        define()
