"""The plans that come with muxk."""

from __future__ import annotations

from muxk.policies.loongserve import LoongServe
from muxk.policies.plans import Plans

PLANS = Plans({"loongserve": LoongServe()})
"""By name."""
