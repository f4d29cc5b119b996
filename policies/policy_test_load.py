"""The device and the arrivals of a PolicyTest, read from its document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from muxk.kernel.devices.sim import SimCosts
from muxk.policies.loader import fields
from muxk.policies.marks import MappingNode, Node, Scalar, SequenceNode, describe
from muxk.policies.policy_test_spec import Arrivals, DeviceText
from muxk.policies.policy_test_values import Values
from muxk.policies.problems import Report

REQUESTS_MAX = 10_000
DEVICES_MAX = 16
UNITS_MAX = 256
LAYERS_MAX = 256
KV_TOKENS_MAX = 4_194_304
TOKENS_MAX = 1_048_576
PROMPTS_MAX = 8_388_608
"""Tokens of all prompts of a test."""

DEVICE: Mapping[str, str] = dict.fromkeys(
    ("devices", "units", "layers", "granularity", "kv_tokens", "calibrate", "costs"), ""
)
COSTS: Mapping[str, str] = {
    "launch": "launch_ns",
    "decode_base": "decode_base_ns",
    "decode_row": "decode_row_ns",
    "decode_context_token": "decode_context_token_ns",
    "prefill_layer_base": "prefill_layer_base_ns",
    "prefill_token": "prefill_token_ns",
    "prefill_pair": "prefill_pair_ns",
    "migration_token": "migration_token_ns",
}
"""Keys of `costs` that are times, and the fields of SimCosts; `decode_saturation` is a share."""
_ARRIVAL_KEYS = (
    *("name", "at", "count", "every", "prompt", "output"),
    *("class", "priority", "deadline", "prefix", "abort_after"),
)
ARRIVAL: Mapping[str, str] = dict.fromkeys(_ARRIVAL_KEYS, "")
_PREFIX = re.compile(r"(\S+)\s+of\s+(\S+)")
_NUMBERED = re.compile(r"(.+)-(\d+)")
_PRIORITY = re.compile(r"-?\d{1,6}")


class LoadReader:
    """Reads what the run consists of."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._values = Values(report)

    # --- the device ---

    def device(self, node: Node | None) -> DeviceText:
        if node is None:
            return DeviceText()
        found = fields(node, DEVICE, "device", self._report)
        values, standard = self._values, DeviceText()
        units = values.count(found.get("units"), "units", standard.units, 1, UNITS_MAX)
        return DeviceText(
            devices=values.count(found.get("devices"), "devices", 1, 1, DEVICES_MAX),
            units=units,
            layers=values.count(found.get("layers"), "layers", standard.layers, 1, LAYERS_MAX),
            granularity=values.count(found.get("granularity"), "granularity", 1, 1, units),
            kv_tokens=values.count(
                found.get("kv_tokens"), "kv_tokens", standard.kv_tokens, 64, KV_TOKENS_MAX
            ),
            calibrate=values.flag(found.get("calibrate"), "calibrate", True),
            costs=self._costs(found.get("costs")),
        )

    def _costs(self, node: Node | None) -> SimCosts:
        standard = SimCosts()
        if node is None:
            return standard
        found = fields(node, {**dict.fromkeys(COSTS, ""), "decode_saturation": ""}, "costs", self._report)
        changed = {
            attribute: self._values.cost(found.get(key), key, getattr(standard, attribute))
            for key, attribute in COSTS.items()
        }
        saturation = found.get("decode_saturation")
        changed["decode_saturation"] = self._values.share(
            saturation, "decode_saturation", standard.decode_saturation
        )
        return SimCosts(**changed)  # type: ignore[arg-type]

    # --- arrivals ---

    def arrivals(self, node: Node | None, spec: Node) -> tuple[Arrivals, ...]:
        items = items_of(node, "arrivals", self._report)
        if not items:
            mark = spec.mark if node is None else node.mark
            hint = "write arrivals: [{name: chat, prompt: 200, output: 100}]"
            self._report.add(mark, "a test needs 'arrivals'", hint)
        groups = [self._group(item) for item in items]
        found = tuple(group for group in groups if group is not None)
        lines: dict[str, int] = {}
        for item, group in zip(items, groups, strict=True):
            if group is not None and group.name in lines:
                hint = f"the other is on line {lines[group.name]}"
                self._report.add(item.mark, f"two groups of arrivals are named '{group.name}'", hint)
            elif group is not None and group.name:
                lines[group.name] = item.mark.line
        if node is not None:
            self._check_amount(node, found)
        return found

    def _check_amount(self, node: Node, groups: Sequence[Arrivals]) -> None:
        """All prompts are made before the run begins, so that they are bounded together."""
        requests = sum(group.count for group in groups)
        tokens = sum(group.count * (group.prefix_tokens + group.prompt.most) for group in groups)
        if requests > REQUESTS_MAX:
            self._report.add(node.mark, f"{requests:,} requests are more than {REQUESTS_MAX:,}")
        if tokens > PROMPTS_MAX:
            message = f"up to {tokens:,} prompt tokens in all are more than {PROMPTS_MAX:,}"
            self._report.add(node.mark, message, "fewer requests, or shorter prompts")

    def _group(self, node: Node) -> Arrivals | None:
        found = fields(node, ARRIVAL, "a group of arrivals", self._report)
        if not isinstance(node, MappingNode):
            return None
        for key in ("name", "prompt", "output"):
            if key not in found:
                self._report.add(node.mark, f"a group of arrivals needs '{key}'")
        values = self._values
        prefix_tokens, prefix_of = self._prefix(found.get("prefix"))
        return Arrivals(
            name=self._group_name(found.get("name")),
            at_ns=values.duration(found.get("at"), "at", 0),
            count=values.count(found.get("count"), "count", 1, 1, REQUESTS_MAX),
            every=values.duration_between(found.get("every"), "every"),
            prompt=values.count_between(found.get("prompt"), "prompt", 1, TOKENS_MAX),
            output=values.count_between(found.get("output"), "output", 1, TOKENS_MAX),
            request_class=values.word(found.get("class"), "class"),
            priority=self._priority(found.get("priority")),
            deadline_ns=self._optional(found.get("deadline"), "deadline"),
            prefix_tokens=prefix_tokens,
            prefix_of=prefix_of,
            abort_after_ns=self._optional(found.get("abort_after"), "abort_after"),
        )

    def _group_name(self, node: Node | None) -> str:
        name = self._values.word(node, "the name of a group")
        if node is not None and _NUMBERED.fullmatch(name):
            hint = "requests of a group get such names: chat-1, chat-2, ..."
            self._report.add(node.mark, "the name of a group must not end in a number after '-'", hint)
        return name

    def _priority(self, node: Node | None) -> int:
        if node is None:
            return 0
        if isinstance(node, Scalar) and _PRIORITY.fullmatch(node.text.strip()):
            return int(node.text)
        self._report.add(
            node.mark, f"priority must be a whole number, not {describe(node)}", "lower is sooner"
        )
        return 0

    def _optional(self, node: Node | None, what: str) -> int | None:
        if node is None:
            return None
        found = self._values.duration(node, what, 1)
        if found < 1:
            self._report.add(node.mark, f"{what} must be more than 0")
        return max(1, found)

    def _prefix(self, node: Node | None) -> tuple[int, str]:
        """`1k of system`: so many tokens, the first of those that everybody shares who names `system`."""
        if node is None:
            return 0, ""
        match = _PREFIX.fullmatch(node.text.strip()) if isinstance(node, Scalar) else None
        if match is None or not isinstance(node, Scalar):
            hint = "such as 1k of system: requests that name 'system' begin with the same tokens"
            self._report.add(node.mark, f"prefix must be a count 'of' a name, not {describe(node)}", hint)
            return 0, ""
        count, name = (Scalar(text, node.style, node.mark, node.start, node.end) for text in match.groups())
        tokens = self._values.count(count, "prefix", 1, 1, TOKENS_MAX)
        return tokens, self._values.word(name, "what a prefix is of")


def items_of(node: Node | None, what: str, report: Report) -> Sequence[Node]:
    """Items of a list; none, with a report, of what is no list."""
    if node is None:
        return ()
    if isinstance(node, SequenceNode):
        return node.items
    report.add(node.mark, f"{what} must be a list, not {describe(node)}", "begin each with '- '")
    return ()
