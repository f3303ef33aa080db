"""What a build takes for available where the kernel, or a container, has its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.memory import available_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    given = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB >> 10} kB\n"} | files
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(where: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    names = ("memory.max", "memory.current")
    if "/memory" in where:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {
        f"{where}/{names[0]}": f"{limit}\n",
        f"{where}/{names[1]}": f"{used}\n",
        f"{where}/memory.stat": stat,
    }


def test_no_limit_is_the_kernels_estimate(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/user\n"} | group("sys/fs/cgroup/user", "max", GIB)
    assert available_bytes(machine(tmp_path, files)) == 8 * GIB


@pytest.mark.parametrize("below", ["", "/pod/own"])
def test_a_container_of_cgroup_v2_leaves_less(tmp_path: Path, below: str) -> None:
    files = {"proc/self/cgroup": f"0::{below or '/'}\n"} | group(
        f"sys/fs/cgroup{below}", str(3 * GIB), 2 * GIB, f"anon 5\ninactive_file {GIB // 2}\n"
    )
    assert available_bytes(machine(tmp_path, files)) == 3 * GIB // 2


def test_a_limit_above_the_process_own_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/own\n",
        **group("sys/fs/cgroup/pod", str(2 * GIB), GIB),
        **group("sys/fs/cgroup/pod/own", "max", GIB // 2),
    }
    assert available_bytes(machine(tmp_path, files)) == GIB


def test_a_container_of_cgroup_v1_leaves_less(tmp_path: Path) -> None:
    # Inside it the group is the top, though the path is the one outside.
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\n"
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/1f\n"} | group(
        "sys/fs/cgroup/memory", str(4 * GIB), 2 * GIB, stat
    )
    assert available_bytes(machine(tmp_path, files)) == 3 * GIB


def test_used_up_is_nothing_and_not_less(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", str(GIB), 2 * GIB)
    assert available_bytes(machine(tmp_path, files)) == 0


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0


def test_without_the_kernels_table_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0
