"""The native code by itself: under sanitizers, without code that crosses instruction sets, with an up-to-date stub."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.fixture(scope="module")
def sanitized():
    """Build folder of the C++ tests under address and undefined-behaviour sanitizers; kept from run to run."""
    cmake, ninja = shutil.which("cmake", path=TOOLS), shutil.which("ninja", path=TOOLS)
    if not cmake or not ninja or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("cmake, ninja and a C++ compiler are needed")
    folder = ROOT / "build" / "sanitized"
    options = ["-DTHINFER_PYTHON=OFF", "-DTHINFER_NATIVE_TESTS=ON", "-DTHINFER_SANITIZE=address,undefined"]
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options]
    for command in (configure, [cmake, "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_native_tests_pass_under_sanitizers(sanitized):
    done = subprocess.run([sanitized / "thinfer_native_tests"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "native tests passed" in done.stdout


@pytest.mark.slow
def test_kernel_objects_share_no_inline_functions(sanitized):
    """A weak function compiled for AVX-512 might be the copy that the linker gives to the others."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is needed")
    objects = sorted(sanitized.glob("CMakeFiles/thinfer_*.dir/csrc/cpu/*.o"))
    assert objects
    symbols = subprocess.run([nm, "-C", *objects], capture_output=True, text=True, check=True).stdout.splitlines()
    shared = {line.split(maxsplit=2)[2] for line in symbols if " W " in line or " V " in line}
    own_namespace = re.compile(r"thinfer::(scalar|avx2|avxvnni|avx512)::")
    assert not {name for name in shared if "thinfer::" in name and not own_namespace.search(name)}


@pytest.mark.skipif(importlib.util.find_spec("nanobind") is None, reason="nanobind is needed")
def test_stub_is_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "write_stub.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
