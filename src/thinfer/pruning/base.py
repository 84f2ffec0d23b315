"""What a pruning method, a refinement and an allocation are, and how one is found by its name.

Each is a frozen dataclass in the file of its name (`wanda.py`, `refine/dsnot.py`, `allocation/owl.py`), whose fields
are its options with their published defaults. The file says which by ``METHOD = Wanda``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from thinfer.pruning.statistics import InputStatistics

Need = Literal["norm", "mean", "gram"]
"""What is recorded of a matrix's inputs x[t, i]: Σ_t x², Σ_t x and the variance, Σ_t x xᵀ.

Each implies the sums before it.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """What one matrix must become: exactly round(sparsity · size) zeros, or exactly n kept of each m."""

    sparsity: float
    pattern: SparsityPattern = field(default_factory=SparsityPattern)


@dataclass(slots=True)
class Pruned:
    """A pruned matrix [outputs, inputs]: its values, zero where `mask` is False, and what the method has to report."""

    weight: Tensor
    mask: Tensor
    notes: dict[str, float | int | str] = field(default_factory=dict)


class Method(Protocol):
    """Prunes one matrix. `needs` says what it must know of the inputs; empty: nothing, no text is run."""

    @property
    def needs(self) -> frozenset[Need]:
        """What is recorded of the inputs for it."""
        ...

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs]; `weight` itself is left as it is."""
        ...


class Refinement(Protocol):
    """Improves a pruned matrix without changing how many weights each row (or each n:m group) keeps."""

    @property
    def needs(self) -> frozenset[Need]:
        """What is recorded of the inputs for it."""
        ...

    def refine(self, weight: Tensor, pruned: Pruned, inputs: InputStatistics, target: Target) -> Pruned:
        """Refine `pruned`, made from the dense float32 matrix `weight` [outputs, inputs]."""
        ...


class ModelView(Protocol):
    """What an allocation may ask of the dense model; each answer is computed when first asked for."""

    @property
    def blocks(self) -> list[list[str]]:
        """Names of the matrices to prune, block by block."""
        ...

    def weight(self, name: str) -> Tensor:
        """A dense matrix [outputs, inputs], float32."""
        ...

    def inputs(self, name: str) -> InputStatistics:
        """Norms of a matrix's inputs in the dense model, over the calibration text."""
        ...

    def loss(self, rates: Mapping[str, float]) -> float:
        """Mean negative log-likelihood (nats a token) with these matrices pruned by the recipe, the others dense."""
        ...


class Allocation(Protocol):
    """Spreads a sparsity over the matrices so that the mean, weighted by their sizes, is the one asked for."""

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """A sparsity from 0 to 1 for every matrix of the view."""
        ...


def names(kind: str = "") -> list[str]:
    """Names of all methods, or of a kind ("refine", "allocation", "structured"), as the command line has them."""
    package = importlib.import_module(f"thinfer.pruning.{kind}".rstrip("."))
    modules = (module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    return sorted(name.replace("_", "-") for name in modules if _declares_method(f"{package.__name__}.{name}"))


def make(name: str, options: Mapping[str, Any] | None = None, kind: str = "") -> Any:
    """The method, refinement or allocation of that name with these options.

    Raises UsageError for an unknown name or option; the message lists those that exist.

    Example: ``make("sparsegpt", {"block": 128})``, ``make("owl", kind="allocation")``.
    """
    known = names(kind)
    if name.replace("_", "-") not in known:
        raise UsageError(f"no {kind or 'pruning method'} named {name!r}; there are {', '.join(known)}")
    path = f"thinfer.pruning.{kind}.{name}" if kind else f"thinfer.pruning.{name}"
    method = importlib.import_module(path.replace("-", "_")).METHOD
    fields = {item.name for item in dataclasses.fields(method) if item.init}
    unknown = sorted(set(options or {}) - fields)
    if unknown:
        raise UsageError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(sorted(fields)) or 'none'}")
    return method(**(options or {}))


def _declares_method(module: str) -> bool:
    """Whether a module's source assigns METHOD; read, not imported: the list must not load PyTorch."""
    spec = importlib.util.find_spec(module)
    get_source = getattr(spec.loader, "get_source", None) if spec else None
    return get_source is not None and "\nMETHOD = " in (get_source(module) or "")
