"""The text side of one live choice: what becomes of the tokens that a step brought, for its client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from muxk.actors.messages import EmittedRow, PromptText, SamplingParams, TextRow
from muxk.actors.protocol import TokenLogprob
from muxk.kernel.work import RowLogprobs, int32_array
from muxk.models.detokenizer import Detokenizer, StopMatcher

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class WantedPrompt:
    """The prompt of a request that asked to see it."""

    tokens: bytes
    """int32[prompt_tokens]."""
    text: str | None
    """What the client sent; None to spell the tokens out."""
    echo: bool

    def told(self, spell: Callable[[Iterable[int]], str], logprobs: tuple[TokenLogprob, ...]) -> PromptText:
        """The prompt with the log-probabilities that its prefill brought."""
        ids = tuple(int32_array(self.tokens).tolist())
        text = "" if not self.echo else spell(ids) if self.text is None else self.text
        return PromptText(text, ids, logprobs)


class TextOutput:
    """Takes the rows of one choice, in order. After a row with a finish reason there are no more."""

    def __init__(
        self,
        params: SamplingParams,
        token_bytes: TokenBytes,
        special_ids: frozenset[int],
        generate: bool,
        prompt: WantedPrompt | None,
    ) -> None:
        """`generate` False: what is sampled is dropped, the choice ends with its prompt."""
        self._params = params
        self._token_bytes = token_bytes if params.detokenize else no_bytes
        self._skipped = special_ids if params.skip_special_tokens else frozenset[int]()
        self._detokenizer = Detokenizer(self._token_bytes, self._skipped)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._generate = generate
        self._prompt = prompt
        self._tokens = 0

    def row(self, row: EmittedRow) -> TextRow:
        """What its client gets of a row; its finish reason may be that of a stop string."""
        prompt = None if self._prompt is None else self._take_prompt(row)
        if not self._generate:
            return TextRow(row.request_id, "", (), "length", row.reused_tokens, None, prompt=prompt)
        text, stop = self._text(row)
        finish_reason = row.finish_reason if stop is None else "stop"
        logprobs = token_logprobs(row.logprobs, self._token_bytes)
        stop_reason = row.stop_token if stop is None else stop
        return TextRow(
            row.request_id, text, row.tokens, finish_reason, row.reused_tokens, stop_reason, logprobs, prompt
        )

    def _take_prompt(self, row: EmittedRow) -> PromptText | None:
        wanted, self._prompt = self._prompt, None
        if wanted is None:
            return None
        return wanted.told(self._spell, token_logprobs(row.prompt_logprobs, self._token_bytes))

    def _spell(self, token_ids: Iterable[int]) -> str:
        detokenizer = Detokenizer(self._token_bytes, self._skipped)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def _text(self, row: EmittedRow) -> tuple[str, str | None]:
        """New text, and the stop string that ends the choice with it, if one does."""
        spelled = row.tokens
        if row.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            spelled = spelled[:-1]  # the token that ended it
        if self._matcher is None:
            return self._detokenize(spelled, row.finish_reason), None
        return self._matched(self._matcher, spelled, row.finish_reason)

    def _detokenize(self, token_ids: tuple[int, ...], finish_reason: str | None) -> str:
        text = self._detokenizer.push(token_ids)
        return text if finish_reason is None else text + self._detokenizer.finish()

    def _matched(
        self, matcher: StopMatcher, token_ids: tuple[int, ...], finish_reason: str | None
    ) -> tuple[str, str | None]:
        """The first `min_tokens` tokens end nothing, though a stop string may begin in them."""
        early = token_ids[: max(0, self._params.min_tokens - self._tokens)]
        self._tokens += len(token_ids)
        before = ""
        if early:
            before = matcher.pass_over(self._detokenizer.push(early))
        text, stop = matcher.push(self._detokenize(token_ids[len(early) :], finish_reason))
        if stop is not None and self._params.include_stop_str_in_output:
            text += stop
        elif stop is None and finish_reason is not None:
            text += matcher.finish()
        return before + text, stop


def no_bytes(token: int) -> bytes:
    """What a token adds to the text of a request that wants none."""
    return b""


def token_logprobs(reported: tuple[RowLogprobs, ...], token_bytes: TokenBytes) -> tuple[TokenLogprob, ...]:
    """What the device reported, with the tokens spelled out."""
    if not reported:
        return ()
    return tuple(
        TokenLogprob(
            token_id=entry.token,
            token=token_bytes(entry.token),
            logprob=entry.logprob,
            rank=entry.rank,
            top_ids=entry.top_ids,
            top_tokens=tuple(map(token_bytes, entry.top_ids)),
            top_logprobs=entry.top_logprobs,
        )
        for entry in reported
    )


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Of one of several choices: the first one alone reports on the prompt, which they share."""
    if choice == 0:
        return params
    return msgspec.structs.replace(params, choice=choice, prompt_logprobs=None)
