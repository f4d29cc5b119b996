"""Writes expressions and policies of the language at random: right ones, nearly right ones, hostile ones.

All words come from the language's own tables, so that a new name, function, unit, key or operator is written
here without a change; a new decision point fails until `ANSWERS` says how its answers are written. Everything
follows from the seed of the `Random` that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from expression_generator import (
    ORDERED,
    UNITS,
    Declared,
    ExpressionWriter,
)
from muxk.policies import answers, splits
from muxk.policies.engine import shipped_policies
from muxk.policies.migrations import MIGRATIONS
from muxk.policies.params import TYPES
from muxk.policies.placing import Among, Reuse
from muxk.policies.rules import OnError
from muxk.policies.schema import API_VERSION, KIND
from muxk.policies.shipped_plans import PLANS
from muxk.policies.units import Type

HOSTILE_BYTES = (
    *("[", "]", "{", "}", ":", "- ", "&a ", "*a", "!!python/object/apply:os.system ", "<<: ", "'", '"', "\t"),
    *(
        "\n",
        "\x00",
        "|",
        ">",
        "? ",
        "#",
        "1e999",
        "é",
        "then",
        "~",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "\u2028",
    ),
    *("\ufeff", "\U0001f600", "&a [*a, *a]", "{" * 40, "- " * 40, "null", "\r\n", "when: ", "  ", "@", "`"),
)


def quoted(text: str) -> str:
    """A YAML scalar of a text, on one line."""
    return "'" + text.replace("'", "''") + "'"


class PolicyWriter:
    """One policy; `slips` of its parts are wrong on purpose."""

    def __init__(self, random: Random, slips: float = 0.0) -> None:
        self._random = random
        self._slips = slips
        self._declared = Declared()
        self._expressions = ExpressionWriter(random, self._declared, slips)
        old = [migration.old for migration in MIGRATIONS]
        self._version = random.choice(old) if slips and random.random() < 0.15 else API_VERSION

    def write(self) -> str:
        """The text of the file."""
        spec = [
            self._word("extends", "", [f"extends: {name}" for name in shipped_policies()]),
            self._params(),
            self._slo(),
            self._variables(),
            self._classes(),
            self._limits(),
            self._word("on_error", "", [f"on_error: {word}" for word in OnError]),
        ]
        spec.append(self._place() if self._random.random() < 0.4 else "")
        spec += [self._point(point) for point in answers.POINTS if self._random.random() < 0.5]
        if self._random.random() < self._slips:
            self._random.shuffle(spec)
            spec.append(
                self._random.choice(["place: {both: x}", "odrer: {by: now}", "slo: 1", "split: []", "form:"])
            )
        head = [f"apiVersion: {self._version}", f"kind: {KIND}", "metadata: {name: fuzz, version: '1'}"]
        if self._random.random() < self._slips:
            del head[self._random.randrange(3)]
        body = "".join(f"  {line}\n" for part in spec for line in part.splitlines())
        return "\n".join(head) + "\nspec:" + (f"\n{body}" if body.strip() else " {}\n")

    def _word(self, key: str, otherwise: str, choices: Sequence[str]) -> str:
        if self._random.random() < 0.6:
            return otherwise
        return self._random.choice(choices) if self._random.random() >= self._slips else f"{key}: nothing"

    def _e(self, wanted: Type, place: str, depth: int = 3) -> str:
        return quoted(self._expressions.write(wanted, place, depth))

    def _params(self) -> str:
        if self._random.random() < 0.5:
            return ""
        lines = ["params:"]
        for index in range(self._random.randint(1, 4)):
            kind = self._random.choice(tuple(TYPES))
            literal = "true" if TYPES[kind] is Type.BOOL else "1" + UNITS[TYPES[kind]][-1]
            self._declared.params[f"p{index}"] = TYPES[kind]
            lines.append(f"  p{index}: {{type: {kind}, default: {literal}}}")
        return "\n".join(lines)

    def _slo(self) -> str:
        tbt = self._random.choice(["50ms", "1s", "10us", "2h"])
        ttft = self._random.choice(["1s", "2ms/token", "500ms + 10ms/token"])
        return self._word("slo", "", [f"slo: {{tbt: {tbt}, ttft: {ttft}}}"])

    def _variables(self) -> str:
        if self._random.random() < 0.6:
            return ""
        lines = ["variables:"]
        for index in range(self._random.randint(1, 4)):
            type_ = self._random.choice((Type.NUMBER, Type.DURATION, Type.BOOL, Type.PERCENT))
            place = self._random.choice(["split", "admit", "form", "preempt"])
            lines.append(f"  v{index}: {self._e(type_, place, 2)}")
            self._declared.variables[f"v{index}"] = (type_, place)
        return "\n".join(lines)

    def _classes(self) -> str:
        if self._random.random() < 0.5:
            return ""
        names = ["gold", "chat", "batch", "rest"][: self._random.randint(1, 4)]
        lines = ["classes:"]
        for name in names:
            keys = [f"name: {name}"]
            if name != names[-1]:
                keys.append(f"when: {quoted(self._expressions.condition('classes'))}")
            keys += [key for key in self._rights() if self._random.random() < 0.7]
            lines.append(f"  - {{{', '.join(keys)}}}")
        self._declared.classes = tuple(names)
        return "\n".join(lines)

    def _rights(self) -> list[str]:
        share = self._random.choice(["1", "0.25", "7", "1e5"])
        if self._random.random() < self._slips:
            share = self._random.choice(["0", "-1", "1GiB", "nan", "'gold'", "1e300", "[]"])
        slo = self._random.choice(["{tbt: 30ms}", "{ttft: 2ms/token}", "{tbt: 20ms, ttft: 1s}"])
        return [f"share: {share}", "max_wait: 30s", f"slo: {slo}"]

    def _limits(self) -> str:
        values = {
            "backlog": "2", "decode_ahead": "1", "decode_floor": "500ms", "queue": "64", "preemptions": "3",
            "parked": "64MiB",
        }  # fmt: skip
        chosen = {key: value for key, value in values.items() if self._random.random() < 0.3}
        for key in chosen:
            if self._random.random() < self._slips:
                chosen[key] = self._random.choice(
                    ["-1", "1e9", "2s", "1GiB", "true", "'x'", "[1]", "~", "90%"]
                )
        return (
            f"limits: {{{', '.join(f'{key}: {value}' for key, value in chosen.items())}}}" if chosen else ""
        )

    def _place(self) -> str:
        """Rules for several devices; a plan where something is to be wrong, or now and then."""
        slips = self._slips
        if self._random.random() < 0.2 + slips:
            plan = self._random.choice([*PLANS.shipped, *(["lonngserve", "[]"] if slips else [])] or ["none"])
            return f"place: {{plan: {plan}}}" if PLANS.shipped else ""
        lines = ["place:"]
        has_pools = self._random.random() < 0.6
        if has_pools:
            share = self._random.choice(["1", "50%", "rest", "2"])
            other = self._random.choice(["25%", "1"]) if share == "rest" else "rest"
            lines.append(f"  pools: {{prefill: {share}, decode: {other}}}")
        lines += [f"  reuse: {word}" for word in Reuse if self._random.random() < 0.2][:1]
        phases = self._random.choice([("prefill",), ("prefill", "decode", "both"), ("both",)])
        for phase in phases:
            lines.append(f"  {phase}:")
            lines += [f"    - {self._place_rule(phase, index, has_pools)}" for index in range(2)]
        return "\n".join(lines)

    def _place_rule(self, phase: str, index: int, has_pools: bool) -> str:
        words = [
            word
            for word in Among
            if (word is not Among.SAME or phase == "decode")
            and (has_pools or word in (Among.ALL, Among.SAME))
        ]
        if self._random.random() < self._slips:
            words = [*Among, "nowhere"]
        keys = [f"name: {phase}{index}", f"among: {self._random.choice(words)}"]
        if self._random.random() < 0.5 and index == 0:
            keys.append(f"where: {quoted(self._expressions.condition('place'))}")
        if self._random.random() < 0.7:
            by = self._e(self._random.choice((*ORDERED, Type.BOOL)), "place", 1)
            keys.append(f"by: {self._random.choice([by, f'[{by}, device.number]'])}")
        return f"{{{', '.join(keys)}}}"

    def _point(self, point: str) -> str:
        if self._random.random() < 0.3:
            return f"{point}: {self._answer(point)}"
        lines = [f"{point}:"]
        count = self._random.randint(0, 3)
        for index in range(count):
            when = quoted(self._expressions.condition(point))
            lines.append(f"  - {{name: r{index}, when: {when}, then: {self._answer(point)}}}")
        if self._random.random() >= self._slips:
            lines.append(f"  - {{name: last, then: {self._answer(point)}}}")
        return "\n".join(lines)

    def _answer(self, point: str) -> str:
        if self._random.random() < self._slips:
            other = self._random.choice(tuple(ANSWERS))
            return self._random.choice(["{}", "[]", "nothing", "1", "~", ANSWERS[other](self, other)])
        return ANSWERS[point](self, point)

    # --- the answers of the points ---

    def admit(self, point: str) -> str:
        action = self._random.choice(answers.ADMIT)
        with_reason = action in answers.WITH_REASON and self._random.random() < 0.5
        return f"{{{action}: because of this}}" if with_reason else action

    def keys(self, point: str) -> str:
        keys = []
        for _ in range(self._random.randint(1, 3)):
            text = self._expressions.write(self._random.choice((*ORDERED, Type.BOOL)), f"a key of {point}", 1)
            keys.append(quoted(self._random.choice(["", "-"]) + text))
        return f"{{by: [{', '.join(keys)}]}}"

    def form(self, point: str) -> str:
        parts = (f"{key}: {self._e(Type.NUMBER, 'form')}" for key in answers.FORM)
        return f"{{{', '.join(parts)}}}"

    def split(self, point: str) -> str:
        decode, prefill = self._units(), self._random.choice(["rest", "rest", "none"])
        seeks = "fewest" in decode or decode == "fit"
        if decode in ("all", "rest") or self._random.random() < 0.1:
            decode, prefill, seeks = "all", "all", False
        otherwise = ", otherwise: {decode: most, prefill: rest}" if seeks else ""
        return f"{{decode: {decode}, prefill: {prefill}{otherwise}}}"

    def _units(self) -> str:
        kind = self._random.randrange(4)
        if kind == 0:
            return self._random.choice(tuple(word for word in splits.KEYWORDS if word != "none"))
        if kind == 1:
            return "fit"
        if kind == 2:
            condition = self._expressions.write(Type.BOOL, "fewest")
            if self._version != API_VERSION:
                return f"{{fewest: {quoted(condition)}}}"
            return quoted(f"fewest where {condition}")
        return self._e(self._random.choice((Type.NUMBER, Type.PERCENT)), "split", 2)

    def slice(self, point: str) -> str:
        amount = self._random.choice([answers.ALL, self._e(Type.NUMBER, "slice")])
        kind = self._random.randrange(4)
        if kind == 0:
            return f"{{layers: {amount}}}"
        if kind == 1:
            return f"{{tokens: {amount}}}"
        if kind == 2:
            return f"{{layers: {amount}, tokens: {self._e(Type.NUMBER, 'slice', 1)}}}"
        return f"{{tokens: {amount}, fuse: {answers.FUSE[0]}}}"

    def preempt(self, point: str) -> str:
        return self._random.choice(answers.PREEMPT)

    def retain(self, point: str) -> str:
        return self._random.choice(answers.RETAIN)


ANSWERS: Mapping[str, Callable[[PolicyWriter, str], str]] = {
    "admit": PolicyWriter.admit,
    "order": PolicyWriter.keys,
    "form": PolicyWriter.form,
    "split": PolicyWriter.split,
    "slice": PolicyWriter.slice,
    "preempt": PolicyWriter.preempt,
    "victim": PolicyWriter.keys,
    "retain": PolicyWriter.retain,
}
"""How the answers of each decision point are written."""


def right_policy(random: Random) -> str:
    return PolicyWriter(random).write()


def nearly_right_policy(random: Random) -> str:
    return PolicyWriter(random, slips=random.choice([0.01, 0.03, 0.1])).write()


def hostile_policy(random: Random) -> str:
    """A policy with bytes put in, taken out, repeated or moved."""
    text = PolicyWriter(random, slips=random.choice([0.0, 0.03])).write()
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(text) + 1)
        end = min(len(text), start + random.choice([0, 0, 1, 5, 40]))
        kind = random.randrange(4)
        if kind == 0:
            text = text[:start] + text[start:end] * 2 + text[end:]
        elif kind == 1:
            lines = text.split("\n")
            random.shuffle(lines)
            text = "\n".join(lines) if random.random() < 0.2 else text[:end]
        else:
            text = text[:start] + random.choice(HOSTILE_BYTES) + text[end:]
    return text
