"""Models named by a hub id, through huggingface-hub's cache and its environment variables."""

import re
from pathlib import Path

from thinfer.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?")
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model")


def is_hub_id(ref: str) -> bool:
    """Tell whether a reference has the form ``owner/name`` or ``owner/name/file.gguf``.

    Example:
        >>> is_hub_id("HuggingFaceTB/SmolLM2-135M"), is_hub_id("./model.gguf"), is_hub_id("dir/model.gguf")
        (True, False, False)
    """
    if not _ID.fullmatch(ref) or ".." in ref:
        return False
    # "models/x.gguf" is a mistyped path far more often than a repository of that name.
    return ref.count("/") > 1 or not ref.endswith((".gguf", ".safetensors", ".json"))


def fetch(ref: str) -> Path:
    """Return the local path of a hub model, fetching into the hub's cache what it lacks.

    Returns:
        The snapshot folder, or the file of ``owner/name/file.gguf``.

    Raises:
        CheckpointError: No such repository or file, no access, no network, or offline and not in the cache.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    owner, name, *rest = ref.split("/")
    repo = f"{owner}/{name}"
    try:
        if rest:
            return Path(hf_hub_download(repo, "/".join(rest)))
        # The root of the repository only: subfolders hold the same weights for other programs.
        folder = Path(snapshot_download(repo, allow_patterns=list(_PATTERNS), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{ref}: no such local path, and the hub gave: {lines[0]}; check the id, HF_TOKEN, HF_HUB_OFFLINE and"
            " the network, or give a local path"
        ) from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{ref}: the repository has no config.json; name a file in it: {ref}/FILE.gguf")
    return folder
