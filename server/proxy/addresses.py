"""Which upstreams there are: those that were given, those in a file that may change, and all addresses of a DNS name.

``dns:replicas:9000`` stands for every address that ``replicas`` has at the moment (a headless service of Kubernetes, for
instance). What cannot be looked up or read keeps the addresses it had before, and is said once in the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from server.config.commands import read_upstream_file
from server.errors import StartError

logger = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> its addresses


@dataclasses.dataclass(frozen=True, order=True)
class Address:
    """``target`` is what gRPC connects to, ``server_name`` what TLS verifies where that is an address of a name."""

    target: str
    server_name: str | None = None


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a host, by the system's resolver.

    Raises:
        OSError: there is none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class AddressBook:
    """`look` says which upstreams there are now.

    Args:
        given: addresses as ``--upstream`` takes them.
        file: a file with more of them.
        resolve: asks DNS.
    """

    def __init__(self, given: Sequence[str], file: Path | None = None, resolve: Resolve = resolve):
        self._given = tuple(given)
        self._file = file
        self._resolve = resolve
        self._in_file: tuple[str, ...] = ()
        self._known: dict[str, tuple[Address, ...]] = {}  # of names, as last looked up
        self._said: dict[str, str] = {}

    @property
    def changes(self) -> bool:
        """It may say something else the next time."""
        return self._file is not None or any(address.startswith("dns:") for address in self._given)

    async def look(self) -> list[Address]:
        """At least one, each once, in the order in which they are written.

        Raises:
            StartError: the file is not good at the first look.
        """
        if self._file is not None:
            try:
                # Few lines, mostly of a local disk; but a network's file system may take its time.
                self._in_file = await asyncio.to_thread(read_upstream_file, self._file)
                self._said.pop(str(self._file), None)
            except StartError as error:
                if not self._in_file:  # there never was a good one
                    raise
                self._say(str(self._file), f"{error}; the upstreams stay as they are")
        found: dict[Address, None] = {}
        for written in (*self._given, *self._in_file):
            if written.startswith("dns:"):
                found.update(dict.fromkeys(await self._addresses(written)))
            else:
                found[Address(written)] = None
        return list(found)

    async def _addresses(self, written: str) -> Sequence[Address]:
        host, _, port = written.removeprefix("dns:").rpartition(":")
        try:
            addresses = await self._resolve(host.strip("[]"), int(port))
        except (OSError, UnicodeError) as error:  # the latter: no name that DNS could have
            self._say(written, f"--upstream {written} has no address: {error}")
            # gRPC takes the same spelling for a name, and says in each answer that it has no address.
            return self._known.get(written) or (Address(written),)
        self._said.pop(written, None)
        made = (Address(f"[{address}]:{port}" if ":" in address else f"{address}:{port}", host) for address in addresses)
        self._known[written] = tuple(made)
        return self._known[written]

    def _say(self, about: str, message: str) -> None:
        if self._said.get(about) != message:
            self._said[about] = message
            logger.warning("%s", message)
