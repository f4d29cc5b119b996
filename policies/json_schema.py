"""JSON Schema (2020-12) of policies, from the tables that the reader uses, for editors and other tools.

It knows the structure: keys, words, and what literals and expressions are made of. Whether an expression
makes sense only the reader can say. A key that a table gains and that is not described here is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muxk.kernel.policy import GUARDS
from muxk.policies import answers, inheritance, params, place_section, schema, sections
from muxk.policies.engine import shipped_policies
from muxk.policies.lexer import MAX_CHARACTERS
from muxk.policies.placing import Among, Reuse
from muxk.policies.rules import OnError
from muxk.policies.shipped_plans import PLANS
from muxk.policies.splits import KEYWORDS, SPLIT
from muxk.policies.units import COUNTS, DURATION_NS, NUMBER, SIZES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

_IDENTIFIER = "^[A-Za-z_][A-Za-z0-9_]*$"
_NAME = f"^{sections.NAME.pattern}$"
_NUMBER = NUMBER.replace(r"\d", "[0-9]")


def _one(words: Sequence[str]) -> str:
    return "(?:" + "|".join(sorted(words, key=len, reverse=True)) + ")"


_DURATION = f"{_NUMBER}{_one([*DURATION_NS])}"
_RATE = rf"{_DURATION}\s*(?:/\s*token)?"
_EXPRESSION = r"""^(?:[A-Za-z0-9_.\s()<>=!&|+*/%,-]|'[^'\n]*'|"[^"\n]*")*$"""
PATTERNS: Mapping[str, str] = {
    "duration": rf"^\s*-?{_DURATION}\s*$",
    "size": rf"^\s*-?{_NUMBER}{_one([*SIZES])}\s*$",
    "percent": rf"^\s*-?{_NUMBER}%\s*$",
    "number": rf"^\s*-?{_NUMBER}{_one([*COUNTS])}?\s*$",
}
"""Of the literals of each type of param."""


def described(about: str, shape: Schema) -> Schema:
    """A schema with the text that editors show."""
    return {"description": about, **shape}


