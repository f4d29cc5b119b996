"""One thread for every test, and runners of the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from muxk.models.load import load_runner, open_weights
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


@pytest.fixture(scope="session")
def embedded_runner() -> Callable[[str], ModelRunner]:
    """Runners of the embedded model, one for each dtype, made when first asked for."""
    made: dict[str, ModelRunner] = {}

    def runner(dtype: str) -> ModelRunner:
        if dtype not in made:
            made[dtype] = load_runner(EMBEDDED_ALIAS, pages=200, dtype=dtype)
        return made[dtype]

    return runner


@pytest.fixture(scope="session")
def embedded_weights() -> Weights:
    return open_weights(EMBEDDED_ALIAS)
