"""Several workers give what one gives, and an error of one ends all."""

from __future__ import annotations

from threading import Barrier
from time import sleep

import pytest

from calibration.comparison.workers import measured, shared
from runtime.executor import EngineOptions


def test_each_task_is_measured_once_and_two_run_at_a_time() -> None:
    both = Barrier(2, timeout=60)  # breaks unless two workers are in it together

    def measure(worker: str, task: int) -> tuple[str, int]:
        both.wait()
        return worker, task

    found = list(measured(["a", "b"], range(8), measure))
    assert sorted(task for _, task in found) == list(range(8))
    assert {worker for worker, _ in found} == {"a", "b"}


def test_a_worker_has_one_task_at_a_time() -> None:
    busy: set[str] = set()

    def measure(worker: str, task: int) -> None:
        assert worker not in busy
        busy.add(worker)
        sum(range(10_000))
        busy.remove(worker)

    assert len(list(measured(["a", "b"], range(200), measure))) == 200


def test_an_error_is_raised_and_later_tasks_are_not_begun() -> None:
    begun: list[int] = []

    def measure(_: str, task: int) -> int:
        begun.append(task)
        if task == 3:
            raise ValueError("task 3")
        sleep(0.01)
        return task

    with pytest.raises(ValueError, match="task 3"):
        list(measured(["a"], range(1000), measure))  # all of them would take 10 s
    assert len(begun) < 1000


@pytest.mark.parametrize(("threads", "workers", "each"), [(1, 1, 1), (2, 2, 1), (9, 2, 4)])
def test_workers_share_the_threads(threads: int, workers: int, each: int) -> None:
    count, options = shared(EngineOptions(threads=threads))
    assert (count, options.threads) == (workers, each)
