"""Readers of published tables of operator times, as rows that a fit can use.

The tables are read where they lie and are no part of muxk: Vidur (github microsoft/vidur, MIT),
AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0, parquet) and InferSim (alibaba/InferSim, Apache-2.0).
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muxk.profiles.operators import NUMBER_BYTES

HELD_OUT_OF = 3
"""One shape in so many is held out."""
VIDUR_RESOLUTION_NS = 10_000.0
"""Vidur's tables are in whole microseconds: shorter rows are fitted, but say nothing about the error."""
VIDUR_SHAPE = (
    *("n_embd", "n_head", "n_kv_head", "n_expanded_embd"),
    *("num_tokens", "num_tensor_parallel_workers"),
)
HEAD_DIM = 128
GEMM_DIMENSION_MIN = 512
"""Smaller products are none of a decoder's."""


class TableError(ValueError):
    """A table is missing or damaged; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: the arguments of an operator's formula, and what it took."""

    operator: str
    shape: str
    """What is held out as a whole: rows of one shape differ in tokens or context only."""
    arguments: tuple[float | str, ...]
    ns: float
    judged: bool = True
    """False: too short for the table's resolution to judge an error."""

    @property
    def held_out(self) -> bool:
        """By a hash of its shape, so that the split does not depend on the order of rows."""
        digest = hashlib.blake2b(f"{self.operator}/{self.shape}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_OF == 0


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, row) pairs. Raises TableError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from enumerate(csv.DictReader(file), start=2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path.name}: {error}") from error


def _number(path: Path, line: int, row: dict[str, str], key: str) -> float:
    try:
        value = float(row[key])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path.name}:{line}: {key} is {row.get(key)!r}, not a number") from error
    if not 0 <= value < 1e12:
        raise TableError(f"{path.name}:{line}: {key} is {value}, out of range")
    return value


def _count(path: Path, line: int, row: dict[str, str], key: str) -> int:
    count = int(_number(path, line, row, key))
    if count < 1:
        raise TableError(f"{path.name}:{line}: {key} is {count}, not a count")
    return count


def vidur_layers(path: Path) -> tuple[list[Row], list[Row]]:
    """GEMMs (tokens, columns, inner) and streams (kernel, tokens, bytes) of Vidur's MLP tables."""
    gemms: list[Row] = []
    streams: list[Row] = []
    for line, row in _csv_rows(path):
        hidden, heads, kv_heads, inner, tokens, tp = (_count(path, line, row, key) for key in VIDUR_SHAPE)
        head_dim = hidden // heads
        shapes = {
            "attn_pre_proj": ("qkv", (heads + 2 * kv_heads) * head_dim // tp, hidden),
            "attn_post_proj": ("o", hidden, hidden // tp),
            "mlp_up_proj": ("gate_up", 2 * inner // tp, hidden),
            "mlp_down_proj": ("down", hidden, inner // tp),
        }
        moved = {
            "input_layernorm": ("norm", 2 * hidden),
            "attn_rope": ("rope", 2 * (heads + kv_heads) * head_dim // tp),
            "mlp_act": ("activation", 3 * inner // tp),
            "add": ("add", 3 * hidden),
        }
        for key, (operator, columns, depth) in shapes.items():
            ns = _vidur_ns(path, line, row, key)
            if ns:
                gemms.append(_vidur_row(operator, f"{columns}x{depth}", (tokens, columns, depth), ns))
        for key, (kernel, numbers) in moved.items():
            ns = _vidur_ns(path, line, row, key)
            if ns:
                arguments = (kernel, tokens, float(NUMBER_BYTES * numbers * tokens))
                streams.append(_vidur_row(kernel, f"{numbers}x{tokens}", arguments, ns))
    return gemms, streams


def _vidur_ns(path: Path, line: int, row: dict[str, str], key: str) -> float | None:
    """The median, or None where the table has a hole."""
    column = f"time_stats.{key}.median"
    return _number(path, line, row, column) * 1e6 if row.get(column) else None


def _vidur_row(operator: str, shape: str, arguments: tuple[float | str, ...], ns: float) -> Row:
    return Row(operator, shape, arguments, ns, judged=ns >= VIDUR_RESOLUTION_NS)


def vidur_all_reduce(path: Path) -> list[Row]:
    """(tp, message bytes); the mean over ranks and repeats of a size."""
    times: dict[tuple[int, float], list[float]] = {}
    for line, row in _csv_rows(path):
        key = (int(_number(path, line, row, "num_workers")), _number(path, line, row, "size"))
        times.setdefault(key, []).append(_number(path, line, row, "time_stats.all_reduce.median") * 1e6)
    return [
        Row("all_reduce", f"{tp}/{size:.0f}", (tp, size), sum(found) / len(found))
        for (tp, size), found in sorted(times.items())
    ]


def infersim_decode(path: Path) -> list[Row]:
    """(rows, context tokens, heads, kv heads, head_dim); 32 query and 8 KV heads of 128."""
    return [
        Row(
            "decode_attention",
            f"{row['batch_size']}x{row['kv_len']}",
            _decode_arguments(
                _number(path, line, row, "batch_size"), _number(path, line, row, "kv_len"), 32, 8
            ),
            _number(path, line, row, "latency_us") * 1e3,
        )
        for line, row in _csv_rows(path)
    ]


def _decode_arguments(rows: float, context: float, heads: int, kv_heads: int) -> tuple[float, ...]:
    return (rows, rows * context, heads, kv_heads, HEAD_DIM)


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TableError(f"{path.name} needs pyarrow: pip install 'muxk[fit]'") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise TableError(f"{path.name}: {error}") from error
    return rows


def aic_gemms(path: Path) -> list[Row]:
    """(tokens, columns, inner) of bf16 products."""
    found = []
    for row in _parquet_rows(path):
        columns, inner = row["n"], row["k"]
        if row["gemm_dtype"] == "bfloat16" and min(columns, inner) >= GEMM_DIMENSION_MIN:
            found.append(Row("gemm", f"{columns}x{inner}", (row["m"], columns, inner), row["latency"] * 1e6))
    return found


def _plain_attention(path: Path) -> Iterable[dict[str, Any]]:
    """Rows of FlashAttention 3 with head_dim 128, bf16 and no window."""
    for row in _parquet_rows(path):
        plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16" and not row["window_size"]
        if plain and row["head_dim"] == HEAD_DIM and row["kernel_source"].endswith("fa3"):
            yield row


def aic_decode(path: Path) -> list[Row]:
    found = []
    for row in _plain_attention(path):
        heads, kv_heads, batch, context = (
            row["num_heads"],
            row["num_key_value_heads"],
            row["batch_size"],
            row["step"] + 1,
        )
        arguments = _decode_arguments(batch, context, heads, kv_heads)
        found.append(Row("decode_attention", f"{heads}/{kv_heads}x{batch}", arguments, row["latency"] * 1e6))
    return found


def aic_prefill(path: Path) -> list[Row]:
    """(tokens, pairs, context tokens, heads, kv heads, head_dim) of prompts of one length."""
    found = []
    for row in _plain_attention(path):
        heads, batch, length = row["num_heads"], row["batch_size"], row["isl"]
        pairs = batch * length * (length + 1) / 2
        kv_heads, tokens = row["num_key_value_heads"], batch * length
        arguments = (tokens, pairs, tokens, heads, kv_heads, HEAD_DIM)
        shape = f"{heads}/{kv_heads}x{batch}"
        found.append(Row("prefill_attention", shape, arguments, row["latency"] * 1e6))
    return found
