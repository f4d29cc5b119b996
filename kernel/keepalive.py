"""How a socket notices that the machine at the other end is gone: by TCP itself, not by ZeroMQ's heartbeats.

libzmq 4.3.5 aborts the whole process (`Assertion failed: !_io_error`, stream_engine_base.cpp; libzmq #4841)
when it has to send a ping, or answer one, on a connection that was closed by its peer while frames of it wait
behind a full high-water mark. So muxk sends no pings, in either direction. A process that ends closes its
connections, which is noticed at once; a machine that vanishes is what TCP's keep-alive is for.
"""

from __future__ import annotations

import zmq

IDLE_S = 5
"""A connection without traffic is probed after this, and then every PROBE_S."""
PROBE_S = 2
PROBES = 3
"""Unanswered ones after which the connection is closed."""
UNSENT_MS = 10_000
"""What was sent has to arrive within this, or the connection is closed."""


def notice_dead_hosts(socket: zmq.Socket[bytes]) -> None:
    """Set the options; they have an effect on tcp only. Before the socket is bound or connected."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, UNSENT_MS)
