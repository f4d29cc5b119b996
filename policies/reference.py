"""The policy reference, made from the tables that policies are read with.

`python -m muxk.policies.reference FILE` writes it; docs/policy-reference.md is what it gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from muxk.kernel.policy import GUARDS
from muxk.policies import (
    answers,
    inheritance,
    json_schema,
    lexer,
    loader,
    place_section,
    points,
    schema,
    sections,
)
from muxk.policies import policy_test_load as load
from muxk.policies import reference_prose as prose
from muxk.policies.markdown import blocks, code, codes, link, table
from muxk.policies.marks import MappingNode, Node, SequenceNode, written
from muxk.policies.names import ASKED, MAX_KEY_COST
from muxk.policies.operators import SIGNS, result
from muxk.policies.params import TYPES
from muxk.policies.policy_test_expect import EXPECTATIONS_MAX
from muxk.policies.policy_test_schema import policy_test_schema
from muxk.policies.policy_test_spec import DeviceText
from muxk.policies.problems import Report
from muxk.policies.reference_names import (
    OF_THE_POLICY,
    expectations_section,
    functions_table,
    index,
    names_section,
)
from muxk.policies.reference_place import place_blocks
from muxk.policies.reference_tables import Schema, builtins_table, groups_known, keys_of
from muxk.policies.rules import OnError
from muxk.policies.shipped_files import DEFAULTS, shipped_text
from muxk.policies.shown import duration, size
from muxk.policies.units import COUNTS, DURATION_NS, SIZES, Type
from muxk.policies.vocabulary import MAX_COST


def reference() -> str:
    """The whole document, in Markdown."""
    parts = (
        _file(),
        _spec(),
        _points(),
        _expressions(),
        _tests(),
        blocks("## Bounds", prose.BOUNDS, _bounds()),
        index(),
    )
    return blocks(prose.TITLE, _contents(parts), *parts) + "\n"


def _contents(parts: Sequence[str]) -> str:
    """Links to the headings of the first two levels."""
    lines = []
    in_code = False
    for line in "\n".join(parts).split("\n"):
        in_code ^= line.startswith("```")
        if line.startswith("## ") and not in_code:
            lines.append(f"- {link(line.removeprefix('## '))}")
        elif line.startswith("### ") and not in_code:
            lines[-1] += f"{':' if ':' not in lines[-1] else ','} {link(line.removeprefix('### '))}"
    return "\n".join(lines)


# --- what the schema of editors knows ---


def _file() -> str:
    document = json_schema.policy_document()
    metadata = document["properties"]["metadata"]
    return blocks(
        "## A policy file", prose.DOCUMENT, keys_of(document), "Keys of `metadata`:", keys_of(metadata)
    )


# --- sections ---


def _defaults() -> MappingNode:
    """The spec of the policy that every policy extends."""
    root = loader.load(shipped_text(DEFAULTS), DEFAULTS, Report())
    spec = root.get("spec") if isinstance(root, MappingNode) else None
    assert isinstance(spec, MappingNode), "defaults is a policy"
    return spec


def _spec() -> str:
    properties = json_schema.policy_document()["properties"]["spec"]["properties"]
    rows = [
        (
            link(key) if key != "extends" else code(key),
            "key by key" if key in inheritance.MERGED else "" if key == "extends" else "as a whole",
            each["description"],
        )
        for key, each in properties.items()
        if key not in answers.POINTS
    ]
    rows.append(("a decision point", "as a whole", f"Answers of the policy: {link('Decision points')}."))
    return blocks(
        "## Sections of a policy",
        prose.SPEC,
        table(("section", "inherited", "what it says"), rows),
        blocks("### slo", prose.SLO, _default_of("slo")),
        blocks(
            "### params",
            prose.PARAMS,
            keys_of(properties["params"]["additionalProperties"]),
            _types_of_params(),
        ),
        blocks("### variables", prose.VARIABLES),
        blocks("### classes", prose.CLASSES, keys_of(properties["classes"]["items"])),
        *place_blocks(properties["place"]["properties"]),
        blocks("### limits", prose.LIMITS, _limits(properties["limits"])),
        blocks("### estimator", prose.ESTIMATOR, _guards(), _default_of("estimator")),
        blocks("### on_error", prose.ON_ERROR, _on_error(), _default_of("on_error")),
    )


def _default_of(section: str) -> str:
    node = _defaults().get(section)
    assert node is not None, f"defaults says {section}"
    return f"Default: {code(written(node))}."


def _types_of_params() -> str:
    return f"Types: {codes(TYPES)}. Values have their unit, as in expressions: see {link('Types and units')}."


def _limits(shape: Schema) -> str:
    said = _defaults().get("limits")
    assert isinstance(said, MappingNode), "defaults says all limits"
    rows = []
    for key, bounds in sections.LIMIT_RANGES.items():
        default = said.get(key)
        about = shape["properties"][key]["description"]
        assert default is not None, f"defaults says {key}"
        rows.append((code(key), _range(key, bounds), code(written(default)), about))
    return table(("limit", "range", "default", "what it is"), rows)


def _range(key: str, bounds: tuple[int, int] | None) -> str:
    if bounds is None:
        return "a duration above 0"
    least, most = bounds
    return f"{least} to {size(most) if key == 'parked' else f'{most:,}'}"


def _guards() -> str:
    return table(("guard", "factor of a predicted decode step"), [(code(g), prose.GUARDS[g]) for g in GUARDS])


def _on_error() -> str:
    return table(("word", "who answers"), [(code(word), prose.ON_ERRORS[word]) for word in OnError])


# --- decision points ---


def _points() -> str:
    rows = [
        (
            link(point),
            ASKED[point].about,
            prose.OFTEN[ASKED[point].per],
            json_schema.ABOUT_POINTS[point],
        )
        for point in answers.POINTS
    ]
    return blocks(
        "## Decision points",
        prose.POINTS,
        table(("point", "asked", "how often", "question"), rows),
        blocks("### Rules", prose.RULES, keys_of(_rule_shape())),
        *map(_point, answers.POINTS),
    )


def _rule_shape() -> Schema:
    about = {
        "name": "Shown wherever the rule answers, as `point/name`.",
        "when": "The condition.",
        "then": "The answer.",
    }
    properties = {key: {"description": about[key]} for key in schema.RULE}
    return {"properties": properties, "required": ("name", "then")}


def _point(point: str) -> str:
    asked = ASKED[point]
    default = _defaults().get(point)
    assert default is not None, "defaults answers every point"
    facts = (
        f"- Asked: {asked.about} ({prose.OFTEN[asked.per]}).",
        f"- Without rules of its own a policy has: {_rules(default)}.",
        f"- When its rules fail: {prose.FALLBACKS[point]}.",
        f"- Names: {', '.join(map(link, groups_known(point)))}, {link(OF_THE_POLICY)}.",
    )
    return blocks(
        f"### {point}",
        json_schema.ABOUT_POINTS[point],
        _answer(point),
        prose.POINT_TEXTS[point],
        "\n".join(facts),
    )


def _rules(node: Node) -> str:
    """What `defaults` says of a point."""
    if not isinstance(node, SequenceNode):
        return code(written(node))
    return "; ".join(_rule(item) for item in node.items)


def _rule(item: Node) -> str:
    when = item.get("when") if isinstance(item, MappingNode) else None
    then = item.get("then") if isinstance(item, MappingNode) else None
    assert then is not None, "a rule has an answer"
    return (
        f"{code(written(then))} when {code(written(when))}"
        if when is not None
        else f"else {code(written(then))}"
    )


def _answer(point: str) -> str:
    """How the answer of a point is written."""
    if point == "split":
        units = table(("units", "meaning"), [(code(word), about) for word, about in prose.WORDS.items()])
        return blocks(keys_of(json_schema.definitions()["split"]), "Units are written as:", units)
    words: Mapping[str, Sequence[str]] = {
        "admit": answers.ADMIT,
        "preempt": answers.PREEMPT,
        "retain": answers.RETAIN,
    }
    if point in words:
        rows = [(_word(point, word), prose.ANSWER_WORDS[word]) for word in words[point]]
        return table(("answer", "meaning"), rows)
    return keys_of(json_schema.ANSWERS[point]())


def _word(point: str, word: str) -> str:
    reason = f", `{{{word}: reason}}`" if point == "admit" and word in answers.WITH_REASON else ""
    return code(word) + reason


# --- expressions ---


def _expressions() -> str:
    return blocks(
        "## Expressions",
        prose.EXPRESSIONS,
        blocks("### Types and units", prose.TYPES, _types(), "Units of literals:", _units()),
        blocks("### Operators", _operators()),
        blocks("### Functions", prose.FUNCTIONS, builtins_table(), functions_table(), prose.COSTS),
        names_section(),
    )


def _types() -> str:
    return table(
        ("type", "written as"), [(word, prose.TYPE_TEXTS[word]) for word in Type if word is not Type.ANY]
    )


def _units() -> str:
    rows = [
        ("duration", codes(f"{unit}" for unit in DURATION_NS), ""),
        ("count", codes(COUNTS), "powers of 1000, and of 1024 with `i`"),
        ("size", codes(SIZES), "the same in bytes"),
        ("percentage", code("%"), ""),
    ]
    return table(("of", "unit", "meaning"), rows)


def _operators() -> str:
    """Arithmetic by what stands on both sides; rows with equal types are one."""
    signs = [sign for sign in SIGNS.values() if sign not in ("<", "<=", ">", ">=", "==", "!=")]
    types = [each for each in Type if each not in (Type.ANY, Type.PERCENT)]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for left in types:
        for right in types:
            for sign in signs:
                found = result(sign, left, right)
                if found is not None:
                    rows.setdefault((left, right, found), []).append(sign)
    cells = [(left, codes(found, " "), right, gives) for (left, right, gives), found in rows.items()]
    compared = (
        "Comparisons take two values of one type and give a bool; `name` and `bool` know `==` and `!=` only."
    )
    return blocks(table(("left", "sign", "right", "gives"), cells), compared)


# --- tests ---


def _tests() -> str:
    test = policy_test_schema()
    spec = test["properties"]["spec"]
    parts = spec["properties"]
    return blocks(
        "## Policy tests",
        prose.TESTS,
        keys_of(spec),
        blocks(
            "### device",
            prose.DEVICE,
            keys_of(parts["device"], _device_defaults()),
            "Costs:",
            _costs(parts),
        ),
        blocks("### arrivals", prose.ARRIVALS, keys_of(parts["arrivals"]["items"])),
        blocks("### actions", "Changes in the middle of the run.", keys_of(parts["actions"]["items"])),
        blocks("### expect", prose.EXPECTATIONS, keys_of(parts["expect"]["items"])),
        expectations_section(),
    )


def _device_defaults() -> dict[str, str]:
    standard = DeviceText()
    values = {key: getattr(standard, key) for key in load.DEVICE if key != "costs"}
    return {key: "true" if value is True else f"{value:,}" for key, value in values.items()}


def _costs(parts: Schema) -> str:
    standard = DeviceText().costs
    defaults = {key: _cost(getattr(standard, attribute)) for key, attribute in load.COSTS.items()}
    defaults["decode_saturation"] = f"{standard.decode_saturation:.0%}"
    return keys_of(parts["device"]["properties"]["costs"], defaults)


def _cost(value_ns: float) -> str:
    return duration(value_ns) if value_ns >= 1 else f"{value_ns:g}ns"


# --- bounds ---


def _bounds() -> str:
    rows: Iterator[tuple[str, int]] = iter(
        (
            ("characters of a file", loader.MAX_CHARACTERS),
            ("depth of a file", loader.MAX_DEPTH),
            ("values and keys of a file", loader.MAX_NODES),
            ("policies that extend one another", inheritance.MAX_BASES),
            ("rules of a decision point", schema.MAX_RULES),
            ("cost of all expressions of a decision point", points.MAX_POINT_COST),
            ("rules of a phase in `place`", place_section.MAX_PLACE_RULES),
            ("cost of all expressions of `place`", place_section.MAX_PLACE_COST),
            ("classes", sections.MAX_CLASSES),
            ("variables", sections.MAX_VARIABLES),
            ("characters of all variables", sections.MAX_VARIABLE_CHARACTERS),
            ("sort keys", answers.MAX_KEYS),
            ("characters of a reason", answers.MAX_REASON),
            ("characters of an expression", lexer.MAX_CHARACTERS),
            ("words and signs of an expression", lexer.MAX_TOKENS),
            ("cost of an expression", MAX_COST),
            ("cost of a sort key", MAX_KEY_COST),
            ("requests of a test", load.REQUESTS_MAX),
            ("expectations of a test", EXPECTATIONS_MAX),
        )
    )
    return table(("of", "at most"), [(what, f"{most:,}") for what, most in rows])


def main(arguments: Sequence[str]) -> int:
    """Write the reference to a file, or to standard output without one."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        sys.stderr.write("usage: python -m muxk.policies.reference [FILE]\n")
        return 2
    if arguments:
        Path(arguments[0]).write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
