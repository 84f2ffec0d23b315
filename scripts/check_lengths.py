"""Fails when a source file is longer than 500 lines: a file that long holds two things."""

import sys
from pathlib import Path

LIMIT = 500
SUFFIXES = {".py", ".cpp", ".h", ".c", ".cu"}


def too_long(roots: list[Path]) -> list[str]:
    files = sorted(path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES)
    counts = ((path, len(path.read_text(encoding="utf-8").splitlines())) for path in files)
    return [f"{path}: {count} lines, the limit is {LIMIT}: split it" for path, count in counts if count > LIMIT]


if __name__ == "__main__":
    findings = too_long([Path(root) for root in sys.argv[1:]])
    print("\n".join(findings) if findings else f"no file is longer than {LIMIT} lines")
    sys.exit(bool(findings))
