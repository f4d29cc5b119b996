"""How the demo looks: a live view on a terminal, plain lines elsewhere, and the summary after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from muxk.client import protocol
from muxk.client.demo_load import ChatLine, DemoFacts
from muxk.client.figures import Distribution, distribution
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BAR_CELLS = 32
CHAT_LINES = 5
"""Lines of a chat's answer that are shown."""
DEVICES_SHOWN = 4
"""Lines for devices where there are several."""

State = Mapping[str, Any]


def live_view(
    facts: DemoFacts, state: State, server: protocol.Welcome, seconds: float, width: int
) -> RenderableType:
    """The whole screen, `width` columns wide; it fits into 24 lines."""
    policy = _part(state, "server").get("policy", server.policy)
    title = f"muxk: {server.model} on {server.device}, policy {policy}"
    clock = f"{min(facts.elapsed_s, seconds):.0f} of {seconds:.0f} s"
    head = Panel(Group(*_lanes(state), _times(facts, state)), title=Text(title), subtitle=clock)
    tail = CHAT_LINES * int((width // 2 - 4) * 0.85)  # lines break at words, so not all are full
    panels = [_chat(number, chat, tail) for number, chat in enumerate(facts.chats, 1)]
    chats = Table.grid(expand=True)
    chats.add_column(ratio=1)
    chats.add_column(ratio=1)
    for left, right in zip(panels[::2], panels[1::2], strict=True):
        chats.add_row(left, right)
    return Group(head, chats)


def _part(state: State, name: str) -> Mapping[str, Any]:
    part = state.get(name, {})
    return part if isinstance(part, Mapping) else {}


def _parts(state: State, actor: str) -> list[Mapping[str, Any]]:
    """Of each device; one with nothing in it before anything is known."""
    groups = [name for name in state if name.partition("@")[0] == actor]
    names = sorted(groups, key=lambda name: (len(name), name))
    return [_part(state, name) for name in names or [actor]]


def _sum(state: State, actor: str, figure: str) -> int:
    """Over all devices."""
    return sum(int(part.get(figure, 0)) for part in _parts(state, actor))


def _waiting(state: State) -> int:
    """Requests whose prompts nobody computes yet."""
    return _sum(state, "admission", "waiting") + int(_part(state, "placement").get("waiting", 0))


def _split(arbiter: Mapping[str, Any]) -> tuple[int, int, int]:
    """Units of decode, of prefill, and of the device."""
    split = _part(arbiter, "split")
    return int(split.get("decode", 0)), int(split.get("prefill", 0)), int(arbiter.get("units", 0))


def _flights(arbiter: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(flight.get("phase")): flight for flight in arbiter.get("lanes", ())}


def _lanes(state: State) -> list[RenderableType]:
    """What runs on each lane: of one device with the split as a bar, of several a line each."""
    arbiters = _parts(state, "arbiter")
    if len(arbiters) == 1:
        return [_bar(arbiters[0]), _flight_line("running  ", _flights(arbiters[0]))]
    lines: list[RenderableType] = [
        _flight_line(f"device {number}  ", _flights(arbiter))
        for number, arbiter in enumerate(arbiters[:DEVICES_SHOWN])
    ]
    more = len(arbiters) - DEVICES_SHOWN
    return [*lines, Text(f"and {more} more devices")] if more > 0 else lines


def _bar(arbiter: Mapping[str, Any]) -> Text:
    decode, prefill, units = _split(arbiter)
    flights = _flights(arbiter)
    shared = decode + prefill > units
    bar = Text("lanes    ")
    if units and shared:
        bar.append("█" * BAR_CELLS, style="green" if "decode" in flights else "blue")
    elif units:
        bar.append("█" * (decode * BAR_CELLS // units), style="green" if "decode" in flights else "grey50")
        bar.append("█" * (prefill * BAR_CELLS // units), style="blue" if "prefill" in flights else "grey50")
    bar.append(f"  decode {decode} + prefill {prefill} of {units} units")
    return bar


def _flight_line(label: str, flights: Mapping[str, Mapping[str, Any]]) -> Text:
    line = Text(label)
    decode, prefill = flights.get("decode"), flights.get("prefill")
    line.append(
        "decode step of " + f"{decode['rows']} requests" if decode else "no decode step", style="green"
    )
    line.append("  ")
    reading = (
        f"prefill of {prefill.get('tokens', 0):,} tokens, {prefill.get('layers_left', 0)} layers to go"
        if prefill
        else "no prefill"
    )
    line.append(reading, style="blue")
    return line


def _times(facts: DemoFacts, state: State) -> Table:
    grid = Table.grid(padding=(0, 3))
    gaps, short, long = (distribution(times) for times in (facts.gaps, facts.ttft_short, facts.ttft_long))
    grid.add_row("between tokens", _ms("P50", gaps.p50), _ms("P99", gaps.p99), _ms("max", gaps.max))
    grid.add_row("first token, chats", _ms("P50", short.p50), _ms("max", short.max), f"{short.count} seen")
    grid.add_row("first token, longs", _ms("P50", long.p50), _ms("max", long.max), _reading(facts))
    used, total = _sum(state, "kv_pool", "pages_used"), _sum(state, "kv_pool", "pages_total")
    pages = f"KV pages {used} of {total}"
    grid.add_row(f"{facts.tokens_per_s():.0f} tokens/s", f"{_waiting(state)} waiting", pages)
    return grid


def _reading(facts: DemoFacts) -> str:
    if facts.longs_reading:
        return f"{facts.longs_reading} being read"
    return f"{facts.longs_answered} of {facts.longs_sent} answered"


def _ms(name: str, value: float) -> str:
    """Nothing takes 0 ms: that is a time that was not seen yet."""
    if not value:
        return f"{name} -"
    return f"{name} {value:.0f} ms" if value < 10_000 else f"{name} {value / 1000:.1f} s"


def _chat(number: int, chat: ChatLine, tail: int) -> Panel:
    text = " ".join(chat.text[-tail:].split())
    return Panel(Text(text), title=f"chat {number}", subtitle=Text(chat.question), height=CHAT_LINES + 2)


def plain_line(facts: DemoFacts, state: State) -> str:
    """One line for a log."""
    splits = [_split(arbiter) for arbiter in _parts(state, "arbiter")]
    split = " | ".join(f"{decode}+{prefill}" for decode, prefill, _units in splits)
    gaps = distribution(facts.gaps)
    used, total = _sum(state, "kv_pool", "pages_used"), _sum(state, "kv_pool", "pages_total")
    reading = f", reading {facts.longs_reading} long" if facts.longs_reading else ""
    return (
        f"{facts.elapsed_s:5.1f} s  {facts.tokens_per_s():4.0f} tok/s  "
        f"gap P50 {gaps.p50:.0f} P99 {gaps.p99:.0f} max {gaps.max:.0f} ms  split {split}  "
        f"waiting {_waiting(state)}  pages {used}/{total}{reading}  "
        f"| {_tail(facts.chats)}"
    )


def _tail(chats: Sequence[ChatLine]) -> str:
    """The last words of the first chat."""
    return " ".join(chats[0].text.split())[-40:]


def summary_table(facts: DemoFacts, before: State, after: State, server: protocol.Welcome) -> Table:
    """What the demo showed, with the server's states before and after it."""
    table = Table(title=f"{server.model} on {server.device} under {server.policy}, {facts.elapsed_s:.0f} s")
    for column in ("", "count", "P50", "P99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    _row(table, "between tokens, all streams", distribution(facts.gaps))
    _row(table, "first token, chats", distribution(facts.ttft_short))
    _row(table, f"first token, prompts of {facts.long_tokens:,} tokens", distribution(facts.ttft_long))
    answered = sum(chat.answered for chat in facts.chats)
    table.add_section()
    table.add_row("tokens", str(facts.tokens), f"{facts.tokens / facts.elapsed_s:.0f}/s", "", "")
    table.add_row("chats answered", str(answered), "", "", "")
    table.add_row("long prompts read", f"{len(facts.ttft_long)} of {facts.longs_sent}", "", "", "")
    for split, share in residency(before, after):
        table.add_row(f"time on {split}", f"{share:.0%}", "", "", "")
    return table


def residency(before: State, after: State) -> list[tuple[str, float]]:
    """Share of the time by split, the largest first; less than one percent is left out."""
    spent: Counter[str] = Counter()
    for arbiter in _parts(after, "arbiter"):
        spent.update(_named_ms(arbiter))
    for arbiter in _parts(before, "arbiter"):
        spent.subtract(_named_ms(arbiter))
    total = sum(spent.values())
    shares = sorted(((name, ms / total) for name, ms in spent.items() if total), key=lambda row: -row[1])
    return [(name, share) for name, share in shares if share >= 0.01]


def _named_ms(arbiter: Mapping[str, Any]) -> dict[str, int]:
    """Time of a device by split."""
    units = int(arbiter.get("units", 0))
    named: Counter[str] = Counter()
    for split, ms in _part(arbiter, "split_residency_ms").items():
        named[_split_name(split, units)] += int(ms)
    return named


def _split_name(name: str, units: int) -> str:
    """`1+1` as people read it; a split that uses units twice is the whole device for both in turn."""
    decode, prefill = (int(part) for part in name.split("+"))
    if decode + prefill > units:
        return "the whole device for both in turn"
    return f"decode {decode} + prefill {prefill} units"


def _row(table: Table, label: str, times: Distribution) -> None:
    cells = [f"{value:,.0f} ms" if times.count else "-" for value in (times.p50, times.p99, times.max)]
    table.add_row(label, str(times.count), *cells)