def closed(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """A mapping that has no other keys."""
    found: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def keyed(table: Mapping[str, str], shapes: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """A mapping with the supported keys of a table of the reader, each with its schema."""
    supported = [key for key, refusal in table.items() if not refusal]
    assert all(key in table for key in shapes), "what is described is a key"
    return closed({key: shapes[key] for key in supported}, required)


def expression(about: str) -> Schema:
    """Anything that may be an expression: also what YAML reads as a number, true or false."""
    return {"description": about, "$ref": "#/$defs/expression"}


def text(about: str, **more: Any) -> Schema:
    """A text; YAML reads some as numbers."""
    return described(about, {"type": ["string", "number"], **more})


def definitions() -> Schema:
    """What the schemas of policies and tests refer to."""
    return {
        "expression": {
            "type": ["string", "number", "boolean"],
            "pattern": _EXPRESSION,
            "minLength": 1,
            "maxLength": MAX_CHARACTERS,
        },
        "name": {"type": "string", "pattern": _NAME},
        "slo": _slo(),
        "split": _split(nested=False),
        "splitOtherwise": _split(nested=True),
    }


def policy_schema() -> Schema:
    """The schema of `kind: SchedulingPolicy`."""
    return {
        "$schema": DIALECT,
        "title": "muxk SchedulingPolicy",
        "description": "A policy: what is wanted, and the answers to the scheduler's questions.",
        **policy_document(),
        "$defs": definitions(),
    }


def policy_document() -> Schema:
    """The root of a policy, without definitions."""
    shapes = {
        "apiVersion": described("Version of the language.", {"const": schema.API_VERSION}),
        "kind": described("What the document is.", {"const": schema.KIND}),
        "metadata": described("What it is called.", keyed(schema.METADATA, _metadata(), ("name",))),
        "spec": described("The sections of the policy.", keyed(schema.SPEC, _spec())),
    }
    return keyed(schema.DOCUMENT, shapes, tuple(schema.DOCUMENT))


def _metadata() -> dict[str, Schema]:
    return {
        "name": described("Name of the policy.", {"$ref": "#/$defs/name"}),
        "version": text("Version of the policy; any text.", maxLength=schema.MAX_VERSION_CHARACTERS),
        "description": text("What the policy is for, in one line."),
    }


def _spec() -> dict[str, Schema]:
    return {
        "extends": described(
            "The shipped policy whose answers hold where this one says nothing.",
            {"type": "string", "pattern": _NAME, "examples": list(shipped_policies())},
        ),
        "slo": {"description": "What latency is wanted.", "$ref": "#/$defs/slo"},
        "params": described("Values that --set can change; in rules params.name.", _params()),
        "variables": described(
            "Named expressions; in rules vars.name.",
            {
                "type": "object",
                "propertyNames": {"pattern": _IDENTIFIER},
                "additionalProperties": expression("What the name stands for."),
                "maxProperties": sections.MAX_VARIABLES,
            },
        ),
        "classes": described(
            "Classes of requests; the first whose `when` holds, the last has none.", _classes()
        ),
        "estimator": described(
            "How decode steps are predicted.",
            keyed(sections.ESTIMATOR, {"guard": described("Their factor.", {"enum": list(GUARDS)})}),
        ),
        "limits": described("Bounds that hold whatever the rules say.", keyed(sections.LIMITS, _limits())),
        "on_error": described(
            "Who answers when a rule fails: the built-in default, the next rule, or the extended policy.",
            {"enum": [str(word) for word in OnError]},
        ),
        "place": described(
            "Several devices: which of them compute the prompts, and which decode.",
            keyed(place_section.PLACE, _place()),
        ),
        **{point: described(ABOUT_POINTS[point], _point(answer())) for point, answer in ANSWERS.items()},
    }


def _slo() -> Schema:
    ttft = rf"^\s*{_RATE}(?:\s*\+\s*{_RATE})?\s*$"
    return keyed(
        sections.SLO,
        {
            "tbt": expression("Longest time between two tokens of a request, such as 50ms."),
            "ttft": described(
                "Longest time to the first token, such as 800ms or 500ms + 10ms/token.",
                {"type": "string", "pattern": ttft},
            ),
        },
    )


def _params() -> Schema:
    values: Schema = {"type": ["string", "number", "boolean"]}
    shapes = {
        "type": described("What the values are.", {"enum": list(params.TYPES)}),
        "default": described("The value without --set.", values),
        "min": described("The least value that --set takes.", values),
        "max": described("The largest value that --set takes.", values),
        "description": text("What the param is for."),
    }
    param = {
        **keyed(params.PARAM, shapes, ("type", "default")),
        "allOf": [_values_of(kind) for kind in params.TYPES],
    }
    return {
        "type": "object",
        "propertyNames": {"pattern": _IDENTIFIER},
        "additionalProperties": param,
    }


def _values_of(kind: str) -> Schema:
    """What the values of a param are, given its type."""
    if kind == "bool":
        value: Schema = {"enum": [True, False, "true", "false"]}
    elif kind == "number":
        value = {"type": ["string", "number"], "pattern": PATTERNS[kind]}
    else:
        value = {"type": "string", "pattern": PATTERNS[kind]}
    then = {"properties": dict.fromkeys(("default", "min", "max"), value)}
    return {"if": {"properties": {"type": {"const": kind}}, "required": ["type"]}, "then": then}


def _classes() -> Schema:
    shapes = {
        "name": described("Name of the class.", {"$ref": "#/$defs/name"}),
        "when": expression("Which requests are in it: request.class, priority, prompt_tokens, max_tokens."),
        "slo": {"description": "SLOs of the class; the policy's where it has none.", "$ref": "#/$defs/slo"},
        "share": expression("Weight of its prefill tokens while classes compete, more than 0."),
        "max_wait": expression("A request that waited so long goes first, such as 60s."),
    }
    row = keyed(sections.CLASS, shapes, ("name",))
    return {"type": "array", "items": row, "minItems": 1, "maxItems": sections.MAX_CLASSES}


def _limits() -> dict[str, Schema]:
    return {
        "backlog": expression("Work items in flight a lane, 1 to 4."),
        "decode_ahead": expression("Decode steps queued behind the one that runs, 0 or 1."),
        "decode_floor": expression("Longest time that a decode step is held, such as 1s."),
        "queue": expression("Requests that may wait."),
        "preemptions": expression("How often one prefill batch may be parked."),
        "parked": expression("Bytes of hidden state that parked batches may keep, such as 1GiB."),
    }


# --- several devices ---


def _place() -> dict[str, Schema]:
    pool = "a number of devices, a percentage of all, or `rest`; one of the two has the rest."
    pools = {key: expression(f"Devices for {key}: {pool}") for key in place_section.POOLS}
    values = {"additionalProperties": expression("A parameter of the plan."), "type": "object"}
    return {
        "pools": described(
            "How the devices are shared out; the first ones are for prefill.",
            keyed(place_section.POOLS, pools, tuple(place_section.POOLS)),
        ),
        "prefill": _place_rules("Rules for the device that computes the prompt."),
        "decode": _place_rules("Rules for the one that decodes; without them it is the same."),
        "both": _place_rules("Rules for one device that does both, where `prefill` or `decode` has none."),
        "reuse": described(
            "Where a prefill looks for prefixes: on its `own` device, or also on the one that will `decode`.",
            {"enum": [str(word) for word in Reuse]},
        ),
        "plan": described(
            "A plan that answers in the place of rules.",
            {"type": "string", "pattern": _NAME, "examples": list(PLANS.shipped)},
        ),
        "with": described("Parameters of the plan.", values),
    }


def _place_rules(about: str) -> Schema:
    by = expression("What the devices are sorted by, ascending; the first is taken.")
    several = {"type": "array", "items": by, "minItems": 1, "maxItems": answers.MAX_KEYS}
    shapes = {
        "name": described("Name of the rule, shown wherever it answers.", {"$ref": "#/$defs/name"}),
        "among": described("Which devices it looks at.", {"enum": [str(word) for word in Among]}),
        "where": expression("The condition that a device must meet."),
        "by": {
            "description": "One sort key or several; equal devices by their number.",
            "if": {"type": "array"},
            "then": several,
            "else": by,
        },
    }
    rule = keyed(place_section.PLACE_RULE, shapes, ("name",))
    most = place_section.MAX_PLACE_RULES
    return described(about, {"type": "array", "items": rule, "minItems": 1, "maxItems": most})


# --- decision points ---


def _point(answer: Schema) -> Schema:
    """One answer, or a list of rules."""
    shapes = {
        "name": described("Name of the rule, shown wherever it answers.", {"$ref": "#/$defs/name"}),
        "when": expression("The condition; the last rule has none."),
        "then": described("The answer.", answer),
    }
    rule = keyed(schema.RULE, shapes, ("name", "then"))
    rest = described("As the last: the rules of the extended policy.", {"const": inheritance.REST})
    item = {"if": {"type": "string"}, "then": rest, "else": rule}
    rules = {"type": "array", "items": item, "minItems": 1, "maxItems": schema.MAX_RULES}
    return {"if": {"type": "array"}, "then": rules, "else": answer}


def _admit() -> Schema:
    reason = text("What the client reads.", minLength=1, maxLength=answers.MAX_REASON)
    one = {
        **closed(dict.fromkeys(answers.WITH_REASON, reason)),
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"if": {"type": "object"}, "then": one, "else": {"enum": list(answers.ADMIT)}}


def _sort_keys() -> Schema:
    key = expression("What to sort by, ascending; `-` before the whole key: descending.")
    several = {"type": "array", "items": key, "minItems": 1, "maxItems": answers.MAX_KEYS}
    by = {"description": "One sort key or several.", "if": {"type": "array"}, "then": several, "else": key}
    return keyed(answers.SORT_KEYS, {"by": by}, ("by",))


def _form() -> Schema:
    shapes = {
        "requests": expression("Requests of the next prefill batch, at most."),
        "tokens": expression("Their tokens, at most; the head of the queue is always taken."),
    }
    return keyed(answers.FORM, shapes, tuple(answers.FORM))


def _split(nested: bool) -> Schema:
    units = (
        "A number of units, a percentage of all, a word "
        f"({', '.join(KEYWORDS)}, fit), or `fewest where` and a condition on `units`."
    )
    shapes = {
        "decode": expression(f"Units for decode. {units}"),
        "prefill": expression(f"Units for prefill. {units}"),
        "otherwise": {
            "description": "What holds when no split will do for `fewest where` or `fit`.",
            "$ref": "#/$defs/splitOtherwise",
        },
    }
    table = {key: "refused" if nested and key == "otherwise" else "" for key in SPLIT}
    return {**keyed(table, shapes), "minProperties": 1}


def _slice() -> Schema:
    shapes = {
        "layers": expression(f"Layers of the next prefill item, or `{answers.ALL}`."),
        "tokens": expression(f"Tokens of the next chunk, or `{answers.ALL}`."),
        "fuse": described("Run the chunk in one pass with the decode step.", {"enum": list(answers.FUSE)}),
    }
    fused = {"required": ["tokens"], "properties": {"layers": False}}
    return {**keyed(answers.SLICE, shapes), "minProperties": 1, "dependentSchemas": {"fuse": fused}}


ANSWERS: Mapping[str, Callable[[], Schema]] = {
    "admit": _admit,
    "order": _sort_keys,
    "form": _form,
    "split": lambda: {"$ref": "#/$defs/split"},
    "slice": _slice,
    "preempt": lambda: {"enum": list(answers.PREEMPT)},
    "victim": _sort_keys,
    "retain": lambda: {"enum": list(answers.RETAIN)},
}
ABOUT_POINTS: Mapping[str, str] = {
    "admit": "A request is tokenised: accept it, refuse it for ever, or shed it for now.",
    "order": "The waiting queue is read: what to sort it by.",
    "form": "The prefill lane can take work: how large the next batch is.",
    "split": "How many units decode and prefill get.",
    "slice": "What the next prefill item is: layers, or a chunk of tokens.",
    "preempt": "A candidate waits while a batch runs: park the batch or continue.",
    "victim": "The KV pool is exhausted: what to sort by who loses its pages; the first does.",
    "retain": "A request ended: keep its pages for its prefix, or free them.",
}
