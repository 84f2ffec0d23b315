"""What the architectures are built of: names of weights, and the graph blocks that use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph, Node
from thinfer.models.alibi import alibi_slopes

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

GGUF_EMBEDDING = "token_embd.weight"
GGUF_HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: its Hugging Face name, its GGUF name and its shape.

    `rotary_heads` is not 0 where rows are query or key heads; some GGUF architectures store those interleaved.
    `fused_heads` is (kv heads, query heads of each, head width) where Hugging Face stores the rows of q|k|v by kv head:
    its query heads, its key, its value. `aliases` are other Hugging Face names of it.
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    fused_heads: tuple[int, int, int] | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Naming:
    """Hugging Face names of an architecture's modules; those of a block follow `block` and its number.

    Attributes:
        embedding: token table.
        block: list of the blocks.
        attention_norm: norm before attention.
        qkv: projections to queries, keys and values: three, or one that is all of them.
        output: attention's output projection.
        ffn_norm: norm before the FFN; "" where it shares attention's.
        ffn: gate and up, or up alone.
        down: the FFN's output projection.
        final_norm: norm before the head.
        heads: names of the output head, this engine's first.
        layer_norms: whether norms are layer norms with biases, rather than RMS norms.
        gguf_norms: GGUF's names of `attention_norm` and `ffn_norm`.
        embedding_norm: norm after the embedding, if any.
        positions: table of learned positions, if any.
        position_offset: rows of that table before the one of position 0.
    """

    embedding: str = "model.embed_tokens"
    block: str = "model.layers"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    ffn_norm: str = "post_attention_layernorm"
    ffn: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    heads: tuple[str, ...] = ("lm_head",)
    layer_norms: bool = False
    gguf_norms: tuple[str, str] = ("attn_norm", "ffn_norm")
    embedding_norm: str = ""
    positions: str = ""
    position_offset: int = 0

    def norm(self, name: str) -> tuple[str, ...]:
        """The weights of a norm."""
        return (f"{name}.weight", f"{name}.bias") if self.layer_norms else (f"{name}.weight",)


LLAMA = Naming()


def decoder_weights(config: ModelConfig, naming: Naming = LLAMA) -> Iterator[WeightSpec]:
    """All weights of a decoder; a tied head is not among them."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield WeightSpec(f"{naming.embedding}.weight", GGUF_EMBEDDING, (vocab, hidden))
    if naming.positions:
        rows = config.max_position_embeddings + naming.position_offset
        yield WeightSpec(f"{naming.positions}.weight", "position_embd.weight", (rows, hidden))
    if naming.embedding_norm:
        yield from _norm(config, naming, naming.embedding_norm, "token_embd_norm")
    for i in range(config.num_hidden_layers):
        hf, gguf = f"{naming.block}.{i}", f"blk.{i}"
        yield from _norm(config, naming, f"{hf}.{naming.attention_norm}", f"{gguf}.{naming.gguf_norms[0]}")
        yield from _attention_weights(config, naming, hf, gguf)
        if naming.ffn_norm:
            yield from _norm(config, naming, f"{hf}.{naming.ffn_norm}", f"{gguf}.{naming.gguf_norms[1]}")
        ffn = config.intermediate_size
        for name, stored in zip(naming.ffn, ("ffn_gate", "ffn_up")[-len(naming.ffn) :], strict=True):
            yield from _linear(f"{hf}.{name}", f"{gguf}.{stored}", (ffn, hidden), bias=config.mlp_bias)
        yield from _linear(f"{hf}.{naming.down}", f"{gguf}.ffn_down", (hidden, ffn), bias=config.mlp_bias)
    yield from _norm(config, naming, naming.final_norm, "output_norm")
    if not config.tie_word_embeddings:
        aliases = tuple(f"{name}.weight" for name in naming.heads[1:])
        yield WeightSpec(f"{naming.heads[0]}.weight", GGUF_HEAD, (vocab, hidden), aliases=aliases)


def _norm(config: ModelConfig, naming: Naming, hf: str, gguf: str) -> Iterator[WeightSpec]:
    for name in naming.norm(hf):
        yield WeightSpec(name, gguf + name.removeprefix(hf), (config.hidden_size,))


