"""Views: frozen facts that decisions are made from. Decisions: what a policy answers.

A view is a handful of sums, never a list of every request, so that `decide` costs the same at batch 4 and
at batch 256. Times are integer nanoseconds of the runtime's clock.
"""

from __future__ import annotations

import msgspec
from muxk.kernel.estimates import Estimates
from muxk.kernel.work import PrefillShape, Split


class DecodeView(msgspec.Struct, frozen=True, gc=False):
    """The running decode batch."""

    batch: int
    """Rows of the step that waits or runs; 0 when nothing decodes."""
    context_tokens: int
    waiting: bool
    """True when a step was submitted and not launched."""
    in_flight: bool
    idle_ns: int
    """Time since the last decode step ended, or 0 with no batch: how long tokens have been held."""
    tbt_slo_ns: int | None = None
    """The tightest TBT SLO of its rows' classes; None with no batch."""
    coming: int = 0
    """Rows that join it when prefill items in flight end: nothing of their prompts is left to launch."""
    coming_tokens: int = 0
    """Their context."""


class PrefillView(msgspec.Struct, frozen=True, gc=False):
    """A prefill batch: the running one, the parked one, or the candidate that would be formed next."""

    batch_id: int
    """0 for a candidate, which is not formed yet."""
    requests: int
    new_tokens: int
    reused_tokens: int
    pairs: int
    """Query-key pairs, see `work.attention_pairs`."""
    layers_left: int
    """Layers not launched yet of the chunk that was begun, or of the whole model before the next chunk."""
    arrival_ns: int
    """Of its oldest request."""
    deadline_ns: int
    """Earliest TTFT deadline of its requests."""
    depth: int
    """0, or 1 when it preempted another batch."""
    preemptions: int
    """How often it was parked."""
    chunk_tokens: int = 0
    """Tokens of the chunk that was begun and has layers left; 0 between chunks."""
    chunk_pairs: int = 0
    tokens_left: int = 0
    """New tokens of no chunk yet."""
    pairs_left: int = 0
    """Query-key pairs of those."""
    layers_launched: int = 0
    """Layers in flight, of the chunk that was begun last."""
    launched_tokens: int = 0
    """Tokens of that chunk; 0 with nothing in flight."""
    launched_pairs: int = 0
    class_rank: int = 0
    """The best (lowest) rank of its requests' classes."""
    parked_bytes: int = 0
    """Hidden state that is kept on the device while it is parked, or would be if it were."""


class QueueView(msgspec.Struct, frozen=True):
    """Requests that wait for prefill."""

    requests: int
    tokens: int


class KvView(msgspec.Struct, frozen=True):
    """Pages of the KV pool."""

    pages_total: int
    pages_free: int
    """Free or only cached: what an allocation can take."""


class View(msgspec.Struct, frozen=True, gc=False):
    """What `Policy.decide` sees at a decision point."""

    now_ns: int
    units_total: int
    splits: tuple[Split, ...]
    """Disjoint splits that the device offers, ascending in decode units; empty with a single unit."""
    split: Split
    """The split in force."""
    layers: int
    """Layers of the model."""
    decode: DecodeView
    running: PrefillView | None
    """The batch whose next layers would be launched."""
    parked: PrefillView | None
    """A batch that was preempted and waits."""
    candidate: PrefillView | None
    """The head of the waiting queue, as the batch it would start; None when nobody waits."""
    prefill_in_flight: int
    """Prefill items on the device's lanes."""
    queue: QueueView
    kv: KvView
    estimates: Estimates
    leaving: PrefillShape | None = None
    """The batch that has items in flight and nothing left to launch."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """What the arbiter does next, as far as the device and the bounds allow."""

    split: Split
    """`split.decode_units == 0` holds decode, `split.prefill_units == 0` holds prefill."""
    layers: int
    """Layers of the next prefill item; at least 1, cut to what is left."""
    preempt: bool
    """Park the running prefill and start the candidate."""
    rules: tuple[str, ...]
    """`point/rule` of every rule that fired, for explain and for counters."""
    errors: tuple[str, ...] = ()
    """What went wrong in rules that fell back; counted and logged, never fatal."""
    tokens: int | None = None
    """Tokens of the next prefill chunk, at least 1, when one begins with the next item; None: all that are
    left. The device's `chunk_tokens_max` bounds it."""
    fuse: bool = False
    """Run the chunk through all layers in one pass with the decode step, on the lane of both. While a decode
    batch runs nothing of prefill is launched by itself, and decode goes alone when no chunk is there."""

    def rule(self, point: str) -> str | None:
        """The rule that fired at a decision point, as `point/rule`."""
        return next((rule for rule in self.rules if rule.startswith(f"{point}/")), None)


