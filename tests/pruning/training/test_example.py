"""The lottery ticket example runs, and its seven curves meet at the same sparsities."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "lottery_ticket.py"


def test_it_writes_its_curves(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    small = ["--seeds", "1", "--rounds", "2", "--steps", "12", "--sparsity", "0.9", "--rewind-step", "2"]
    ran = subprocess.run([sys.executable, EXAMPLE, "-o", tmp_path, *small], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    curves = json.loads((tmp_path / "curves.json").read_text())["curves"]
    assert curves.keys() == {"one-shot", "iterative", "L1", "L2", "lr rewound", "rewound", "re-initialised"}
    for name, points in curves.items():
        assert [round(point["sparsity"], 3) for point in points if point["sparsity"]] == [0.684, 0.9], name
        assert all(0 <= point["accuracy"] <= 1 for point in points)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
