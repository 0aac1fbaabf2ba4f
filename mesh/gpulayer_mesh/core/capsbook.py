"""The newest capabilities record of each member, as its node signed it.

Records are relayed unchanged, so whoever passes one on need not be believed. Order is (boot,
version), which only the subject raises. This module does not know how records travel, or who is
alive. Memory is at most 32 KiB per member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpulayer_mesh.core import wire
from gpulayer_mesh.core.roster import RosterBook
from gpulayer_mesh.core.types import CapsRecord, NodeId
from gpulayer_mesh.errors import RemoteProtocolError

Version = tuple[int, int]  # boot, version
_NONE: Version = (-1, -1)


class CapsBook:
    """What every member has, as far as heard."""

    def __init__(self, book: RosterBook) -> None:
        self._book = book
        self._records: dict[NodeId, tuple[CapsRecord, bytes]] = {}

    def get(self, node: NodeId) -> CapsRecord | None:
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

    def put(self, record: CapsRecord, signed: bytes) -> None:
        """Keep a verified record unless a newer one is held."""
        if self.version(record.node) < (record.boot, record.version):
            self._records[record.node] = (record, signed)

    def offer(self, signed: bytes) -> None:
        """Verify what a peer brings, and keep it if it is news.

        Raises:
            RemoteProtocolError: malformed, or not signed by the member it describes.
        """
        envelope = wire.open_envelope(
            signed,
            mesh=self._book.mesh,
            key_of=self._book.key_of,
            kind="caps",
            max_bytes=wire.RECORD_MAX,
        )
        record = wire.decode_as(CapsRecord, envelope.body)
        if record.node != envelope.sender:
            raise RemoteProtocolError("capabilities signed by somebody else")
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
