"""What each actor accepts, and the addresses of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors import group_messages as g
from muxk.actors import messages as m
from muxk.actors import policy_messages as p
from muxk.kernel import messages as k
from muxk.kernel.actor import Ref
from muxk.kernel.device import DeviceFailed, ItemDone, ItemFailed
from muxk.kernel.link import MigrationDone, MigrationFailed

GatewayInbox = (
    k.FrameReceived
    | k.PeerGone
    | k.PeerSlow
    | m.RequestAccepted
    | m.RequestRefused
    | m.TextEmitted
    | m.IdsEmitted
    | m.RequestFailed
    | m.RequestAborted
    | m.EstimatorReady
    | p.PolicyCompiled
    | p.PolicyFileRead
    | p.PolicyFileUnreadable
    | p.ExplanationMade
    | m.KeepAlive
    | k.StateReported
    | k.RequestsReported
    | k.LaneStuck
    | k.LaneMoved
    | k.EngineFailed
)
TokenizerInbox = (
    m.EncodeRequest
    | m.PromptEncoded
    | m.EncodeFailed
    | m.TokensEmitted
    | m.RequestRefused
    | m.RequestFailed
    | m.AbortRequest
    | k.ReportState
    | k.ReportRequests
)
AdmissionInbox = (
    m.AdmitRequest
    | k.FormBatch
    | m.PagesReserved
    | m.PagesFreed
    | m.FindHead
    | m.RecomputeRequest
    | m.AbortRequest
    | k.KvChanged
    | k.EstimatesChanged
    | k.PolicyChanged
    | m.LookForOverdue
    | g.DevicesTaken
    | k.ReportState
    | k.ReportRequests
)
KvPoolInbox = (
    m.ReservePages
    | m.PagesFilled
    | m.GrowPages
    | m.ReleasePages
    | m.AbortRequest
    | g.PinPrefix
    | g.MakeRoom
    | g.PrefixArrived
    | g.PrefixUnwanted
    | g.ReceiveRequest
    | g.ReleaseDevice
    | g.TakeDevices
    | k.ReportState
)
PrefillInbox = (
    m.StartPrefill
    | k.PrefillDone
    | k.PrefillFailed
    | k.PrefillCancelled
    | m.AbortRequest
    | k.PolicyChanged
    | k.ReportState
    | k.ReportRequests
)
DecodeInbox = (
    m.JoinDecode
    | k.DecodeStepDone
    | k.StepsRan
    | k.StepLaunched
    | k.DecodeFailed
    | m.PagesGrown
    | m.StopRequest
    | m.AbortRequest
    | g.ResumeDecode
    | g.MoveDecode
    | k.PolicyChanged
    | k.ReportState
    | k.ReportRequests
)
EstimatorInbox = k.ProbeDone | k.ItemsMeasured | k.PolicyChanged | k.ReportState
ArbiterInbox = (
    k.RunProbe
    | k.EstimatesChanged
    | k.PolicyChanged
    | k.QueueChanged
    | k.KvChanged
    | k.BatchNotFormed
    | k.SubmitPrefill
    | k.BatchClassified
    | k.CancelPrefill
    | k.SubmitDecode
    | k.MoreSteps
    | k.DecodeIdle
    | ItemDone
    | ItemFailed
    | DeviceFailed
    | k.DecodeFloorReached
    | k.LookForStuckItems
    | k.ResizeGroup
    | k.ReportState
    | k.ReportRequests
)
PlacementInbox = (
    m.AdmitRequest
    | m.RecomputeRequest
    | m.AbortRequest
    | m.StopRequest
    | m.EstimatorReady
    | g.RequestsJoined
    | g.RequestMigrated
    | g.RequestEnded
    | g.DeviceReleased
    | g.DevicesTaken
    | k.GroupResized
    | k.KvChanged
    | k.EstimatesChanged
    | k.PolicyChanged
    | k.ReportState
    | k.ReportRequests
)
MigrationInbox = (
    g.FetchPrefix
    | g.PrefixPinned
    | g.RoomMade
    | g.PrefixKept
    | g.MigrateRequest
    | g.RequestReceived
    | g.RoomFreed
    | MigrationDone
    | MigrationFailed
    | m.AbortRequest
    | g.RequestEnded
    | k.ReportState
    | k.ReportRequests
)


@dataclass(frozen=True)
class Refs:
    """One address an actor, and the ingress that frames to clients go through.

    With several devices each group has a `Refs` of its own, see `group_refs`.
    """

    ingress: Ref[k.SendFrame | k.LossHeard] = field(default_factory=lambda: Ref("ingress"))
    gateway: Ref[GatewayInbox] = field(default_factory=lambda: Ref("gateway"))
    tokenizer: Ref[TokenizerInbox] = field(default_factory=lambda: Ref("tokenizer"))
    admission: Ref[AdmissionInbox] = field(default_factory=lambda: Ref("admission"))
    kv_pool: Ref[KvPoolInbox] = field(default_factory=lambda: Ref("kv_pool"))
    prefill: Ref[PrefillInbox] = field(default_factory=lambda: Ref("prefill"))
    decode: Ref[DecodeInbox] = field(default_factory=lambda: Ref("decode"))
    estimator: Ref[EstimatorInbox] = field(default_factory=lambda: Ref("estimator"))
    arbiter: Ref[ArbiterInbox] = field(default_factory=lambda: Ref("arbiter"))
    group: int = 0
    intake: Ref[m.AdmitRequest | m.RecomputeRequest | m.AbortRequest] = field(
        default_factory=lambda: Ref("admission")
    )
    """Where requests go that no group has: to the only one's admission, or to placement."""
    stops: Ref[m.StopRequest] = field(default_factory=lambda: Ref("decode"))
    """Who finds the decode of a request."""
    chased: Ref[m.AbortRequest] = field(default_factory=lambda: Ref("kv_pool"))
    """Where a request went that decode does not have."""
    readiness: Ref[m.EstimatorReady] = field(default_factory=lambda: Ref("gateway"))
    placement: Ref[PlacementInbox] | None = None
    """None with one device."""
    migration: Ref[MigrationInbox] | None = None


