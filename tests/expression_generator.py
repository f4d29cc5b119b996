"""Writes expressions of the policy language at random, for `policy_generator.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from muxk.policies.names import ASKED, PLACES, vocabulary
from muxk.policies.operators import BOOLS, BUILTINS, SIGNS, result
from muxk.policies.units import COUNTS, DURATION_NS, SIZES, Type
from muxk.policies.vocabulary import Constant

EXPRESSIONS = tuple(type_ for type_ in Type if type_ is not Type.ANY)
ORDERED = tuple(type_ for type_ in EXPRESSIONS if type_ not in (Type.BOOL, Type.NAME))
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
ARITHMETIC = tuple(sign for sign in SIGNS.values() if sign not in COMPARISONS)
OPERATIONS: Mapping[Type, tuple[tuple[Type, str, Type], ...]] = {
    wanted: tuple(
        (left, sign, right)
        for sign in ARITHMETIC
        for left in ORDERED
        for right in ORDERED
        if result(sign, left, right) is wanted
    )
    for wanted in EXPRESSIONS
}
UNITS: Mapping[Type, tuple[str, ...]] = {
    Type.NUMBER: ("", "", *COUNTS),
    Type.DURATION: tuple(DURATION_NS),
    Type.SIZE: tuple(SIZES),
    Type.PERCENT: ("%",),
}
DIGITS = ("1", "2", "7", "0.5", "1e3", "16", "100", ".25", "3.75", "1024")
HOSTILE_WORDS = (
    *("__class__", "().__class__", "lambda", "f'{x}'", "'a' * 9", "9**9**9", "1e999", "[0]", "{}", "x := 1"),
    *(
        "０x1",
        "ﬀ",
        "\u202e",
        "\x00",
        "\ud7ff",
        "nan",
        "inf",
        "None",
        "-",
        "import",
        "(" * 40,
        "!" * 40,
        "1_000",
    ),
    *(
        "estimate.decode",
        "estimate.decode()",
        "min(1)",
        "units",
        "vars.none",
        "params.none",
        "'nobody'",
        "slo",
    ),
    *(
        "9" * 400,
        "a." * 60 + "b",
        "1 if 2",
        "==",
        ",",
        "#",
        "é",
        "50 ms",
        "5parsecs",
        "90 %",
        "5%%",
        "'",
        '"',
    ),
    "not " * 80,
)


@dataclass
class Declared:
    """What a policy declares before its rules, as far as expressions may name it."""

    params: dict[str, Type] = field(default_factory=dict)
    variables: dict[str, tuple[Type, str]] = field(default_factory=dict)
    """Type, and the place whose names it uses; empty for params only."""
    classes: tuple[str, ...] = ("default",)

    @property
    def constants(self) -> dict[str, Constant]:
        found = {f"params.{name}": Constant(type_, 1) for name, type_ in self.params.items()}
        return {**found, "slo.tbt": Constant(Type.DURATION, 50_000_000)}


class ExpressionWriter:
    """Expressions of a wanted type for a place; `slips` is the share of parts that are wrong on purpose."""

    def __init__(self, random: Random, declared: Declared | None = None, slips: float = 0.0) -> None:
        self._random = random
        self._declared = declared or Declared()
        self._slips = slips

    def write(self, wanted: Type, place: str, depth: int = 3) -> str:
        if self._random.random() < self._slips:
            return self._slip(wanted, place, depth)
        if depth <= 0 or self._random.random() < 0.25:
            return self._leaf(wanted, place)
        return self._random.choice(self._branches(wanted, place))(wanted, place, depth - 1)

    def condition(self, place: str) -> str:
        """A comparison, so that it is not simply true: rules after such a one could not be reached."""
        return self._comparison(Type.BOOL, place, 3)

    def _slip(self, wanted: Type, place: str, depth: int) -> str:
        """Another type, a name of another place, a misspelt name, or something that nobody should write."""
        kind = self._random.randrange(5)
        if kind == 0:
            return self.write(self._random.choice(EXPRESSIONS), place, depth)
        if kind == 1:
            return self._random.choice([name for names in PLACES.values() for name in names])
        if kind == 2:
            word = self._leaf(wanted, place)
            cut = self._random.randrange(len(word))
            return word[:cut] + self._random.choice(["", "x", ".", "_", " "]) + word[cut + 1 :]
        if kind == 3:
            return self._random.choice(HOSTILE_WORDS)
        return self._random.choice(
            ["%s %s", "%s.%s", "(%s", "%s)", "%s and", "%s ** %s", "%s if %s"]
        ).replace("%s", self._leaf(wanted, place))

    def _branches(self, wanted: Type, place: str) -> list[Callable[[Type, str, int], str]]:
        branches: list[Callable[[Type, str, int], str]] = [self._choice]
        if self._operations(wanted, place):
            branches += [self._arithmetic] * 3
        if any(wanted in builtin.types for builtin in BUILTINS.values()):
            branches.append(self._builtin)
        if any(function.result is wanted for function in ASKED[place].functions.values()):
            branches += [self._function] * 2
        if wanted is Type.BOOL:
            branches += [self._comparison] * 4 + [self._logic] * 2 + [self._negation]
        if wanted is Type.NAME:
            return [self._choice, self._only_leaf]
        return branches

    def _ordered(self, place: str) -> tuple[Type, ...]:
        """Types of values that a place has; moments can not be written as literals."""
        has_moments = any(name.type is Type.MOMENT for name in PLACES[place].values())
        return tuple(type_ for type_ in ORDERED if has_moments or type_ is not Type.MOMENT)

    def _operations(self, wanted: Type, place: str) -> list[tuple[Type, str, Type]]:
        types = self._ordered(place)
        return [one for one in OPERATIONS[wanted] if one[0] in types and one[2] in types]

    def _leaf(self, wanted: Type, place: str) -> str:
        known = vocabulary(place, self._declared.constants).names
        names = [name for name, one in known.items() if one.type is wanted]
        names += [
            f"vars.{name}"
            for name, (type_, home) in self._declared.variables.items()
            if type_ is wanted and home in ("", place)
        ]
        if names and self._random.random() < 0.6:
            return self._random.choice(names)
        return self._literal(wanted, place, names)

    def _literal(self, wanted: Type, place: str, names: Sequence[str]) -> str:
        if wanted in UNITS:
            return self._random.choice(DIGITS) + self._random.choice(UNITS[wanted])
        if wanted is Type.BOOL:
            return self._random.choice(tuple(BOOLS))
        if wanted is Type.NAME:
            words = (*self._declared.classes, "gold") if place == "classes" else self._declared.classes
            return (
                self._random.choice("'\"").join(["", self._random.choice(words), ""])[:66].replace('"', "'")
            )
        return self._random.choice(names) if names else "now"

    def _only_leaf(self, wanted: Type, place: str, depth: int) -> str:
        return self._leaf(wanted, place)

    def _arithmetic(self, wanted: Type, place: str, depth: int) -> str:
        left, sign, right = self._random.choice(self._operations(wanted, place))
        if sign in ("/", "//", "%"):
            # What divides is a name or a literal: a constant 0 would be refused when the policy is compiled.
            return f"({self.write(left, place, depth)} {sign} {self._leaf(right, place)})"
        return f"({self.write(left, place, depth)} {sign} {self.write(right, place, depth)})"

    def _builtin(self, wanted: Type, place: str, depth: int) -> str:
        fitting = [name for name, builtin in BUILTINS.items() if wanted in builtin.types]
        name = self._random.choice(fitting)
        builtin = BUILTINS[name]
        count = self._random.randint(builtin.least, min(builtin.most, builtin.least + 2))
        return f"{name}({', '.join(self.write(wanted, place, depth - 1) for _ in range(count))})"

    def _function(self, wanted: Type, place: str, depth: int) -> str:
        functions = ASKED[place].functions
        name = self._random.choice([name for name, one in functions.items() if one.result is wanted])
        parameters = functions[name].parameters
        return f"{name}({', '.join(self.write(type_, place, depth - 1) for _, type_ in parameters)})"

    def _choice(self, wanted: Type, place: str, depth: int) -> str:
        condition = self.write(Type.BOOL, place, depth - 1)
        return f"({self.write(wanted, place, depth)} if {condition} else {self.write(wanted, place, depth)})"

    def _comparison(self, wanted: Type, place: str, depth: int) -> str:
        ordered = self._ordered(place)
        type_ = self._random.choice((*ordered, *ordered, Type.NAME, Type.BOOL))
        signs = COMPARISONS if type_ in ordered else ("==", "!=")
        parts = [self.write(type_, place, depth)]
        for _ in range(1 + (self._random.random() < 0.1 and type_ in ORDERED)):
            parts += [self._random.choice(signs), self.write(type_, place, depth)]
        return f"({' '.join(parts)})"

    def _logic(self, wanted: Type, place: str, depth: int) -> str:
        word = self._random.choice([" and ", " or ", " && ", " || "])
        parts = (self.write(Type.BOOL, place, depth) for _ in range(self._random.randint(2, 4)))
        return f"({word.join(parts)})"

    def _negation(self, wanted: Type, place: str, depth: int) -> str:
        return self._random.choice(["(not %s)", "!%s"]) % self.write(Type.BOOL, place, depth)
