"""EngineOptions: everything a user may choose about how a model is run."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from thinfer.core.config import ModelConfig
from thinfer.engine.cores import MAX_THREADS, usable_cores
from thinfer.errors import UsageError

WeightType = Literal["stored", "q4", "q8", "f16"]
ActivationType = Literal["int8", "f32"]
KvType = Literal["f16", "f32"]
ExecutorName = Literal["auto", "cpu", "reference"]
LayoutName = Literal["auto", "rows", "columns"]
NeuronsName = Literal["auto", "skip", "off"]

_CHOICES = {
    "weights": get_args(WeightType),
    "activations": get_args(ActivationType),
    "kv_type": get_args(KvType),
    "executor": get_args(ExecutorName),
    "layout": get_args(LayoutName),
    "neurons": get_args(NeuronsName),
}
DEFAULT_MAX_MODEL_LEN = 4096
# Buffers hold `chunk` rows and the KV pool keeps a record a block: more than this is a mistake and not a wish.
_MOST = {"threads": MAX_THREADS, "chunk": 1 << 16, "kv_tokens": 1 << 28, "recall_steps": 1 << 30}
_LOGITS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine; invalid values raise UsageError.

    Attributes:
        executor: "cpu" (native), "reference" (NumPy) or "auto": cpu if it was built, said at start-up.
        threads: threads of the native executor; None: one a physical core this process may use.
        isa: instruction set of the native kernels; None: the best this machine has (THINFER_ISA forces one).
        weights: "stored" keeps the checkpoint's precision, the others re-quantise float checkpoints at load.
        activations: "int8" per group, or "f32", the oracle.
        kv_type: type of keys and values in memory.
        chunk: most rows (tokens) in one executor call.
        max_model_len: most tokens of one sequence; None: the model's maximum, at most 4096.
        kv_tokens: positions in the KV pool, shared by all sequences; None: 4 × max_model_len. Memory is
            committed when it is first used.
        max_sequences: most sequences that run together.
        prefix_cache: keep the keys and values of ended requests, as long as the KV pool has room, for prompts that
            begin with the same tokens; changes no token.
        sparsity: use the thresholds found beside the model; False runs dense and says so.
        layout: how matrices lie in memory whose input channels are dropped by threshold: "columns" skips what is
            dropped, "rows" reads it all in order and multiplies by zeros, "auto" times both on this machine at load
            (about a tenth of a second for each shape) and takes the faster. No choice changes a bit of the result.
        neurons: FFN neurons whose activation is exactly 0 (ReLU models): "skip" reads up only for those that fire
            (and of those that are listed or predicted nothing else), "off" reads all of them and runs no predictors,
            "auto" times both as for `layout`, and leaves out predictors of neurons found beside the model that
            read more bytes than they save; else "auto" and "skip" do not differ in a bit of the result.
        recall_steps: in one step of so many a layer computes also the neurons that its predictor leaves out, to see
            whether they fire (`Usage.recall`), a layer at a time; 0: never. Changes no token.
    """

    executor: ExecutorName = "auto"
    threads: int | None = None
    isa: str | None = None
    weights: WeightType = "stored"
    activations: ActivationType = "int8"
    kv_type: KvType = "f16"
    chunk: int = 512
    max_model_len: int | None = None
    kv_tokens: int | None = None
    max_sequences: int = 16
    prefix_cache: bool = True
    sparsity: bool = True
    layout: LayoutName = "auto"
    neurons: NeuronsName = "auto"
    recall_steps: int = 64

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        for name in ("threads", "chunk", "max_model_len", "kv_tokens", "max_sequences", "recall_steps"):
            value = getattr(self, name)
            least = 0 if name == "recall_steps" else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
            if value is not None and value > _MOST.get(name, value):
                raise UsageError(f"{name} is {value}; it must be at most {_MOST[name]}")
        isa: Any = self.isa
        if isa is not None and (not isinstance(isa, str) or not isa):
            raise UsageError(f"isa is {isa!r}; it must be the name of an instruction set, such as avx2, or None")
        if not isinstance(self.prefix_cache, bool):
            raise UsageError(f"prefix_cache is {self.prefix_cache!r}; it must be True or False")
        if not isinstance(self.sparsity, bool):
            raise UsageError(
                f"sparsity is {self.sparsity!r}; True uses the model's thresholds, False runs dense, and "
                "thinfer calibrate sets how sparse"
            )

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> "EngineOptions":
        """Options from keyword arguments; an unknown name raises UsageError that lists the known ones."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(keywords) - set(known))
        if unknown:
            raise UsageError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**keywords)

    def context_length(self, config: ModelConfig) -> int:
        """Most tokens of one sequence; more than the model was made for raises UsageError."""
        if self.max_model_len is None:
            return min(config.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > config.max_position_embeddings:
            raise UsageError(
                f"max_model_len is {self.max_model_len} but the model was made for "
                f"{config.max_position_embeddings} tokens; choose at most that"
            )
        return self.max_model_len

    def logit_rows(self, config: ModelConfig) -> int:
        """Most rows of one executor call whose logits are computed, so that logits never take more than 32 MiB."""
        return max(1, min(self.chunk, _LOGITS_BYTES // (4 * config.vocab_size)))

    def thread_count(self) -> int:
        """Threads of the native executor: as asked, else one a usable physical core."""
        return self.threads if self.threads is not None else usable_cores()
