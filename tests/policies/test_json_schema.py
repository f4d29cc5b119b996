"""The JSON Schema and the reader agree on what a policy and a test may look like."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from muxk.client import cli
from muxk.policies import answers, params, policy_test, schema, sections
from muxk.policies.engine import compile_policy, shipped_policies
from muxk.policies.json_schema import policy_schema
from muxk.policies.marks import plain
from muxk.policies.policy_choice import split_documents
from muxk.policies.policy_test_expect import EXPECT
from muxk.policies.policy_test_load import ARRIVAL, DEVICE
from muxk.policies.policy_test_schema import any_schema, policy_test_schema
from muxk.policies.problems import PolicyError, Report
from muxk.policies.splits import SPLIT
from schema_documents import VALID, VALID_TEST
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
WRONG = [file for file in EXAMPLES if file.stem.endswith("-wrong")]
"""Shown for their mistakes."""
FILES = [*sorted((ROOT / "policies").glob("*.yaml")), *(file for file in EXAMPLES if file not in WRONG)]
POLICY = Draft202012Validator(policy_schema())
TEST = Draft202012Validator(policy_test_schema())
ANY = Draft202012Validator(any_schema())


def documents() -> list[tuple[str, Any]]:
    return [
        (f"{file.name}:{document.name}", plain(document.root))
        for file in FILES
        for document in split_documents(file.read_text(encoding="utf-8"), file.name, Report())
    ]


DOCUMENTS = documents()


def test_the_schemas_are_schemas() -> None:
    for validator in (POLICY, TEST, ANY):
        Draft202012Validator.check_schema(validator.schema)


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_a_shipped_document_is_valid(name: str, document: Any) -> None:
    of_kind = TEST if document["kind"] == "PolicyTest" else POLICY
    assert [error.message for error in [*of_kind.iter_errors(document), *ANY.iter_errors(document)]] == []


def test_the_shipped_documents_are_all_there() -> None:
    names = [name.partition(":")[2] for name, _ in DOCUMENTS]
    assert {*shipped_policies(), "defaults"} <= {*names}
    assert len(names) > 8


def test_documents_that_say_everything_are_valid_and_can_be_read() -> None:
    assert POLICY.is_valid(VALID)
    assert ANY.is_valid(VALID)
    compile_policy(json.dumps(VALID))
    assert TEST.is_valid(VALID_TEST)
    assert ANY.is_valid(VALID_TEST)
    policy_test.read_tests(json.dumps(VALID_TEST).replace('"class": "chat", ', ""), "test.json")


def test_a_document_of_the_other_kind_is_not_valid() -> None:
    assert not POLICY.is_valid(VALID_TEST)
    assert not TEST.is_valid(VALID)


def at(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a dotted path; a number is an index."""
    changed = copy.deepcopy(document)
    *parents, last = path.split(".")
    place: Any = changed
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "muxk/v9"),
        ("kind", "Policy"),
        ("metadata", {"description": "no name"}),
        ("metadata.name", "two words"),
        ("metadata.naem", "x"),
        ("spec.limts", {"queue": 3}),
        ("spec.slo", "50ms"),
        ("spec.slo.tpt", "50ms"),
        ("spec.slo.ttft", "10"),
        ("spec.slo.ttft", "10ms/tok"),
        ("spec.params.burst.type", "text"),
        ("spec.params.burst", {"type": "number"}),
        ("spec.params.floor.default", 3),
        ("spec.params.floor.default", "4GiB"),
        ("spec.params.room.default", "4k"),
        ("spec.params.part.max", "5"),
        ("spec.params.on.default", "yes"),
        ("spec.params", {"a-b": {"type": "number", "default": 1}}),
        ("spec.variables", ["queue.tokens"]),
        ("spec.variables", {"a b": "1"}),
        ("spec.classes", []),
        ("spec.classes", {"name": "chat"}),
        ("spec.classes.0.weight", 3),
        ("spec.classes.0", {"share": 3}),
        ("spec.limits.backlog", {"a": 1}),
        ("spec.on_error", "panic"),
        ("spec.admit", "acept"),
        ("spec.admit", {"accept": "hello"}),
        ("spec.admit", {"shed": "a", "refuse": "b"}),
        ("spec.admit.0.then", {"refuse": ""}),
        ("spec.admit.0.whem", "true"),
        ("spec.order", {}),
        ("spec.order", {"by": []}),
        ("spec.order", []),
        ("spec.form", {"requests": 3}),
        ("spec.split", {}),
        ("spec.split", {"decode": {"fewest": "units > 3"}, "prefill": "rest"}),
        ("spec.split", {"decode": "units ? 3 : 4"}),
        ("spec.split", {"decode": "units[3]"}),
        ("spec.split.1.then.otherwise", {"decode": "most", "otherwise": {"decode": "all"}}),
        ("spec.split.0", {"when": "true"}),
        ("spec.slice", {}),
        ("spec.slice", "all"),
        ("spec.slice", {"fuse": "decode"}),
        ("spec.slice", {"tokens": 3, "layers": 2, "fuse": "decode"}),
        ("spec.slice", {"tokens": 3, "fuse": "prefill"}),
        ("spec.preempt", True),
        ("spec.retain", "kep"),
    ],
)
def test_the_schema_and_the_reader_refuse_a_structural_mistake(path: str, value: Any) -> None:
    changed = at(VALID, path, value)
    assert not POLICY.is_valid(changed)
    assert not ANY.is_valid(changed)
    with pytest.raises(PolicyError):
        compile_policy(json.dumps(changed))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "v1"),
        ("spec.polcy", "muxwise"),
        ("spec.arrivals", []),
        ("spec.arrivals.0.promt", 3),
        ("spec.arrivals.0.at", 3),
        ("spec.arrivals.0.prompt", "4GiB"),
        ("spec.arrivals.0.prefix", "1k"),
        ("spec.device.cores", 3),
        ("spec.device.calibrate", "maybe"),
        ("spec.device.costs.launch", 3),
        ("spec.actions.0", {"at": "1s"}),
        ("spec.expect", []),
        ("spec.expect.1", {"for": "chat"}),
        ("spec.expect.1.when", "1s"),
        ("spec.timeout", "soon"),
    ],
)
def test_the_schema_and_the_reader_refuse_a_mistake_of_a_test(path: str, value: Any) -> None:
    changed = at(VALID_TEST, path, value)
    assert not TEST.is_valid(changed)
    assert not ANY.is_valid(changed)
    with pytest.raises(PolicyError):
        policy_test.read_tests(json.dumps(changed), "test.json")


