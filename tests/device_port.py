"""Items for a device, and a port that collects what it posts."""

from __future__ import annotations

import queue
import time

from muxk.kernel.actor import Message, Timer
from muxk.kernel.work import DecodeWork, Item, PrefillWork, SamplingColumns

GREEDY = SamplingColumns(b"\0\0\0\0", b"\0\0\x80\x3f", b"\0\0\0\0", bytes(8), b"\0\0\0\0", True)


class CollectingPort:
    """Collects what a device posts from threads of its own."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def post(self, message: Message) -> None:
        self.messages.put(message)

    def post_after(self, delay_ns: int, message: Message) -> Timer:
        raise NotImplementedError("this device keeps time itself")

    def cancel(self, timer: Timer) -> None:
        raise NotImplementedError("this device keeps time itself")

    def take(self) -> Message:
        return self.messages.get(timeout=10)


def prefill_item(item_id: int, first: int, last: int, layers: int, batch_id: int = 1) -> Item:
    """Layers of a prompt of 20 tokens in two pages of its own."""
    tokens = b"\1\0\0\0" * 20
    pages = bytes([2 * batch_id, 0, 0, 0, 2 * batch_id + 1, 0, 0, 0])
    work = PrefillWork(batch_id, (batch_id,), tokens, (20,), (0,), pages, 2, GREEDY)
    return Item(item_id, work, first, last, last == layers, last_token=20)


def decode_item(item_id: int, layers: int) -> Item:
    """A step of one row in page 1."""
    work = DecodeWork(item_id, 1, (9,), b"\1\0\0\0", b"\0\0\0\0", b"\1\0\0\0", 1, 1, GREEDY)
    return Item(item_id, work, 0, layers, True)
