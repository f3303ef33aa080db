"""How much memory a check may take: what the kernel can give, within the limit of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be taken without swapping. root: where `proc` and `sys` lie.

    As Linux estimates it (`MemAvailable`), and no more than the process's control groups leave
    (cgroup v2's memory.max, v1's memory.limit_in_bytes); elsewhere the machine's memory.
    """
    table = root / "proc/meminfo"
    if not table.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([_estimate(table), *_left_in_groups(root)]))


def _estimate(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of the process's group and all above it, where each has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for group in _upwards(top, path.strip("/")):
            most, taken = _text(group / limit).strip(), _text(group / used).strip()
            if most.isdigit() and taken.isdigit():  # "max": no limit
                yield int(most) - int(taken) + _reclaimable(group)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """A container may see its own group as the top, whatever the path says."""
    group = top / path
    while group != top:
        yield group
        group = group.parent
    yield top


def _reclaimable(group: Path) -> int:
    """Cached pages of files that nobody uses: they are counted, and given back when needed."""
    lines = _text(group / "memory.stat").splitlines()
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    # v1 counts groups below apart; v2 has no such line.
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
