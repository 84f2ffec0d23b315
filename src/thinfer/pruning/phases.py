"""How long each phase of a run took and how much memory it needed at most."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


class Phases:
    """Adds up seconds and peak memory by the name of the phase.

    Example:
        >>> phases = Phases("cpu")
        >>> with phases.measure("prune"):
        ...     pass
        >>> sorted(phases.to_dict()["prune"])
        ['peak_bytes', 'seconds']
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, dict[str, int]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count what runs inside for the phase `name`."""
        _reset_peak()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._cuda:
                torch.cuda.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            peaks = {"peak_bytes": _peak_bytes()}
            if self._cuda:
                peaks["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            known = self._peaks.setdefault(name, peaks)
            self._peaks[name] = {key: max(value, known[key]) for key, value in peaks.items()}

    def to_dict(self) -> dict[str, dict[str, float | int]]:
        """By phase: "seconds", "peak_bytes" of the process, and "device_peak_bytes" where a GPU is used."""
        return {name: {"seconds": seconds, **self._peaks[name]} for name, seconds in self._seconds.items()}


def _reset_peak() -> None:
    """Start the peak of the process anew where the system can; elsewhere peaks are those since its start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
