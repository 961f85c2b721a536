"""Read ahead in a background thread, and never wait for it longer than agreed."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from typing import Any

POLL_SECONDS = 0.1  # how soon a stop or a dead thread is noticed
JOIN_SECONDS = 2.0  # how long closing waits for the thread; a thread stuck in a system call is left behind


class Prefetcher:
    """Items of an iterator, made by a daemon thread that keeps at most `depth` of them waiting.

    An exception in the thread is raised from `next()`. The thread ends on `close()`, when this object is collected,
    or at interpreter exit, whichever comes first; it never keeps the process alive.
    """

    def __init__(self, make_iterator: Callable[[], Iterator[Any]], *, depth: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._queue: Queue = Queue(maxsize=depth)
        stop = threading.Event()
        self._thread = threading.Thread(target=_fill, args=(make_iterator, self._queue, stop), daemon=True)
        self.close = weakref.finalize(self, _end, stop, self._thread)
        self._thread.start()

    def next(self) -> Any:
        """The next item; TimeoutError if none comes in time, StopIteration at the end of the iterator."""
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                kind, value = self._queue.get(timeout=POLL_SECONDS)
            except Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise RuntimeError("reading ahead was stopped; make a new loader") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing arrived within {self.timeout_seconds:g} s") from None
                continue
            if kind == "item":
                return value
            raise value


def _fill(make_iterator: Callable[[], Iterator[Any]], queue: Queue, stop: threading.Event) -> None:
    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            try:
                return queue.put((kind, value), timeout=POLL_SECONDS)
            except Full:
                continue

    try:
        for item in make_iterator():
            put("item", item)
            if stop.is_set():
                return
        put("end", StopIteration())
    except BaseException as error:  # whatever it is, it belongs to the thread that waits for a batch
        put("error", error)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(JOIN_SECONDS)
