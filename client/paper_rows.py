"""What the MuxWise paper measured (arXiv 2504.14489v3, section 4), as runs of the simulator.

Nothing here, and no constant of a simulated card, was fitted to these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from muxk.client.cells import Cell

GPUS = 8
CARD = "sim:a100"
BUDGETS = (256, 512, 1024, 2048)
"""Token budgets that chunked prefill is tuned over, for each model and workload."""
BUDGET_70B = 256
"""What the paper's tuning came to for 70B, "under a TBT SLO of 100 ms"; none is printed for 8B."""
BATCHES = (512, 2048)
STATIC = (("borrow", "false"),)
"""Static disaggregation of the paper (SGLang-PD): one instance for prefill, one for decode."""
EVALUATED = (("max_prefill", "5s"),)
"""As LoongServe was evaluated; its code's default is shorter."""


class System(StrEnum):
    MUXWISE = "MuxWise"
    CHUNKED = "chunked"
    LOONGSERVE = "LoongServe"
    STATIC = "static disaggregation"
    TEMPORAL = "temporal only"


@dataclass(frozen=True)
class Known:
    """What a system carried in an earlier study, where runs take so long that a search has to begin there."""

    rate: float
    requests: int
    """Of a run."""


@dataclass(frozen=True)
class Setting:
    """A model on GPUs under a workload."""

    model: str
    workload: str
    tbt_ms: float
    gpus: int = GPUS
    requests: int = 300
    start: float = 4.0
    """Requests a second at which the sweep of chunked prefill's budgets begins."""
    near: float = 1.0
    """What chunked prefill carries about, as found once: where the searches of all systems begin."""
    budgets: tuple[int, ...] = BUDGETS
    printed: int | None = None
    """The budget that the paper ran chunked prefill with, if it says; else the best of the sweep is taken."""
    batches: tuple[int, ...] = ()
    """Prompt tokens that share a batch, over which MuxWise is tuned. Empty where prompts are longer than the
    largest of them: each is a batch of its own then, whatever the bound."""
    seeds: int | None = None
    """At most so many of the study's; all of them without it."""
    tolerance: float = 0.0
    """Of its searches, where it is coarser than the study's."""
    known: tuple[tuple[System, Known], ...] = ()

    def known_of(self, system: System) -> Known | None:
        return dict(self.known).get(system)

    @property
    def name(self) -> str:
        size = self.model.rpartition("-")[2].upper()
        cards = "one A100" if self.gpus == 1 else f"{self.gpus}xA100"
        return f"{size}, {cards}, {self.workload}, TBT {self.tbt_ms:g} ms"


LLAMA_8B, LLAMA_70B = "llama-3.1-8b", "llama-3.1-70b"
AGENT_8B = Setting(LLAMA_8B, "toolagent", 50.0, requests=640, start=8.0, near=6.727171322029717)
AGENT_70B = Setting(
    *(LLAMA_70B, "toolagent", 100.0), requests=480, start=2.0, near=0.8408964152537146, printed=BUDGET_70B
)
SHAREGPT_70B = Setting(
    *(LLAMA_70B, "sharegpt", 100.0),
    requests=600,
    start=16.0,
    near=16.0,
    batches=BATCHES,
    printed=BUDGET_70B,
)
LOOGLE_70B = Setting(
    *(LLAMA_70B, "loogle", 100.0), requests=240, start=0.5, near=0.08838834764831845, printed=BUDGET_70B
)
# 8,000 tokens a request, eight minutes in service each, and a pool of 1.56 million tokens on eight cards:
# with few requests a run ends before it is full, whatever the rate. So requests come for two hours, about.
THOUGHTS_70B = Setting(
    *(LLAMA_70B, "openthoughts", 100.0),
    requests=1200,
    budgets=(BUDGET_70B,),
    printed=BUDGET_70B,
    seeds=2,
    tolerance=0.25,
    known=(
        (System.MUXWISE, Known(0.3, 2400)),
        (System.CHUNKED, Known(0.3, 2400)),
        (System.LOONGSERVE, Known(0.2, 1200)),
        (System.STATIC, Known(0.16, 1200)),
    ),
)
SHAREGPT_8B = Setting(
    *(LLAMA_8B, "sharegpt", 50.0),
    gpus=1,
    requests=600,
    start=8.0,
    near=26.908685288118868,
    batches=BATCHES,
)


