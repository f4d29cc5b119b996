"""Partitions on a made-up driver: the calls are the real bindings', the rules are those of cuda.h."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fake_cuda import INSTALLED, Failed, FakeCuda, build

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs cuda-bindings: make install brings them")

H200 = {"SMS": 132, "MAJOR": 9, "MINOR": 0, "FIELDS": 1, "GREEN": 1}
H200 |= {"LIE": 0, "ROUND": 0, "OVERLAP": 0, "REFUSE_STRUCTURED": 0}
NON_BLOCKING = 1

Start = Callable[..., FakeCuda]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts processes with a driver that has what it has from its start."""
    folder = build(tmp_path_factory.mktemp("driver"))
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(FakeCuda(folder, **settings))


@pytest.fixture(scope="module")
def old_process(start: Start) -> FakeCuda:
    """CUDA 13.0: splits by count only."""
    return start(DRIVER=13000)


@pytest.fixture(scope="module")
def new_process(start: Start) -> FakeCuda:
    """CUDA 13.1: structured splits."""
    return start(DRIVER=13010)


@pytest.fixture
def cuda(old_process: FakeCuda) -> Iterator[FakeCuda]:
    """A card of 132 SMs on CUDA 13.0."""
    old_process.set(**H200)
    yield old_process
    leave_nothing(old_process)


@pytest.fixture
def newer(new_process: FakeCuda) -> Iterator[FakeCuda]:
    """The same card on CUDA 13.1."""
    new_process.set(**H200)
    yield new_process
    leave_nothing(new_process)


def leave_nothing(cuda: FakeCuda) -> None:
    """What a failed test left open is closed, so that only that test fails."""
    cuda.fail(0)
    if cuda.alive():
        cuda.close()


def test_decode_and_prefill_get_streams_on_disjoint_sms_that_together_are_the_device(cuda: FakeCuda) -> None:
    described = cuda.open()
    splits = cuda.ask("splits")
    assert splits == [[16, 116], [24, 108], [32, 100], [48, 84], [64, 68], [80, 52], [96, 36]]
    for decode, prefill in splits:
        streams = cuda.ask("stream", "decode", decode), cuda.ask("stream", "prefill", prefill)
        assert cuda.ask("shared", *streams) == 0
        assert [cuda.ask("shared", stream, stream) for stream in streams] == [decode, prefill]
    assert described["why_not"] is None
    assert described["granularity"] == {"minimum": 8, "alignment": 8, "source": "driver"}
    assert {part["method"] for part in described["parts"]} == {"by count"}
    cuda.close()
    assert not cuda.alive()


def test_a_full_device_pair_covers_all_sms(cuda: FakeCuda) -> None:
    cuda.open([64])
    streams = [cuda.ask("stream", phase, 132) for phase in ("decode", "prefill")]
    assert streams[0] != streams[1]
    assert cuda.ask("shared", *streams) == 132
    cuda.close()


def test_decode_runs_before_prefill_and_no_stream_waits_for_the_default_one(cuda: FakeCuda) -> None:
    cuda.open([64])
    for units in ((64, 68), (132, 132)):
        decode, prefill = (
            cuda.ask("priority_and_flags", cuda.ask("stream", phase, count))
            for phase, count in zip(("decode", "prefill"), units, strict=True)
        )
        assert decode[0] < prefill[0]
        assert decode[1] == prefill[1] == NON_BLOCKING
    cuda.close()


@pytest.mark.parametrize(
    ("card", "splits"),
    [
        ({"SMS": 108, "MAJOR": 8}, [12, 20, 26, 40, 54, 66, 80]),
        ({"SMS": 72, "MAJOR": 7, "MINOR": 5}, [8, 12, 18, 26, 36, 44, 54]),
        ({"SMS": 16}, [8]),
        ({"SMS": 148, "MAJOR": 10}, [16, 24, 32, 48, 72, 88, 104]),
    ],
)
def test_the_default_menu_suits_the_card(cuda: FakeCuda, card: dict[str, int], splits: list[int]) -> None:
    cuda.set(**card)
    cuda.open()
    assert cuda.ask("splits") == [[decode, card["SMS"] - decode] for decode in splits]
    cuda.close()


