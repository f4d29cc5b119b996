"""The server of stage 5, a process of its own: random weights on the card, the actors of `muxk run`.

`python -m muxk.profiles.gpu_check_server --directory DIR [--dry-run]` writes one JSON object a line:
`progress`, then `ready` with the endpoint and the admin endpoint. It serves until it is told to stop by
SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from muxk.actors.backends import Backend
from muxk.actors.cuda_opening import CardAccess, CardModel, open_on_card, real_access
from muxk.actors.policy_files import open_with_text
from muxk.actors.rundir import EndpointClaims, admin_endpoint
from muxk.actors.system import ServeOptions, Serving, new_ingress
from muxk.kernel.devices.cuda_driver import open_driver
from muxk.kernel.policy import PolicyBook
from muxk.models.cuda_load import ROWS_MAX, CardType, RandomCardWeights
from muxk.models.tokenizer import ByteTokenizer
from muxk.profiles.gpu_check_rig import Rig

DRY_KV_TOKENS = 8192
DRY_ROWS = 4


class NumberTokenizer(ByteTokenizer):
    """A text for every token of a vocabulary of any size."""

    end_ids = special_ids = frozenset()

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()


@dataclass(frozen=True)
class Arguments:
    directory: Path
    dry_run: bool
    index: int


def open_backend(arguments: Arguments) -> Backend:
    """The model of the rig's sizes, with random weights."""
    rig = Rig(dry=arguments.dry_run, index=arguments.index)
    config = rig.sizes.model
    model = CardModel(
        name=f"random weights, {config.layers} layers of {config.hidden}",
        config=config,
        dtype="auto",
        weights=partial(_random_weights, rig),
        tokenizer=NumberTokenizer(config.vocabulary),
        kv_tokens=DRY_KV_TOKENS if rig.dry else None,
        rows_max=DRY_ROWS if rig.dry else ROWS_MAX,
    )
    return open_on_card(_access(rig), model, _progress)


def _access(rig: Rig) -> CardAccess:
    if not rig.dry:
        return real_access(rig.index, open_driver().card(rig.index).capability)
    return CardAccess(rig.index, rig.torch_device, (9, 0), rig.open_partitions, lambda: rig.streams)


def _random_weights(rig: Rig, device: str, dtype: CardType) -> RandomCardWeights:
    return RandomCardWeights(rig.sizes.model, rig.device, dtype)


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _progress(what: str, share: float) -> None:
    _say(progress=[what, share])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--index", type=int, default=0)
    arguments = Arguments(**vars(parser.parse_args(argv)))
    backend = open_backend(arguments)
    try:
        _say(stopped=_serve(arguments.directory, backend))
    finally:
        backend.device.close()
    return 0


def _serve(directory: Path, backend: Backend) -> str:
    endpoint = f"ipc://{directory}/muxk"
    options = ServeOptions(policy="muxwise", endpoint=endpoint, run_directory=directory)

    def ready(bound: str) -> None:
        _say(ready=bound, admin=admin_endpoint(bound, directory))

    with EndpointClaims(directory) as claims:
        ingress = new_ingress(options, endpoint, directory, claims)
        opened = open_with_text(options.policy, {})
        book = PolicyBook()
        serving = Serving(options, opened, book, None, _progress, ready, lambda text: None)
        return anyio.run(serving.run, backend, ingress, directory)


if __name__ == "__main__":
    sys.exit(main())
