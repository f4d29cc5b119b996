"""CURVE keys: making them, their files, and which client keys a server lets in.

Files are those of pyzmq (`zmq.auth`): `NAME.key` holds the public key, `NAME.key_secret` both, mode 0600.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"
KEY_FILE = """# A {kind} key of muxk, made by `muxk keys`. {advice}
metadata
curve
    public-key = "{public}"
"""
PUBLIC_ADVICE = "Not a secret."
SECRET_ADVICE = "SECRET: whoever reads this file is its owner."
ALLOWED_KEYS_MAX = 10_000


class KeyFileError(Exception):
    """A key file can not be used or made; the text names it. It never holds a key."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, each in Z85 (40 characters). Its `repr` shows the public one only."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveServer:
    """What a socket that lets in known clients only is given."""

    keys: CurveKeys
    allows: Callable[[bytes], bool]
    """Asked about the 32 bytes of a client's public key."""


@dataclass(frozen=True, slots=True)
class CurveClient:
    """What a client needs to reach such a socket."""

    server_public: bytes
    """Z85."""
    keys: CurveKeys


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair as `NAME.key` and `NAME.key_secret`; the paths. Existing files are never replaced.

    Raises:
        KeyFileError: a file is there already, or can not be written.
    """
    public, secret = zmq.curve_keypair()
    public_path, secret_path = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    text = KEY_FILE.format(kind="public", advice=PUBLIC_ADVICE, public=public.decode())
    secret_text = KEY_FILE.format(kind="secret", advice=SECRET_ADVICE, public=public.decode())
    secret_text += f'    secret-key = "{secret.decode()}"\n'
    if public_path.exists():
        raise KeyFileError(f"{public_path} is there already; keys are never replaced, remove it first")
    _write(secret_path, secret_text, 0o600)
    _write(public_path, text, 0o644)
    return public_path, secret_path


def _write(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise KeyFileError(f"{path} is there already; keys are never replaced, remove it first") from None
    except OSError as error:
        raise KeyFileError(f"can not write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def load_public(path: Path) -> bytes:
    """The public key in a `.key` or `.key_secret` file, in Z85. Raises KeyFileError."""
    return _load(path)[0]


def load_pair(path: Path) -> CurveKeys:
    """The pair in a `.key_secret` file that only its owner can read. Raises KeyFileError."""
    public, secret = _load(path)
    if secret is None:
        raise KeyFileError(f"{path} holds no secret key; name the {SECRET_SUFFIX} file")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(f"{path} can be read by others; make new keys, or chmod 600 it if nobody did")
    return CurveKeys(public, secret)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret or public):
            if len(z85.decode(key)) != 32:
                raise ValueError
    except OSError as error:
        raise KeyFileError(f"can not read {path}: {error.strerror or 'no such file'}") from error
    except (ValueError, KeyError, ZeroDivisionError, IndexError):
        raise KeyFileError(f"{path} is no key file of `muxk keys`") from None
    return public, secret


class AllowedClients:
    """The public keys in a folder; read again when a file was added or removed, so that no restart is needed.

    A key that is removed keeps its open connections: restart the server to end them.
    """

    def __init__(self, folder: Path) -> None:
        """Raises KeyFileError."""
        self._folder = folder
        self._changed_ns = 0
        self._keys: frozenset[bytes] = frozenset()
        self._look()

    def __call__(self, key: bytes) -> bool:
        """Whether the 32 bytes of a public key are among them."""
        with contextlib.suppress(KeyFileError):  # a file that is being written; those known so far stay
            self._look()
        return key in self._keys

    def _look(self) -> None:
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            files = sorted(self._folder.glob(f"*{PUBLIC_SUFFIX}"))[:ALLOWED_KEYS_MAX]
        except OSError as error:
            raise KeyFileError(f"can not read {self._folder}: {error.strerror}") from error
        self._keys = frozenset(z85.decode(load_public(file)) for file in files)
        self._changed_ns = changed_ns