def test_the_granularity_comes_from_the_table_where_the_driver_does_not_say(cuda: FakeCuda) -> None:
    cuda.set(FIELDS=0, SMS=108, MAJOR=8)
    assert cuda.open([4])["granularity"] == {"minimum": 4, "alignment": 2, "source": "capability"}
    cuda.close()


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        (4, "the least is 8"),
        (0, "the least is 8"),
        (-8, "the least is 8"),
        (20, "they come in multiples of 8: 16 or 24"),
        (118, "they come in multiples of 8: 112 or 120"),
        (125, "that leaves 7 for prefill, which needs 8: at most 120"),
        (128, "that leaves 4 for prefill, which needs 8: at most 120"),
        (132, "that leaves 0 for prefill, which needs 8: at most 120"),
        (136, "there are only 132: at most 120"),
    ],
)
def test_a_count_that_the_card_can_not_have_is_refused_with_what_it_can(
    cuda: FakeCuda, decode: int, why: str
) -> None:
    with pytest.raises(Failed, match="PartitionRefused") as raised:
        cuda.open([16, decode])
    assert raised.value.text == f"a decode partition of {decode} SMs can not be had on NVIDIA Fake 200: {why}"
    assert not cuda.alive()


def test_a_menu_longer_than_the_bound_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(Failed, match="a menu of 17 splits was asked for, and 16 are the most"):
        cuda.open([8] * 17)


def test_a_menu_may_be_in_any_order_and_name_a_split_twice(cuda: FakeCuda) -> None:
    cuda.open([64, 16, 64])
    assert cuda.ask("splits") == [[16, 116], [64, 68]]
    cuda.close()


def test_a_context_with_other_sms_than_were_asked_is_an_error_and_not_a_smaller_partition(
    cuda: FakeCuda,
) -> None:
    cuda.set(LIE=2)
    with pytest.raises(Failed, match="was to have 64 SMs, and its context has 62"):
        cuda.open([64])
    with pytest.raises(Failed, match="PartitionRefused"):
        cuda.open()
    assert not cuda.alive()


def test_a_driver_that_rounds_up_is_refused_for_a_count_that_was_asked(cuda: FakeCuda) -> None:
    cuda.set(ROUND=16)
    with pytest.raises(Failed, match="the driver would make one of 32: ask for that"):
        cuda.open([24])
    cuda.open()
    assert cuda.ask("splits") == [[16, 116], [32, 100], [48, 84], [64, 68], [80, 52], [96, 36]]
    cuda.close()


def test_partitions_that_overlap_are_refused(cuda: FakeCuda) -> None:
    cuda.set(OVERLAP=1)
    with pytest.raises(Failed, match="partitions of NVIDIA Fake 200 that overlap: 64 and 132 SMs"):
        cuda.open([64])
    assert not cuda.alive()


def test_a_driver_with_the_structured_split_is_asked_for_it(newer: FakeCuda) -> None:
    described = newer.open()
    assert {part["method"] for part in described["parts"]} == {"structured"}
    assert newer.ask("splits")[0] == [16, 116]
    newer.close()
    assert not newer.alive()


def test_a_structured_split_that_is_refused_is_made_by_count(newer: FakeCuda) -> None:
    newer.set(REFUSE_STRUCTURED=1)
    assert newer.open([64])["parts"] == [
        {"split": {"decode_units": 64, "prefill_units": 68}, "method": "by count"}
    ]
    newer.close()


def assert_shares_the_device(cuda: FakeCuda, why: str) -> None:
    """Two prioritised streams on all SMs, and the reason."""
    assert why in cuda.open()["why_not"]
    [[decode, prefill]] = cuda.ask("splits")
    streams = cuda.ask("stream", "decode", decode), cuda.ask("stream", "prefill", prefill)
    assert cuda.ask("shared", *streams) == decode + prefill
    assert cuda.ask("priority_and_flags", streams[0])[0] < cuda.ask("priority_and_flags", streams[1])[0]
    cuda.close()
    assert not cuda.alive()


def test_a_slice_too_small_for_two_partitions_is_shared_and_says_so(cuda: FakeCuda) -> None:
    cuda.set(SMS=14)
    assert_shares_the_device(cuda, "14 SMs are too few for two partitions of 8 or more in steps of 8")


