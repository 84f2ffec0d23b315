"""ReLU in place of a model's activation, in memory and in its configuration.

Mirzadeh et al. 2023, "ReLU Strikes Back" (arxiv.org/abs/2310.04564): stage 1 puts max(x − b, 0) in place of SiLU or
GELU in the FFNs, stage 2 puts ReLU behind the norms in front of attention and FFN too. A shift b is kept as the bias
−b of the layer in front of the activation, so that the result is an ordinary ReLU model that any reader understands.
Stage 2 has no place in an ordinary configuration, and a reader that does not know of it would silently leave it out:
such a folder has the model type `relufied_llama` (or `_mistral`, `_qwen2`, `_qwen3`) and the key `norm_act`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinfer.errors import UnsupportedError, UsageError
from thinfer.models.hf_config import RELUFIED
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.transformers_setup import quiet_transformers

RELU = "relu"
STAGE_2_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_ACT_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_ONE = "only models with one dense FFN a block can be turned into ReLU models"
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Ffn:
    """The FFN of one block.

    Attributes:
        holder: the module whose attribute `name` is the activation.
        name: of that attribute.
        gate: the linear layer whose outputs are activated.
        down: the linear layer whose inputs are the neurons.
        linears: all linear layers of the FFN.
        norms: the norms in front of attention and FFN, where this family has them under the usual names.
    """

    holder: nn.Module
    name: str
    gate: nn.Module
    down: nn.Module
    linears: tuple[nn.Module, ...]
    norms: tuple[nn.Module, ...]


class BlendedRelu(nn.Module):
    """(1 − amount) · old(x + shift) + amount · relu(x); `shift` is what a bias of −shift has taken from x before."""

    amount: Tensor

    def __init__(self, old: nn.Module, shift: float, device: torch.device | str) -> None:
        super().__init__()
        self.old, self.shift = old, shift
        self.register_buffer("amount", torch.ones((), device=device), persistent=False)
        self.whole = True

    def set(self, amount: float) -> None:
        """How much of the result is ReLU, from 0 to 1."""
        self.amount.fill_(amount)
        self.whole = amount >= 1

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape and type of x."""
        new = torch.relu(x)
        return new if self.whole else self.between(self.old(x + self.shift), new)

    def between(self, old: Tensor, new: Tensor) -> Tensor:
        """Part `amount` of the way; it is a tensor, for a compiled model is compiled again for every new number."""
        return torch.lerp(old, new, self.amount.to(old.dtype))


class ReluSwap:
    """A model of transformers whose activations have been replaced, in place.

    Args:
        model: a decoder with one dense FFN in every block.
        stage: 1, or 2 for ReLU behind the norms too.
        shift: b of stage 1.

    Attributes:
        old: name of the activation that was there.
        ffns: of all blocks, in order.

    Raises:
        UnsupportedError: the configuration of this architecture cannot express the result, or its FFNs are not dense.

    Example:
        >>> swap = ReluSwap(model, stage=1)  # doctest: +SKIP
        >>> swap.set(0.5)  # halfway between SiLU and ReLU  # doctest: +SKIP
    """

    def __init__(self, model: Any, stage: int, shift: float = 0.0) -> None:
        if stage not in (1, 2):
            raise UsageError(f"stage {stage}: 1 replaces activations, 2 puts ReLU behind the norms too")
        self._model, self.stage = model, stage
        self.ffns, self.old = find_ffns(model), activation_name(model.config)
        kind = model.config.model_type
        if stage == 2 and kind not in STAGE_2_TYPES:
            raise UnsupportedError(f"stage 2 is built for {', '.join(STAGE_2_TYPES)}, not for {kind}; use --stage 1")
        if shift:
            self._move_into_biases(shift)
        device = next(model.parameters()).device
        self._blends = [BlendedRelu(getattr(ffn.holder, ffn.name), shift, device) for ffn in self.ffns]
        for ffn, blend in zip(self.ffns, self._blends, strict=True):
            setattr(ffn.holder, ffn.name, blend)
        for key in _ACT_KEYS:
            if isinstance(getattr(model.config, key, None), str):
                setattr(model.config, key, RELU)
        if stage == 2:
            for norm in (norm for ffn in self.ffns for norm in ffn.norms):
                norm.register_forward_hook(self._after_norm)

    def set(self, amount: float) -> None:
        """How much of every activation is ReLU already, from 0 to 1; 1 at first."""
        for blend in self._blends:
            blend.set(amount)

    def config_file(self) -> str | None:
        """The text of config.json where an ordinary one does not say it all; None where it does."""
        if self.stage == 1:
            return None
        values = copy.deepcopy(self._model.config).to_diff_dict()
        kind = str(self._model.config.model_type)
        values |= {
            "model_type": RELUFIED + kind,
            "norm_act": RELU,
            "architectures": [f"Relufied{type(self._model).__name__}"],
        }
        # transformers 5 writes what belongs to a number type as an object.
        return json.dumps(values, indent=2, sort_keys=True, default=str) + "\n"

    def _after_norm(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rectified = torch.relu(output)
        blend = self._blends[0]
        return rectified if blend.whole else blend.between(output, rectified)

    def _move_into_biases(self, shift: float) -> None:
        """Subtract the shift in the bias of every gate, making biases where the architecture allows for them."""
        missing = [ffn for ffn in self.ffns if getattr(ffn.gate, "bias", None) is None]
        if missing and not hasattr(self._model.config, "mlp_bias"):
            raise UnsupportedError(
                f"--shift needs FFNs with biases, which {self._model.config.model_type} cannot have; leave it out"
            )
        with torch.no_grad():
            for linear in (linear for ffn in missing for linear in ffn.linears):
                weight: Any = linear.weight
                linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))
            for ffn in self.ffns:
                bias: Any = ffn.gate.bias
                bias -= shift
        if missing:
            self._model.config.mlp_bias = True


