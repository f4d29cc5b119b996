"""The products of a model by themselves, to measure what share of a step they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from muxk.models.llama import load_decoder
from muxk.models.load import cpu_operators, open_weights
from muxk.models.ops import Linear
from muxk.models.runner import ModelRunner


class Products:
    """Every product of a model, noted while it loads."""

    def __init__(self) -> None:
        self._made: list[tuple[Linear, int]] = []

    def noted(self, make: Callable[..., Linear | None]) -> Callable[..., Linear | None]:
        """An operator that makes products from weights [out, in] and notes each."""

        def made(weight: Any, bias: Any) -> Linear | None:
            product = make(weight, bias)
            if product is not None:
                self._made.append((product, weight.shape[1]))
            return product

        return made

    @torch.inference_mode()
    def run(self, rows: int) -> None:
        """All products once, of `rows` rows."""
        inputs = {width: torch.ones(rows, width) for _, width in self._made}
        for product, width in self._made:
            product(inputs[width])


def load_with_products(source: str, pages: int) -> tuple[ModelRunner, Products]:
    """A runner as `load_runner` makes it, and its products."""
    weights, products = open_weights(source), Products()
    operators = cpu_operators("auto", weights.config.head_dim, native=os.environ.get("MUXK_NATIVE") != "0")
    for name in ("linear", "quantised_linear"):
        setattr(operators, name, products.noted(getattr(operators, name)))
    return ModelRunner(load_decoder(weights, operators), pages), products


def use_threads(threads: int) -> None:
    """How many threads operators take that the calling thread runs."""
    torch.set_num_threads(threads)
