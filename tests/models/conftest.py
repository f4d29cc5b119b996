"""One thread for every test, and runners of the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from muxk.models.cpu_ops import CpuOperators
from muxk.models.load import cpu_operators, load_runner, open_weights
from muxk.models.native_library import load_native
from muxk.models.resolve import EMBEDDED_ALIAS
from muxk.models.runner import ModelRunner
from muxk.models.weights import Weights


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two busy threads on a shared machine only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPERATORS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(load_native() is None, reason="native operators are not built")
    ),
]


@pytest.fixture(scope="session", params=OPERATORS)
def operators_name(request: pytest.FixtureRequest) -> str:
    """Every test that asks for it, directly or not, runs once for each kind of operators."""
    return str(request.param)


@pytest.fixture(scope="session")
def float32_operators(operators_name: str) -> CpuOperators:
    return cpu_operators("float32", head_dim=8, native=operators_name == "native")


@pytest.fixture(scope="session")
def embedded_runner(operators_name: str) -> Callable[[str], ModelRunner]:
    """Runners of the embedded model, one for each dtype, made when first asked for."""
    made: dict[str, ModelRunner] = {}

    def runner(dtype: str) -> ModelRunner:
        if dtype not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MUXK_NATIVE", str(int(operators_name == "native")))
                made[dtype] = load_runner(EMBEDDED_ALIAS, pages=200, dtype=dtype)
        assert made[dtype].operators_name == operators_name
        return made[dtype]

    return runner


@pytest.fixture(scope="session")
def embedded_weights() -> Weights:
    return open_weights(EMBEDDED_ALIAS)
