"""The names of the policy reference: one table for each group of them, and an index of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from muxk.kernel.work import PAGE_SIZE
from muxk.policies import expectations, reference_prose
from muxk.policies.markdown import blocks, code, codes, link, table
from muxk.policies.names import ASKED, PLACES
from muxk.policies.vocabulary import Function, Name


@dataclass(frozen=True, slots=True)
class Group:
    """Names that belong together."""

    title: str
    about: str
    roots: tuple[str, ...]
    """First words of its names. Several roots have the same fields and share a table."""


GROUPS: tuple[Group, ...] = (
    Group("The time", "", ("now",)),
    Group(
        "A request",
        "`request` is the request that is asked about, or that a key sorts. In `form`, `head` is the first "
        "of the queue.",
        ("request", "head"),
    ),
    Group("The class of a request", "Of `request`, or of `head` in `form`.", ("class",)),
    Group("The waiting queue", "", ("queue",)),
    Group("The KV pool", f"In pages of {PAGE_SIZE} tokens.", ("kv",)),
    Group("The device and the model", "", ("units", "layers")),
    Group("Decode", "", ("decode",)),
    Group("Prefill", "", ("prefill",)),
    Group(
        "A prefill batch",
        "`running` is the batch whose layers are launched, `parked` the one that was preempted, and "
        "`candidate` the one that could start next. They are there where `running.active`, `parked.waiting` "
        "and `candidate.waiting` are true: a rule that reads a field should ask that first.",
        ("running", "parked", "candidate"),
    ),
    Group(
        "The devices of a server",
        "`device` is the device that a rule of `place` looks at.",
        ("device", "devices"),
    ),
    Group("Estimates", "The functions are among [the functions](#functions).", ("estimate",)),
)
_PLACES: Mapping[str, str] = {
    "a key of order": "sort keys",
    "a key of victim": "sort keys",
    "fewest": "`fewest where`",
    "order": "`when` of `order` and `victim`",
    "victim": "`when` of `order` and `victim`",
}
_OF_THE_POLICY = (
    (
        "slo.tbt",
        "duration",
        "the TBT SLO of the policy; where decode is decided, the tightest of who decodes",
    ),
    ("params.NAME", "as declared", "the value of a param"),
    ("vars.NAME", "that of the expression", "a variable, where all of its names are known"),
)
OF_THE_POLICY = "Of the policy itself"
DISTRIBUTION = ("p50", "p90", "p99", "max", "mean")
"""Figures of each distribution of times."""


def _place(place: str) -> str:
    """A place that holds expressions, in words."""
    return _PLACES.get(place, code(place))


@dataclass(frozen=True, slots=True)
class _Row:
    """A name, or the same field of several roots."""

    shown: tuple[str, ...]
    name: Name
    places: tuple[str, ...]


def names_section() -> str:
    """All names that a policy may use, group by group."""
    known = {name: group for group in GROUPS for place in PLACES.values() for name in _of(group, place)}
    missing = [name for place in PLACES.values() for name in place if name not in known]
    assert not missing, f"names in no group of the reference: {missing}"
    own = blocks(
        f"#### {OF_THE_POLICY}",
        "`slo.tbt` and variables are not known in the conditions of classes, nor any of them in `ttft`.",
        table(
            ("name", "type", "value"), [(code(name), type_, about) for name, type_, about in _OF_THE_POLICY]
        ),
    )
    return blocks("### Names", reference_prose.NAMES, *map(_group, GROUPS), own)


def groups_of(place: str) -> list[str]:
    """Titles of the groups of which a place knows a name."""
    return [group.title for group in GROUPS if _of(group, PLACES[place])]


def _of(group: Group, names: Mapping[str, Name]) -> list[str]:
    return [name for name in names if name.partition(".")[0] in group.roots]


def _group(group: Group) -> str:
    rows = list(_rows(group))
    first = rows[0].places
    everywhere = first if all(row.places == first for row in rows) else ()
    known = f"Known in {_where(everywhere)}." if everywhere else ""
    cells = [
        (
            codes(row.shown),
            str(row.name.type),
            row.name.about,
            "" if everywhere else _where(row.places),
        )
        for row in rows
    ]
    return blocks(
        f"#### {group.title}", group.about, known, table(("name", "type", "value", "known in"), cells)
    )


def _rows(group: Group) -> Iterator[_Row]:
    """Names of a group; a field that several roots have the same way is one row."""
    found: dict[tuple[str, str, str], tuple[Name, dict[str, None], dict[str, None]]] = {}
    for place, names in PLACES.items():
        for full in _of(group, names):
            root, _, field = full.partition(".")
            name = names[full]
            key = (field or root, name.type, name.about)
            _, roots, places = found.setdefault(key, (name, {}, {}))
            roots[root] = None
            places[place] = None
    for (field, _, _), (name, roots, places) in found.items():
        shared = len(group.roots) > 1 and len(roots) == len(group.roots)
        alone = [root if field == root else f"{root}.{field}" for root in roots]
        yield _Row((f".{field}",) if shared else tuple(alone), name, tuple(places))


def _where(places: tuple[str, ...]) -> str:
    """Places in words; what `split` knows `fewest where` knows too."""
    shown = [place for place in places if not (place == "fewest" and "split" in places)]
    return ", ".join(dict.fromkeys(map(_place, shown)))


def functions_table() -> str:
    """Functions of decision points."""
    places: dict[str, list[str]] = {}
    functions: dict[str, Function] = {}
    for place, asked in ASKED.items():
        for name, function in asked.functions.items():
            places.setdefault(name, []).append(place)
            functions[name] = function
    rows = [
        (code(_call(name, each)), each.result, each.about, _where(tuple(places[name])), str(each.cost))
        for name, each in functions.items()
    ]
    return table(("function", "gives", "value", "known in", "cost"), rows)


def _call(name: str, function: Function) -> str:
    return f"{name}({', '.join(parameter for parameter, _ in function.parameters)})"


def expectations_section() -> str:
    """Names of the expectations of a test."""
    tables = (
        blocks(f"#### {reference_prose.EXPECTED[place]}", table(("name", "type", "value"), _expected(names)))
        for place, names in expectations.PLACES.items()
    )
    return blocks("### Names of expectations", *tables)


def _expected(names: Mapping[str, Name]) -> Iterator[tuple[str, str, str]]:
    """A row for each name; the figures of one distribution are one row."""
    for name, each in names.items():
        root, _, figure = name.partition(".")
        if figure == DISTRIBUTION[0]:
            figures = codes((f"{root}.{DISTRIBUTION[0]}", *(f".{one}" for one in DISTRIBUTION[1:])), " ")
            yield figures, str(each.type), f"{each.about}, and so on"
        elif figure not in DISTRIBUTION or f"{root}.{DISTRIBUTION[0]}" not in names:
            yield code(name), str(each.type), each.about


def index() -> str:
    """First words of names, what may follow them, and where they are explained; then keys and words."""
    return blocks(
        "## Index of names",
        "Of policies:",
        table(("name", "followed by", "explained in"), sorted([*_policy_index(), *_OWN_INDEX])),
        "Of the expectations of tests:",
        table(("name", "followed by", "explained in"), sorted(_test_index())),
    )


def _policy_index() -> Iterator[tuple[str, str, str]]:
    found: dict[str, dict[str, None]] = {}
    known = [name for names in PLACES.values() for name in names]
    for name in (*known, *(f"{name}()" for asked in ASKED.values() for name in asked.functions)):
        root, _, field = name.partition(".")
        found.setdefault(root, {})[field] = None
    titles = {root: group.title for group in GROUPS for root in group.roots}
    for root, fields in found.items():
        yield code(root), _fields(fields), link(titles[root])


def _fields(fields: Iterable[str]) -> str:
    return codes(field for field in sorted(fields) if field)


_OWN_INDEX = (
    (code("params"), "names of params", link(OF_THE_POLICY)),
    (code("slo"), code("tbt"), link(OF_THE_POLICY)),
    (code("vars"), "names of variables", link(OF_THE_POLICY)),
)


def _test_index() -> Iterator[tuple[str, str, str]]:
    for place, names in expectations.PLACES.items():
        found: dict[str, list[str]] = {}
        for name in names:
            root, _, field = name.partition(".")
            found.setdefault(root, []).append(field)
        for root, fields in found.items():
            yield code(root), _fields(fields), link(reference_prose.EXPECTED[place])
