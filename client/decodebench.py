"""Where the time of a decode step goes, beside llama.cpp where it is installed.

Run `python -m muxk.client.decodebench [ROUNDS]`. Rounds of all settings are interleaved; medians are printed.
The peer runs in a Python of its own: MUXK_LLAMA_PYTHON names one that has `llama-cpp-python`, no dependency.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muxk.client.llama_peer import LlamaPeer
from muxk.kernel.devices.cpu import prepare_process
from muxk.kernel.work import DecodeWork, int32_bytes

if TYPE_CHECKING:
    from muxk.models.products import Products
    from muxk.models.runner import ModelRunner

MODEL = "smollm2-135m-instruct"
ROWS = (1, 4, 8)
CONTEXTS = (64, 512)
THREADS = (1, 2)
ROUNDS = 5
"""With the peer a round takes much longer: its prompts have to be read each time."""
STEPS = 4
"""Steps of one round; the fastest counts."""
PEER = "MUXK_LLAMA_PYTHON"
OVERHEAD_AIM_MS = 10


@dataclass
class Setting:
    """One kind of step, and what was measured of it."""

    threads: int
    rows: int
    context: int
    step_ms: list[float] = field(default_factory=list)
    products_ms: list[float] = field(default_factory=list)
    peer_ms: list[float] = field(default_factory=list)

    def text(self) -> str:
        step, products = statistics.median(self.step_ms), statistics.median(self.products_ms)
        shown = f"{self.threads} threads, {self.rows} rows of {self.context} tokens: step {step:.1f} ms"
        shown += (
            f" ({min(self.step_ms):.1f} .. {max(self.step_ms):.1f}), {1000 * self.rows / step:.0f} tok/s;"
        )
        shown += f" products {products:.1f}, everything else {step - products:.1f} ms"
        if self.peer_ms:
            peer = statistics.median(self.peer_ms)
            shown += f"; llama.cpp {peer:.1f} ms, {step / peer:.2f} times its step"
        return shown


def bench_decode(rounds: int = ROUNDS) -> None:
    """Print a line for each number of threads, rows and context tokens."""
    prepare_process()
    from muxk.models.products import load_with_products

    runner, products = load_with_products(MODEL, pages=max(ROWS) * (max(CONTEXTS) // 16 + 1) + 1)
    operators = runner.decoder.operators
    print(f"products: {operators.dtype}, everything else: {operators.name}", flush=True)
    settings = [Setting(t, rows, context) for t in THREADS for context in CONTEXTS for rows in ROWS]
    with LlamaPeer.start(os.environ.get(PEER), MODEL) as peer:
        for _ in range(rounds):
            for setting in settings:
                _measure(setting, runner, products, peer)
    for setting in settings:
        print(setting.text(), flush=True)
    print(f"aim for everything else: below {OVERHEAD_AIM_MS} ms at 4 rows on two cores")
    if peer.reason:
        print(f"no comparison with llama.cpp: {peer.reason} ({PEER})")


def _measure(setting: Setting, runner: ModelRunner, products: Products, peer: LlamaPeer) -> None:
    from muxk.models.products import use_threads

    use_threads(setting.threads)
    work = _decode_work(setting.rows, setting.context)
    setting.step_ms.append(_fastest(lambda: runner.decode(work)))
    setting.products_ms.append(_fastest(lambda: products.run(setting.rows)))
    step_ms = peer.step_ms(setting.threads, setting.rows, setting.context, STEPS)
    if step_ms is not None:
        setting.peer_ms.append(step_ms)


def _fastest(run: Callable[[], object]) -> float:
    """Milliseconds of the fastest of STEPS runs."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def _decode_work(rows: int, context: int) -> DecodeWork:
    """A greedy step of `rows` rows whose last token is the one after `context` tokens."""
    from muxk.actors.columns import page_table, sampling_columns
    from muxk.actors.messages import SamplingParams

    greedy = SamplingParams(1, 0.0, 1.0, 0, 0, 0, (), True)
    each = context // 16 + 1
    table, width = page_table([range(1 + row * each, 1 + (row + 1) * each) for row in range(rows)])
    return DecodeWork(
        step_id=1,
        version=0,
        requests=tuple(range(rows)),
        tokens=int32_bytes([100 + row for row in range(rows)]),
        positions=int32_bytes([context] * rows),
        page_table=table,
        pages_per_row=width,
        context_tokens=rows * (context + 1),
        sampling=sampling_columns([greedy] * rows),
    )


if __name__ == "__main__":
    bench_decode(*map(int, sys.argv[1:2]))
