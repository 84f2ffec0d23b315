"""What a speed figure must carry: the commit and the processor it was measured with."""

import subprocess
from pathlib import Path

import thinfer


def commit() -> str:
    """Short commit of the checkout that runs, with ``-dirty`` when files differ from it; else the version."""
    root = Path(thinfer.__file__).parents[2]
    if not (root / ".git").exists():
        return thinfer.__version__
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return thinfer.__version__
    return described.stdout.strip()


def cpu() -> str:
    """The processor's name, as the system gives it."""
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
