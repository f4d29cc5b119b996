"""The attention of a fused step: decode rows first, then the tokens of a prefill chunk."""

from __future__ import annotations

import torch
from muxk.models.ops import Attention, HeadNorms, KvLayer
from torch import Tensor


class FusedAttention:
    """Hands the first rows of a qkv product to one attention and the rest to another.

    Each part appends its keys and values before it attends. The decode part goes first: a prompt may reuse a
    page whose last token this very step writes, while no decode row reads what a prefill is still writing.
    """

    def __init__(self, decode_rows: int, decode: Attention, prefill: Attention) -> None:
        """Rows past those of both are padding, which `prefill` makes zero."""
        self._decode_rows = decode_rows
        self._decode = decode
        self._prefill = prefill
        self.parts = (decode, prefill)
        """Of the first rows, and of the rest. Layers in one native call attend to each by themselves."""

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, kv: KvLayer) -> Tensor:
        decoded = self._decode(qkv[: self._decode_rows], norms, kv)
        return torch.cat([decoded, self._prefill(qkv[self._decode_rows :], norms, kv)])