def keys(validator: Draft202012Validator, path: str) -> list[str]:
    """Keys of the mapping that a path through `properties` leads to."""
    place = validator.schema
    for key in path.split("/") if path else ():
        place = place[key]
        while "$ref" in place:
            place = validator.schema["$defs"][place["$ref"].rpartition("/")[2]]
    assert place["additionalProperties"] is False
    return list(place["properties"])


@pytest.mark.parametrize(
    ("validator", "path", "table"),
    [
        (POLICY, "", schema.DOCUMENT),
        (POLICY, "properties/metadata", schema.METADATA),
        (POLICY, "properties/spec", {key: "" for key, refusal in schema.SPEC.items() if not refusal}),
        (POLICY, "$defs/slo", sections.SLO),
        (POLICY, "properties/spec/properties/params/additionalProperties", params.PARAM),
        (POLICY, "properties/spec/properties/classes/items", sections.CLASS),
        (POLICY, "properties/spec/properties/limits", sections.LIMITS),
        (POLICY, "properties/spec/properties/split/then/items/else", schema.RULE),
        (POLICY, "properties/spec/properties/split/else", SPLIT),
        (POLICY, "properties/spec/properties/form/else", answers.FORM),
        (POLICY, "properties/spec/properties/slice/else", answers.SLICE),
        (POLICY, "properties/spec/properties/victim/else", answers.SORT_KEYS),
        (TEST, "properties/spec", policy_test.SPEC),
        (TEST, "properties/spec/properties/device", DEVICE),
        (TEST, "properties/spec/properties/arrivals/items", ARRIVAL),
        (TEST, "properties/spec/properties/actions/items", policy_test.ACTION),
        (TEST, "properties/spec/properties/expect/items/then", EXPECT),
    ],
)
def test_the_schema_has_every_key_of_the_reader_and_no_other(
    validator: Draft202012Validator, path: str, table: dict[str, str]
) -> None:
    assert keys(validator, path) == list(table)


def test_every_key_is_described_for_editors() -> None:
    def undescribed(place: Any, path: str) -> list[str]:
        found = []
        if isinstance(place, dict):
            for key, shape in place.get("properties", {}).items():
                if isinstance(shape, dict) and "then" not in path and "description" not in shape:
                    found.append(f"{path}/{key}")
            for key, shape in place.items():
                if key not in ("if", "allOf", "dependentSchemas"):
                    found += undescribed(shape, f"{path}/{key}")
        return found

    missing = undescribed(POLICY.schema, "") + undescribed(TEST.schema, "")
    assert [path for path in missing if not path.endswith("/metadata")] == []


