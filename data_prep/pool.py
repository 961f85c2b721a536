"""Worker processes that never outlive their parent, and a parent that never waits for a dead one.

The processes are forked, so that they share with each other and with their parent the memory of what was loaded or
computed before.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from queue import Queue
from typing import Any

from recipes.errors import UserError

AHEAD = 2  # tasks that a worker holds: one in work, one waiting


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(work: Callable[[Any], Any], tasks: Iterable[Any], workers: int) -> Iterator[Any]:
    """Results of `work(task)` for every task, as they are ready; an error of a worker is raised here.

    Args:
        work: runs in the workers, which are forked now: it may use anything that exists in this process.
        tasks: drawn from as workers become free.
        workers: processes; each uses one core.
    """
    pool = _Pool(work, workers)
    try:
        yield from pool.run(iter(tasks))
    finally:
        pool.kill()


class _Pool:
    def __init__(self, work: Callable[[Any], Any], workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            process = context.Process(target=_serve, args=(work, theirs, list(self._ends)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def run(self, tasks: Iterator[Any]) -> Iterator[Any]:
        held = dict.fromkeys(self._ends, 0)
        open_ended = True
        while True:
            while open_ended and (end := min(held, key=lambda e: held[e])) and held[end] < AHEAD:
                try:
                    task = next(tasks)
                except StopIteration:
                    open_ended = False
                    break
                self._send(end, task)
                held[end] += 1
            busy = [end for end, count in held.items() if count]
            if not busy:
                return
            for end in wait(busy):
                assert isinstance(end, Connection)
                held[end] -= 1
                yield self._receive(end)

    def _send(self, end: Connection, task: Any) -> None:
        try:
            end.send(task)
        except OSError as error:
            raise self._died(end) from error

    def _receive(self, end: Connection) -> Any:
        try:
            is_result, value = end.recv()
        except (EOFError, OSError) as error:
            raise self._died(end) from error
        if is_result:
            return value
        raise value

    def _died(self, end: Connection) -> UserError:
        process = self._processes[self._ends.index(end)]
        process.join(5)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return UserError(f"a worker process {how} (out of memory?); run the same command again, it goes on from there")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()


def _serve(work: Callable[[Any], Any], end: Connection, ends_of_parent: list[Connection]) -> None:
    """Body of a worker: its main thread takes tasks in, so that the parent need not wait until they are wanted."""
    for other in ends_of_parent:  # else a worker would keep another one's pipe to their dead parent open
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and kills
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a core
    tasks: Queue = Queue(maxsize=1)

    def work_on() -> None:
        try:
            while True:
                task = tasks.get()
                try:
                    answer = (True, work(task))
                except BaseException as error:
                    answer = (False, _portable(error))
                end.send(answer)
        except Exception:  # the answer cannot be sent: the parent hears of the end of the process
            traceback.print_exc()
            os._exit(1)

    # not in the main thread, whose memory comes out of the many small holes that the parent's has: slow to work in
    threading.Thread(target=work_on, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks.put(end.recv())
    os._exit(0)  # the parent is gone


def _portable(error: BaseException) -> BaseException:
    """The error, or its words where it cannot be sent."""
    error.__cause__ = error.__context__ = None
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
