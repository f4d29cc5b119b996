"""The protocol between a client and a muxk server, for people who write a client.

Transport. ZeroMQ: the server binds one ROUTER socket, a client connects one DEALER socket. By default the
endpoint is `ipc://` in a directory that only its user can enter; `tcp://127.0.0.1:PORT` on request, and off
the machine only with CURVE keys. A second ROUTER socket, the admin socket, is always an ipc file:
`PATH.admin` beside a client socket `ipc://PATH`, `tcp-PORT.admin` in the run directory for a server on tcp.
One ZeroMQ message has exactly one frame (no empty delimiter), of at most 1 MiB towards the server.

Encoding. Each frame is one MessagePack value: a map with the key `type`, which names the struct, and the
struct's fields. Fields with a default may be left out. The server refuses unknown fields in commands;
a client should ignore unknown fields in events. Nothing is ever pickled. A client sends one command a frame:

    Hello  Submit  Abort  GetState  Explain           on either socket
    SwapPolicy  SetShadow  AbortAny  Drain            on the admin socket only

and the server answers with frames that hold a list of events (everything one decode step brought for this
client comes in one frame):

    Welcome  Accepted  Prompt  Tokens  TokenIds  ChoiceFinished  Finished  Failed
    DuplicateRequest  State  Explained  PolicySwapped  ShadowSet  AbortedAny  ProtocolError  Draining

An exchange, as JSON for reading (`->` to the server, `<-` from it):

    -> {"type": "Hello", "version": 1}
    <- {"events": [{"type": "Welcome", "version": 1, "model": "smollm2-135m-instruct", "device": "cpu",
                    "policy": "muxwise", "max_context_tokens": 2048, "vocabulary_size": 49152}]}
    -> {"type": "Submit", "request_id": "r1", "prompt": "Once upon", "max_tokens": 3, "temperature": 0.0}
    <- {"events": [{"type": "Accepted", "request_id": "r1", "prompt_tokens": 2, "request_class": "default"}]}
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
- All mistakes of a `Submit` come in one `Failed` with the code `invalid`, each with its field's name and the
  allowed values. A number is a MessagePack number (an integer may stand for a float, never a float for an
  integer, nor a string or a boolean for either); a key that comes twice counts as it came last.
- Limits: n 1 to 16, stop 16 strings of 256 characters, stop_token_ids 64, logit_bias 1024 tokens from -100 to
  100, logprobs and prompt_logprobs 0 to 20, temperature 0 to 2 (under 1e-5 it is greedy), penalties -2 to 2,
  repetition_penalty 0.01 to 10, min_p 0 to 1, seed in int64, deadline 1 ms to a day, a prompt of at most 32
  characters for each token of the context, a frame of 1 MiB.
- `n` choices of one request share its prompt and differ by their sampling; with temperature 0 all are the
  same. `Tokens.choice` says which one goes on. A request with several choices also says `ChoiceFinished` at
  the end of each; `Finished` comes once, after the last. If one choice fails, the request does. In every
  bound of the server a request counts as `n`.
- With `detokenize` false a request gets token ids and no text. What a step brought to all such requests of a
  client comes in one event `TokenIds`, with a token for each name (and its choice, unless all are choice 0);
  only those that ask for log-probabilities or to see their prompt get `Tokens`, with an empty text and tokens
  of no bytes. A `stop` string is found in text, so that both together are refused; `stop_token_ids` are not.
  A server in virtual time, and no other, tells of some steps together, each with the time of its end
  (`at_ns`).
- A stop token is the last of `token_ids`, and its text is not shown unless `include_stop_str_in_output`.
- With `echo`, or `prompt_logprobs`, one event `Prompt` comes before the first `Tokens` of choice 0. With
  either, `max_tokens` may be 0: the request then ends with `length` after its prompt.
- A log-probability is a list: token id, bytes of the token, log-probability, rank, and three lists of equal
  length with the ids, bytes and log-probabilities of the likeliest tokens.
- `Accepted.notes` says which fields have no effect under the policy in force, such as `priority`, and
  `Accepted.request_class` which of its classes the policy chose.
- `Tokens.text` may lag behind `Tokens.token_ids`: it never splits a character and never shows a part of a
  stop string. The concatenation of all texts is the answer.
- `Abort` is legal at any time; the request then ends with `Finished` and the reason `abort`.
- `GetState`, `Explain`, `SwapPolicy`, `SetShadow` and `AbortAny` carry a `ticket` that comes back in the
  answer.
- `Explain` tells on the clients' socket of requests of the same connection only, and of decisions only those
  that are about one of them alone: what others asked for, and when, is nobody else's business. Whoever can
  open the admin socket runs the server and sees all; texts of prompts and outputs are in no explanation.
- A client that closes its connection, or whose machine vanishes, has its requests aborted within about 12 s.
  Leave ZeroMQ's heartbeats off (`kernel/keepalive.py` says why); `Hello` serves as a ping.
- What a client does not read is held back for it, 256 KiB at most; when there is more, or it has read nothing
  for 10 s, its requests are aborted, and `Failed` with the code `slow_reader` waits for it.
- After `Drain` the server says `Draining`, refuses new requests with the code `draining`, ends what it
  has accepted and stops.
"""

from __future__ import annotations

from muxk.actors.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AbortAny,
    AbortedAny,
    Accepted,
    AnyCommand,
    ChatMessage,
    ChoiceFinished,
    Command,
    Drain,
    Draining,
    DuplicateRequest,
    Event,
    Explain,
    Explained,
    ExplainedRequest,
    Failed,
    Finished,
    Frame,
    GetState,
    Hello,
    PolicySwapped,
    Prompt,
    ProtocolError,
    SetShadow,
    ShadowSet,
    State,
    Submit,
    SwapPolicy,
    TokenIds,
    TokenLogprob,
    Tokens,
    Welcome,
)

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "AbortAny",
    "AbortedAny",
    "Accepted",
    "AnyCommand",
    "ChatMessage",
    "ChoiceFinished",
    "Command",
    "Drain",
    "Draining",
    "DuplicateRequest",
    "Event",
    "Explain",
    "Explained",
    "ExplainedRequest",
    "Failed",
    "Finished",
    "Frame",
    "GetState",
    "Hello",
    "PolicySwapped",
    "Prompt",
    "ProtocolError",
    "SetShadow",
    "ShadowSet",
    "State",
    "Submit",
    "SwapPolicy",
    "TokenIds",
    "TokenLogprob",
    "Tokens",
    "Welcome",
]
