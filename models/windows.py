"""Sliding windows: which layers see only the last tokens, from the fields of a `config.json`.

A window of w means that a token sees itself and the w - 1 tokens before it, as in transformers. The pages of
tokens that all windows have passed stay in the pool until their request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muxk.models.errors import ModelError
from muxk.models.fields import positive_int

Windows = tuple[int | None, ...]
"""The window of each layer, None for one that sees everything; empty where all do."""
FindWindows = Callable[[Mapping[str, Any], int, str], Windows]
"""(fields, layers, place) -> the windows."""


def no_windows(values: Mapping[str, Any], layers: int, place: str) -> Windows:
    """For families that have none, whatever the file says."""
    return ()


def windows_of_all_layers(values: Mapping[str, Any], layers: int, place: str) -> Windows:
    """mistral: `sliding_window`, where null is none and a missing one is 4096."""
    if values.get("sliding_window", 4096) is None:
        return ()
    return (positive_int({"sliding_window": 4096, **values}, "sliding_window", place),) * layers


def windows_by_layer(values: Mapping[str, Any], layers: int, place: str) -> Windows:
    """qwen: only with `use_sliding_window`, in layers of `layer_types` or from `max_window_layers` on."""
    if not values.get("use_sliding_window") or values.get("sliding_window", 4096) is None:
        return ()
    window = positive_int({"sliding_window": 4096, **values}, "sliding_window", place)
    first = values.get("max_window_layers", 28)
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(f"{place}: field 'layer_types' is {kinds!r}, wanted a list of {layers}")
    known = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"{place}: layer type {kind!r} is not supported; supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def effective_windows(windows: Windows, max_context_tokens: int) -> Windows:
    """Without windows that no context fills, and empty where none is left."""
    kept = tuple(None if w is not None and w >= max_context_tokens else w for w in windows)
    return kept if any(window is not None for window in kept) else ()
