"""Why figures of `docs/paper.md` differ from the paper's, as far as was found: by the key of the figure."""

from __future__ import annotations

from collections.abc import Mapping

EDITION = ""
"""How this edition was made."""

CHUNKED = (
    "On the modelled GPUs MuxWise is bound by prefill, not by its TBT: its P99 gap is under half of "
    "the SLO (8B) or well inside it (70B) when the queue begins to grow, and the few SMs that "
    "decode has already are what prefill loses. Chunked prefill loses less here than on the "
    "authors' system: a fused step pays the roofline, the launches and the all-reduce of its "
    "tokens, and not the scheduling of an engine in Python between two steps, which SGLang's does "
    "and which no constant of ours stands for."
)
SHAREGPT = (
    "Prompts of some 200 tokens leave little to multiplex, and how batches are formed decides: the "
    "paper does not say how, and ours takes at most 8 prompts or 512 tokens, which is under what "
    "fills the GEMMs of so many SMs, while a chunk of 512 is full. That was not tested by a run."
)

NOTES: Mapping[str, str] = {
    "8B, 8xA100, toolagent, TBT 50 ms: static disaggregation": (
        "It is at the border (1.61 with the first seed alone): one of two instances computes prompts, and "
        "that is what limits it."
    ),
    "8B, 8xA100, toolagent, TBT 50 ms: chunked": CHUNKED,
    "70B, 8xA100, toolagent, TBT 100 ms: chunked": CHUNKED,
    "8B, 8xA100, toolagent, TBT 50 ms: LoongServe": (
        "Both compute what they must at nearly the speed of the GPUs here; LoongServe's price, no "
        "reuse, is a factor of 1.6 in prompt tokens, of which it gets a part back by fewer "
        "all-reduces (tensor parallelism 2 for 8)."
    ),
    "70B, 8xA100, toolagent, TBT 100 ms: LoongServe": (
        "Without reuse, prompts of up to 123k tokens are computed whole by 4 or 8 GPUs, and a queue "
        "of them at rates where MuxWise is calm. The runs are of a version whose plan paused one "
        "decode group for a prefill and had no macro-iterations."
    ),
    "70B, 8xA100, sharegpt, TBT 100 ms: chunked": SHAREGPT,
    "70B, 8xA100, sharegpt, TBT 100 ms: static disaggregation": (
        SHAREGPT + " "
        "Static disaggregation is ahead for the same reason: its prefill instance batches 2,048 "
        "tokens."
    ),
    "70B, 8xA100, sharegpt, TBT 100 ms: LoongServe": (
        "The paper does not say why LoongServe fails so early there (9.5x). In ours its decode "
        "groups meet the SLO until the queue grows; steps of its published code may well cost more "
        "than the model's roofline."
    ),
    "8B, one A100, sharegpt, TBT 50 ms: chunked": SHAREGPT,
    "idle, MuxWise": (
        "Decode steps are queued one ahead here, so that the host's time between two steps is "
        "hidden; the paper's engine has one thread for all and counts what it costs. The load of "
        "the paper's figure is not said."
    ),
    "idle, chunked": (
        "The same: a simulated engine spends nothing between two fused steps but the launch that is modelled."
    ),
    "preemption": (
        "At 0.5 requests a second the mix asks more prefill of the modelled GPUs than they have "
        "(their goodput for LooGLE alone is under 0.2 a second), so that long prompts are late. A late "
        "one may not be parked, and by their earlier deadlines late ones go first: short prompts wait "
        "behind them with preemption (which happened 119 times) as without it. Only the paper's rate "
        "was run."
    ),
    "no layer split, 8B": (
        "The next step is queued on the device before a prompt's launches begin, so that launching "
        "a whole prompt does not make it late; the paper's engine launches one step at a time."
    ),
    "nor polling, 8B": (
        "What is lost without polling is the time of the prompts themselves: P99 picks the long "
        "ones of the trace (up to 123k tokens). The paper does not say which load and requests its "
        "figure is of."
    ),
    "nor polling, 70B": ("As for 8B."),
}