def group_refs(group: int) -> Refs:
    """The addresses that the actors of one group of several use."""
    return Refs(
        admission=Ref(f"admission@{group}"),
        kv_pool=Ref(f"kv_pool@{group}"),
        prefill=Ref(f"prefill@{group}"),
        decode=Ref(f"decode@{group}"),
        estimator=Ref(f"estimator@{group}"),
        arbiter=Ref(f"arbiter@{group}"),
        group=group,
        intake=Ref("placement"),
        stops=Ref("placement"),
        chased=Ref("migration"),
        readiness=Ref("placement"),
        placement=Ref("placement"),
        migration=Ref("migration"),
    )


@dataclass(frozen=True)
class Everybody:
    """Whom the gateway asks and tells: the actors of all groups."""

    tokenizer: Ref[TokenizerInbox]
    groups: tuple[Refs, ...]

    @property
    def reporting(self) -> tuple[Ref[k.ReportState], ...]:
        """Who describes itself."""
        refs: list[Ref[k.ReportState]] = [self.tokenizer]
        for group in self.groups:
            refs += [group.admission, group.kv_pool, group.prefill, group.decode]
            refs += [group.estimator, group.arbiter]
        first = self.groups[0]
        return (*refs, *(ref for ref in (first.placement, first.migration) if ref is not None))

    @property
    def holding(self) -> tuple[Ref[k.ReportRequests], ...]:
        """Who may have requests."""
        refs: list[Ref[k.ReportRequests]] = [self.tokenizer]
        for group in self.groups:
            refs += [group.admission, group.prefill, group.decode, group.arbiter]
        first = self.groups[0]
        return (*refs, *(ref for ref in (first.placement, first.migration) if ref is not None))

    @property
    def deciding(self) -> tuple[Ref[k.PolicyChanged], ...]:
        """Who asks the policy."""
        placement = self.groups[0].placement
        refs: list[Ref[k.PolicyChanged]] = [] if placement is None else [placement]
        for group in self.groups:
            refs += [group.arbiter, group.admission, group.prefill, group.decode, group.estimator]
        return tuple(refs)
