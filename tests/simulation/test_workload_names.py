"""A workload by name or by file, and what is said when it is neither."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from muxk.client.arrivals import Arrivals
from muxk.client.synthetic import NAMES, synthetic
from muxk.client.traces import open_trace
from muxk.client.traffic import WorkloadError
from muxk.client.workload_names import Traffic, find_workload
from trace_data import mooncake_sessions


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_synthetic_workload(name: str) -> None:
    found = find_workload(name, Traffic(2.0, seed=4))
    expected = synthetic(name, Arrivals(2.0, seed=4))
    assert list(islice(found.requests(), 20)) == list(islice(expected.requests(), 20))


def test_names_joined_by_plus_come_in_equal_parts() -> None:
    made = list(islice(find_workload("sharegpt+loogle", Traffic(4.0)).requests(), 2000))
    kinds = [request.request_class for request in made]
    assert kinds.count("loogle") / 2000 == pytest.approx(0.5, abs=0.05)


def test_a_file_is_a_trace(tmp_path: Path) -> None:
    path = mooncake_sessions(tmp_path / "m", sessions=6, turns=2)
    found = find_workload(str(path), Traffic(None, seed=0))
    assert list(found.requests()) == list(open_trace(path).requests())


@pytest.mark.parametrize(
    ("name", "rate", "complaint"),
    [
        ("conversatoin", 1.0, "'conversatoin' is no workload and no file; did you mean conversation?"),
        ("sharegpt+x", 1.0, "'x' is no workload and no file; there are sharegpt,"),
        ("sharegpt", None, "sharegpt needs a rate"),
        ("sharegpt+sharegpt", 1.0, "has a part twice"),
        ("traces/none.csv", 1.0, "traces/none.csv: No such file"),
        ("sharegpt", 0.0, "rate is 0.0"),
    ],
)
def test_what_is_neither_name_nor_file_is_refused_with_a_hint(
    name: str, rate: float | None, complaint: str
) -> None:
    with pytest.raises(WorkloadError) as refused:
        find_workload(name, Traffic(rate))
    assert complaint in str(refused.value)
