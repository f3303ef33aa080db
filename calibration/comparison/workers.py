"""Prompts measured by a few workers at once, which share the weights.

Single rows keep few cores busy, and laws are worked out in NumPy between them: while one worker
does the one, another does the other, each with its part of the threads. A prompt is one worker's,
from its first row to its last, so what is measured doesn't depend on who is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

from runtime.executor import EngineOptions

WORKERS = 2
Worker = TypeVar("Worker")
Task = TypeVar("Task")
Found = TypeVar("Found")


def shared(options: EngineOptions) -> tuple[int, EngineOptions]:
    """How many workers, and what each one's engines may use."""
    threads = options.resolved_threads()
    workers = min(WORKERS, threads)
    return workers, replace(options, threads=threads // workers)


def measured(
    workers: Sequence[Worker], tasks: Sequence[Task], measure: Callable[[Worker, Task], Found]
) -> Iterator[Found]:
    """As they come; what a task raises is raised, and no other begins then."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def run(task: Task) -> Found:
        worker = free.get()
        try:
            return measure(worker, task)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        futures: list[Future[Found]] = [pool.submit(run, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