class RequestView(msgspec.Struct, frozen=True):
    """A request, as `admit`, `order`, `victim` and `retain` see it."""

    request_id: int
    arrival_ns: int
    deadline_ns: int
    """Arrival plus the TTFT SLO for its prompt."""
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    pages: int
    """Pages it holds (victim), or needs for its prompt (admit, order)."""
    priority: int
    """Lower is sooner."""
    recomputes: int
    request_class: str = ""
    """What the client named; empty when it named none."""
    class_name: str = ""
    """The class that the policy put it in; empty before `Policy.classify` was asked."""


class RequestClass(msgspec.Struct, frozen=True):
    """What a policy makes of a request: one of its classes, whose SLOs and rights it gets."""

    name: str
    rank: int
    """Place among the policy's classes, from 0."""
    tbt_slo_ns: int
    ttft_slo_ns: int
    """For the prompt of this request."""
    share: float = 1.0
    """Of the prefill tokens while other classes want some too: a weight, more than 0."""
    max_wait_ns: int | None = None
    """A request that waited so long goes before all that have not; None: never."""


class ClassAnswer(msgspec.Struct, frozen=True):
    """The class of a request."""

    chosen: RequestClass
    rule: str
    errors: tuple[str, ...] = ()


class AdmitView(msgspec.Struct, frozen=True):
    """What `Policy.admit` sees when a request is tokenised."""

    now_ns: int
    request: RequestView
    queue: QueueView
    queue_bound: int
    kv: KvView
    estimates: Estimates
    class_queue: QueueView = QueueView(0, 0)
    """Requests of its class that wait."""


class AdmitAnswer(msgspec.Struct, frozen=True):
    """`accept`, or `refuse` or `shed` with the reason that the client reads."""

    action: str
    reason: str
    rule: str
    errors: tuple[str, ...] = ()


class OrderAnswer(msgspec.Struct, frozen=True):
    """The waiting queue: indices of the requests that were given, first to be served first."""

    order: tuple[int, ...]
    rule: str
    errors: tuple[str, ...] = ()


class VictimAnswer(msgspec.Struct, frozen=True):
    """Who is recomputed later: an index of the requests that were given."""

    index: int
    rule: str
    errors: tuple[str, ...] = ()


class RetainAnswer(msgspec.Struct, frozen=True):
    """Whether the pages of a finished request are kept in the prefix index."""

    keep: bool
    rule: str
    errors: tuple[str, ...] = ()


class FormView(msgspec.Struct, frozen=True):
    """What `Policy.form` sees when the prefill lane can take a new batch."""

    now_ns: int
    head: RequestView
    """First of the queue in the policy's order."""
    queue: QueueView
    decode: DecodeView
    kv: KvView
    estimates: Estimates
    class_queue: QueueView = QueueView(0, 0)
    """Requests of the head's class that wait, the head among them."""


class FormAnswer(msgspec.Struct, frozen=True):
    """How large the next prefill batch may be; the head is always taken."""

    max_requests: int
    max_tokens: int
    rule: str
    errors: tuple[str, ...] = ()


class Limits(msgspec.Struct, frozen=True):
    """Bounds that the kernel enforces for a policy."""

    backlog: int
    """Items in flight a lane may hold, 1 to 4."""
    decode_floor_ns: int
    """A decode step that waited this long is launched whatever the policy says."""
    queue_bound: int
    """Requests that may wait for prefill."""
    decode_ahead: int = 0
    """Decode steps that may be queued behind the one that runs, before its tokens are seen: 0 or 1, where the
    device can. It hides the host's time between two steps; a newcomer joins one step later."""
    preemptions: int = 16
    """How often one prefill batch may be parked."""
    parked_bytes: int = 1 << 30
    """Hidden state that parked batches may keep on the device."""
