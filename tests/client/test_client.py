"""The blocking client against a gateway that says what each test wants."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gateway import (
    FakeGateway,
    Frames,
    Vanish,
    finished,
    patient,
    silent_after_hello,
    talkative,
    welcome,
)
from muxk.client import Client, ConnectError, PolicyNotFound, PolicyRefused, RequestError, protocol


def test_text_arrives_piece_by_piece_and_the_result_has_all_of_it(endpoint: str) -> None:
    with FakeGateway(endpoint), Client(endpoint) as client:
        stream = client.submit("hello", max_tokens=4)
        assert [delta.text for delta in stream] == ["w0 ", "w1 ", "w2 ", "w3 "]
        result = stream.result()
        assert result.text == "w0 w1 w2 w3 "
        assert result.token_ids == (0, 1, 2, 3)
        assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == ("length", 3, 4)


def test_what_is_submitted_reaches_the_server_as_it_was_given(endpoint: str) -> None:
    with FakeGateway(endpoint) as gateway, Client(endpoint) as client:
        client.submit(token_ids=[5, 6], temperature=0.0, stop=["END"], seed=9, ignore_eos=True).result()
        sent = gateway.wait_for(protocol.Submit)
        assert (sent.prompt_token_ids, sent.temperature, sent.stop) == ([5, 6], 0.0, ["END"])
        assert (sent.seed, sent.ignore_eos, sent.max_tokens) == (9, True, None)
        client.submit(messages=[{"role": "user", "content": "hi"}]).result()
        assert gateway.wait_for(protocol.Submit).messages == [protocol.ChatMessage("user", "hi")]


def test_two_streams_at_once_each_get_their_own_tokens(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        one, two = client.submit("one"), client.submit("two")
        # The gateway answers a submit by itself: wait for that, or what is said here may overtake it.
        assert next(one).text == next(two).text == "first "
        for text in ("a", "b"):
            gateway.say(
                protocol.Tokens(one.request_id, f"1{text}", (1,)),
                protocol.Tokens(two.request_id, f"2{text}", (2,)),
            )
        gateway.say(finished(two.request_id), finished(one.request_id))
        assert one.result().text == "first 1a1b"
        assert two.result().text == "first 2a2b"


def test_abort_ends_a_stream_with_its_reason_and_keeps_its_text(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        stream = client.submit("go on")
        assert next(stream).text == "first "
        stream.abort()
        assert list(stream) == []
        assert (stream.result().finish_reason, stream.result().text) == ("abort", "first ")
        assert gateway.wait_for(protocol.Abort).request_id == stream.request_id


def test_leaving_a_stream_early_aborts_it(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        with client.submit("go on") as stream:
            next(stream)
        assert gateway.wait_for(protocol.Abort).request_id == stream.request_id


def test_without_a_server_the_error_names_the_endpoint_and_the_command(endpoint: str) -> None:
    with pytest.raises(
        ConnectError, match=r"nothing listens there\n.*muxk run policies/muxwise.yaml"
    ) as caught:
        Client(endpoint)
    assert endpoint in str(caught.value)


def test_a_nonsense_endpoint_is_told_at_once() -> None:
    with pytest.raises(ConnectError, match="the endpoint can not be used"):
        Client("nowhere")


def test_a_server_that_never_answers_is_given_up(endpoint: str) -> None:
    def mute(_command: protocol.Command) -> Frames:
        yield from ()

    with FakeGateway(endpoint, mute), pytest.raises(ConnectError, match="did not answer within"):
        Client(endpoint, connect_timeout_s=0.1)


def test_a_server_of_another_version_is_refused(endpoint: str) -> None:
    def newer(_command: protocol.Command) -> Frames:
        yield (welcome(version=99),)

    with FakeGateway(endpoint, newer), pytest.raises(ConnectError, match="protocol version 99"):
        Client(endpoint)


def test_a_server_that_goes_in_mid_stream_is_an_error_and_not_a_hang(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        stream = client.submit("go on")
        gateway.wait_for(protocol.Submit)
        gateway.vanish()
        assert next(stream).text == "first "
        with pytest.raises(RequestError, match="the server is gone") as caught:
            next(stream)
        assert caught.value.code == "server_gone"
        with pytest.raises(RequestError, match="the server is gone"):
            client.submit("another")


def test_a_server_that_hangs_with_its_socket_open_is_given_up(endpoint: str) -> None:
    class HelloOnce:
        said = False

        def __call__(self, command: protocol.Command) -> Frames:
            if not self.said:
                self.said = True
                yield from silent_after_hello(command)

    with FakeGateway(endpoint, HelloOnce()), Client(endpoint, silence_s=0.4) as client:
        with pytest.raises(RequestError) as caught:
            client.submit("hello?").result()
        assert caught.value.code == "server_silent"


def test_a_server_that_is_only_busy_is_asked_and_kept(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint, silence_s=0.4) as client:
        stream = client.submit("something long")
        gateway.wait_for(protocol.Hello)
        gateway.wait_for(protocol.Submit)
        for _ in range(3):
            gateway.wait_for(protocol.Hello)
        gateway.say(finished(stream.request_id))
        assert stream.result().finish_reason == "length"


def test_a_refused_request_raises_its_code_and_disturbs_no_other(endpoint: str) -> None:
    def full(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Submit) and command.prompt == "big":
            yield (protocol.Failed(command.request_id, "never_fits", "needs 99 pages, the pool has 9"),)
        else:
            yield from talkative(command)

    with FakeGateway(endpoint, full), Client(endpoint) as client:
        with pytest.raises(RequestError, match="needs 99 pages") as caught:
            client.submit("big").result()
        assert caught.value.code == "never_fits"
        assert client.submit("small").result().finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one of"),
        ({"prompt": "a", "max_tokens": "many"}, "Expected `int"),
        ({"token_ids": [1.5]}, "integer"),
        ({"token_ids": [2**70]}, "serialize ints"),
        ({"messages": [{"role": "user"}]}, "'content'"),
        ({"prompt": "a", "request_id": ""}, "request_id"),
    ],
)
def test_a_mistake_in_a_request_is_told_before_it_is_sent(
    endpoint: str, arguments: dict[str, Any], complaint: str
) -> None:
    with FakeGateway(endpoint), Client(endpoint) as client:
        with pytest.raises(RequestError, match=complaint) as caught:
            client.submit(**arguments)
        assert caught.value.code == "invalid"
        assert client.submit("fine").result().finish_reason == "length"


def test_a_live_request_id_is_not_sent_twice(endpoint: str) -> None:
    with FakeGateway(endpoint, patient), Client(endpoint) as client:
        stream = client.submit("a", request_id="mine")
        with pytest.raises(RequestError, match="'mine' is still live"):
            client.submit("b", request_id="mine")
        stream.abort()
        stream.result()
        client.submit("c", request_id="mine").abort()


def test_a_result_that_takes_too_long_raises_and_the_request_goes_on(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        stream = client.submit("slow")
        with pytest.raises(RequestError) as caught:
            stream.result(timeout_s=0.05)
        assert caught.value.code == "timeout"
        gateway.say(finished(stream.request_id))
        assert stream.result().text == "first "


def test_a_frame_that_is_none_ends_the_connection_with_an_error(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway, Client(endpoint) as client:
        stream = client.submit("hello")
        gateway.wait_for(protocol.Submit)
        gateway.say_raw(b"\xc1 garbage")
        with pytest.raises(RequestError) as caught:
            stream.result()
        assert caught.value.code == "protocol"


def test_a_command_that_the_server_does_not_understand_fails_what_waits_for_it(endpoint: str) -> None:
    def puzzled(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Hello):
            yield (welcome(),)
        else:
            yield (protocol.ProtocolError("what?"),)

    with FakeGateway(endpoint, puzzled), Client(endpoint) as client:
        with pytest.raises(RequestError, match=r"what\?"):
            client.submit("hello").result()
        with pytest.raises(RequestError, match=r"what\?"):
            client.state()


def test_state_ping_and_drain_are_answered(endpoint: str) -> None:
    with FakeGateway(endpoint) as gateway, Client(endpoint) as client:
        assert client.server.vocabulary_size == 1000
        assert client.state()["server"]["tokens"] == 7
        assert 0 < client.ping() < 5
        client.drain()
        gateway.wait_for(protocol.Drain)


def test_draining_an_idle_server_that_stops_at_once_is_no_error(endpoint: str) -> None:
    def leaving(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Drain):
            raise Vanish
        yield from talkative(command)

    with FakeGateway(endpoint, leaving), Client(endpoint) as client:
        client.drain()


def test_a_swap_sends_the_text_and_names_what_runs_now(endpoint: str, tmp_path: Any) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("extends: muxwise\n", encoding="utf-8")
    with FakeGateway(endpoint) as gateway, Client(endpoint) as client:
        assert client.swap(policy, {"slo.tbt": "40ms"}).name == "inflight"
        sent = gateway.wait_for(protocol.SwapPolicy)
        assert (sent.source, sent.filename) == ("extends: muxwise\n", str(policy))
        assert sent.settings == {"slo.tbt": "40ms"}
        client.swap("muxwise")
        assert "kind: SchedulingPolicy" in gateway.wait_for(protocol.SwapPolicy).source


def test_a_refused_swap_raises_the_report(endpoint: str) -> None:
    def strict(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.SwapPolicy):
            yield (protocol.PolicySwapped(command.ticket, False, "", "", "x.yaml:3:5: unknown key"),)
        else:
            yield from talkative(command)

    with FakeGateway(endpoint, strict), Client(endpoint) as client:
        with pytest.raises(PolicyRefused, match="unknown key"):
            client.swap("muxwise")
        with pytest.raises(PolicyNotFound, match=r"shipped policies are: .*inflight.*muxwise"):
            client.swap("no-such-policy.yaml")


def test_closing_the_client_fails_what_is_open(endpoint: str) -> None:
    with FakeGateway(endpoint, patient) as gateway:
        client = Client(endpoint)
        stream = client.submit("go on")
        gateway.wait_for(protocol.Submit)
        client.close()
        client.close()
        with pytest.raises((RequestError, RuntimeError)):
            stream.result()
