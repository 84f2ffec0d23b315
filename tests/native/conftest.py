"""Skips these tests where the native part is not built, except in CI; `isa` runs a test on every instruction set."""

import importlib.util
import os

import pytest

BUILT = importlib.util.find_spec("thinfer._core") is not None


def pytest_collection_modifyitems(items):
    if not BUILT:
        if os.environ.get("CI"):
            raise pytest.UsageError("thinfer._core is not built: run `make setup`; CI must not skip its tests")
        for item in items:
            if "tests/native" in item.path.as_posix():
                item.add_marker(pytest.mark.skip("the native part is not built"))


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        names = importlib.import_module("thinfer._core").isas() if BUILT else ["scalar"]
        metafunc.parametrize("isa", names)
