"""Measures what one message costs in the realtime runtime: two actors pass a decode step back and forth.

Run `python -m muxk.profiles.hop_bench`.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import anyio
from muxk.kernel.actor import Actor, ActorSpec, Ref
from muxk.kernel.messages import DecodeStepDone
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.trace import Trace

MESSAGES = 50_000
"""Hops of one measurement: about half a second."""

ROWS = 64
"""Rows of the decode step that travels."""


class Echo(Actor):
    """Sends every step on, until the last one, which stops the run."""

    Accepts: ClassVar = DecodeStepDone

    def __init__(self, other: Ref[DecodeStepDone], messages: int) -> None:
        self._other = other
        self._messages = messages
        self.started_ns = 0
        self.ended_ns = 0

    def on_decode_step_done(self, message: DecodeStepDone) -> None:
        """Pass it on with one more on its step."""
        if message.step_id == 0:
            self.started_ns = self.now_ns()
        if message.step_id >= self._messages:
            self.ended_ns = self.now_ns()
            self.stop("measured")
            return
        self.send(
            self._other,
            DecodeStepDone(
                step_id=message.step_id + 1,
                version=1,
                tokens=message.tokens,
                ended_ns=self.now_ns(),
            ),
        )


class Serve(Echo):
    """The side that starts."""

    def started(self) -> None:
        step = DecodeStepDone(step_id=0, version=1, tokens=bytes(4 * ROWS), ended_ns=0)
        self.send(Ref("echo"), step)


def measure_hop(messages: int = MESSAGES) -> float:
    """Nanoseconds of one hop: send, encode, ZeroMQ, decode, dispatch, trace and the handler itself."""
    # An even number of hops ends at the actor that handled the first one.
    messages += messages % 2
    actors = {"echo": Echo(Ref("serve"), messages), "serve": Serve(Ref("echo"), messages)}
    specs = [
        ActorSpec("echo", lambda: actors["echo"], Echo),
        ActorSpec("serve", lambda: actors["serve"], Serve),
    ]
    anyio.run(RealtimeRuntime(specs, trace=Trace()).run)
    echo = actors["echo"]
    return (echo.ended_ns - echo.started_ns) / messages


def main() -> None:
    """Print the best and the median of five measurements."""
    measured = sorted(measure_hop() for _ in range(5))
    sys.stdout.write(f"hop: best {measured[0] / 1e3:.1f} us, median {measured[2] / 1e3:.1f} us\n")


if __name__ == "__main__":
    main()
