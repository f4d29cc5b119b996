"""What a lane of a card computes beside products: the seam, and its reference in torch's operators.

Everything writes into tensors that it is given, so that a lane allocates nothing while it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from muxk.kernel.work import PAGE_SIZE
from muxk.models.cuda_batch import Batch
from muxk.models.errors import ModelError
from muxk.models.ops import HeadNorms, Heads, KvLayer
from torch import Tensor
from torch.nn import functional


class Kernels(Protocol):
    """Operators over rows. They keep nothing between calls."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """out = x / sqrt(mean(x^2) + epsilon) * weight, for [rows, width]."""

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """x += added in place, then `rms_norm` of it."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """[rows, 2n] -> [rows, n]: silu of the first half times the second."""

    def rotate_append(
        self,
        qkv: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        batch: Batch,
        rotation: Tensor,
        kv: KvLayer,
        queries: Tensor,
    ) -> None:
        """From the qkv product [tokens, (heads + 2 * kv_heads) * dim]: norm heads, rotate pairs, append.

        Rotated queries go to `queries` [tokens, heads * dim], keys and values to the slots of their tokens.
        `rotation` float32[positions, dim / 2, 2]: cosine and sine of each position and pair.
        """


@dataclass(frozen=True)
class AttentionShape:
    """What plans need to know of a model and its device."""

    heads: Heads
    windows: tuple[int | None, ...]
    """The distinct windows of its layers."""
    dtype: torch.dtype
    device: torch.device
    device_units: int
    """Units of the whole device."""


class Attend(Protocol):
    """Attention of the rows of one batch, its plan made; used by every layer."""

    def __call__(self, queries: Tensor, kv: KvLayer, window: int | None, out: Tensor) -> None:
        """queries [tokens, heads, dim] -> out [tokens, heads, dim], causal at the end of each row's context.

        With a `window` a token sees itself and the `window - 1` tokens before it.
        """


class Planner(Protocol):
    """Makes the plans of one lane, one at a time: a plan is good until the next. No two lanes share one."""

    @property
    def bytes(self) -> int:
        """Device memory of its workspaces."""

    def plan(self, batch: Batch) -> Attend:
        """Work of the host before the layers of an item; enqueues copies at most."""


class LanePlanner(Planner, Protocol):
    """For batches of any shape on a lane; its graphs may share its workspaces, since a lane is one stream."""

    def step_planner(self, rows: int, pages: int) -> Planner:
        """For the graph of a decode step of `rows` rows and at most `pages` pages.

        What its `plan` gives is called once, while the graph is captured; later plans serve its replays. Its
        bytes are those that it takes beside the lane's.
        """


class AttentionKind(Protocol):
    """A kind of attention on a device."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> AttentionShape: ...

    def planner(self, units: int) -> LanePlanner:
        """For a lane of so many units (SMs)."""


def empty_kv_layer(
    pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KvLayer:
    """One tensor [pages, 2, PAGE_SIZE, kv_heads, head_dim] (NHD), seen as keys and values."""
    pool = torch.zeros(pages, 2, PAGE_SIZE, kv_heads, head_dim, dtype=dtype, device=device)
    return KvLayer(keys=pool[:, 0], values=pool[:, 1])


class TorchKernels:
    """The reference of the kernels, and what serves where there is no Triton."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        out.copy_(functional.rms_norm(x, (x.shape[-1],), weight, epsilon))

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self.rms_norm(x.add_(added), weight, epsilon, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=out)

    def rotate_append(
        self,
        qkv: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        batch: Batch,
        rotation: Tensor,
        kv: KvLayer,
        queries: Tensor,
    ) -> None:
        tokens = qkv.shape[0]
        parts = qkv.view(tokens, heads.queries + 2 * heads.kv, heads.dim)
        asked, keys, values = torch.split(parts, [heads.queries, heads.kv, heads.kv], dim=1)
        if norms is not None:
            asked = functional.rms_norm(asked, (heads.dim,), norms.queries, heads.epsilon)
            keys = functional.rms_norm(keys, (heads.dim,), norms.keys, heads.epsilon)
        table = torch.view_as_complex(rotation.index_select(0, batch.positions)).unsqueeze(1)
        queries.view(tokens, heads.queries, heads.dim).copy_(_rotated(asked, table))
        pages, places = (batch.slots // PAGE_SIZE).long(), (batch.slots % PAGE_SIZE).long()
        kv.keys.index_put_((pages, places), _rotated(keys, table).to(kv.keys.dtype))
        kv.values.index_put_((pages, places), values)


def _rotated(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate interleaved pairs of [tokens, heads, dim] in float32 by complex64[tokens, 1, dim / 2]."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(-2)


@dataclass(frozen=True)
class TorchAttentionKind:
    """Row by row over gathered pages, for comparisons. No graph can hold it: it reads tables on the host."""

    shape: AttentionShape
    name: str = "torch"

    def planner(self, units: int) -> LanePlanner:
        return TorchPlanner(self.shape)


class TorchPlanner:
    """Plans nothing."""

    bytes = 0

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def step_planner(self, rows: int, pages: int) -> Planner:
        """Itself where nothing is captured. A graph would go on with the contexts of its capture."""
        if self._shape.device.type == "cuda":
            raise ModelError("torch's attention can not be captured in a graph: install flashinfer or triton")
        return self

    def plan(self, batch: Batch) -> Attend:
        def attend(queries: Tensor, kv: KvLayer, window: int | None, out: Tensor) -> None:
            tables = batch.host
            for row, context in enumerate(tables.contexts.tolist()):
                pages = batch.pages[tables.page_starts[row] : tables.page_starts[row + 1]]
                span = slice(tables.query_starts[row], tables.query_starts[row + 1])
                keys, values = (_gathered(part, pages, context) for part in (kv.keys, kv.values))
                out[span] = attend_row(queries[span], keys, values, window)

        return attend


def attend_row(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of queries [new, heads, dim] at the end of keys and values [context, kv_heads, dim]."""
    new, context = queries.shape[0], keys.shape[0]
    distance = torch.arange(context - new, context)[:, None] - torch.arange(context)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    group = queries.shape[1] // keys.shape[1]
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.repeat_interleave(group, dim=1).transpose(0, 1),
        values.repeat_interleave(group, dim=1).transpose(0, 1),
        attn_mask=seen.to(queries.device),
    )
    return attended.transpose(0, 1)


def _gathered(part: Tensor, pages: Tensor, context: int) -> Tensor:
    return part.index_select(0, pages).flatten(0, 1)[:context]


def distinct_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """In the order of their first layers."""
    return tuple(dict.fromkeys(windows))
