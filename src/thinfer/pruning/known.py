"""Models that thinfer runs and transformers cannot build: what to work on instead."""

from __future__ import annotations

from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models.gguf_config import SPARSE_LLAMA
from thinfer.models.hf_config import RELUFIED


def require_known(checkpoint: Checkpoint) -> None:
    """UnsupportedError, naming a way, where only thinfer's own engine knows a model's activation or its norms.

    Weights are changed in a model of transformers, and what it would make of such a checkpoint is another model.
    """
    from transformers.activations import ACT2FN

    values = checkpoint.metadata
    if checkpoint.kind == "gguf":
        if values.get("general.architecture") != SPARSE_LLAMA:
            return
        act, rectified = values.get(f"{SPARSE_LLAMA}.activation"), values.get(f"{SPARSE_LLAMA}.norm_activation")
    else:
        kind = str(values.get("model_type"))
        act, rectified = values.get("hidden_act"), kind.startswith(RELUFIED)
        # transformers has a bamboo too: a hybrid with state space layers.
        if kind == "bamboo" and not any(name.startswith("mamba_") for name in values):
            act = "drelu"
    if rectified:
        raise UnsupportedError(
            f"{checkpoint.path}: transformers has no ReLU behind norms (stage 2 of thinfer relufy), so thinfer runs "
            "this model but cannot prune or train it; prune its stage 1, and make stage 2 from the result"
        )
    if isinstance(act, str) and act not in ACT2FN:
        raise UnsupportedError(
            f"{checkpoint.path}: transformers has no activation {act!r}, so this model cannot be pruned or trained, "
            "though thinfer runs it; take the model it was made from, or one with relu (thinfer relufy makes one)"
        )
