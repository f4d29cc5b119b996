"""What an answer of a policy in Python must be: each check returns a clean value or raises `WrongAnswer`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from muxk.kernel.placing import Action, Assign, Grow, Move, Shrink
from muxk.kernel.view import Limits, RequestClass, View
from muxk.kernel.work import Split
from muxk.policies.units import LONGEST_NS

ERROR_CHARS_MAX = 200
CLASSES_MAX = 64
LARGEST_SHARE = 1e9
ACTIONS_MAX = 256
REQUESTS_MAX = 1 << 63
DEVICES_MAX = 1 << 16

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LIMITS: Mapping[str, tuple[int, int]] = {
    "backlog": (1, 4),
    "decode_floor_ns": (1, LONGEST_NS),
    "queue_bound": (1, 1_000_000),
    "decode_ahead": (0, 1),
    "preemptions": (0, 1_000_000),
    "parked_bytes": (0, 1 << 50),
}


class WrongAnswer(Exception):
    """A policy said something that makes no sense; the text says what."""


class BoundedTexts:
    """The first so many different texts; all others count as one, so that counters stay small."""

    def __init__(self, most: int, other: str) -> None:
        self._most = most
        self._other = other
        self._texts: dict[str, None] = {}

    def known(self, text: str) -> str:
        if text in self._texts:
            return text
        if len(self._texts) >= self._most:
            return self._other
        self._texts[text] = None
        return text


def in_words(error: BaseException) -> str:
    """Type and first line of an exception, bounded, whatever its `__str__` does."""
    if isinstance(error, WrongAnswer):
        return str(error)
    try:
        text = str(error)
    except Exception:
        text = ""
    name = type(error).__name__
    first = printable(text.strip().split("\n", 1)[0], ERROR_CHARS_MAX)
    return f"{name}: {first}" if first else name


def described(policy: Any, attribute: str) -> str:
    """What a policy says of itself for people, on one line."""
    try:
        value = getattr(policy, attribute, "")
    except (Exception, SystemExit):
        value = ""
    return printable(" ".join(value.split()), ERROR_CHARS_MAX) if isinstance(value, str) else ""


def printable(text: str, most: int) -> str:
    """At most so many characters of a text, with none that a terminal or a log would act on."""
    return "".join(character if character.isprintable() else " " for character in text[:most]).strip()


def shown(value: Any) -> str:
    """A value for messages; its own `__repr__` is not to be relied on."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 1 << 64 else "a huge integer"
    if isinstance(value, str):
        return f"'{printable(value, 40)}'"
    return f"a {type(value).__name__}"


