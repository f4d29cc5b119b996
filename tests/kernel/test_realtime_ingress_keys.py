"""Two fronts, and a client front that lets in known keys only: real sockets, real handshakes."""

from __future__ import annotations

import socket as plain
import stat
from pathlib import Path

import pytest
import zmq
from ingress_driver import TCP, Clients, ask, serve
from muxk.kernel.curve import (
    AllowedClients,
    CurveKeys,
    CurveServer,
    KeyFileError,
    load_pair,
    load_public,
    make_keys,
)
from muxk.kernel.fronts import Front, front_of
from muxk.kernel.ingress import Ingress

REFUSED_MS = 300


class Keys:
    """A server's folder with one allowed client, and a stranger's pair."""

    def __init__(self, folder: Path) -> None:
        self.allowed = folder / "clients"
        self.allowed.mkdir(parents=True)
        self.server = load_pair(make_keys(folder, "server")[1])
        self.client = self.let_in("alice")
        self.stranger = load_pair(make_keys(folder, "mallory")[1])
        self.folder = folder

    def let_in(self, name: str) -> CurveKeys:
        return load_pair(make_keys(self.allowed, name)[1])

    def ingress(self) -> Ingress:
        return Ingress(TCP, curve=CurveServer(self.server, AllowedClients(self.allowed)))

    def options(self, own: CurveKeys, server: CurveKeys | None = None) -> dict[str, bytes]:
        return {
            "CURVE_SERVERKEY": (server or self.server).public,
            "CURVE_PUBLICKEY": own.public,
            "CURVE_SECRETKEY": own.secret,
        }


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def test_only_a_client_with_a_known_key_gets_an_answer_and_others_are_not_heard(keys: Keys) -> None:
    own = keys.options(keys.client)
    intruders = {
        "no key": {},
        "a stranger's key": keys.options(keys.stranger),
        "the wrong server": keys.options(keys.client, server=keys.stranger),
    }

    def client(clients: Clients) -> None:
        good = clients.dealer(**own)
        assert ask(good, b"before") == b"before"
        for name, options in intruders.items():
            bad = clients.dealer(RCVTIMEO=REFUSED_MS, LINGER=0, **options)
            bad.send(b"let me in")
            with pytest.raises(zmq.Again):
                bad.recv()
            assert ask(good, name.encode()) == name.encode()

    gateway = serve(client, keys.ingress(), **own)
    assert gateway.frames == [b"before", *(name.encode() for name in intruders), b"quit"]


def test_a_key_that_is_added_while_the_server_runs_is_let_in(keys: Keys) -> None:
    def client(clients: Clients) -> None:
        assert ask(clients.dealer(**keys.options(keys.client)), b"one") == b"one"
        assert ask(clients.dealer(**keys.options(keys.let_in("bob"))), b"two") == b"two"

    serve(client, keys.ingress(), **keys.options(keys.client))


def test_connections_that_never_say_who_they_are_do_not_keep_others_out(keys: Keys) -> None:
    own = keys.options(keys.client)

    def client(clients: Clients) -> None:
        host, port = clients.endpoint.removeprefix("tcp://").split(":")
        silent = [plain.create_connection((host, int(port)), timeout=10) for _ in range(100)]
        for connection in silent[::2]:
            connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        assert ask(clients.dealer(**own), b"hello") == b"hello"
        for connection in silent:
            connection.close()

    assert serve(client, keys.ingress(), **own).frames == [b"hello", b"quit"]


def test_the_admin_socket_is_a_file_for_its_owner_and_its_peers_are_told_apart(tmp_path: Path) -> None:
    place = tmp_path / "s.admin"
    peers: list[Front] = []

    def client(clients: Clients) -> None:
        mode = place.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        # A client may choose its identity, and so its first byte; the front is not part of it.
        forger = clients.dealer(IDENTITY=b"\x01admin")
        admin = clients.dealer(endpoint=f"ipc://{place}")
        for dealer, text in ((forger, b"client"), (admin, b"admin"), (forger, b"client again")):
            assert ask(dealer, text) == text

    ingress = Ingress(TCP, admin=lambda bound: f"ipc://{place}" if bound.startswith("tcp://") else "")
    gateway = serve(client, ingress)
    peers = [front_of(peer) for peer in gateway.peers]
    assert peers == [Front.CLIENT, Front.ADMIN, Front.CLIENT, Front.CLIENT]


def test_key_files_are_for_their_owner_are_never_replaced_and_show_no_secret(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path, "server")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    pair = load_pair(secret)
    assert load_public(public) == pair.public
    assert pair.secret.decode() not in repr(pair)
    with pytest.raises(KeyFileError, match="never replaced"):
        make_keys(tmp_path, "server")
    assert load_pair(secret) == pair


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no key file"),
        (b"\xff\x00", "no key file"),
        (b'metadata\ncurve\n    public-key = "short"\n', "no key file"),
        (b'metadata\ncurve\n    public-key = "' + b"~" * 40 + b'"\n', "no key file"),
        (None, "can not read"),
    ],
)
def test_a_file_that_is_no_key_is_named(content: bytes | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileError, match=complaint) as caught:
        load_public(path)
    assert str(path) in str(caught.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path, "a")
    secret.chmod(0o640)
    with pytest.raises(KeyFileError, match="read by others"):
        load_pair(secret)
    with pytest.raises(KeyFileError, match="no secret key"):
        load_pair(public)
