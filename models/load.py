"""From a model's name to a runner."""

from __future__ import annotations

import os

from muxk.models.cpu_ops import CpuOperators
from muxk.models.gguf_file import read_gguf
from muxk.models.gguf_weights import GgufWeights
from muxk.models.llama import load_decoder
from muxk.models.memory import keep_freed_memory, release_freed_memory
from muxk.models.native_attention import supports
from muxk.models.native_library import load_native
from muxk.models.native_ops import NativeOperators
from muxk.models.ops import kv_bytes_per_page
from muxk.models.resolve import GgufSource, Source, resolve_model
from muxk.models.runner import ModelRunner
from muxk.models.weights import Progress, SafetensorsWeights, Weights


def load_runner(
    source: Source | str, pages: int, dtype: str = "auto", progress: Progress | None = None
) -> ModelRunner:
    """Load weights and make a KV pool of `pages` pages, page 0 included.

    `dtype` is `blocks` (as a quantised file holds them), `fp16`, `float32`, or `auto` for the fastest that
    works here. ModelError tells what is wrong.
    MUXK_NATIVE=0 in the environment keeps torch's operators where native ones are built.
    """
    keep_freed_memory()
    weights = open_weights(source)
    native = os.environ.get("MUXK_NATIVE") != "0"
    decoder = load_decoder(weights, cpu_operators(dtype, weights.config.head_dim, native), progress)
    release_freed_memory()
    return ModelRunner(decoder, pages)


def cpu_operators(dtype: str, head_dim: int, native: bool) -> CpuOperators:
    """Native operators where wanted, built and able to work on such heads, else torch's."""
    library = load_native() if native and supports(head_dim) else None
    return CpuOperators(dtype) if library is None else NativeOperators(library, dtype)


def open_weights(source: Source | str) -> Weights:
    """The weights of a source, or of a model's name; only metadata is read here."""
    if isinstance(source, str):
        source = resolve_model(source)
    if isinstance(source, GgufSource):
        return GgufWeights(read_gguf(source.path))
    return SafetensorsWeights(source.path)


def bytes_per_page(weights: Weights) -> int:
    """Bytes that one page of the KV pool takes over all layers, to size the pool before loading."""
    config = weights.config
    return kv_bytes_per_page(config.layers, config.kv_heads, config.head_dim)
