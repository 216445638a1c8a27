"""Ports for the servers of tests."""

import socket
from contextlib import suppress
from random import SystemRandom

HOST = "127.0.0.1"
PORTS = range(11_000, 22_000)  # below those that the kernel gives to connections
BUS = 10_000  # The bus of a node of a Redis cluster has the port that is higher by this.


def free_port() -> int:
    """Return a port that is free, as is that of the bus. The kernel gives neither to another program's connection."""
    for port in SystemRandom().sample(PORTS, 200):
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind((HOST, port))
            other.bind((HOST, port + BUS))
            return port
    raise OSError("no free port")


def has_ipv6() -> bool:
    """Return whether this host has an IPv6 address."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as one:
        one.bind(("::1", 0))
        return True
    return False
