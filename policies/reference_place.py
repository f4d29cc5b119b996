"""What the policy reference says of several devices: the section `place`, its rules, and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from muxk.policies import reference_prose as prose
from muxk.policies.markdown import blocks, code, link, table
from muxk.policies.placing import Among, Reuse
from muxk.policies.plans import Plan
from muxk.policies.reference_names import OF_THE_POLICY
from muxk.policies.reference_tables import Schema, groups_known, keys_of
from muxk.policies.shipped_plans import PLANS
from muxk.policies.shown import show
from muxk.policies.units import Type


def place_blocks(shapes: Schema) -> Iterator[str]:
    """Sections about several devices."""
    among = [(code(word), prose.PLACE_WORDS[word]) for word in Among]
    reuse = [(code(word), prose.REUSE_WORDS[word]) for word in Reuse]
    known = f"Names: {', '.join(map(link, groups_known('place')))}, {link(OF_THE_POLICY)}."
    yield blocks(
        "### place",
        prose.PLACE,
        keys_of({"properties": shapes}),
        "Keys of a rule:",
        keys_of(shapes["prefill"]["items"]),
        "`among` is one of:",
        table(("among", "devices"), among),
        "Pools:",
        prose.PLACE_POOLS,
        table(("reuse", "where a prefill finds prefixes"), reuse),
        known,
    )
    yield blocks("### plans", prose.PLANS, *(_plan(name, plan) for name, plan in PLANS.shipped.items()))


def _plan(name: str, plan: Plan) -> str:
    rows = [
        (
            code(key),
            str(each.type),
            shown(each.default),
            f"{shown(each.least)} to {shown(each.most)}",
            each.about,
        )
        for key, each in plan.params.items()
        for shown in (_shown_as(each.type),)
    ]
    header = ("parameter", "type", "default", "range", "what it is")
    return blocks(f"#### {name}", plan.about, table(header, rows))


def _shown_as(type_: Type) -> Callable[[float], str]:
    return lambda value: show(value, type_.value, 0)
