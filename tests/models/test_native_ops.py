"""The native operators compute what torch's do, and each row alone, to the last bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cpu_ops import CpuOperators
from muxk.models.load import cpu_operators
from muxk.models.native_build import build
from muxk.models.native_library import BUILT, load_native
from muxk.models.native_ops import NativeOperators
from muxk.models.ops import HeadNorms, Heads, KvLayer
from numpy.typing import NDArray
from torch import Tensor

LIBRARY = load_native()
needs_native = pytest.mark.skipif(LIBRARY is None, reason="native operators are not built")
EPSILON = 1e-5
SHAPES = [
    Heads(queries=9, kv=3, dim=64, epsilon=EPSILON),
    Heads(queries=1, kv=1, dim=16, epsilon=EPSILON),
    Heads(queries=9, kv=1, dim=32, epsilon=EPSILON),
    Heads(queries=8, kv=4, dim=128, epsilon=EPSILON),
    Heads(queries=28, kv=1, dim=24, epsilon=EPSILON),
    Heads(queries=5, kv=1, dim=80, epsilon=EPSILON),
    Heads(queries=4, kv=1, dim=256, epsilon=EPSILON),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def native() -> NativeOperators:
    assert LIBRARY is not None
    return NativeOperators(LIBRARY, "float32")


class Case:
    """Rows of new tokens after reused ones, in scattered pages of a pool full of other things."""

    def __init__(self, heads: Heads, counts: list[tuple[int, int]], seed: int = 0) -> None:
        """`counts`: new and reused tokens of each row."""
        self.heads = heads
        self.new, self.reused = zip(*counts, strict=True)
        width = max(-(-(new + reused) // PAGE_SIZE) for new, reused in counts)
        pages = np.random.default_rng(seed).permutation(np.arange(1, len(counts) * width + 1))
        self.table: NDArray[np.int32] = pages.astype(np.int32).reshape(len(counts), width)
        self.tokens = sum(self.new)
        self.qkv = random(self.tokens, (heads.queries + 2 * heads.kv) * heads.dim, seed=seed + 1)
        angles = random(self.tokens, 1, heads.dim // 2, seed=seed + 2)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        shape = (len(pages) + 1, heads.kv, heads.dim, PAGE_SIZE)
        self.keys, self.values = random(*shape, seed=seed + 3), random(*shape, seed=seed + 4)

    def run(
        self,
        operators: CpuOperators,
        norms: HeadNorms | None = None,
        row: int | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, KvLayer]:
        """The output and the pool of all rows, or of one of them alone."""
        rows = slice(None) if row is None else slice(row, row + 1)
        first = 0 if row is None else sum(self.new[:row])
        tokens = slice(first, first + sum(self.new[rows]))
        keys, values = self.keys.clone(), self.values.clone().transpose(2, 3).contiguous()
        kv = KvLayer(keys, values)
        attention = operators.prefill_attention(
            self.table[rows], self.new[rows], self.reused[rows], self.heads, self.rotation[tokens], window
        )
        return attention(self.qkv[tokens].clone(), norms, kv), kv


def assert_alike(case: Case, native: NativeOperators, norms: HeadNorms | None = None) -> None:
    found, found_kv = case.run(native, norms)
    wanted, wanted_kv = case.run(CpuOperators("float32"), norms)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_kv.keys, wanted_kv.keys)
    torch.testing.assert_close(found_kv.values, wanted_kv.values)


@needs_native
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("contexts", [[1], [16, 1, 17], [500, 257, 256, 255, *range(1, 14)]], ids=len)
def test_attention_of_decode_rows_equals_that_of_torch(
    native: NativeOperators, heads: Heads, contexts: list[int]
) -> None:
    case = Case(heads, [(1, context - 1) for context in contexts])
    assert_alike(case, native)
    order = np.argsort(case.reused)
    positions = np.array(case.reused, dtype=np.int32)[order]
    rotation = case.rotation[torch.from_numpy(order)]
    qkv, kv = case.qkv[torch.from_numpy(order)], KvLayer(case.keys, case.values.transpose(2, 3).contiguous())
    step = native.decode_attention(case.table[order], positions, heads, rotation)
    assert torch.equal(step(qkv, None, kv), case.run(native)[0][torch.from_numpy(order)])


@needs_native
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize(
    "counts", [[(7, 0)], [(3, 20), (17, 0), (1, 31), (40, 16)], [(290, 270)]], ids=["one", "ragged", "long"]
)
@pytest.mark.parametrize("normed", [False, True])
def test_attention_of_prefill_rows_equals_that_of_torch(
    native: NativeOperators, heads: Heads, counts: list[tuple[int, int]], normed: bool
) -> None:
    norms = HeadNorms(random(heads.dim, seed=5), random(heads.dim, seed=6)) if normed else None
    assert_alike(Case(heads, counts), native, norms)


@needs_native
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(native: NativeOperators, heads: Heads) -> None:
    case = Case(heads, [(1, 299), (5, 3), (1, 0), (33, 250), (1, 15), (2, 510)])
    together, _ = case.run(native)
    first = 0
    for row, new in enumerate(case.new):
        assert torch.equal(case.run(native, row=row)[0], together[first : first + new]), row
        first += new


@needs_native
@pytest.mark.parametrize("heads", SHAPES[:1], ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 260])
def test_a_token_has_the_same_bits_in_a_prefill_and_in_a_decode_step(
    native: NativeOperators, heads: Heads, window: int | None
) -> None:
    whole = Case(heads, [(600, 0)])
    attended, kv = whole.run(native, window=window)
    for position in (0, 15, 16, 255, 256, 299, 512, 518, 531, 599):
        rotation = whole.rotation[position : position + 1]
        attention = native.decode_attention(
            whole.table, np.array([position], dtype=np.int32), heads, rotation, window
        )
        again = attention(whole.qkv[position : position + 1].clone(), None, kv)
        assert torch.equal(again[0], attended[position]), position


@needs_native
def test_two_threads_give_the_bits_of_one(native: NativeOperators) -> None:
    case = Case(SHAPES[0], [(400, 100), (1, 300), (90, 0)])
    x, weight, gate_up = random(2000, 576), random(576, seed=1), random(400, 2 * 777, seed=2)

    def run() -> list[Tensor]:
        attended, kv = case.run(native)
        added = x.clone()
        normed = native.add_rms_norm(added, x, weight, EPSILON)
        return [attended, kv.keys, kv.values, added, normed, native.silu_mul(gate_up)]

    alone = run()
    torch.set_num_threads(2)
    assert all(torch.equal(one, two) for one, two in zip(alone, run(), strict=True))


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("width", [1, 7, 8, 31, 32, 48, 576, 1000])
def test_norms_and_silu_equal_those_of_torch(native: NativeOperators, rows: int, width: int) -> None:
    reference = CpuOperators("float32")
    x, added, weight = random(rows, width), random(rows, width, seed=1), random(width, seed=2)
    torch.testing.assert_close(
        native.rms_norm(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON), rtol=1e-5, atol=1e-6
    )
    sums = x.clone(), x.clone()
    normed = [
        ops.add_rms_norm(total, added, weight, EPSILON)
        for ops, total in zip((native, reference), sums, strict=True)
    ]
    assert torch.equal(*sums)
    torch.testing.assert_close(*normed, rtol=1e-5, atol=1e-6)
    gate_up = random(rows, 2 * width, seed=3) * 30
    gate_up[0, 0], gate_up[0, -1] = -200.0, 200.0
    wanted = reference.silu_mul(gate_up)
    torch.testing.assert_close(native.silu_mul(gate_up), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(native.silu_mul(gate_up)[-1], native.silu_mul(gate_up[-1:])[0])


@needs_native
def test_large_scores_do_not_overflow_and_what_lies_behind_the_context_is_never_read(
    native: NativeOperators,
) -> None:
    case = Case(SHAPES[0], [(1, 20), (20, 3)])
    case.qkv *= 100
    wanted, _ = case.run(CpuOperators("float32"))
    owned, _ = case.run(native)
    torch.testing.assert_close(owned, wanted, rtol=1e-3, atol=1e-3)
    for row, tokens in enumerate((21, 23)):
        page, start = case.table[row, tokens // PAGE_SIZE], tokens % PAGE_SIZE
        case.keys[page, :, :, start:] = torch.nan
        case.values[page, :, :, start:] = torch.nan
    assert torch.equal(case.run(native)[0], owned)


def test_without_the_library_torch_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_native(tmp_path / "missing.so") is None
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF")
    assert load_native(damaged) is None
    monkeypatch.setattr("muxk.models.load.load_native", lambda: None)
    assert cpu_operators("float32", head_dim=64, native=True).name == "torch"


@needs_native
def test_torch_does_the_work_where_native_is_unwanted_or_cannot() -> None:
    assert cpu_operators("float32", head_dim=64, native=True).name == "native"
    assert cpu_operators("float32", head_dim=64, native=False).name == "torch"
    assert cpu_operators("float32", head_dim=20, native=True).name == "torch"
    assert cpu_operators("float32", head_dim=512, native=True).name == "torch"


@needs_native
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxk.models.native_library.VERSION", -1)
    assert load_native() is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_build_command_makes_a_library_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that does not optimise takes a tenth of the time; what -O3 makes is tested everywhere else.
    quick = tmp_path / "quick-cc"
    quick.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    assert build(tmp_path / BUILT.name) is None
    assert load_native(tmp_path / BUILT.name) is not None


def test_a_build_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path / BUILT.name) == "no C compiler; looked for no-such-compiler"
    assert list(tmp_path.iterdir()) == []


@needs_native
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_library_shares_the_openmp_runtime_of_torch() -> None:
    code = (
        "from muxk.models.native_library import load_native\n"
        "assert load_native() is not None\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "print(*(p for p in paths if p.rsplit('/')[-1].startswith(('libgomp', 'libomp', 'libiomp'))))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(result.stdout.split()) <= 1, result.stdout
