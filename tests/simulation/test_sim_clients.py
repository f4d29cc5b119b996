"""The clients of a simulated server: every request gets its own tokens, each at the time at which it came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from muxk.actors import protocol as wire
from muxk.client.sim_clients import LiveRequest, LiveRequests
from muxk.client.traffic import TrafficRequest

NAMES = ("a", "b", "c", "d")


def live(name: str) -> LiveRequest:
    return LiveRequest(TrafficRequest(0, (), 1, 0, 0, NAMES.index(name)), 1, None)


@given(st.lists(st.sampled_from(NAMES), max_size=12), st.data())
def test_tokens_and_times_are_those_of_each_request_however_the_steps_change(
    changes: list[str], data: st.DataObject
) -> None:
    requests = LiveRequests()
    expected: dict[str, tuple[list[int], list[int]]] = {}
    now_ns = 0
    for name in changes:
        if name in expected:
            taken = requests.take(name)
            assert (taken.said, taken.token_ns) == expected.pop(name)
        else:
            requests.add(name, live(name))
            expected[name] = ([], [])
        for _ in range(data.draw(st.integers(0, 3))):
            now_ns += 7
            names = tuple(expected)
            tokens = tuple(data.draw(st.integers(0, 9)) for _ in names)
            if names:
                requests.hear(wire.TokenIds(names, tokens), now_ns)
            for one, token in zip(names, tokens, strict=True):
                expected[one][0].append(token)
                expected[one][1].append(now_ns)
    assert len(requests) == len(expected)
    for name, heard in expected.items():
        taken = requests.take(name)
        assert (taken.said, taken.token_ns) == heard
