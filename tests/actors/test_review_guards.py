"""A few freak steps, as of a machine that was suspended, do not change for good how the device is split."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import virtual_server
from muxk.kernel.devices.sim import SimDevice
from muxk.kernel.work import DecodeWork, Item
from virtual_server import MS, S, VirtualServer

FREAK_NS = 400 * MS
BEGIN_S, FREAK_S, HEALED_S, END_S = 2, 3, 12, 20


class FreakDevice(SimDevice):
    """From FREAK_S on, the first `freaks` decode steps on a part of the units take FREAK_NS."""

    freaks = 0

    def _cost_ns(self, item: Item, units: int) -> int:
        assert self._port is not None
        if (
            self.freaks
            and isinstance(item.work, DecodeWork)
            and units < self.units
            and self._port.now_ns() > FREAK_S * S
        ):
            self.freaks -= 1
            return FREAK_NS
        return super()._cost_ns(item, units)


def residency(server: VirtualServer) -> Counter[str]:
    """Milliseconds in each split so far; those in which decode runs alone count as one.

    This device's decode is as fast on 2 units as on all, so that nothing hangs on which of them it is.
    """
    found: Counter[str] = Counter()
    for split, ms in server.describe("arbiter")["split_residency_ms"].items():
        found["alone" if split.endswith("+0") else split] += ms
    return found


def serve(freaks: int) -> tuple[Counter[str], dict[str, float]]:
    """Residency in the splits after it had time to heal, and the guards, of four streams beside prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_server, "SimDevice", FreakDevice)
        server = VirtualServer(layers=8, kv_tokens=16_384)
    assert isinstance(server.device, FreakDevice)
    server.device.freaks = freaks
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    for index in range(4):
        server.submit(BEGIN_S * S, f"d{index}", prompt_token_ids=[70 + index] * 30, max_tokens=3000, **fields)
    for second in range(FREAK_S, END_S):
        prompt = [97 + second] * 1200
        server.submit(second * S, f"p{second}", prompt_token_ids=prompt, max_tokens=1, ignore_eos=True)
    server.run_until(HEALED_S * S)
    before = residency(server)
    server.run_until(END_S * S)
    assert server.device.freaks == 0
    guards: dict[str, float] = server.describe("estimator")["decode_guard"]
    return residency(server) - before, guards


@pytest.fixture(scope="module")
def usual() -> tuple[Counter[str], dict[str, float]]:
    """The same without freak steps."""
    return serve(0)


@pytest.mark.parametrize("freaks", [1, 6])
def test_a_guard_that_freak_steps_moved_heals(
    usual: tuple[Counter[str], dict[str, float]], freaks: int
) -> None:
    usual_splits, usual_guards = usual
    splits, guards = serve(freaks)
    for split in usual_splits | splits:
        assert splits[split] == pytest.approx(usual_splits[split], abs=60), split
    for units, guard in guards.items():
        assert guard == pytest.approx(usual_guards[units], abs=0.1), units
