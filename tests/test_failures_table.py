"""docs/failures.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_table_names_tests_that_exist():
    table = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", table))
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (TESTS / file).is_file() or f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert not missing
