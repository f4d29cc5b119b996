"""Choices, log-probabilities, echo and notes in the client and on its command line; output nobody reads."""

from __future__ import annotations

import json

import anyio
import msgspec
import pytest
from fake_gateway import FakeGateway, Frames, finished, talkative
from muxk.client import AsyncClient, Client, RequestError, cli, protocol
from muxk.client.inbox import LOGPROB_BYTES, TOKEN_BYTES, Inbox
from muxk.client.session import Session
from typer.testing import CliRunner, Result

NOTE = "priority has no effect: no rule of the policy muxwise looks at it"
FIRST = protocol.TokenLogprob(7, b"\xc3", -0.25, 1, (7, 9), (b"\xc3", b" no"), (-0.25, -1.5))


def generous(command: protocol.Command) -> Frames:
    """Two tokens for each choice, in turns; choice 0 is the last to end. Everything that may be asked for."""
    if not isinstance(command, protocol.Submit):
        yield from talkative(command)
        return
    name, count = command.request_id, command.n
    yield (protocol.Accepted(name, 3, (NOTE,) if command.priority else ()),)
    if command.echo:
        yield (protocol.Prompt(name, "Once", (1, 2), (FIRST,)),)
    if command.max_tokens != 0:
        logprobs = () if command.logprobs is None else (FIRST,)
        for word in ("a", "b"):
            yield tuple(
                protocol.Tokens(name, f"{word}{choice}", (choice,), choice, logprobs)
                for choice in range(count)
            )
    if count > 1:
        yield tuple(
            protocol.ChoiceFinished(name, choice, "stop", choice, 2) for choice in reversed(range(count))
        )
    yield (finished(name, tokens=2 * count),)


def test_the_choices_of_a_request_are_told_apart(endpoint: str) -> None:
    with FakeGateway(endpoint, generous) as gateway, Client(endpoint) as client:
        stream = client.submit("x", n=3, temperature=1.0)
        assert [(delta.choice, delta.text) for delta in stream][:4] == [
            (0, "a0"),
            (1, "a1"),
            (2, "a2"),
            (0, "b0"),
        ]
        result = stream.result()
        assert [choice.text for choice in result.choices] == ["a0b0", "a1b1", "a2b2"]
        assert [choice.stop_reason for choice in result.choices] == [0, 1, 2]
        assert (result.text, result.completion_tokens) == ("a0b0", 6)
        assert gateway.wait_for(protocol.Submit).n == 3


def test_one_choice_is_among_the_choices_too(endpoint: str) -> None:
    with FakeGateway(endpoint, generous), Client(endpoint) as client:
        result = client.submit("x").result()
        [choice] = result.choices
        assert (choice.text, choice.token_ids) == (result.text, result.token_ids)
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_choices_without_an_end_of_their_own_end_with_an_abort(endpoint: str) -> None:
    def aborted(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Submit):
            name = command.request_id
            yield (
                protocol.Tokens(name, "some", (1,), 1),
                protocol.ChoiceFinished(name, 1, "stop", None, 1),
                finished(name, "abort", 1),
            )
        else:
            yield from talkative(command)

    with FakeGateway(endpoint, aborted), Client(endpoint) as client:
        result = client.submit("x", n=2).result()
        assert [choice.finish_reason for choice in result.choices] == ["abort", "stop"]
        assert [choice.text for choice in result.choices] == ["", "some"]


def test_log_probabilities_and_the_prompt_are_in_the_result(endpoint: str) -> None:
    with FakeGateway(endpoint, generous), Client(endpoint) as client:
        stream = client.submit("x", logprobs=2, echo=True, priority=1)
        first = next(stream)
        assert stream.prompt is not None
        assert (stream.prompt.text, stream.prompt.token_ids) == ("Once", (1, 2))
        [entry] = first.logprobs
        assert (entry.token_id, entry.token, entry.bytes, entry.rank) == (7, "\ufffd", (0xC3,), 1)
        assert [(other.token, other.logprob) for other in entry.top] == [("\ufffd", -0.25), (" no", -1.5)]
        result = stream.result()
        assert len(result.choices[0].logprobs) == 2
        assert result.prompt == stream.prompt
        assert result.notes == (NOTE,)


def test_every_field_reaches_the_server(endpoint: str) -> None:
    fields = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0, "6": -1.0},
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 9,
        "skip_special_tokens": False,
        "detokenize": False,
        "deadline": 0.5,
        "request_class": "gold",
    }
    with FakeGateway(endpoint, generous) as gateway, Client(endpoint) as client:
        client.submit("x", **fields).result()  # type: ignore[arg-type]
        sent = gateway.wait_for(protocol.Submit)
        assert {name: getattr(sent, name) for name in fields} == fields


def test_a_stream_that_nobody_reads_is_aborted_and_the_others_go_on(endpoint: str) -> None:
    def endless(command: protocol.Command) -> Frames:
        if isinstance(command, protocol.Submit) and command.prompt == "endless":
            for _ in range(50):
                yield (protocol.Tokens(command.request_id, "x" * 1000, (1,)),)
        elif isinstance(command, protocol.Abort):
            yield (finished(command.request_id, "abort"),)
        else:
            yield from talkative(command)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            session = client._session
            assert session is not None
            session._unread_bytes_max = 20_000
            unread = await client.submit("endless")
            assert (await (await client.submit("other")).result()).text == "w0 w1 w2 "
            assert len((await unread.deltas())[0].text) == 1000  # what was kept is still there
            with pytest.raises(RequestError, match="not read"):
                await unread.result()

    with FakeGateway(endpoint, endless) as gateway:
        anyio.run(main)
        gateway.wait_for(protocol.Abort)


