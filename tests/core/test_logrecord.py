"""Log records: format, parser under any cut and any garbage, the lines that explain an end."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from gpulayer_mesh.core.logrecord import (
    DATA_MAX,
    EVERY_LINE,
    HEADER,
    RECORD_FORMAT,
    LogPick,
    LogRecord,
    LogStream,
    RecordParser,
    begin_of_tail,
    last_lines,
)
from gpulayer_mesh.errors import RemoteProtocolError
from hypothesis import given
from hypothesis import strategies as st

RECORDS = st.builds(
    LogRecord,
    rank=st.integers(0, 65535),
    seq=st.integers(0, 2**64 - 1),
    wall=st.floats(0, 1e11),
    stream=st.sampled_from(LogStream),
    data=st.binary(max_size=200),
)


def out(data: bytes, stream: LogStream = LogStream.OUT) -> LogRecord:
    return LogRecord(0, 1, 0.0, stream, data)


@given(st.lists(RECORDS, max_size=20), st.data())
def test_records_survive_any_cut_of_the_stream(
    records: list[LogRecord], data: st.DataObject
) -> None:
    packed = b"".join(record.pack() for record in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=10)))
    parser = RecordParser()
    found: list[LogRecord] = []
    for start, end in zip([0, *cuts], [*cuts, len(packed)], strict=True):
        found += parser.feed(packed[start:end])
    assert found == records
    assert parser.pending == 0


def test_unfinished_record_is_kept_until_the_rest_comes() -> None:
    packed = out(b"hello\n").pack()
    parser = RecordParser()
    assert parser.feed(packed[:-1]) == []
    assert parser.pending == len(packed) - 1
    assert parser.feed(packed[-1:]) == [out(b"hello\n")]


@pytest.mark.parametrize(
    ("stream", "length", "wall"),
    [
        (1, DATA_MAX + 1, 0.0),
        (0, 1, 0.0),
        (4, 1, 0.0),
        (1, 1, float("nan")),
        (1, 1, -1.0),
        (1, 1, 1e300),
    ],
)
def test_impossible_header_is_refused_before_its_data_comes(
    stream: int, length: int, wall: float
) -> None:
    with pytest.raises(RemoteProtocolError):
        RecordParser().feed(struct.pack(RECORD_FORMAT, 0, 1, wall, stream, length))


def test_garbage_gives_only_the_typed_error(rng: random.Random) -> None:
    whole = b"".join(out(bytes([65 + i]) * 50).pack() for i in range(20))
    for _ in range(20_000):
        garbage = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            garbage[rng.randrange(len(garbage))] = rng.randrange(256)
        parser = RecordParser()
        try:
            parser.feed(bytes(garbage))
        except RemoteProtocolError:
            continue
        assert parser.pending <= HEADER.size + DATA_MAX


def test_lines_keep_their_ends() -> None:
    data = b"a\nb\r\nbar 1\rbar 2\rrest"
    assert out(data).lines() == [b"a\n", b"b\r\n", b"bar 1\r", b"bar 2\r", b"rest"]


def test_last_lines_prefer_stderr_and_notes() -> None:
    records = [
        out(b"epoch 1\n"),
        out(b"Trace", LogStream.ERR),
        out(b"back\nError: x\n", LogStream.ERR),
        out(b"epoch 2\n"),
        out(b"killed by the kernel\n", LogStream.NOTE),
    ]
    assert last_lines(records, 2) == ("Error: x", "killed by the kernel")
    assert last_lines(records, 9) == ("Traceback", "Error: x", "killed by the kernel")


def test_last_lines_fall_back_to_stdout() -> None:
    assert last_lines([out(b"a\nb\n\n"), out(b" \n", LogStream.ERR)], 5) == ("a", "b")
    assert last_lines([], 5) == ()


def test_last_lines_show_the_last_state_of_a_bar_and_cut_long_lines() -> None:
    records = [out(b"\r10%\r20%\r\nError: " + b"x" * 100 + b"\xff\n", LogStream.ERR)]
    assert last_lines(records, 5, chars_max=11) == ("20%", "x" * 10 + "\ufffd")


TAIL = [out(b"a\nb\n"), out(b"c"), out(b"d\ne\n"), out(b"f\ng\n")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, b""), (1, b"g\n"), (2, b"f\ng\n"), (3, b"e\nf\ng\n"), (4, b"cd\ne\nf\ng\n"),
     (6, b"a\nb\ncd\ne\nf\ng\n"), (9, b"a\nb\ncd\ne\nf\ng\n")],
)  # fmt: skip
def test_last_lines_of_a_log_begin_at_a_record_and_a_place_in_it(
    count: int, expected: bytes
) -> None:
    records = [replace(one, seq=seq) for seq, one in enumerate(TAIL, 1)]

    def shown(records: list[LogRecord]) -> bytes:
        seq, at = begin_of_tail(records, count)
        left = [one.data[at if one.seq == seq else 0 :] for one in records if one.seq >= seq]
        return b"".join(left)

    assert shown(records) == expected
    live = [*records, replace(out(b"h"), seq=5)]  # a line that is not at its end
    if count:
        lines = [*expected.splitlines(keepends=True), b"h"]
        assert shown(live) == b"".join(lines[-count:])
    assert begin_of_tail([], count) == (0, 0)


def test_pick_takes_streams_and_ages() -> None:
    assert EVERY_LINE.takes(LogStream.OUT, 0.0, 1e9)
    errors = LogPick(stderr=True)
    assert [errors.takes(stream, 0.0, 1e9) for stream in LogStream] == [False, True, True]
    recent = LogPick(since_s=60.0)
    assert [recent.takes(1, wall, 100.0) for wall in (39.0, 40.0, 101.0)] == [False, True, True]
