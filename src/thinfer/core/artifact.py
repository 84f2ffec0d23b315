"""What thinfer learned about a model: thinfer.json and thinfer.safetensors, tied to the model by hash."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thinfer.errors import ArtifactError, ResourceError, UsageError

JSON_NAME = "thinfer.json"
TENSORS_NAME = "thinfer.safetensors"
_VERSION = 1
_MADE_BY = {"selector": "calibrate", "profile": "profile", "predictors": "predict train"}


@dataclass(frozen=True, slots=True)
class Artifact:
    """Sections (JSON) and tensors that belong to the checkpoint with this fingerprint.

    `base` says where that checkpoint is: a path relative to the artifact's folder, an absolute path, or a hub id.

    Example: `Artifact("../model.gguf", checkpoint.fingerprint(), {"selector": section}, tensors).save(folder)`.
    """

    base: str
    fingerprint: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """Write both files into the folder (made when absent); each appears whole or not at all.

        Both are on the disk before either appears. The JSON comes last and holds the hash of the tensors, so a mixture
        of two writes is refused by `read`.

        Raises:
            ResourceError: the disk is full, or the folder forbids it; what was there before stays.
        """
        path = Path(folder)
        blob = save({name: np.ascontiguousarray(value) for name, value in self.tensors.items()})
        document = {
            "format": "thinfer",
            "version": _VERSION,
            "base": self.base,
            "fingerprint": self.fingerprint,
            "tensors_sha256": hashlib.sha256(blob).hexdigest(),
            "sections": self.sections,
        }
        text = (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write({path / TENSORS_NAME: blob, path / JSON_NAME: text})
        except OSError as error:
            raise ResourceError(
                f"{path}: cannot be written ({error.strerror}); free some space or choose another -o, and run again"
            ) from error

    def merged(self, folder: str | Path) -> Artifact:
        """This artifact with the sections that it lacks and that the folder's own has for the same weights.

        Tensors belong to the section that their names begin with. What the folder has for other weights, or damaged,
        is of no use any more and left out: the next `save` replaces it.

        Example: `Artifact(base, fingerprint, {"profile": section}, tensors).merged(folder).save(folder)`.
        """
        try:
            there = Artifact.read(folder)
            there.check(self.fingerprint)
        except ArtifactError:
            return self
        kept = {name: value for name, value in there.sections.items() if name not in self.sections}
        tensors = {name: value for name, value in there.tensors.items() if name.partition(".")[0] in kept}
        return replace(self, sections={**kept, **self.sections}, tensors={**tensors, **self.tensors})

    @classmethod
    def read(cls, folder: str | Path) -> Artifact:
        """Read a folder's artifact; ArtifactError when a file is missing, damaged, of a newer version, or mixed."""
        path = Path(folder)
        document = read_document(path)
        try:
            blob = (path / TENSORS_NAME).read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path / TENSORS_NAME}: {error.strerror}; calibrate again") from error
        if hashlib.sha256(blob).hexdigest() != document["tensors_sha256"]:
            raise ArtifactError(f"{path}: {TENSORS_NAME} is not the one {JSON_NAME} was written with; calibrate again")
        try:
            tensors = load(blob)
        except SafetensorError as error:
            raise ArtifactError(f"{path / TENSORS_NAME}: {error}; calibrate again") from error
        return cls(document["base"], document["fingerprint"], document["sections"], tensors)

    def check(self, fingerprint: str) -> None:
        """Raise ArtifactError unless this artifact was made for the checkpoint with this fingerprint."""
        if fingerprint != self.fingerprint:
            made = [verb for section, verb in _MADE_BY.items() if section in self.sections] or ["calibrate"]
            raise ArtifactError(
                f"stale artifact: made for weights {self.fingerprint[:12]}, but {self.base} now has "
                f"{fingerprint[:12]}; run thinfer {' and thinfer '.join(made)} again"
            )


def base_for(given: str | Path, path: Path, folder: str | Path) -> str:
    """How an artifact in the folder names its base: relative inside the model's own folder, so both move together.

    Args:
        given: what the user called the model; a hub id stays one.
        path: where it was found.
        folder: where the artifact is written.

    Returns:
        The hub id, the relative path, or for a folder elsewhere the absolute path.
    """
    if not Path(given).expanduser().exists():
        return str(given)
    home, place = (path if path.is_dir() else path.parent).resolve(), Path(folder).resolve()
    return os.path.relpath(path.resolve(), place) if place.is_relative_to(home) else str(path.resolve())


def require_writable(folder: str | Path) -> None:
    """Raise UsageError unless an artifact could be written there; asked before the work is done, and makes nothing."""
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not nearest.is_dir():
        raise UsageError(f"{nearest}: a file, not a folder; choose another place for the artifact")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest}: no permission to write there; choose another place for the artifact")


def read_document(folder: Path) -> dict[str, Any]:
    """The checked content of a folder's thinfer.json, without reading its tensors."""
    path = folder / JSON_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != "thinfer":
        raise ArtifactError(f"{path}: not an artifact of thinfer")
    if document.get("version") != _VERSION:
        raise ArtifactError(
            f"{path}: version {document.get('version')} is unknown, this thinfer reads {_VERSION}; "
            "update thinfer or calibrate again"
        )
    expected = {"base": str, "fingerprint": str, "tensors_sha256": str, "sections": dict}
    for name, kind in expected.items():
        if not isinstance(document.get(name), kind):
            raise ArtifactError(f"{path}: field {name!r} is missing or damaged; calibrate again")
    return document


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all beside their targets, then rename in order, so that a reader never sees half a file."""
    # mkstemp makes files private; an artifact is as readable as the model beside it.
    umask = os.umask(0)
    os.umask(umask)
    with ExitStack() as unfinished:
        ready = []
        for path, data in files.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
            unfinished.callback(Path(name).unlink, missing_ok=True)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~umask)
            ready.append((name, path))
        for name, path in ready:
            os.replace(name, path)
