"""Prompt sources: what may and may not be drawn, and in which order."""

import json

import pytest

from nodes.backends.prompt_files import PromptFileError
from nodes.backends.shapes import Scene, composition_split
from nodes.prompts import PromptList, PromptListParams, ShapePrompts, ShapePromptsParams


def _pairs(metadata):
    return {item.pair for item in Scene.from_metadata(metadata).objects}


def _opened(context, **params):
    source = ShapePrompts(ShapePromptsParams(**params))
    source.open(context("1", 0))
    return source


def test_no_training_prompt_has_a_held_out_pair_and_every_evaluation_prompt_has_one(context):
    source = _opened(context, prompts_per_tick=64)
    held_out = composition_split(0).held_out
    seen = set()
    for tick in range(1, 21):
        outputs = source.run(context("1", tick))
        for metadata in outputs.prompts.metadata:
            seen |= _pairs(metadata)
    assert not seen & held_out
    assert {colour for colour, _ in seen} == {"red", "green", "blue", "yellow", "purple", "orange"}
    assert {shape for _, shape in seen} == {"circle", "square", "triangle", "ring", "cross", "star"}
    assert len(outputs.held_out.metadata) == 64
    assert all(_pairs(metadata) & held_out for metadata in outputs.held_out.metadata)


def test_shape_prompts_depend_on_seed_and_tick_alone_and_held_out_on_neither(context):
    source = _opened(context)
    first = source.run(context("1", 3))
    again = _opened(context).run(context("1", 3))
    other_tick = source.run(context("1", 4))
    other_seed = source.run(context("1", 3, seed=1))
    assert first.prompts == again.prompts
    assert len({first.prompts.prompts, other_tick.prompts.prompts, other_seed.prompts.prompts}) == 3
    assert first.held_out == other_tick.held_out == other_seed.held_out


def _list(context, tmp_path, **params):
    node = PromptList(PromptListParams(**params))
    node.open(context())
    return node


def test_prompt_list_reads_the_card_and_files(context, tmp_path):
    (tmp_path / "input" / "a.jsonl").write_text(
        '\ufeff{"prompt": "third", "tag": "counting"}\n\n{"prompt": " fourth "}\n', encoding="utf-8"
    )
    node = _list(
        context,
        tmp_path,
        text="first\n\n  second ",
        file="a.jsonl",
        prompts_per_tick=3,
        order="sequential",
        group_size=2,
    )
    outputs = node.run(context(tick=1))
    assert outputs.all_prompts.prompts == ("first", "second", "third", "fourth")
    assert outputs.all_prompts.metadata[2] == {"tag": "counting"}
    assert outputs.prompts.prompts == ("first", "second", "third")
    assert len(outputs.prompts) == 6
    assert node.run(context(tick=2)).prompts.prompts == ("fourth", "first", "second")


def test_shuffled_list_shows_every_prompt_once_a_round_and_changes_order_between_rounds(
    context, tmp_path
):
    words = [f"p{i}" for i in range(12)]
    node = _list(context, tmp_path, text="\n".join(words), prompts_per_tick=4)
    rounds = [
        [
            p
            for tick in range(first, first + 3)
            for p in node.run(context(tick=tick)).prompts.prompts
        ]
        for first in (1, 4)
    ]
    assert sorted(rounds[0]) == sorted(rounds[1]) == sorted(words)
    assert rounds[0] != rounds[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": }\n', "line 2, column 12: no JSON"),
        (
            "a.jsonl",
            b'{"text": "x"}\n',
            "line 1: expected an object with a non-empty text `prompt`",
        ),
        ("a.jsonl", b'["x"]\n', "line 1: expected an object with a non-empty text `prompt`"),
        ("a.txt", b"caf\xe9\n", "byte 3 is not UTF-8"),
        ("a.csv", b"x\n", "expected a .txt or .jsonl file"),
        ("a.txt", b"\n\n", "there is no prompt"),
    ],
)
def test_bad_prompt_files_are_named(context, tmp_path, name, content, message):
    (tmp_path / "input" / name).write_bytes(content)
    with pytest.raises(PromptFileError, match=message.replace("(", r"\(")):
        _list(context, tmp_path, file=name)


def test_a_missing_prompt_file_lists_what_is_there(context, tmp_path):
    (tmp_path / "input" / "prompts.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"prompts\.txt"):
        _list(context, tmp_path, file="promts.txt")


def test_widget_values_are_strict():
    with pytest.raises(ValueError, match=r"`group_size` is 5\.7"):
        ShapePromptsParams(group_size=5.7)
    assert json.loads(json.dumps(ShapePromptsParams().iterations)) == 100
