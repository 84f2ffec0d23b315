"""What a model is: sizes, rotary frequencies and special tokens, independent of where it was read from."""

from __future__ import annotations

from dataclasses import dataclass

# No model comes near these; a file that claims more is corrupt, and its lists of layers would fill memory.
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 1 << 16
MAX_SIZE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding with every static scaling already applied.

    `inv_freq` holds angular frequencies in radians per position: head_dim/2, fewer where only the first channels of a
    head turn, none without rotary positions. cos and sin are multiplied by `attention_factor` (yarn), which is 1 for
    all other kinds.

    Example: `Rope(inv_freq=(1.0, 0.01))` rotates heads of width 4.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer, named as in Hugging Face's config.json.

    `layer_windows[i]` is the sliding window of layer i in positions (the query's own included), None for full
    attention; `sliding_window` is the model's one value, for display. `attention_bias` means biases on q, k and v;
    `output_bias` one on o; `mlp_bias` on gate, up and down. `qk_norm` means RMS norms over each q and k head.
    `rms_norm_eps` is the epsilon of layer norms too, to whose weights `norm_offset` is added; `norm_act` is the
    activation after a block's norms, if any. `act_threshold` is what fatrelu drops up to. With `parallel_residual`
    attention and FFN read the same x, with `shared_norm` even its same norm; `alibi` biases scores by distance.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope: Rope
    sliding_window: int | None = None
    layer_windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    act_threshold: float = 0.0
    norm_act: str = ""
    norm_offset: float = 0.0
    parallel_residual: bool = False
    shared_norm: bool = False
    alibi: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together (the same for values)."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Width of the fused q|k|v buffer."""
        return self.q_width + 2 * self.kv_width