def whole_number(value: Any, least: int, most: int, what: str) -> int:
    """An integer in a range; what counts as one (numpy's do) is made one."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise WrongAnswer(f"{what} must be a whole number, not {shown(value)}")
    if not least <= number <= most:
        raise WrongAnswer(f"{what} must be {least} to {most}, not {shown(number)}")
    return number


def boolean(value: Any, what: str) -> bool:
    """True or False and nothing that is like it."""
    if not isinstance(value, bool):
        raise WrongAnswer(f"{what} must be True or False, not {shown(value)}")
    return value


def names(value: Any, least: int, what: str) -> tuple[str, ...]:
    """Different names, at least so many."""
    if not isinstance(value, tuple | list) or not least <= len(value) <= CLASSES_MAX:
        raise WrongAnswer(f"{what} must be a tuple of {least} to {CLASSES_MAX} names")
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise WrongAnswer(f"{what} must be names of letters, digits, '-', '_' and '.', not {shown(name)}")
    if len(dict.fromkeys(value)) < len(value):
        raise WrongAnswer(f"{what} has a name twice")
    return tuple(str(name) for name in value)


def limits(value: Any) -> Limits:
    """Limits within what the kernel can keep."""
    if not isinstance(value, Limits):
        raise WrongAnswer(f"limits must be Limits, not {shown(value)}")
    checked = {
        name: whole_number(getattr(value, name), least, most, f"limits.{name}")
        for name, (least, most) in _LIMITS.items()
    }
    return Limits(**checked)


def permutation(value: Any, length: int) -> tuple[int, ...]:
    """Each index below `length` once."""
    if not isinstance(value, tuple | list) or len(value) != length:
        count = len(value) if isinstance(value, tuple | list) else shown(value)
        raise WrongAnswer(f"order must have each of {length} indices once, not {count} of them")
    order = tuple(whole_number(index, 0, length - 1, "an index") for index in value)
    if sorted(order) != list(range(length)):
        raise WrongAnswer(f"order must have each of {length} indices once; it has one twice")
    return order


def split(value: Any, view: View) -> Split:
    """A split that the device offers: a disjoint one, a part of one, or the whole device."""
    if not isinstance(value, Split):
        raise WrongAnswer(f"split must be a Split, not {shown(value)}")
    total = view.units_total
    decode = whole_number(value.decode_units, 0, total, "split.decode_units")
    prefill = whole_number(value.prefill_units, 0, total, "split.prefill_units")
    whole = (decode or total) == total == (prefill or total)
    offered = whole or any(
        decode in (0, split.decode_units) and prefill in (0, split.prefill_units) for split in view.splits
    )
    if not offered or not (decode or prefill):
        raise WrongAnswer(f"the device offers no split {decode}+{prefill} of {total} units; see view.splits")
    return Split(decode, prefill)


def request_class(value: Any, classes: tuple[str, ...]) -> RequestClass:
    """One of the classes, with SLOs and rights that make sense."""
    if not isinstance(value, RequestClass):
        raise WrongAnswer(f"chosen must be a RequestClass, not {shown(value)}")
    if value.name not in classes:
        raise WrongAnswer(f"there is no class {shown(value.name)} in `classes`")
    rank = classes.index(value.name)
    if value.rank != rank:
        raise WrongAnswer(f"the rank of class '{classes[rank]}' is {rank}, not {shown(value.rank)}")
    share = value.share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= LARGEST_SHARE:
        raise WrongAnswer(f"a share must be more than 0, not {shown(share)}")
    wait = value.max_wait_ns
    return RequestClass(
        name=classes[rank],
        rank=rank,
        tbt_slo_ns=whole_number(value.tbt_slo_ns, 1, LONGEST_NS, "tbt_slo_ns"),
        ttft_slo_ns=whole_number(value.ttft_slo_ns, 1, LONGEST_NS, "ttft_slo_ns"),
        share=float(share),
        max_wait_ns=None if wait is None else whole_number(wait, 0, LONGEST_NS, "max_wait_ns"),
    )


def place_actions(value: Any) -> tuple[Action, ...]:
    """Actions of `place` with whole numbers in them; whether what they name is there the kernel checks."""
    if not isinstance(value, tuple | list) or len(value) > ACTIONS_MAX:
        raise WrongAnswer(f"actions must be a tuple of at most {ACTIONS_MAX}")
    return tuple(_action(one) for one in value)


def _action(value: Any) -> Action:
    if isinstance(value, Assign):
        decode, keep = value.decode, value.keep
        return Assign(
            _indices(value.requests, REQUESTS_MAX, "requests"),
            _device(value.group, "group"),
            _indices(value.devices, DEVICES_MAX, "devices"),
            None if keep is None else whole_number(keep, 1, DEVICES_MAX, "keep"),
            None if decode is None else _device(decode, "decode"),
        )
    if isinstance(value, Grow | Shrink):
        return type(value)(_device(value.group, "group"), _indices(value.devices, DEVICES_MAX, "devices"))
    if isinstance(value, Move):
        return Move(_device(value.group, "group"), _device(value.to, "to"))
    raise WrongAnswer(f"an action must be Assign, Grow, Shrink or Move, not {shown(value)}")


def _device(value: Any, what: str) -> int:
    return whole_number(value, 0, DEVICES_MAX, what)


def _indices(value: Any, most: int, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > DEVICES_MAX:
        raise WrongAnswer(f"{what} must be a tuple of whole numbers")
    return tuple(whole_number(one, 0, most, what) for one in value)
