"""The protocol between a client and a muxk server, for people who write a client.

Transport. ZeroMQ: the server binds one ROUTER socket, a client connects one DEALER socket. By default the
endpoint is `ipc://` in a directory that only its user can enter; `tcp://127.0.0.1:PORT` on request. One
ZeroMQ message has exactly one frame (no empty delimiter).

Encoding. Each frame is one MessagePack value: a map with the key `type`, which names the struct, and the
struct's fields. Fields with a default may be left out. The server refuses unknown fields in commands;
a client should ignore unknown fields in events. Nothing is ever pickled. A client sends one command a frame:

    Hello  Submit  Abort  GetState  SwapPolicy  Drain

and the server answers with frames that hold a list of events (everything one decode step brought for this
client comes in one frame):

    Welcome  Accepted  Tokens  Finished  Failed
    DuplicateRequest  State  PolicySwapped  ProtocolError  Draining

An exchange, as JSON for reading (`->` to the server, `<-` from it):

    -> {"type": "Hello", "version": 1}
    <- {"events": [{"type": "Welcome", "version": 1, "model": "smollm2-135m-instruct", "device": "cpu",
                    "policy": "muxwise", "max_context_tokens": 2048, "vocabulary_size": 49152}]}
    -> {"type": "Submit", "request_id": "r1", "prompt": "Once upon", "max_tokens": 3, "temperature": 0.0}
    <- {"events": [{"type": "Accepted", "request_id": "r1", "prompt_tokens": 2}]}
    <- {"events": [{"type": "Tokens", "request_id": "r1", "text": " a", "token_ids": [253]}]}
    <- {"events": [{"type": "Tokens", "request_id": "r1", "text": " time", "token_ids": [655]}]}
    <- {"events": [{"type": "Tokens", "request_id": "r1", "text": ",", "token_ids": [28]},
                   {"type": "Finished", "request_id": "r1", "finish_reason": "length", "stop_reason": null,
                    "prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}]}

Rules.

- `Hello` comes first and may be repeated: the server answers each with `Welcome`, so it serves as a ping.
- A request is named by its client; the name is private to the connection and free again after its end.
- Every `Submit` gets exactly one terminal event, `Finished` or `Failed`. Only a name that is still live is
  answered with `DuplicateRequest`, and a frame that can not be decoded with `ProtocolError`.
- `Tokens.text` may lag behind `Tokens.token_ids`: it never splits a character and never shows a part of a
  stop string. The concatenation of all texts is the answer.
- `Abort` is legal at any time; the request then ends with `Finished` and the reason `abort`.
- `GetState` and `SwapPolicy` carry a `ticket` that comes back in the answer.
- A client that closes its connection, or stops answering ZeroMQ heartbeats, has its requests aborted. A
  client that does not read what it is sent gets `Failed` with the code `slow_reader`.
- After `Drain` the server says `Draining`, refuses new requests with the code `draining`, ends what it
  has accepted and stops.
"""

from __future__ import annotations

from muxk.actors.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AnyCommand,
    ChatMessage,
    Command,
    Drain,
    Draining,
    DuplicateRequest,
    Event,
    Failed,
    Finished,
    Frame,
    GetState,
    Hello,
    PolicySwapped,
    ProtocolError,
    State,
    Submit,
    SwapPolicy,
    Tokens,
    Welcome,
)

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "AnyCommand",
    "ChatMessage",
    "Command",
    "Drain",
    "Draining",
    "DuplicateRequest",
    "Event",
    "Failed",
    "Finished",
    "Frame",
    "GetState",
    "Hello",
    "PolicySwapped",
    "ProtocolError",
    "State",
    "Submit",
    "SwapPolicy",
    "Tokens",
    "Welcome",
]
