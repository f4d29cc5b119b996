"""Plain values of a PolicyTest: counts, times, words, and values that are drawn from a range."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from muxk.policies.marks import MappingNode, Node, Scalar, describe
from muxk.policies.problems import Report
from muxk.policies.units import Quantity, Type, UnitError, parse_quantity

WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_RANGE = re.compile(r"(.+?)\s+to\s+(.+)")
LONGEST_NS = 24 * 3_600_000_000_000
"""A day: more than any run in virtual time may take."""


@dataclass(frozen=True, slots=True)
class Between:
    """A whole number, or one that is drawn evenly from a range each time."""

    least: int
    most: int

    def draw(self, dice: random.Random) -> int:
        return self.least if self.least == self.most else dice.randint(self.least, self.most)


class Values:
    """Reads values and reports what they are not."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def word(self, node: Node | None, what: str) -> str:
        """A name; empty when there is none or it is wrong."""
        if node is None:
            return ""
        if isinstance(node, Scalar) and WORD.fullmatch(node.text):
            return node.text
        self.report.add(
            node.mark, f"{what} must be a word of letters, digits, '-', '_' and '.', not {describe(node)}"
        )
        return ""

    def text(self, node: Node | None, what: str) -> str:
        if node is None:
            return ""
        if isinstance(node, Scalar) and node.text.strip():
            return node.text
        self.report.add(node.mark, f"{what} must be a text, not {describe(node)}")
        return ""

    def flag(self, node: Node | None, what: str, default: bool) -> bool:
        if node is None:
            return default
        if isinstance(node, Scalar) and node.text in ("true", "false"):
            return node.text == "true"
        self.report.add(node.mark, f"{what} must be true or false, not {describe(node)}")
        return default

    def count(self, node: Node | None, what: str, default: int, least: int, most: int) -> int:
        """A whole number within bounds."""
        if node is None:
            return default
        found = self._amount(node, what, Type.NUMBER)
        if found is None:
            return default
        if found != round(found) or not least <= found <= most:
            self.report.add(
                node.mark,
                f"{what} must be a whole number from {least:,} to {most:,}, not {describe(node)}",
            )
            return default
        return round(found)

    def duration(self, node: Node | None, what: str, default: int) -> int:
        """A time in ns; 0s is one."""
        if node is None:
            return default
        found = self._amount(node, what, Type.DURATION)
        return default if found is None else round(found)

    def cost(self, node: Node | None, what: str, default: float) -> float:
        """A time in ns, parts of one included."""
        if node is None:
            return default
        found = self._amount(node, what, Type.DURATION)
        return default if found is None else found

    def share(self, node: Node | None, what: str, default: float) -> float:
        """A percentage above 0, as a number up to 1."""
        if node is None:
            return default
        text = node.text.strip() if isinstance(node, Scalar) else ""
        found = self._parsed(text.removesuffix("%"))
        if not text.endswith("%") or found is None or found.type is not Type.NUMBER:
            self.report.add(node.mark, f"{what} must be a percentage, not {describe(node)}", "such as 25%")
            return default
        if not 0 < found.value <= 100:
            self.report.add(node.mark, f"{what} must be above 0% and at most 100%, not {describe(node)}")
            return default
        return found.value / 100

    def count_between(self, node: Node | None, what: str, default: int, most: int) -> Between:
        """`200`, or `100 to 4k`; from 1 on."""
        low, high = self._ends(node)
        first = self.count(low, what, default, 1, most)
        return self._between(node, what, first, self.count(high, what, first, 1, most))

    def duration_between(self, node: Node | None, what: str) -> Between:
        """`100ms`, or `50ms to 150ms`."""
        low, high = self._ends(node)
        first = self.duration(low, what, 0)
        return self._between(node, what, first, self.duration(high, what, first))

    def settings(self, node: Node | None) -> Mapping[str, Scalar]:
        """Values of params by name, as written."""
        if node is None:
            return {}
        if not isinstance(node, MappingNode):
            self.report.add(node.mark, f"'set' must map params to values, not {describe(node)}")
            return {}
        found: dict[str, Scalar] = {}
        for entry in node:
            if isinstance(entry.value, Scalar):
                found[entry.key.text] = entry.value
            else:
                self.report.add(entry.value.mark, f"a value is expected, not {describe(entry.value)}")
        return found

    def _between(self, node: Node | None, what: str, least: int, most: int) -> Between:
        if most < least and node is not None:
            self.report.add(node.mark, f"{what} goes from more to less", "write the smaller one first")
            return Between(least, least)
        return Between(least, most)

    def _ends(self, node: Node | None) -> tuple[Node | None, Node | None]:
        """Both ends of a range; one value is the first of them."""
        match = _RANGE.fullmatch(node.text.strip()) if isinstance(node, Scalar) else None
        if match is None or not isinstance(node, Scalar):
            return node, None
        low, high = (Scalar(text, node.style, node.mark, node.start, node.end) for text in match.groups())
        return low, high

    def _parsed(self, text: str) -> Quantity | None:
        try:
            return parse_quantity(text)
        except UnitError:
            return None

    def _amount(self, node: Node, what: str, wanted: Type) -> float | None:
        """A quantity of a type, not negative."""
        if not isinstance(node, Scalar):
            self.report.add(node.mark, f"{what} must be {wanted.phrase}, not {describe(node)}")
            return None
        try:
            quantity = parse_quantity(node.text)
        except UnitError as error:
            self.report.add(node.mark, f"{what}: {error}", error.hint)
            return None
        if quantity.type is not wanted or not math.isfinite(quantity.value):
            hint = f"write {node.text.strip()[:20]}ms or {node.text.strip()[:20]}s"
            timeless = wanted is Type.DURATION and quantity.type is Type.NUMBER
            message = f"{what} must be {wanted.phrase}, not {describe(node)}"
            self.report.add(node.mark, message, hint if timeless else "")
            return None
        if wanted is Type.DURATION and quantity.value > LONGEST_NS:
            self.report.add(node.mark, f"{what} must be at most 24h, not {describe(node)}")
            return None
        return quantity.value
