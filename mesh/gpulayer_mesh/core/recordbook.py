"""The newest record of one kind of each member, as its node signed it.

What a machine has (`CapsRecord`) and what it measured of its links (`LinkReport`) are such records.
They are relayed unchanged, so whoever passes one on need not be believed. Order is (boot, version),
which only the author raises. This module does not know how records travel, what they say, or who
is alive. Memory is at most 32 KiB per member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import NodeId
from gpulayer_mesh.errors import RemoteProtocolError

Version = tuple[int, int]  # boot, version
_NONE: Version = (-1, -1)


class Record(Protocol):
    """What every kind of record says."""

    @property
    def node(self) -> NodeId: ...
    @property
    def boot(self) -> int: ...
    @property
    def version(self) -> int: ...


R = TypeVar("R", bound=Record)


class RecordBook(Generic[R]):
    """What every member says of itself, as far as heard.

    Args:
        kind: of the envelopes that carry these records.
        of: what their bodies are.
    """

    def __init__(self, book: RosterBook, kind: str, of: type[R]) -> None:
        self._book = book
        self._kind = kind
        self._of = of
        self._records: dict[NodeId, tuple[R, bytes]] = {}

    def get(self, node: NodeId) -> R | None:
        found = self._records.get(node)
        return found[0] if found else None

    def signed(self, node: NodeId) -> bytes | None:
        """Return a record as its node signed it."""
        found = self._records.get(node)
        return found[1] if found else None

    def version(self, node: NodeId) -> Version:
        """Return what is held of a node; lower than every real version if nothing is."""
        record = self.get(node)
        return (record.boot, record.version) if record else _NONE

    @property
    def versions(self) -> dict[NodeId, Version]:
        """Everything held, for a peer that wants to know what to send."""
        return {node: self.version(node) for node in self._records}

    def put(self, record: R, signed: bytes) -> None:
        """Keep a verified record unless a newer one is held."""
        if self.version(record.node) < (record.boot, record.version):
            self._records[record.node] = (record, signed)

    def offer(self, signed: bytes) -> None:
        """Verify what a peer brings, and keep it if it is news.

        Raises:
            RemoteProtocolError: malformed, or not signed by the member it is of.
        """
        envelope = wire.open_envelope(
            signed,
            mesh=self._book.mesh,
            key_of=self._book.key_of,
            kind=self._kind,
            max_bytes=wire.RECORD_MAX,
        )
        record = wire.decode_as(self._of, envelope.body)
        if record.node != envelope.sender:
            raise RemoteProtocolError(f"a {self._kind} record signed by somebody else")
        self.put(record, signed)

    def newer_than(self, have: Mapping[NodeId, Version], *, max_bytes: int) -> list[bytes]:
        """Return the signed records that somebody lacks, as many as fit."""
        found = []
        for node, (_, signed) in self._records.items():
            if have.get(node, _NONE) < self.version(node) and len(signed) < max_bytes:
                max_bytes -= len(signed)
                found.append(signed)
        return found

    def keep(self, members: Collection[NodeId]) -> None:
        """Forget who is not among them."""
        self._records = {node: one for node, one in self._records.items() if node in members}