# --- any policy ---

expressions = st.sampled_from(
    ["1", "2 * 3", "decode.batch", "kv.free / 2", "max(1, kv.total)", "params.n", "50%"]
)
conditions = st.sampled_from(
    ["decode.batch > 3", "not running.active", "true", "kv.free < 10% * kv.total", "slo.tbt < 1s and 1 < 2"]
)
names = st.from_regex(sections.NAME, fullmatch=True).filter(
    lambda name: name.lower() not in ("true", "false", "null", "nan", "inf", "y", "n")
)
splits = st.one_of(
    st.fixed_dictionaries({"decode": expressions, "prefill": st.just("rest")}),
    st.fixed_dictionaries({"prefill": st.just("all")}),
    st.fixed_dictionaries(
        {
            "decode": st.one_of(st.just("fit"), conditions.map("fewest where units > 2 and {}".format)),
            "prefill": st.just("rest"),
            "otherwise": st.fixed_dictionaries({"decode": st.just("most"), "prefill": st.just("rest")}),
        }
    ),
)
slices = st.one_of(
    st.fixed_dictionaries({"layers": st.sampled_from(["all", 3, "layers.total"])}),
    st.fixed_dictionaries({"tokens": st.just("decode.batch + 1")}, optional={"fuse": st.just("decode")}),
)


@st.composite
def rules(draw: st.DrawFn, answer: st.SearchStrategy[Any]) -> Any:
    if draw(st.booleans()):
        return draw(answer)
    several = draw(st.lists(st.tuples(names, conditions), max_size=3, unique_by=lambda rule: rule[0]))
    found = [{"name": name, "when": when, "then": draw(answer)} for name, when in several if when != "true"]
    return [*found, {"name": "the-last-of-all", "then": draw(answer)}]


specs = st.fixed_dictionaries(
    {"params": st.just({"n": {"type": "number", "default": 3}})},
    optional={
        "extends": st.sampled_from(shipped_policies()),
        "slo": st.fixed_dictionaries({}, optional={"tbt": st.just("9ms"), "ttft": st.just("9ms/token")}),
        "limits": st.fixed_dictionaries({}, optional={"backlog": st.just(2), "queue": st.just("1k")}),
        "on_error": st.sampled_from(["default", "next", "base"]),
        "admit": st.one_of(st.sampled_from(["accept", "shed"]), st.just({"refuse": "no"})),
        "split": rules(splits),
        "slice": rules(slices),
        "preempt": rules(st.sampled_from(["park", "continue"])),
        "retain": st.sampled_from(["keep", "free"]),
    },
)
mistakes = st.sampled_from(["slo", "limits", "spec", "metadata", ""])


def policy(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": schema.API_VERSION,
        "kind": "SchedulingPolicy",
        "metadata": {"name": "generated"},
        "spec": spec,
    }


@settings(max_examples=100, deadline=None)
@given(specs)
def test_a_policy_that_is_right_passes_both(spec: dict[str, Any]) -> None:
    document = policy(spec)
    assert [error.message for error in POLICY.iter_errors(document)] == []
    compile_policy(json.dumps(document))


@settings(max_examples=100, deadline=None)
@given(specs, mistakes, st.from_regex(r"[a-z]{1,9}", fullmatch=True))
def test_a_key_that_nobody_knows_is_refused_by_both(spec: dict[str, Any], place: str, key: str) -> None:
    document = policy(spec)
    places = {"spec": document["spec"], "metadata": document["metadata"], "": document}
    mapping = places.get(
        place, document["spec"].setdefault(place, {}) if place in ("slo", "limits") else None
    )
    if key in [*schema.SPEC, *schema.METADATA, *schema.DOCUMENT, *sections.SLO, *sections.LIMITS]:
        return
    mapping[key] = "1"
    assert not POLICY.is_valid(document)
    with pytest.raises(PolicyError, match="unknown key"):
        compile_policy(json.dumps(document))


# --- the command ---


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("policy", "SchedulingPolicy"),
        ("test", "PolicyTest"),
        ("", "SchedulingPolicy or PolicyTest"),
    ],
)
def test_the_command_prints_a_schema(kind: str, title: str) -> None:
    shown = CliRunner().invoke(cli.build_app(), ["schema", *([kind] if kind else [])])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["title"] == f"muxk {title}"


def test_the_command_knows_its_kinds() -> None:
    shown = CliRunner().invoke(cli.build_app(), ["schema", "rule"])
    assert (shown.exit_code, "policy, test and any" in shown.stderr) == (2, True)
