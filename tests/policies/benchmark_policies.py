"""Prints what expressions and decisions cost. Not a test: `python tests/policies/benchmark_policies.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from muxk.client.microbench import fifty_rules
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.view import DecodeView, KvView, PrefillView, QueueView, RequestView, View
from muxk.kernel.work import Split
from muxk.policies.engine import load_policy, shipped_policies
from muxk.policies.expressions import compile_expression
from muxk.policies.names import DecideScope, vocabulary
from muxk.policies.params import whole
from muxk.policies.problems import Report, Source
from muxk.policies.units import Type

UNITS = 132
SPLITS = tuple(Split(units, UNITS - units) for units in range(20, 132, 16))
EXPRESSIONS = (
    "decode.batch == 0",
    "decode.batch > 3 and queue.tokens < 4k and kv.free >= 100 or decode.idle * 2 > 50ms",
    "estimate.decode(16) <= 100ms",
)


def estimates() -> Estimates:
    """Tables for each split of a device of 132 units."""
    sizes = [*(split.decode_units for split in SPLITS), UNITS]
    decode = tuple(DecodeModel(units, 5e6, 4e9 / units / 100, 1e3, 1.2) for units in sizes)
    prefill = tuple(PrefillModel(units, 1e5, 1e5 / units, 1.0, 1.0) for units in sizes)
    return Estimates(80, decode, prefill)


def busy_view() -> View:
    """A long prefill beside a decode batch, and a short request that waits."""
    running = PrefillView(1, 1, 32_000, 0, 512_000_000, 40, 0, 320_000_000_000, 0, 0, 32_000, 512_000_000)
    candidate = PrefillView(0, 1, 200, 0, 20_100, 80, 0, 320_000_000_000, 0, 0, 0, 0, 200, 20_100)
    return View(
        now_ns=10**9,
        units_total=UNITS,
        splits=SPLITS,
        split=SPLITS[0],
        layers=80,
        decode=DecodeView(64, 60_000, True, False, 1000),
        running=running,
        parked=None,
        candidate=candidate,
        prefill_in_flight=1,
        queue=QueueView(1, 200),
        kv=KvView(10_000, 5_000),
        estimates=estimates(),
    )


def best_us(function: Callable[[], Any], calls: int) -> float:
    """Microseconds a call: the best of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter_ns() - start) / calls / 1000)
    return min(rounds)


def median_us(function: Callable[[], Any], calls: int) -> float:
    """Microseconds of the median call."""
    times_ns = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        function()
        times_ns.append(time.perf_counter_ns() - start)
    return statistics.median(times_ns) / 1000


def main() -> None:
    """Print a table."""
    view = busy_view()
    scope = DecideScope(view)
    for text in EXPRESSIONS:
        report = Report()
        expression = compile_expression(
            whole(Source("-", text), text), Type.BOOL, vocabulary("split", {}), report
        )
        report.raise_any()
        assert expression is not None
        run = expression.run
        print(f"{best_us(lambda run=run: run(scope), 20_000):8.2f} us  {text}")
    policy = fifty_rules()
    policy_us = median_us(lambda: policy.decide(view), 5_000)
    print(f"{policy_us:8.2f} us  decide with 50 rules, all looked at, median {policy.decide(view).rules}")
    waiting = [RequestView(i, i, -i, 100, 0, 100, 7, 0, 0) for i in range(512)]
    for name in shipped_policies():
        policy = load_policy(name)
        decide_us = best_us(lambda policy=policy: policy.decide(view), 2_000)
        order_us = best_us(lambda policy=policy: policy.order(waiting, 0, {}), 20)
        compile_ms = best_us(lambda name=name: load_policy(name), 2) / 1000
        print(f"{decide_us:8.2f} us  {name}.decide {policy.decide(view).rules}")
        print(f"{order_us:8.2f} us  {name}.order of 512;  compile {compile_ms:.1f} ms")


if __name__ == "__main__":
    main()
