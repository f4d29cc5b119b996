"""JSON Schema of `kind: PolicyTest`, and the one of files that hold policies, tests or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muxk.policies import json_schema, policy_test
from muxk.policies.json_schema import closed, definitions, described, expression, keyed, policy_document, text
from muxk.policies.policy_test_expect import EXPECT, EXPECTATIONS_MAX
from muxk.policies.policy_test_load import ARRIVAL, COSTS, DEVICE
from muxk.policies.units import COUNTS, DURATION_NS, NUMBER

Schema = dict[str, Any]
_NUMBER = NUMBER.replace(r"\d", "[0-9]")
_COUNT = f"{_NUMBER}(?:{'|'.join(COUNTS)})?"
_TIME = f"{_NUMBER}(?:{'|'.join(DURATION_NS)})"


def _count(about: str) -> Schema:
    return described(about, {"type": ["integer", "string"], "minimum": 0, "pattern": rf"^\s*{_COUNT}\s*$"})


def _time(about: str) -> Schema:
    return described(about, {"type": "string", "pattern": rf"^\s*{_TIME}\s*$"})


def _count_or_range(about: str) -> Schema:
    pattern = rf"^\s*{_COUNT}(?:\s+to\s+{_COUNT})?\s*$"
    return described(about, {"type": ["integer", "string"], "minimum": 1, "pattern": pattern})


def _time_or_range(about: str) -> Schema:
    return described(about, {"type": "string", "pattern": rf"^\s*{_TIME}(?:\s+to\s+{_TIME})?\s*$"})


def _name(about: str) -> Schema:
    return {"description": about, "$ref": "#/$defs/name"}


def policy_test_schema() -> Schema:
    """The schema of `kind: PolicyTest`."""
    return {
        "$schema": json_schema.DIALECT,
        "title": "muxk PolicyTest",
        "description": "A policy, a device of given costs, requests that arrive, and what is expected.",
        **_document(),
        "$defs": definitions(),
    }


def any_schema() -> Schema:
    """The schema of a document of either kind."""
    is_test = {"properties": {"kind": {"const": policy_test.KIND}}, "required": ["kind"]}
    return {
        "$schema": json_schema.DIALECT,
        "title": "muxk SchedulingPolicy or PolicyTest",
        "if": is_test,
        "then": _document(),
        "else": policy_document(),
        "$defs": definitions(),
    }


def _document() -> Schema:
    shapes = {
        "apiVersion": described("Version of the language.", {"const": policy_test.API_VERSION}),
        "kind": described("What the document is.", {"const": policy_test.KIND}),
        "metadata": keyed(
            policy_test.METADATA,
            {"name": _name("Name of the test."), "description": text("What it shows, in one line.")},
            ("name",),
        ),
        "spec": described("The test.", keyed(policy_test.SPEC, _spec(), ("arrivals", "expect"))),
    }
    return keyed(policy_test.DOCUMENT, shapes, tuple(policy_test.DOCUMENT))


def _spec() -> dict[str, Schema]:
    actions = keyed(
        policy_test.ACTION,
        {
            "at": _time("When, from the start of the test."),
            "swap": text("The policy that takes over."),
            "set": _settings(),
        },
        ("at", "swap"),
    )
    return {
        "policy": text("A shipped policy, a path from this file, or a policy of this file."),
        "set": _settings(),
        "seed": _count("Seed of what is drawn from ranges."),
        "device": described("The simulated device.", _device()),
        "timeout": _time("When the test ends at the latest, in virtual time."),
        "arrivals": described("Requests that arrive.", {"type": "array", "items": _arrival(), "minItems": 1}),
        "actions": described("What happens in the middle of the run.", {"type": "array", "items": actions}),
        "expect": described(
            "What must hold.",
            {"type": "array", "items": _expectation(), "minItems": 1, "maxItems": EXPECTATIONS_MAX},
        ),
    }


def _settings() -> Schema:
    values = {"type": ["string", "number", "boolean"]}
    return described("Values of params by name.", {"type": "object", "additionalProperties": values})


ABOUT_COSTS: Mapping[str, str] = {
    "launch": "Time to launch an item",
    "decode_base": "Time of a decode step whatever its rows",
    "decode_row": "Time of each row of a decode step",
    "decode_context_token": "Time of each token of context of those rows",
    "prefill_layer_base": "Time of a layer of prefill whatever its tokens",
    "prefill_token": "Time of each token in a layer",
    "prefill_pair": "Time of each query-key pair in a layer",
    "migration_token": "Time to move the KV of a token to another device",
}


def _device() -> Schema:
    costs = {key: _time(f"{ABOUT_COSTS[key]}, such as 100us.") for key in COSTS}
    costs["decode_saturation"] = described(
        "Share of the device beyond which decode gets no faster, such as 25%.",
        {"type": "string", "pattern": json_schema.PATTERNS["percent"]},
    )
    shapes = {
        "devices": _count("How many there are, all alike; they can work together."),
        "units": _count("Units of a device, that can be split."),
        "layers": _count("Layers of the model."),
        "granularity": _count("Units that a split moves by."),
        "kv_tokens": _count("Tokens that the KV pool of a device holds."),
        "calibrate": described("Whether costs were measured before the test begins.", {"type": "boolean"}),
        "costs": described("How long work takes.", closed(costs)),
    }
    return keyed(DEVICE, shapes)


def _arrival() -> Schema:
    shapes = {
        "name": _name("Name of the group; its requests are name-1, name-2, ..."),
        "at": _time("When the first arrives."),
        "count": _count("How many arrive."),
        "every": _time_or_range("Time between two of them, such as 100ms or 50ms to 150ms."),
        "prompt": _count_or_range("Tokens of a prompt, such as 200 or 100 to 4k."),
        "output": _count_or_range("Tokens that it gets."),
        "class": _name("The class that the client names."),
        "priority": described("Lower is sooner.", {"type": "integer"}),
        "deadline": _time("Time to the first token that the client asks for."),
        "prefix": described(
            "Tokens that requests share who name the same, such as 1k of system.",
            {"type": "string", "pattern": r"^\s*\S+\s+of\s+\S+\s*$"},
        ),
        "abort_after": _time("The client gives up so long after the request."),
    }
    return keyed(ARRIVAL, shapes, ("name", "prompt", "output"))


def _expectation() -> Schema:
    names = {"type": "string"}
    shapes = {
        "that": expression("What must hold, such as tbt.max <= 50ms."),
        "for": described(
            "Groups of arrivals, or single requests, that it is about.",
            {"type": ["string", "array"], "items": names, "minItems": 1},
        ),
        "class": _name("The class of requests that it is about."),
        "at": _time("The moment that it is about."),
        "rule": text("The rule that it is about, as point/name."),
        "because": text("Why it should be so; shown when it is not."),
    }
    said = keyed(EXPECT, shapes, ("that",))
    return {"if": {"type": "object"}, "then": said, "else": expression("What must hold in the whole run.")}