def test_unread_output_counts_what_is_reported_with_it_and_reading_frees_it() -> None:
    inbox = Inbox(4, unread_bytes_max=LOGPROB_BYTES + 4 * TOKEN_BYTES)
    inbox.put(protocol.Tokens("r", "x", (1,)), 1)
    assert not inbox.overrun
    inbox.put(protocol.Tokens("r", "x", (1,), 0, (FIRST,)), 2)
    assert inbox.overrun
    assert len(inbox.take()) == 2
    assert not inbox.overrun


def test_merged_output_of_several_choices_loses_nothing() -> None:
    inbox = Inbox(3)
    for number in range(9):
        inbox.put(protocol.Tokens("r", f"{number} ", (number,), number % 2), number)
    deltas = inbox.take()
    assert len(deltas) <= 4
    for choice in (0, 1):
        text = "".join(delta.text for delta in deltas if delta.choice == choice)
        assert text == "".join(f"{number} " for number in range(choice, 9, 2))


def test_the_name_of_an_overrun_request_stays_taken_until_the_server_ended_it() -> None:
    session = Session(unread_bytes_max=10)
    inbox = session.open_request("r")
    frame = protocol.Frame((protocol.Tokens("r", "x" * 100, (1,)), protocol.Tokens("r", "y", (2,))))
    session.receive(protocol_bytes(frame), 1)
    assert session.overrun == ["r"]
    assert inbox.error is not None
    assert session.is_live("r")
    session.receive(protocol_bytes(protocol.Frame((finished("r", "abort"),))), 2)
    assert not session.is_live("r")


def protocol_bytes(frame: protocol.Frame) -> bytes:
    return msgspec.msgpack.encode(frame)


def muxk(endpoint: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli.build_app(), ["submit", *arguments, "--endpoint", endpoint])


def test_the_command_line_shows_choices_prompt_log_probabilities_and_notes(endpoint: str) -> None:
    with FakeGateway(endpoint, generous) as gateway:
        shown = muxk(endpoint, "x", "-n", "2", "--echo", "--logprobs", "2", "--priority", "5")
        assert shown.exit_code == 0
        assert "--- choice 0 (stop)\nOncea0b0\n--- choice 1 (stop)\nOncea1b1\n" in shown.stdout
        assert shown.stdout.count("rank 1") == 5
        assert shown.stderr == f"muxk: note: {NOTE}\n"
        assert gateway.wait_for(protocol.Submit).logprobs == 2


def test_one_choice_streams_behind_its_prompt(endpoint: str) -> None:
    with FakeGateway(endpoint, generous):
        assert muxk(endpoint, "x", "--echo").stdout.startswith("Oncea0b0\n")
        assert muxk(endpoint, "x", "--echo", "--max-tokens", "0").stdout.startswith("Once\n")


def test_json_has_everything(endpoint: str) -> None:
    with FakeGateway(endpoint, generous):
        shown = muxk(endpoint, "x", "-n", "2", "--echo", "--logprobs", "2", "--priority", "5", "--json")
    result = json.loads(shown.stdout)
    assert [choice["text"] for choice in result["choices"]] == ["a0b0", "a1b1"]
    assert result["choices"][1]["logprobs"][0]["top"][1]["token"] == " no"
    assert result["prompt"]["text"] == "Once"
    assert result["notes"] == [NOTE]


def test_flags_become_fields(endpoint: str) -> None:
    flags = ["--logit-bias", "5=-1.5", "--logit-bias", "7=2", "--stop-token-id", "3", "--include-stop"]
    flags += [
        "--keep-special-tokens",
        "--class",
        "gold",
        "--deadline",
        "0.5",
        "--token-ids",
        "--min-p",
        "0.1",
    ]
    with FakeGateway(endpoint, generous) as gateway:
        assert muxk(endpoint, "1, 2 3", *flags).exit_code == 0
        sent = gateway.wait_for(protocol.Submit)
    assert (sent.prompt, sent.prompt_token_ids) == (None, [1, 2, 3])
    assert (sent.logit_bias, sent.stop_token_ids) == ({5: -1.5, 7: 2.0}, [3])
    assert (sent.include_stop_str_in_output, sent.skip_special_tokens, sent.min_p) == (True, False, 0.1)
    assert (sent.request_class, sent.deadline) == ("gold", 0.5)


def without_text(command: protocol.Command) -> Frames:
    """Two tokens for each choice, a step of all choices at a time."""
    if not isinstance(command, protocol.Submit):
        yield from talkative(command)
        return
    name, choices = command.request_id, tuple(range(command.n))
    for step in (10, 20):
        ids = tuple(step + choice for choice in choices)
        yield (protocol.TokenIds((name,) * command.n, ids, choices if command.n > 1 else ()),)
    yield (finished(name, tokens=2 * command.n),)


def test_tokens_without_text_reach_their_choices_and_are_shown_as_ids(endpoint: str) -> None:
    with FakeGateway(endpoint, without_text) as gateway, Client(endpoint) as client:
        choices = client.submit("x", n=3, detokenize=False).result().choices
        assert [choice.token_ids for choice in choices] == [(10, 20), (11, 21), (12, 22)]
        assert muxk(endpoint, "x", "--no-detokenize").stdout == "10 20 \n"
        assert not gateway.wait_for(protocol.Submit).detokenize


@pytest.mark.parametrize("arguments", [("x", "--logit-bias", "5:1"), ("1,two", "--token-ids")])
def test_a_flag_that_makes_no_sense_is_a_usage_error(endpoint: str, arguments: tuple[str, ...]) -> None:
    shown = muxk(endpoint, *arguments)
    assert shown.exit_code == 2
    assert "expected" in shown.stderr
