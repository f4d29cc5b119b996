"""Submit and stream from Python, with a policy swap while an answer is on its way.

    python examples/quickstart.py

uses the server that you started with `muxk run policies/muxwise.yaml`, or starts one for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from muxk.client import Client, ConnectError, ServerProcess


@contextmanager
def connect(device: str) -> Iterator[Client]:
    """A client of the running server, or of one that ends with this program."""
    try:
        client = Client()
    except ConnectError:
        print("no server is running: starting one")
        with ServerProcess("muxwise", device=device) as server, Client(server.wait_ready()) as client:
            yield client
    else:
        with client:
            yield client


def main(device: str = "auto") -> None:
    with connect(device) as client:
        print(f"{client.server.model} on {client.server.device}, policy {client.server.policy}\n")

        # Streams are independent: submit many, read them in any order.
        story = client.submit("Once upon a time", max_tokens=80, temperature=0.0)
        question = client.submit(
            messages=[{"role": "user", "content": "Why is the sky blue? One sentence."}],
            max_tokens=60,
            temperature=0.0,
        )

        print("Once upon a time", end="")
        for number, delta in enumerate(story):
            print(delta.text, end="", flush=True)
            if number == 20:  # in the middle of the answer; no request notices
                swapped = client.swap("inflight")
                print(f" [now under {swapped.name}] ", end="", flush=True)
        print("\n")

        answer = question.result()
        print(f"{answer.text.strip()}\n({answer.completion_tokens} tokens, ended by {answer.finish_reason})")

        client.swap("muxwise")
        print(f"{client.state()['server']['tokens']} tokens served")


if __name__ == "__main__":
    main(*sys.argv[1:2])