@dataclass(frozen=True)
class Figure:
    """A ratio of goodputs: MuxWise over another system."""

    row: int
    setting: Setting
    other: System
    paper: float | None
    """None: the other one never meets its SLO."""
    note: str = ""
    """What the paper says besides."""

    @property
    def key(self) -> str:
        return f"{self.setting.name}: {self.other.value}"


FIGURES = (
    Figure(1, AGENT_8B, System.CHUNKED, 2.6),
    Figure(1, AGENT_8B, System.LOONGSERVE, 2.0),
    Figure(1, AGENT_8B, System.STATIC, 1.3),
    Figure(2, AGENT_70B, System.CHUNKED, 3.06),
    Figure(2, AGENT_70B, System.LOONGSERVE, 2.62),
    Figure(2, AGENT_70B, System.STATIC, 1.62),
    Figure(3, SHAREGPT_70B, System.CHUNKED, 1.9),
    Figure(3, SHAREGPT_70B, System.LOONGSERVE, 9.5),
    Figure(3, SHAREGPT_70B, System.STATIC, 1.46),
    Figure(4, LOOGLE_70B, System.CHUNKED, 1.71),
    Figure(4, LOOGLE_70B, System.LOONGSERVE, 1.33),
    Figure(4, LOOGLE_70B, System.STATIC, 2.0),
    Figure(5, THOUGHTS_70B, System.CHUNKED, 2.0),
    Figure(5, THOUGHTS_70B, System.LOONGSERVE, None, "never meets"),
    Figure(5, THOUGHTS_70B, System.STATIC, 2.0, "about 2x"),
    Figure(6, SHAREGPT_8B, System.CHUNKED, 1.2),
    Figure(7, AGENT_8B, System.TEMPORAL, 1.25, "at least 20 % worse; the setting is not said"),
)
AT_LEAST = (7,)
"""Rows whose figure is a bound: more is met too."""


def device_of(system: System, setting: Setting, moved: str = "") -> str:
    """How the paper spreads a system over the GPUs; `moved` is appended to the device's name.

    LoongServe: sequence parallelism 2 of tensor parallelism 4 for 70B, 4 of 2 for 8B. SGLang-PD: 4 and 4
    GPUs.
    """
    if setting.gpus == 1:
        return CARD + moved
    if system is System.LOONGSERVE:
        tp, devices = (4, 2) if setting.model == LLAMA_70B else (2, 4)
        return f"{CARD},tp={tp},devices={devices}{moved}"
    if system is System.STATIC:
        return f"{CARD},tp={setting.gpus // 2},devices=2{moved}"
    return f"{CARD},tp={setting.gpus}{moved}"


POLICIES: Mapping[System, str] = {
    System.MUXWISE: "muxwise",
    System.CHUNKED: "chunked",
    System.LOONGSERVE: "loongserve",
    System.STATIC: "splitwise",
    System.TEMPORAL: "temporal",
}


def cell_of(
    system: System, setting: Setting, budget: int | None = None, profile: str | None = None, moved: str = ""
) -> Cell:
    """A run at no rate yet; `budget` is chunked prefill's, or that of MuxWise's batches where it is not the
    policy's own, `profile` a file of `muxk profile`."""
    settings: tuple[tuple[str, str], ...] = ()
    if system is System.CHUNKED:
        assert budget is not None
        settings = (("budget", str(budget)),)
    elif system is System.MUXWISE and budget is not None:
        settings = (("batch_tokens", str(budget)),)
    elif system is System.STATIC:
        settings = STATIC
    elif system is System.LOONGSERVE:
        settings = EVALUATED
    known = setting.known_of(system)
    return Cell(
        policy=POLICIES[system],
        settings=settings,
        device=device_of(system, setting, moved),
        model=setting.model,
        workload=setting.workload,
        requests=setting.requests if known is None else known.requests,
        tbt_ms=setting.tbt_ms,
        profile=profile if system in (System.MUXWISE, System.TEMPORAL) else None,
    )
