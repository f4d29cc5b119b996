"""How a card's memory is shared out: weights, workspaces, decode graphs, a reserve, and KV pages from the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
PAGES_MIN = 65
"""Page 0 and 1,024 tokens: with less nothing useful is served."""
RESERVE_SHARE = 0.03
"""Of the card's memory: what its allocator loses to fragments, and kernels that are loaded at first use."""
RESERVE_MIN = GIB
GRAPHS_SHARE = 0.02
"""Of the card's memory, for decode graphs."""
GRAPHS_MIN = GIB // 4


class DoesNotFitOnCard(ValueError):
    """The model leaves no room for KV; the text gives the bytes."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a model needs beside its KV pool."""

    model: str
    weights: int
    page: int
    """Of one KV page, over all layers."""
    lanes: int
    """Activations, workspaces and attention plans of all lanes."""
    parked: int
    """Hidden states of parked prefills."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and the pages that they make."""

    total: int
    free: int
    """When nothing of ours was on the card but its context."""
    weights: int
    lanes: int
    parked: int
    graphs: int
    """Budget of decode graphs."""
    reserve: int
    page: int
    pages: int
    """Page 0 included."""

    def describe(self) -> dict[str, int]:
        return {
            "total_bytes": self.total,
            "free_at_start_bytes": self.free,
            "weights_bytes": self.weights,
            "lanes_bytes": self.lanes,
            "parked_bytes": self.parked,
            "graphs_budget_bytes": self.graphs,
            "reserve_bytes": self.reserve,
            "kv_bytes": self.pages * self.page,
            "kv_pages": self.pages,
        }


def plan_memory(free: int, total: int, needs: MemoryNeeds, pages_wanted: int | None = None) -> MemoryPlan:
    """All that is left for KV pages, or as many as are wanted.

    Args:
        free: bytes that nobody has yet, before the weights are loaded.
        pages_wanted: page 0 included; None for as many as fit.

    Raises:
        DoesNotFitOnCard: with every part in bytes.
    """
    reserve = max(RESERVE_MIN, round(total * RESERVE_SHARE))
    graphs = max(GRAPHS_MIN, round(total * GRAPHS_SHARE))
    left = free - needs.weights - needs.lanes - needs.parked - graphs - reserve
    fitting = max(0, left) // needs.page
    wanted = PAGES_MIN if pages_wanted is None else pages_wanted
    if fitting < wanted:
        raise DoesNotFitOnCard(
            f"{needs.model} does not fit: of {total:,} bytes on the card {free:,} are free; weights take "
            f"{needs.weights:,}, lanes {needs.lanes:,}, parked prefills {needs.parked:,}, decode graphs "
            f"{graphs:,}, a reserve {reserve:,}; {max(0, left):,} are left, and {wanted:,} KV pages take "
            f"{wanted * needs.page:,}"
        )
    pages = fitting if pages_wanted is None else pages_wanted
    plan = (needs.weights, needs.lanes, needs.parked, graphs, reserve, needs.page, pages)
    return MemoryPlan(total, free, *plan)