def _linear(hf: str, gguf: str, shape: tuple[int, int], *, bias: bool, **rows: Any) -> Iterator[WeightSpec]:
    yield WeightSpec(f"{hf}.weight", f"{gguf}.weight", shape, **rows)
    if bias:
        yield WeightSpec(f"{hf}.bias", f"{gguf}.bias", shape[:1], **rows)


def _attention_weights(config: ModelConfig, naming: Naming, hf: str, gguf: str) -> Iterator[WeightSpec]:
    heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    bias = config.attention_bias
    if len(naming.qkv) == 1:
        shape = (config.qkv_width, hidden)
        fused = (kv_heads, heads // kv_heads, config.head_dim)
        yield from _linear(f"{hf}.{naming.qkv[0]}", f"{gguf}.attn_qkv", shape, bias=bias, fused_heads=fused)
    else:
        widths = (config.q_width, config.kv_width, config.kv_width)
        for name, part, width, rotary in zip(naming.qkv, "qkv", widths, (heads, kv_heads, 0), strict=True):
            stored = f"{gguf}.attn_{part}"
            yield from _linear(f"{hf}.{name}", stored, (width, hidden), bias=bias, rotary_heads=rotary)
    if config.qk_norm:
        for part in ("q", "k"):
            name = f"{hf}.self_attn.{part}_norm.weight"
            yield WeightSpec(name, f"{gguf}.attn_{part}_norm.weight", (config.head_dim,))
    shape = (hidden, config.q_width)
    yield from _linear(f"{hf}.{naming.output}", f"{gguf}.attn_output", shape, bias=config.output_bias)


class GraphBuilder:
    """Appends blocks to a graph; every method returns the name of the buffer it wrote."""

    def __init__(self, config: ModelConfig, naming: Naming) -> None:
        self.config = config
        self.naming = naming
        self._nodes: list[Node] = []
        self._buffers: dict[str, int] = {}

    def embed(self) -> str:
        """Embedding of the batch's tokens, [M, hidden], with learned positions and a norm where there are."""
        naming, hidden = self.naming, self.config.hidden_size
        x = self._add("embed", (), "embed", hidden, weights=(f"{naming.embedding}.weight",))
        if naming.positions:
            table = (f"{naming.positions}.weight",)
            offset = {"offset": naming.position_offset}
            x = self._add("positions", (x,), "positions", hidden, weights=table, attrs=offset)
        return self.norm(x, "embed_norm", naming.embedding_norm) if naming.embedding_norm else x

    def block(self, x: str, layer: int) -> str:
        """Attention, FFN and their residuals, one after the other or side by side."""
        naming, name, width = self.naming, f"layers.{layer}", self.config.hidden_size
        hf = f"{naming.block}.{layer}"
        normed = self._block_norm(x, f"{name}.attn_norm", f"{hf}.{naming.attention_norm}")
        y = self.attention(normed, layer)
        after = self._add("add", (x, y), f"{name}.attn_out", width)
        if not naming.ffn_norm:
            y = normed
        else:
            source = x if self.config.parallel_residual else after
            y = self._block_norm(source, f"{name}.ffn_norm", f"{hf}.{naming.ffn_norm}")
        y = self.ffn(y, layer)
        return self._add("add", (after, y), f"{name}.ffn_out", width)

    def attention(self, y: str, layer: int) -> str:
        """o(attention(rope(qkv(y)))), with head norms where there are."""
        config, name, hf = self.config, f"layers.{layer}", f"{self.naming.block}.{layer}"
        heads: dict[str, Any] = {
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        weights = tuple(f"{hf}.{part}.weight" for part in self.naming.qkv)
        y = self.linear(y, f"{name}.qkv", config.qkv_width, weights, layer=layer, bias=config.attention_bias)
        if config.qk_norm:
            norms = (f"{hf}.self_attn.q_norm.weight", f"{hf}.self_attn.k_norm.weight")
            attrs = heads | {"eps": config.rms_norm_eps}
            y = self._add("head_norm", (y,), f"{name}.head_norm", config.qkv_width, weights=norms, attrs=attrs)
        if config.rope.inv_freq:
            attrs = heads | {"inv_freq": config.rope.inv_freq, "attention_factor": config.rope.attention_factor}
            y = self._add("rope", (y,), f"{name}.rope", config.qkv_width, attrs=attrs)
        attrs = heads | {"layer": layer, "scale": config.head_dim**-0.5, "window": config.layer_windows[layer]}
        if config.alibi:
            attrs["slopes"] = alibi_slopes(config)
        y = self._add("attention", (y,), f"{name}.attention", config.q_width, attrs=attrs)
        weights = (f"{hf}.{self.naming.output}.weight",)
        return self.linear(y, f"{name}.o", config.hidden_size, weights, layer=layer, bias=config.output_bias)

    def ffn(self, y: str, layer: int) -> str:
        """down(act(gate(y)) · up(y)), or without a gate down(act(up(y)))."""
        config, name, hf = self.config, f"layers.{layer}", f"{self.naming.block}.{layer}"
        gated = len(self.naming.ffn) == 2
        weights = tuple(f"{hf}.{part}.weight" for part in self.naming.ffn)
        width = len(weights) * config.intermediate_size
        site = f"{name}.gate_up" if gated else f"{name}.up"
        y = self.linear(y, site, width, weights, layer=layer, bias=config.mlp_bias)
        attrs: dict[str, Any] = {"act": config.hidden_act}
        if config.act_threshold:
            attrs["threshold"] = config.act_threshold
        op = "gated_act" if gated else "act"
        y = self._add(op, (y,), f"{name}.act", config.intermediate_size, attrs=attrs)
        weights = (f"{hf}.{self.naming.down}.weight",)
        return self.linear(y, f"{name}.down", config.hidden_size, weights, layer=layer, bias=config.mlp_bias)

    def finish(self, x: str) -> Graph:
        """Final norm, selection of the wanted rows, head."""
        y = self.norm(x, "final_norm", self.naming.final_norm)
        y = self._add("select", (y,), "selected", self.config.hidden_size)
        weights = (f"{self.naming.heads[0]}.weight",)
        y = self.linear(y, "lm_head", self.config.vocab_size, weights, layer=-1, bias=False)
        return Graph(tuple(self._nodes), self._buffers, y)

    def norm(self, x: str, output: str, name: str) -> str:
        """The architecture's norm over the whole width."""
        attrs = {"eps": self.config.rms_norm_eps}
        op = "rms_norm"
        if self.naming.layer_norms:
            op, attrs["offset"] = "layer_norm", self.config.norm_offset
        return self._add(op, (x,), output, self._buffers[x], weights=self.naming.norm(name), attrs=attrs)

    def linear(self, x: str, site: str, width: int, weights: tuple[str, ...], *, layer: int, bias: bool) -> str:
        """Fused linear; `site` names its input channels for selectors, and its output buffer."""
        biases = tuple(w.removesuffix("weight") + "bias" if bias else "" for w in weights)
        attrs = {"site": site, "kind": site.rpartition(".")[2], "layer": layer, "biases": biases}
        return self._add("linear", (x,), site, width, weights=weights, attrs=attrs)

    def _block_norm(self, x: str, output: str, name: str) -> str:
        y, act = self.norm(x, output, name), self.config.norm_act
        return self._add("act", (y,), f"{output}_act", self._buffers[y], attrs={"act": act}) if act else y

    def _add(
        self,
        op: str,
        inputs: tuple[str, ...],
        output: str,
        width: int,
        *,
        weights: tuple[str, ...] = (),
        attrs: dict[str, Any] | None = None,
    ) -> str:
        self._nodes.append(Node(op, inputs, output, weights, attrs or {}))
        self._buffers[output] = width
        return output


def decoder(config: ModelConfig, naming: Naming = LLAMA) -> Graph:
    """Pre-norm decoder: embedding, blocks of attention and FFN, head."""
    graph = GraphBuilder(config, naming)
    x = graph.embed()
    for layer in range(config.num_hidden_layers):
        x = graph.block(x, layer)
    return graph.finish(x)
