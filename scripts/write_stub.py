"""Writes src/thinfer/_core.pyi from the built native module; with --check only says whether it is up to date."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "src" / "thinfer" / "_core.pyi"
HEADER = "# ruff: noqa\n# Written by scripts/write_stub.py from the native module: do not edit.\n"


def stub_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "_core.pyi"
        generate = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "thinfer._core", "-o", str(raw)]
        subprocess.run(generate, check=True)
        text = raw.read_text(encoding="utf-8")
    # The layout of arrays is checked at run time; in a signature it hides what matters.
    text = re.sub(r"Annotated\[(NDArray\[[\w.]+\]), dict\(.*?\)\]", r"\1", text)
    text = text.replace("from typing import Annotated\n", "")
    tidy = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(tidy, input=HEADER + text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    current = stub_text()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(current, encoding="utf-8")
    elif not STUB.exists() or STUB.read_text(encoding="utf-8") != current:
        sys.exit(f"{STUB.name} is out of date: run python scripts/write_stub.py")
