"""The comparison with llama.cpp says why there is none."""

from __future__ import annotations

import sys

from muxk.client.llama_peer import LlamaPeer
from muxk.models.resolve import EMBEDDED_ALIAS


def test_without_a_python_that_was_named_there_is_a_reason_and_no_figure() -> None:
    with LlamaPeer.start(None, EMBEDDED_ALIAS) as peer:
        assert "was named" in peer.reason
        assert peer.step_ms(1, 1, 64, 1) is None


def test_a_python_without_llama_cpp_is_a_reason_too() -> None:
    with LlamaPeer.start(sys.executable, EMBEDDED_ALIAS) as peer:
        assert "could not load" in peer.reason
        assert peer.step_ms(1, 1, 64, 1) is None
