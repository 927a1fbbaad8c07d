"""Nodes of a job that do not answer any more, noticed in seconds; Slurm's own answer takes SlurmdTimeout, often minutes.

A node is asked at a port on which nothing listens: the kernel of a live node refuses the connection at once, however busy
the node is, and no daemon has to write it into its log. Where that port is filtered a node never answers, and is not
watched.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

from dist_transformer.cluster import slurm
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.errors import say

Address = tuple[str, int]
CLOSED_PORT = 1
ANSWER_SECONDS = 1.5
"""For an answer: it takes a few times as long as a packet's way, and once the packet of the question may be lost."""
ASK_SECONDS = 2.0
SILENT_SECONDS = 6.0
"""Silence of a node that answered before; shorter ones are the network's, and collectives survive them."""


class SilentNodes:
    """Asks the nodes of a job step, all but this one, every ASK_SECONDS while `found` is called."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._addresses: dict[str, Address] = {}
        self._answered: dict[str, float] = {}
        self._next = 0.0
        others = [node for node in nodes if node != os.environ.get("SLURMD_NODENAME")]
        try:
            addresses = slurm.node_addresses(others) if others else {}
            self._addresses = {node: (host, CLOSED_PORT) for node, (host, _) in addresses.items()}
        except SlurmError as error:
            say(f"nodes are not watched: Slurm alone notices a dead one, after minutes: {str(error).splitlines()[0]}")

    def found(self) -> list[str]:
        """The nodes that have answered and do not any more, as their daemons' silence confirms."""
        if time.monotonic() < self._next:
            return []
        heard = answers(self._addresses)
        now = time.monotonic()
        self._answered |= dict.fromkeys(heard, now)
        self._next = now + ASK_SECONDS - (0 if len(heard) == len(self._addresses) else ANSWER_SECONDS)
        silent = [node for node, then in self._answered.items() if now - then > SILENT_SECONDS]
        try:
            return [node for node in silent if node not in nodes_that_answer(silent)]
        except SlurmError:  # this node may be the one that is cut off
            return []


def nodes_that_answer(nodes: Sequence[str]) -> list[str]:
    """Nodes among `nodes` whose Slurm daemon accepts a connection. Raises SlurmError: the controller does not say where
    they are."""
    heard = answers(slurm.node_addresses(nodes))
    return [node for node in nodes if heard.get(node) == 0]


def answers(addresses: Mapping[str, Address]) -> dict[str, int]:
    """Error numbers, 0 or ECONNREFUSED, of connections to the addresses that are answered within ANSWER_SECONDS."""
    found: dict[str, int] = {}
    waiting: dict[int, tuple[str, socket.socket]] = {}
    poll, deadline = select.poll(), time.monotonic() + ANSWER_SECONDS
    for name, address in addresses.items():
        try:
            family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # a name without an address, too many open files
            continue
        waiting[connection.fileno()] = name, connection
        if connection.connect_ex(place) in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
            poll.register(connection, select.POLLOUT)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(1000 * left):
            name, connection = waiting.pop(number)
            found[name] = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            poll.unregister(connection)
            connection.close()
    for _, connection in waiting.values():
        connection.close()
    return {name: code for name, code in found.items() if code in (0, errno.ECONNREFUSED)}
