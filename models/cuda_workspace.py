"""What FlashInfer's fa2 plans need for partial results: its planner refuses a plan that needs more.

From `PrefillPlan` in its `scheduler.cuh` (0.6.18): float32 sums and one float32 statistic for each query head
and each row of each tile, where contexts are split. Without a graph they are split only into as many tiles as
there are thread blocks for each KV head; a graph has tiles for the worst case of its rows.
"""

from __future__ import annotations

from muxk.models.ops import Heads

BLOCKS_A_UNIT = 2
"""Thread blocks that the planner counts for each SM."""
LEAST_BYTES = 128 << 20
"""What FlashInfer recommends."""
SLACK_BYTES = 1 << 20
"""For alignment."""
TILE = 128
"""Rows of the largest tile: new tokens times the query heads of a KV head."""
STEP_TILES = (16, 64)
"""Rows of the tile of one new token, whose query heads of a KV head must fit: the first that is enough."""


def attention_workspace_bytes(heads: Heads, units: int, rows: int) -> int:
    """Of a lane of so many SMs, with graphs of at most so many rows."""
    across = BLOCKS_A_UNIT * units // heads.kv
    tile = next((size for size in STEP_TILES if heads.group <= size), TILE)
    step_tiles = -(-rows * heads.group // tile) + rows - 1
    split_rows = max(across * TILE, max(across, step_tiles) * tile)
    return max(LEAST_BYTES, 4 * heads.queries * split_rows * (heads.dim + 1) + SLACK_BYTES)
