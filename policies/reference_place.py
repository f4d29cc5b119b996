"""What the policy reference says of several devices: the section `place`, its rules, and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from muxk.policies.markdown import blocks, code, link, table
from muxk.policies.placing import Among, Reuse
from muxk.policies.plans import Plan
from muxk.policies.reference_names import OF_THE_POLICY
from muxk.policies.reference_tables import Schema, groups_known, keys_of
from muxk.policies.shipped_plans import PLANS
from muxk.policies.shown import show
from muxk.policies.units import Type

ABOUT_PLACE = """\
On a server of several devices, where each request goes. The section holds rules, or the name of a
[plan](#plans). Without it a request goes to the device with the fewest requests, and stays.

```yaml
place:
  pools: {prefill: 50%, decode: rest}
  prefill:
    - {name: short-queue, among: prefill, where: device.pending_tokens <= 8k, by: device.pending_tokens}
    - {name: help, among: decode, by: device.decoding}
  decode:
    - name: room
      among: decode
      where: device.promised_pages + request.longest_pages <= device.pages_total
      by: device.promised_pages
    - {name: stay, among: same}
```

Requests of the queue are placed one after the other, and the next sees what the last was given. `prefill`
says which device computes the prompt, `decode` which one decodes; when they differ the KV moves in between.
The first rule for which a device qualifies gives it: the first by the keys of `by`, the one with the lowest
number of equal ones. Where one of the two has no device, `both` is asked for one device that does both. A
request for which there is none waits, and those behind it with it.

A rule that fails for a device does not take that device. When rules fail and nobody is placed, or all devices
are idle and nobody is placed, the built-in answer sends the first request to the device with the fewest
requests."""

PLACE_POOLS = """\
The first devices are the pool for prefill, the last ones that for decode. One pool has the `rest`; the other
is a number of devices or a percentage of all, which may come from `params`, and leaves the other pool one
at least. A policy with pools needs two devices."""

PLACE_WORDS: Mapping[Among, str] = {
    Among.ALL: "all devices; what holds without `among`",
    Among.PREFILL: "those of the pool for prefill that decode for nobody",
    Among.DECODE: "those of the pool for decode that compute no prompts",
    Among.MIXED: "those of either pool that work for the phase of the other one now: a device that was "
    "borrowed is mixed until that work is done",
    Among.SAME: "the device that computes the prompt; in `decode` only",
}
"""Which devices a rule looks at."""

REUSE_WORDS: Mapping[Reuse, str] = {
    Reuse.OWN: "in the pool of the device that computes the prompt",
    Reuse.DECODE: "also in the pool of the device that will decode: what lies there is fetched first",
}
"""Where a prefill finds prefixes that earlier requests left behind."""

ABOUT_PLANS = """\
A plan is a search that rules can not say, under a name, with parameters: `place: {plan: loongserve, with:
{max_prefill: 2s}}`. Parameters may come from `params`. Another package registers a plan of its own under the
entry point group `muxk.plans`."""


def place_blocks(shapes: Schema) -> Iterator[str]:
    """Sections about several devices."""
    among = [(code(word), PLACE_WORDS[word]) for word in Among]
    reuse = [(code(word), REUSE_WORDS[word]) for word in Reuse]
    known = f"Names: {', '.join(map(link, groups_known('place')))}, {link(OF_THE_POLICY)}."
    yield blocks(
        "### place",
        ABOUT_PLACE,
        keys_of({"properties": shapes}),
        "Keys of a rule:",
        keys_of(shapes["prefill"]["items"]),
        "`among` is one of:",
        table(("among", "devices"), among),
        "Pools:",
        PLACE_POOLS,
        table(("reuse", "where a prefill finds prefixes"), reuse),
        known,
    )
    yield blocks("### plans", ABOUT_PLANS, *(_plan(name, plan) for name, plan in PLANS.shipped.items()))


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
