"""How many threads this process may usefully run: physical cores, its affinity and its cgroup's quota."""

import math
import os
from pathlib import Path

MAX_THREADS = 1024
"""Most threads of the native pool."""

_CPU = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu: Path = _CPU, quota: Path = _QUOTA) -> int:
    """Physical cores among the processors this process may use, at most what its cgroup may spend; at least 1.

    Two hyper-threads of one core share its units and its memory ports, and threads beyond the quota only make the
    others wait at the barrier.
    """
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu, index) or str(index) for index in allowed}
    return max(1, min(len(cores), _granted(quota)))


def _siblings(cpu: Path, index: int) -> str:
    try:
        return (cpu / f"cpu{index}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return ""


def _granted(quota: Path) -> int:
    try:
        limit, period = quota.read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):
        # No cgroup v2, or "max": no limit.
        return len(os.sched_getaffinity(0))
