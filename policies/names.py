"""What expressions may name at each decision point. A new name is one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

from muxk.kernel.view import PrefillView
from muxk.kernel.work import PAGE_SIZE
from muxk.policies.classes import Classes, only_class
from muxk.policies.marks import Scalar
from muxk.policies.place_scopes import DEVICE_NAMES
from muxk.policies.problems import ABSENT, RuleError
from muxk.policies.scopes import DecideScope as DecideScope
from muxk.policies.scopes import RequestScope as RequestScope
from muxk.policies.scopes import SortScope as SortScope
from muxk.policies.scopes import estimate_chunk as estimate_chunk
from muxk.policies.scopes import estimate_decode as estimate_decode
from muxk.policies.scopes import estimate_prefill as estimate_prefill
from muxk.policies.scopes import estimate_prefill_layer as estimate_prefill_layer
from muxk.policies.scopes import prefill_time_ns
from muxk.policies.scopes import shared as shared
from muxk.policies.units import TtftSlo, Type
from muxk.policies.vocabulary import MAX_COST, Constant, Function, Name, Vocabulary

_N, _D, _M, _B, _S = Type.NUMBER, Type.DURATION, Type.MOMENT, Type.BOOL, Type.SIZE


def _batch_names(root: str, presence: str, attribute: str) -> dict[str, Name]:
    """Names of one prefill batch of the view; `presence` says whether it is there."""
    get: Callable[[Any], Any] = attrgetter(attribute)
    needs = f"{root}.{presence}"

    def plain(field: str, type_: Type, about: str, least: float | None = None) -> Name:
        return Name(type_, attrgetter(f"{attribute}.{field}"), about, needs, least)

    def derived(read: Callable[[Any, Any], Any], about: str, least: float | None = None) -> Name:
        return Name(_D, lambda scope: read(scope, get(scope)), about, needs, least)

    fields = {
        "requests": plain("requests", _N, "requests in the batch", 1),
        "new_tokens": plain("new_tokens", _N, "tokens to compute, from first to last", 0),
        "reused_tokens": plain("reused_tokens", _N, "tokens whose KV is there already", 0),
        "pairs": plain("pairs", _N, "query-key pairs to compute per head, from first to last", 0),
        "layers_left": plain("layers_left", _N, "layers not launched yet, of the chunk that was begun", 0),
        "chunk_tokens": plain("chunk_tokens", _N, "of the chunk that was begun; 0 between chunks", 0),
        "chunk_pairs": plain("chunk_pairs", _N, "query-key pairs of that chunk", 0),
        "tokens_left": plain("tokens_left", _N, "tokens to compute that are in no chunk yet", 0),
        "pairs_left": plain("pairs_left", _N, "query-key pairs of those", 0),
        "arrival": plain("arrival_ns", _M, "of its oldest request"),
        "deadline": plain("deadline_ns", _M, "earliest TTFT deadline"),
        "depth": plain("depth", _N, "1 if it preempted another batch, else 0", 0),
        "preemptions": plain("preemptions", _N, "how often it was parked", 0),
        "class_rank": plain("class_rank", _N, "the best (least) class.rank of its requests", 0),
        "bytes": plain("parked_bytes", _S, "hidden state that is kept on the device while it is parked", 0),
        "age": derived(lambda scope, batch: scope.view.now_ns - batch.arrival_ns, "now - arrival", 0),
        "time_left": derived(_time_left, "estimated time of all that has not ended, on the prefill units", 0),
        "slack": derived(_slack, "deadline - now - time_left"),
    }
    names = {f"{root}.{field}": name for field, name in fields.items()}
    names[needs] = Name(_B, lambda scope: get(scope) is not None, "true when there is one")
    return names


def _time_left(scope: DecideScope, batch: PrefillView) -> float:
    _present(batch)
    return prefill_time_ns(scope, batch)


def _slack(scope: DecideScope, batch: PrefillView) -> float:
    _present(batch)
    return batch.deadline_ns - scope.view.now_ns - prefill_time_ns(scope, batch)


def _present(batch: PrefillView | None) -> None:
    if batch is None:
        raise RuleError(f"a value is absent: {ABSENT}")


def _candidate_fits(scope: DecideScope) -> bool:
    view, candidate = scope.view, scope.view.candidate
    if candidate is None:
        return False
    room = view.kv.pages_free * PAGE_SIZE
    return candidate.new_tokens + candidate.requests * PAGE_SIZE <= room


def _prefill_pending(scope: DecideScope) -> bool:
    return scope.batch is not None


def _rows(
    root: str, prefix: str, rows: tuple[tuple[str, str, Type, float | None, str], ...]
) -> dict[str, Name]:
    """Names `root.key` for rows of (key, attribute, type, least, about)."""
    return {
        f"{root}.{key}": Name(type_, attrgetter(prefix + attribute), about, "", least)
        for key, attribute, type_, least, about in rows
    }


def _resource_names(prefix: str) -> dict[str, Name]:
    """Names of the queue and the pool, in a scope that holds them under a prefix, `` or `view.`."""
    get_kv: Callable[[Any], Any] = attrgetter(prefix + "kv")
    queue = (
        ("requests", "requests", _N, 0, "requests that wait for prefill"),
        ("tokens", "tokens", _N, 0, "their prompt tokens"),
    )
    kv = (
        ("total", "pages_total", _N, 0, "pages of the pool"),
        ("free", "pages_free", _N, 0, "pages that an allocation can take"),
    )
    return {
        **_rows("queue", prefix + "queue.", queue),
        **_rows("kv", prefix + "kv.", kv),
        "kv.used": Name(_N, lambda scope: _used(get_kv(scope)), "kv.total - kv.free", "", 0),
    }


def _used(kv: Any) -> int:
    pages: int = kv.pages_total - kv.pages_free
    return pages


def _decode_names(prefix: str) -> dict[str, Name]:
    """Names of the decode batch, in a scope that holds it under a prefix."""
    rows = (
        ("batch", "batch", _N, 0, "rows of the decode step; 0 when nothing decodes"),
        ("context_tokens", "context_tokens", _N, 0, "context of all rows"),
        ("waiting", "waiting", _B, None, "a step is submitted and not launched"),
        ("in_flight", "in_flight", _B, None, "a step runs"),
        ("idle", "idle_ns", _D, 0, "time since the last step ended"),
        ("coming", "coming", _N, 0, "rows that join when the prefill items in flight end"),
    )
    return _rows("decode", prefix + "decode.", rows)


def _request_names(root: str) -> dict[str, Name]:
    """Names of one request, `request` or `head`, which the scope holds under that name."""
    rows = (
        ("arrival", "arrival_ns", _M, None, "when it arrived"),
        ("deadline", "deadline_ns", _M, None, "when its first token is due"),
        ("prompt_tokens", "prompt_tokens", _N, 1, "tokens of the prompt"),
        ("generated_tokens", "generated_tokens", _N, 0, "tokens it got so far"),
        ("max_tokens", "max_tokens", _N, 0, "tokens it may get"),
        ("pages", "pages", _N, 0, "KV pages it holds, or needs for its prompt"),
        ("priority", "priority", _N, None, "lower is sooner"),
        ("recomputes", "recomputes", _N, 0, "how often it lost its pages"),
        ("class", "class_name", Type.NAME, None, "the class that the policy put it in"),
    )
    return _rows(root, f"{root}.", rows)


def _timed_request_names(root: str) -> dict[str, Name]:
    """Names of a request that need the time; the scope has `now_ns`."""
    get: Callable[[Any], Any] = attrgetter(root)
    return {
        f"{root}.age": Name(_D, lambda scope: scope.now_ns - get(scope).arrival_ns, "now - arrival", "", 0),
        f"{root}.slack": Name(_D, lambda scope: get(scope).deadline_ns - scope.now_ns, "deadline - now"),
    }


def _class_names(root: str, classes: Classes) -> dict[str, Name]:
    """Names of the class of the request that a scope holds as `root`."""
    get_name: Callable[[Any], str] = attrgetter(f"{root}.class_name")
    return {
        "class.rank": Name(
            _N, lambda scope: classes.named(get_name(scope)).rank, "0 for the first class, and so on", "", 0
        ),
        "class.share": Name(
            _N,
            lambda scope: classes.named(get_name(scope)).weight,
            "share of the class, 1 without one",
            "",
            0,
        ),
    }


_CLASS_QUEUE: Mapping[str, Name] = {
    "class.requests": Name(_N, attrgetter("class_queue.requests"), "requests of its class that wait", "", 0),
    "class.tokens": Name(_N, attrgetter("class_queue.tokens"), "their prompt tokens", "", 0),
}
_NOW: Mapping[str, Name] = {"now": Name(_M, attrgetter("now_ns"), "the time")}
_DECIDE: Mapping[str, Name] = {
    "now": Name(_M, attrgetter("view.now_ns"), "the time"),
    "units.total": Name(_N, attrgetter("view.units_total"), "units of the device", "", 1),
    "units.decode": Name(_N, attrgetter("view.split.decode_units"), "of decode, as it is now", "", 0),
    "units.prefill": Name(_N, attrgetter("view.split.prefill_units"), "of prefill, as it is now", "", 0),
    "layers.total": Name(_N, attrgetter("view.layers"), "layers of the model", "", 1),
    **_decode_names("view."),
    **_resource_names("view."),
    "prefill.pending": Name(_B, _prefill_pending, "a batch runs, is parked, or could be formed"),
    "prefill.in_flight": Name(_N, attrgetter("view.prefill_in_flight"), "prefill items on the device", "", 0),
    **_batch_names("running", "active", "view.running"),
    **_batch_names("parked", "waiting", "view.parked"),
    **_batch_names("candidate", "waiting", "view.candidate"),
    "candidate.fits": Name(_B, _candidate_fits, "there is a candidate, and pages for all of it"),
    "estimate.known": Name(_B, attrgetter("view.estimates.known"), "false until something was measured"),
}
_SPLIT_CHOSEN: Mapping[str, Name] = {
    "decode.units": Name(_N, attrgetter("split.decode_units"), "of the split just chosen", "", 0),
    "prefill.units": Name(_N, attrgetter("split.prefill_units"), "of the split just chosen", "", 0),
}
_UNITS = ("units", _N)
_ESTIMATES: Mapping[str, Function] = {
    "estimate.decode": Function(
        (_UNITS,), _D, estimate_decode, "decode step of the running batch on so many units", 10, 0
    ),
    "estimate.prefill_layer": Function(
        (_UNITS,), _D, estimate_prefill_layer, "one layer of the chunk that runs next", 10, 0
    ),
    "estimate.chunk": Function(
        (_UNITS, ("time", _D)), _N, estimate_chunk, "tokens that fit into a time, through all layers", 80, 0
    ),
}
_ESTIMATES_OF_PROMPTS: Mapping[str, Function] = {
    "estimate.prefill": Function(
        (("requests", _N), ("tokens", _N)),
        _D,
        estimate_prefill,
        "prefill of so many prompts with so many tokens in all, one after the other on all units",
        10,
        0,
    ),
}
_SORT: Mapping[str, Name] = {
    **_NOW,
    "queue.requests": Name(_N, attrgetter("count"), "requests to choose from", "", 1),
}
_NO_CLASSES = only_class(1, TtftSlo(1, 0))
_KEY: Mapping[str, Name] = {
    **_NOW,
    **_request_names("request"),
    **_timed_request_names("request"),
    **_class_names("request", _NO_CLASSES),
}
_CLASSES: Mapping[str, Name] = {
    "request.class": Name(
        Type.NAME, attrgetter("request.request_class"), "the class that the client named, '' for none"
    ),
    "request.priority": _KEY["request.priority"],
    "request.prompt_tokens": _KEY["request.prompt_tokens"],
    "request.max_tokens": _KEY["request.max_tokens"],
}

PLACES: Mapping[str, Mapping[str, Name]] = {
    "classes": _CLASSES,
    "admit": {
        **_KEY,
        **_CLASS_QUEUE,
        **_resource_names(""),
        "queue.bound": Name(_N, attrgetter("queue_bound"), "limits.queue of the policy", "", 1),
        "estimate.known": Name(_B, attrgetter("estimates.known"), _DECIDE["estimate.known"].about),
    },
    "order": _SORT,
    "a key of order": _KEY,
    "form": {
        **_NOW,
        **_request_names("head"),
        **_timed_request_names("head"),
        **_class_names("head", _NO_CLASSES),
        **_CLASS_QUEUE,
        **_resource_names(""),
        **_decode_names(""),
        "estimate.known": Name(_B, attrgetter("estimates.known"), _DECIDE["estimate.known"].about),
    },
    "split": _DECIDE,
    "fewest": {
        **_DECIDE,
        "units": Name(_N, attrgetter("units"), "units that are tried for this phase", "", 1),
    },
    "preempt": {**_DECIDE, **_SPLIT_CHOSEN},
    "slice": {**_DECIDE, **_SPLIT_CHOSEN},
    "victim": _SORT,
    "a key of victim": _KEY,
    "retain": {**_request_names("request"), **_class_names("request", _NO_CLASSES)},
    "place": {**_KEY, **DEVICE_NAMES},
    "pools": {},
    "limits": {},
    "slo": {},
    "a class": {},
}
"""Names of each place that holds expressions."""


class Often(StrEnum):
    """How often an expression is computed."""

    ONCE = "once"
    """When the policy is compiled."""
    REQUEST = "request"
    """For each request that comes, ends or waits."""
    BATCH = "batch"
    """For each prefill batch that is formed, and each time the queue is sorted."""
    STEP = "step"
    """At each decision of the arbiter, thousands a second: nothing here may depend on how many wait."""


MAX_KEY_COST = 100


@dataclass(frozen=True, slots=True)
class Asked:
    """How often the expressions of a place are computed, what they may cost, and what they may call."""

    per: Often
    about: str
    """When the place is asked, for people."""
    max_cost: int = MAX_COST
    functions: Mapping[str, Function] = field(default_factory=dict)


ASKED: Mapping[str, Asked] = {
    "classes": Asked(Often.REQUEST, "when a request arrives, and again after a swap"),
    "admit": Asked(Often.REQUEST, "when a request was tokenised", functions=_ESTIMATES_OF_PROMPTS),
    "order": Asked(Often.BATCH, "when the waiting queue is read"),
    "a key of order": Asked(Often.REQUEST, "for each waiting request when the queue is sorted", MAX_KEY_COST),
    "form": Asked(Often.BATCH, "when the prefill lane can take a batch", functions=_ESTIMATES_OF_PROMPTS),
    "split": Asked(Often.STEP, "at each decision of the arbiter", functions=_ESTIMATES),
    "fewest": Asked(Often.STEP, "for each split that is tried", functions=_ESTIMATES),
    "preempt": Asked(Often.STEP, "while a batch runs and another could start", functions=_ESTIMATES),
    "slice": Asked(Often.STEP, "before prefill is launched", functions=_ESTIMATES),
    "victim": Asked(Often.BATCH, "when the KV pool is exhausted"),
    "a key of victim": Asked(Often.REQUEST, "for each request that holds pages", MAX_KEY_COST),
    "retain": Asked(Often.REQUEST, "when a request ended"),
    "place": Asked(Often.REQUEST, "for each request and device", MAX_KEY_COST, _ESTIMATES_OF_PROMPTS),
    "pools": Asked(Often.ONCE, "when the policy is compiled"),
    "limits": Asked(Often.ONCE, "when the policy is compiled"),
    "slo": Asked(Often.ONCE, "when the policy is compiled"),
    "a class": Asked(Often.ONCE, "when the policy is compiled"),
}
"""How each place of PLACES is asked."""


def _first_places() -> dict[str, str]:
    found = {"slo.tbt": "rules"}
    for place, names in PLACES.items():
        for name in (*names, *ASKED[place].functions):
            found.setdefault(name, place)
    return found


_WHERE: Mapping[str, str] = _first_places()
"""A place that knows a name or function, for each of all."""


def vocabulary(
    place: str,
    constants: Mapping[str, Constant],
    classes: Classes | None = None,
    variables: Mapping[str, Scalar] | None = None,
) -> Vocabulary:
    """What expressions of a place may name.

    Args:
        constants: the policy's params, and `slo.tbt`.
        classes: those of the policy; None before they are known, when any name may stand in quotes.
        variables: the policy's, in the order in which they are written.
    """
    asked = ASKED[place]
    names: dict[str, Name | Constant] = {**PLACES[place], **constants}
    if place == "classes":
        names.pop("slo.tbt", None)
    elif classes is not None:
        names.update(_of_classes(place, classes))
    words = None if classes is None or place == "classes" else classes.names
    return Vocabulary(
        place,
        names,
        asked.functions,
        _WHERE,
        words,
        variables or {},
        asked.max_cost,
    )


def _of_classes(place: str, classes: Classes) -> dict[str, Name]:
    """Names of a place that depend on the classes of the policy."""
    names: dict[str, Name] = {}
    if "class.rank" in PLACES[place]:
        names = _class_names("head" if place == "form" else "request", classes)
    if ASKED[place].per is Often.STEP and classes.has_own_tbt:
        names["slo.tbt"] = _tightest_tbt(classes.tbt_ns)
    return names


def _tightest_tbt(policy_ns: int) -> Name:
    get_ns: Callable[[Any], int | None] = attrgetter("view.decode.tbt_slo_ns")

    def read(scope: Any) -> int:
        tbt_ns = get_ns(scope)
        return policy_ns if tbt_ns is None else tbt_ns

    return Name(_D, read, "the tightest TBT SLO of the requests that decode", "", 1)
