"""Reading ahead: bounded, in order, loud about errors, never in the way of the process's end."""

import itertools
import subprocess
import sys
import threading
import time

import pytest

from data_prep.prefetch import Prefetcher


def test_items_in_order_then_stop():
    ahead = Prefetcher(lambda: iter(range(5)), depth=2, timeout_seconds=5)
    assert [ahead.next() for _ in range(5)] == list(range(5))
    with pytest.raises(StopIteration):
        ahead.next()


def test_error_reaches_the_reader_after_the_items_before_it():
    def items():
        yield 1
        raise OSError("disk")

    ahead = Prefetcher(items, depth=2, timeout_seconds=5)
    assert ahead.next() == 1
    with pytest.raises(OSError, match="disk"):
        ahead.next()


def test_waits_no_longer_than_agreed():
    release = threading.Event()
    ahead = Prefetcher(lambda: iter(release.wait, True), depth=1, timeout_seconds=0.3)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="0.3 s"):
        ahead.next()
    assert 0.25 < time.monotonic() - began < 3
    release.set()
    ahead.close()


def test_reads_no_further_than_its_depth():
    made = []
    ahead = Prefetcher(lambda: (made.append(i) or i for i in itertools.count()), depth=2, timeout_seconds=5)
    assert ahead.next() == 0
    time.sleep(0.5)
    assert len(made) <= 4  # one taken, two waiting, one in hand
    ahead.close()


def test_close_ends_the_thread_and_reading_on_is_an_error():
    ahead = Prefetcher(itertools.count, depth=1, timeout_seconds=5)
    ahead.next()
    ahead.close()
    assert not ahead._thread.is_alive()
    with pytest.raises(RuntimeError, match="stopped"):
        for _ in range(3):
            ahead.next()


def test_collection_ends_the_thread():
    ahead = Prefetcher(itertools.count, depth=1, timeout_seconds=5)
    thread = ahead._thread
    del ahead
    thread.join(3)
    assert not thread.is_alive()


def test_process_ends_with_a_stuck_thread():
    program = (
        "import time; from data_prep.prefetch import Prefetcher\n"
        "ahead = Prefetcher(lambda: iter(lambda: time.sleep(600), 1), depth=1, timeout_seconds=1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=20).returncode == 0