def activation_name(config: Any) -> str:
    """The activation's name in a configuration of transformers.

    Raises:
        UnsupportedError: this architecture's configuration has no such key.
    """
    names = [name for key in _ACT_KEYS if isinstance(name := getattr(config, key, None), str)]
    if not names:
        raise UnsupportedError(
            f"the configuration of {config.model_type} does not name its activation, so that ReLU cannot be asked for "
            "in it; convert a model of another architecture"
        )
    return names[-1]


def find_ffns(model: Any) -> tuple[Ffn, ...]:
    """The FFN of every block of a transformers model.

    Raises:
        UnsupportedError: a block has no dense FFN, or several, as mixtures of experts have.
    """
    from transformers.activations import ACT2FN

    wanted = type(ACT2FN[activation_name(model.config)])
    ffns = []
    for block in find_stack(model).blocks:
        found = [
            (module, name)
            for module in block.module.modules()
            for name, child in module.named_children()
            if type(child) is wanted or isinstance(child, BlendedRelu)
        ]
        if len(found) != 1:
            raise UnsupportedError(f"{block.name} has {len(found)} activations of its own; {_ONE}")
        holder, name = found[0]
        linears = tuple(child for child in holder.children() if getattr(child, "weight", None) is not None)
        linears = tuple(child for child in linears if child.weight.ndim == 2)
        if len(linears) < 2:
            raise UnsupportedError(f"{block.name}: no linear layers beside its activation; {_ONE}")
        norms = tuple(norm for key in _NORMS if (norm := getattr(block.module, key, None)) is not None)
        ffns.append(Ffn(holder, name, linears[0], linears[-1], linears, norms))
    return tuple(ffns)


@contextmanager
def neurons_seen(ffns: Sequence[Ffn], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Within, `see` is told the layer and its neurons [..., neurons] whenever the model computes them."""
    with ExitStack() as hooks:
        for layer, ffn in enumerate(ffns):

            def hook(module: nn.Module, args: tuple[Tensor, ...], layer: int = layer) -> None:
                see(layer, args[0])

            hooks.callback(ffn.down.register_forward_pre_hook(hook).remove)
        yield


class ZeroMeter:
    """Counts neurons that are exactly zero, layer by layer, while `counting`.

    Example:
        >>> meter = ZeroMeter(find_ffns(model))  # doctest: +SKIP
        >>> with meter.counting(): model(input_ids=ids)  # doctest: +SKIP
        >>> meter.shares()  # one number a layer  # doctest: +SKIP
    """

    def __init__(self, ffns: Sequence[Ffn]) -> None:
        self._ffns = ffns
        self._zeros, self._all = [0] * len(ffns), [0] * len(ffns)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, every token counts."""
        with neurons_seen(self._ffns, self._see):
            yield

    def shares(self) -> list[float]:
        """Share of zeros of each layer so far."""
        return [zeros / max(every, 1) for zeros, every in zip(self._zeros, self._all, strict=True)]

    def _see(self, layer: int, neurons: Tensor) -> None:
        self._zeros[layer] += int((neurons == 0).sum())
        self._all[layer] += neurons.numel()


def read_relufied(folder: Path) -> Any:
    """The transformers model of a folder that `thinfer relufy` wrote, of either stage, in float32.

    Raises:
        UnsupportedError: a model type that transformers does not know.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stage = 2 if str(values["model_type"]).startswith(RELUFIED) else 1
    kind = str(values.pop("model_type")).removeprefix(RELUFIED)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(f"{folder}: transformers does not know the model type {kind}")
    config = transformers.AutoConfig.for_model(kind, **values)
    make: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    with quiet_transformers():
        model = make.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True).eval()
    if stage == 2:
        ReluSwap(model, stage)
    return model
