"""What each actor accepts, and the addresses of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxk.actors import messages as m
from muxk.kernel import messages as k
from muxk.kernel.actor import Ref
from muxk.kernel.device import ItemDone, ItemFailed

GatewayInbox = (
    k.FrameReceived
    | k.PeerGone
    | k.PeerSlow
    | m.RequestAccepted
    | m.RequestRefused
    | m.TextEmitted
    | m.RequestFailed
    | m.RequestAborted
    | m.EstimatorReady
    | m.PolicyCompiled
    | m.PolicyFileRead
    | m.PolicyFileUnreadable
    | m.ExplanationMade
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
    | k.ReportState
    | k.ReportRequests
)
KvPoolInbox = m.ReservePages | m.PagesFilled | m.GrowPages | m.ReleasePages | m.AbortRequest | k.ReportState
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
    | k.StepLaunched
    | k.DecodeFailed
    | m.PagesGrown
    | m.StopRequest
    | m.AbortRequest
    | k.PolicyChanged
    | k.ReportState
    | k.ReportRequests
)
EstimatorInbox = k.ProbeDone | k.ItemMeasured | k.ReportState
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
    | k.DecodeIdle
    | ItemDone
    | ItemFailed
    | k.DecodeFloorReached
    | k.LookForStuckItems
    | k.ReportState
    | k.ReportRequests
)


@dataclass(frozen=True)
class Refs:
    """One address an actor, and the ingress that frames to clients go through."""

    ingress: Ref[k.SendFrame] = field(default_factory=lambda: Ref("ingress"))
    gateway: Ref[GatewayInbox] = field(default_factory=lambda: Ref("gateway"))
    tokenizer: Ref[TokenizerInbox] = field(default_factory=lambda: Ref("tokenizer"))
    admission: Ref[AdmissionInbox] = field(default_factory=lambda: Ref("admission"))
    kv_pool: Ref[KvPoolInbox] = field(default_factory=lambda: Ref("kv_pool"))
    prefill: Ref[PrefillInbox] = field(default_factory=lambda: Ref("prefill"))
    decode: Ref[DecodeInbox] = field(default_factory=lambda: Ref("decode"))
    estimator: Ref[EstimatorInbox] = field(default_factory=lambda: Ref("estimator"))
    arbiter: Ref[ArbiterInbox] = field(default_factory=lambda: Ref("arbiter"))
