"""YAML with places, without YAML's traps."""

from __future__ import annotations

import pytest
from muxk.policies.loader import MAX_NODES, load
from muxk.policies.marks import MappingNode, Scalar, plain
from muxk.policies.problems import PolicyError, Problem, Report


def read(text: str) -> object:
    report = Report()
    node = load(text, "p.yaml", report)
    report.raise_any()
    assert node is not None
    return plain(node)


def problems(text: str) -> tuple[Problem, ...]:
    report = Report()
    load(text, "p.yaml", report)
    with pytest.raises(PolicyError) as raised:
        report.raise_any()
    return raised.value.problems


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on", "on"), ("no", "no"), ("yes", "yes"), ("true", True), ("false", False),
        ("1e3", 1000.0), ("1.0e3", 1000.0), ("1:30", "1:30"), ("017", 17), ("0o17", 15), ("0x1F", 31),
        ("1_000", "1_000"), ("2001-01-01", "2001-01-01"), ("~", None), ("", None), ("'1'", "1"),
        ("50ms", "50ms"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(written: str, meant: object) -> None:
    value = read(f"a: {written}\n")
    assert value == {"a": meant}
    assert isinstance(value, dict)
    assert type(value["a"]) is type(meant)


def test_a_duplicate_key_is_refused_at_the_second_place() -> None:
    (problem,) = problems("a: 1\nb: 2\na: 3\n")
    assert (problem.line, problem.column, problem.message) == (3, 1, "duplicate key 'a'")
    assert "line 1" in problem.hint


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: &x 1\nb: *x\n", "anchors"),
        ("a: !!python/object:os.system x\n", "tags"),
        ("a: !x b\n", "tags"),
        ("a: 1\n---\nb: 2\n", "one document"),
        ("", "empty"),
        ("a:\n\t- 1\n", "\\t"),
        ("{a: 1", "expected ','"),
        ("a: \x01", "character"),
        ("? [a, b]\n: c\n", "key must be a word"),
        ('a: "\\UFFFFFFFF"\n', "YAML"),
    ],
)
def test_what_policies_do_not_need_is_refused_with_a_place(text: str, word: str) -> None:
    first = problems(text)[0]
    assert word in first.message
    assert first.file == "p.yaml"
    assert first.line >= 1
    assert first.column >= 1


def test_tabs_get_a_hint_in_plain_words() -> None:
    assert "spaces" in problems("a:\n\t- 1\n")[0].hint


def test_an_alias_bomb_is_refused_while_it_is_small() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)]
    assert any("aliases" in problem.message for problem in problems("\n".join(lines)))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_ends_in_one_message(opening: str) -> None:
    assert "levels deep" in problems(opening * 3000)[-1].message


def test_size_and_node_count_are_bounded() -> None:
    assert "larger" in problems("#" * 1_000_001)[0].message
    assert "nodes" in problems("[" + "1," * (MAX_NODES + 1) + "]")[0].message


def test_a_byte_order_mark_and_windows_line_ends_are_fine() -> None:
    assert read("\ufeffa: 1\r\nb: [x,\r\n  y]\r\n") == {"a": 1, "b": ["x", "y"]}


@pytest.mark.parametrize(
    "text",
    [
        "a: one two BAD three\n",
        "a: 'one  two BAD three'\n",
        'a: "one two\n  BAD three"\n',
        "a: >-\n  one two\n  BAD three\n",
        "a: |\n    one\n    two BAD\n",
        "a: one\n  two\n  BAD\n",
    ],
)
def test_a_word_inside_any_kind_of_scalar_is_found_in_the_file(text: str) -> None:
    node = load(text, "p.yaml", Report())
    assert isinstance(node, MappingNode)
    scalar = node.get("a")
    assert isinstance(scalar, Scalar)
    mark = scalar.mark_at(scalar.text.index("BAD"))
    line = text.split("\n")[mark.line - 1]
    assert line[mark.column - 1 :].startswith("BAD")


def test_a_problem_shows_its_line_with_a_caret_and_cuts_long_lines() -> None:
    shown = str(problems("a: 1\nkey: x\nkey: y\n")[0])
    assert shown.splitlines()[:3] == ["p.yaml:3:1: duplicate key 'key'", "    3 | key: y", "      | ^"]
    long = str(problems("a: {" + "b: 1, " * 400 + "c: 2}")[0])
    assert all(len(line) < 200 for line in long.splitlines())
    caret = long.splitlines()[2].index("^")
    assert long.splitlines()[1][caret] == "b"
