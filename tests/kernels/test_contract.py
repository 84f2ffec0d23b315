"""Every kernel file: its cases run, rows do not depend on each other, and native builds agree with the reference."""

import copy
import importlib
import importlib.util
import pkgutil

import numpy as np
import pytest

import thinfer.kernels

KERNELS = {
    module.name: importlib.import_module(f"thinfer.kernels.{module.name}")
    for module in pkgutil.iter_modules(thinfer.kernels.__path__)
    if module.name != "case"
}
CASES = [
    pytest.param(kernel, case, id=f"{name}-{case.name}")
    for name, kernel in KERNELS.items()
    for case in kernel.cases(np.random.default_rng(0))
]


def isas() -> list[str]:
    if importlib.util.find_spec("thinfer._core") is None:
        return []
    return list(importlib.import_module("thinfer._core").isas())


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Equal shapes, NaN and infinities in the same places, finite values within the tolerance."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    if finite.any():
        bound = tolerance * np.abs(expected[finite]).max()
        assert np.abs(actual[finite] - expected[finite]).max() <= bound


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_file_is_complete(name):
    kernel = KERNELS[name]
    assert kernel.__doc__
    assert kernel.reference.__doc__
    names = [case.name for case in kernel.cases(np.random.default_rng(0))]
    assert len(names) == len(set(names)) >= 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_reference_runs_its_cases(kernel, case):
    with np.errstate(invalid="ignore"):
        result = kernel.reference(**copy.deepcopy(case.args))
    assert result.dtype == np.float32


@pytest.mark.parametrize(
    "isa", isas() or [pytest.param("none", marks=pytest.mark.skip("the native part is not built"))]
)
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_native_agrees_with_the_reference(kernel, case, isa):
    if not hasattr(kernel, "native"):
        pytest.skip("no native kernel of its own")
    expected_args, actual_args = copy.deepcopy(case.args), copy.deepcopy(case.args)
    with np.errstate(all="ignore"):
        expected = kernel.reference(**expected_args)
    assert_close(kernel.native(isa, **actual_args), expected, case.tolerance)
    for name, value in expected_args.items():
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            assert_close(actual_args[name], value, 0.0)
