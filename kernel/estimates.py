"""Immutable tables of predicted times, broadcast by the estimator and read by policies."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class DecodeModel(msgspec.Struct, frozen=True):
    """Solo decode step on a number of units: base + per_row * batch + per_context_token * context, in ns.

    The form of MuxWise's T_decode (section 3.3): th1 * sum(r) + th2 * bs + th3.
    """

    units: int
    base_ns: float
    per_row_ns: float
    per_context_token_ns: float
    guard: float
    """Upper quantile of measured / predicted, alone and beside a prefill."""

    def step_ns(self, batch: int, context_tokens: int) -> float:
        solo = self.base_ns + self.per_row_ns * batch + self.per_context_token_ns * context_tokens
        return solo * self.guard


class PrefillModel(msgspec.Struct, frozen=True):
    """One prefill layer on a number of units: base + per_token * n + per_pair * pairs, in ns.

    The form of MuxWise's T_prefill (section 3.3), with sum(n^2) and sum(n*r) folded into the query-key
    pairs that causal attention computes.
    """

    units: int
    base_ns: float
    per_token_ns: float
    per_pair_ns: float
    scale: float
    """Median of measured / predicted over recent items."""

    def layer_ns(self, new_tokens: int, pairs: int) -> float:
        return (self.base_ns + self.per_token_ns * new_tokens + self.per_pair_ns * pairs) * self.scale


class Estimates(msgspec.Struct, frozen=True):
    """The tables of one device and model; empty before the first measurement."""

    layers: int = 0
    decode: tuple[DecodeModel, ...] = ()
    """Ascending in units."""
    prefill: tuple[PrefillModel, ...] = ()
    """Ascending in units."""

    @property
    def known(self) -> bool:
        """False on a cold start, before anything was measured."""
        return bool(self.decode) and bool(self.prefill)

    def decode_ns(self, units: int, batch: int, context_tokens: int) -> float:
        """Guarded time of one decode step in ns; `units` must be at least 1 and the tables known."""
        return _nearest(self.decode, units).step_ns(batch, context_tokens)

    def prefill_layer_ns(self, units: int, new_tokens: int, pairs: int) -> float:
        """Time of one prefill layer of a batch in ns; `units` must be at least 1 and the tables known."""
        return _nearest(self.prefill, units).layer_ns(new_tokens, pairs)


Model = TypeVar("Model", DecodeModel, PrefillModel)


def _nearest(models: tuple[Model, ...], units: int) -> Model:
    """The model for the largest measured unit count that is at most `units`, else the smallest."""
    found = models[0]
    for model in models:
        if model.units > units:
            break
        found = model
    return found
