"""Values of params to try: `budget=128,256,512`, `budget=64..1024*2` or `decode_share=10%..90%+20%`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from muxk.client.errors import ClientError

VALUES_MAX = 1000
"""Of one param."""
CANDIDATES_MAX = 10_000
_END = r"\s*([\d.]+)([a-zA-Z%]*)\s*"
RANGE = re.compile(_END + r"\.\." + _END + r"([+*])" + _END)

Settings = tuple[tuple[str, str], ...]


class GridError(ClientError):
    """The text is no grid."""


def parse_grid(texts: Sequence[str]) -> list[Settings]:
    """All combinations, the last param changing fastest. Raises GridError."""
    params: dict[str, list[str]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip()
        if not equals or not name or not listed.strip():
            raise GridError(
                f"--param {text}: expected NAME=VALUES, as budget=128,256,512 or budget=64..1024*2 or "
                "decode_share=10%..90%+20%"
            )
        if name in params:
            raise GridError(f"--param {text}: {name} is there twice; give all its values at once")
        params[name] = list(dict.fromkeys(_values(text, listed)))
    count = 1
    for values in params.values():
        count *= len(values)
    if count > CANDIDATES_MAX:
        raise GridError(f"{count:,} combinations; at most {CANDIDATES_MAX:,} are tried")
    names = list(params)
    return [tuple(zip(names, values, strict=True)) for values in itertools.product(*params.values())]


def _values(text: str, listed: str) -> Iterator[str]:
    for part in listed.split(","):
        part = part.strip()
        if not part:
            raise GridError(f"--param {text}: a value is missing between two commas")
        if ".." in part:
            yield from _range(text, part)
        else:
            yield part


def _range(text: str, part: str) -> Iterator[str]:
    match = RANGE.fullmatch(part)
    if match is None:
        raise GridError(_no_range(text, part))
    low_text, unit, high_text, unit_high, sign, by_text, unit_by = match.groups()
    if unit != unit_high or (unit_by != unit if sign == "+" else unit_by):
        raise GridError(_no_range(text, part))
    try:
        low, high, by = float(low_text), float(high_text), float(by_text)
    except ValueError:
        raise GridError(_no_range(text, part)) from None
    if low > high or (sign == "+" and by <= 0) or (sign == "*" and (by <= 1 or low <= 0)):
        raise GridError(
            f"--param {text}: {part} never gets from its low to its high end; write the lower first, then "
            "+STEP with a step above 0, or *FACTOR with a factor above 1"
        )
    for step in range(VALUES_MAX + 1):
        value = low + step * by if sign == "+" else low * by**step
        if value > high * (1 + 1e-9):
            return
        if step == VALUES_MAX:
            raise GridError(f"--param {text}: {part} has more than {VALUES_MAX} values")
        yield f"{value:.10g}{unit}"


def _no_range(text: str, part: str) -> str:
    return (
        f"--param {text}: {part} is no range; write LOW..HIGH+STEP with one unit or LOW..HIGH*FACTOR, as "
        "10%..90%+20% or 64..1024*2"
    )
