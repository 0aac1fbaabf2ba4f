"""Releasing start-up memory: only clean pages of files go, and everything still works after."""

import subprocess
import sys

import pytest
from gpulayer_mesh.runtime.footprint import clean_file_ranges

SMAPS = """\
00400000-00500000 r-xp 00000000 fe:00 100        /usr/lib/libcode.so
Rss:                 900 kB
Anonymous:             0 kB
Swap:                  0 kB
00500000-00510000 r--p 00100000 fe:00 100        /usr/lib/librelocated.so
Anonymous:            64 kB
Swap:                  0 kB
00510000-00520000 r--p 00110000 fe:00 100        /usr/lib/librelocated-and-swapped.so
Anonymous:             0 kB
Swap:                 64 kB
00520000-00530000 rw-p 00120000 fe:00 100        /usr/lib/libdata.so
Anonymous:             0 kB
Swap:                  0 kB
01000000-02000000 rw-p 00000000 00:00 0          [heap]
Anonymous:          9000 kB
Swap:                  0 kB
7f0000000000-7f0000001000 r--p 00000000 00:00 0
Anonymous:             0 kB
Swap:                  0 kB
7f0000010000-7f0000020000 r--p 00000000 fe:00 101 /usr/lib/with space.so (deleted)
Anonymous:             0 kB
Swap:                  0 kB
"""

RELEASE = """
import asyncio, ssl, psutil, aiohttp, cryptography.hazmat.primitives.asymmetric.ed25519 as ed
from gpulayer_mesh.runtime.footprint import release_start_up_memory
before = psutil.Process().memory_info().rss
release_start_up_memory()
after = psutil.Process().memory_info().rss
key = ed.Ed25519PrivateKey.generate()
key.public_key().verify(key.sign(b"x"), b"x")
ssl.create_default_context()
asyncio.run(asyncio.sleep(0))
print(before - after)
"""


def test_only_what_equals_its_file_is_dropped() -> None:
    ranges = list(clean_file_ranges(SMAPS.splitlines()))
    assert ranges == [(0x400000, 0x500000), (0x7F0000010000, 0x7F0000020000)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_libraries_work_on_after_their_pages_are_gone() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5_000_000
