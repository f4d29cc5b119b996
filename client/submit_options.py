"""The options of `muxk submit` that are fields of a request, and how they become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from muxk.client.options import USAGE, die

if TYPE_CHECKING:
    from muxk.client.commands import Sampling

MaxTokens = Annotated[
    int | None, typer.Option(help="Stop after this many tokens. Default: the room left in the context.")
]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; higher is more random.")
]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that add up to this share.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens under this share of the likeliest one; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
StopToken = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="End at this token; may be repeated.")
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Show the stop text as well.")]
MinTokens = Annotated[int, typer.Option(help="Do not end before this many tokens.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on to --max-tokens, whatever the model says.")
]
PresencePenalty = Annotated[float, typer.Option(help="Against tokens that were generated, -2 to 2.")]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, for each time they were.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: against tokens that came before.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Add to a token's logit, -100 to 100; may be repeated."),
]
Choices = Annotated[int, typer.Option("--n", "-n", help="How many answers to generate.")]
Logprobs = Annotated[
    int | None, typer.Option(help="Show each token's log-probability and this many of the likeliest.")
]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")]
Echo = Annotated[bool, typer.Option("--echo", help="Show the prompt before the answer.")]
Truncate = Annotated[
    int | None, typer.Option("--truncate-prompt-tokens", help="Keep only the last so many prompt tokens.")
]
KeepSpecial = Annotated[bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")]
Detokenize = Annotated[
    bool, typer.Option("--detokenize/--no-detokenize", help="Get text; without it token ids are shown.")
]
Priority = Annotated[int, typer.Option(help="Lower is sooner, where the policy looks at it.")]
Deadline = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="When the first token is due, from now on.")
]
RequestClass = Annotated[str, typer.Option("--class", help="A class of the policy, which sets its SLOs.")]
AsChat = Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message, not as raw text.")]
AsTokenIds = Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids, such as 1,2,3.")]


def sampling_of(options: dict[str, Any]) -> Sampling:
    """The fields of a request among the values of a command's options; options have the fields' names."""
    from muxk.client.commands import Sampling

    sampling = {name: options[name] for name in Sampling.__annotations__ if name in options}
    sampling["skip_special_tokens"] = not options["keep_special_tokens"]
    sampling["logit_bias"] = _biases(options["logit_bias"])
    for name in ("stop", "stop_token_ids"):
        sampling[name] = list(options[name]) if options[name] else None
    fields: Sampling = sampling  # type: ignore[assignment]
    return fields


def _biases(given: list[str] | None) -> dict[int | str, float] | None:
    """`["5=-1.5"]` -> `{5: -1.5}`; ends the command when it is not of that form."""
    biases: dict[int | str, float] = {}
    for text in given or ():
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            die(f"--logit-bias {text}: expected ID=BIAS, for example --logit-bias 42=-5", USAGE)
    return biases or None


def token_ids_of(prompt: str) -> list[int]:
    """Ids with commas, spaces or both between them; ends the command when it is not that."""
    try:
        return [int(text) for text in prompt.replace(",", " ").replace("[", " ").replace("]", " ").split()]
    except ValueError:
        die("--token-ids: expected integers with commas between them, for example 1,2,3", USAGE)
