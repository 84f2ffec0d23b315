"""The tiny model that the tests of several rooms share."""

import os
import signal

import pytest

# Before NumPy and PyTorch are loaded: their threads wait by spinning, which stalls tests that run beside others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from tiny_llama import write_tiny_llama


def pytest_configure():
    # A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    checkpoint = open_checkpoint(tiny_folder)
    yield load_model(checkpoint)
    checkpoint.close()