def test_a_device_without_green_contexts_is_shared_and_says_so(cuda: FakeCuda) -> None:
    cuda.set(GREEN=0)
    assert_shares_the_device(cuda, "operation not supported")


def test_a_driver_from_before_green_contexts_is_shared_and_says_so(start: Start) -> None:
    assert_shares_the_device(
        start(DRIVER=12020), "the driver implements CUDA 12.2, and green contexts need 12.5 or later"
    )


@pytest.mark.parametrize("missing", ["cuGreenCtxStreamCreate", "cuDevSmResourceSplitByCount"])
def test_a_driver_that_lacks_one_of_the_calls_is_shared_and_says_so(start: Start, missing: str) -> None:
    cuda = start(DRIVER=13000, MISSING=missing)
    assert_shares_the_device(cuda, f"{missing} failed: it is not in the installed driver")


def test_ten_thousand_cycles_leave_nothing_behind(cuda: FakeCuda) -> None:
    grown_kib = cuda.ask("cycles", 10_000, [64])
    figures = cuda.figures()
    assert not cuda.alive()
    assert figures["made_greens"] >= 20_000
    assert grown_kib < 4096


@pytest.mark.parametrize("menu", [[64], [16, 64]])
def test_a_failure_of_any_call_leaves_nothing_behind(cuda: FakeCuda, menu: list[int]) -> None:
    cuda.fail(0)
    before = cuda.figures()["calls"]
    cuda.open(menu)
    calls = cuda.figures()["calls"] - before
    cuda.close()
    failures = set()
    for at in range(1, calls + 1):
        cuda.fail(at)
        with pytest.raises(Failed) as raised:
            cuda.open(menu)
        cuda.fail(0)
        assert not cuda.alive(), f"after a failure of call {at}: {raised.value}"
        failures.add(raised.value.kind)
    assert failures == {"CudaError", "CudaUnavailable"}


def test_an_error_names_the_call_the_reason_and_what_to_look_at(cuda: FakeCuda) -> None:
    cuda.fail(1, "cuGreenCtxCreate", 2)
    with pytest.raises(Failed) as raised:
        cuda.open([64])
    assert raised.value.text == (
        "cuGreenCtxCreate failed: out of memory (the card's memory is full: look at nvidia-smi for other "
        "processes on it), CUDA_ERROR_OUT_OF_MEMORY"
    )


def test_streams_are_destroyed_before_their_contexts_and_closing_twice_is_one(cuda: FakeCuda) -> None:
    cuda.open()
    assert cuda.alive() == {"primaries": 15, "greens": 14, "streams": 16}
    cuda.close()
    assert not cuda.alive()  # which counts contexts that went before a stream of theirs
    cuda.close()
    assert not cuda.alive()


def test_nothing_is_destroyed_while_work_runs(cuda: FakeCuda) -> None:
    cuda.open([64])
    stream = cuda.ask("stream", "prefill", 68)
    cuda.ask("busy", stream, 1, 0)
    with pytest.raises(Failed, match="PartitionsBusy: work runs on 1 streams"):
        cuda.close()
    assert cuda.figures()["greens"] == 2
    cuda.ask("busy", stream, 0, 0)
    cuda.close()
    assert not cuda.alive()


def test_a_lost_device_is_given_back_all_the_same(cuda: FakeCuda) -> None:
    cuda.open([64])
    cuda.ask("busy", cuda.ask("stream", "decode", 64), 0, 1)
    cuda.close()
    assert not cuda.alive()


def test_what_can_not_be_destroyed_keeps_nothing_else_alive(start: Start) -> None:
    cuda = start(DRIVER=13000)
    cuda.open([64])
    cuda.fail(1, "cuGreenCtxDestroy", 719)
    with pytest.raises(Failed, match="cuGreenCtxDestroy failed: unspecified launch failure"):
        cuda.close()
    assert cuda.alive() == {"primaries": 1, "greens": 1}


def test_a_partition_that_is_not_there_is_named_with_those_that_are(cuda: FakeCuda) -> None:
    cuda.open([16, 64])
    with pytest.raises(Failed, match="no decode partition has 24 SMs: there are 16, 64, 132"):
        cuda.ask("stream", "decode", 24)
    cuda.close()
