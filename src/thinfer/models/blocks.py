"""What the architectures are built of: graph blocks and the weights they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph, Node

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: its Hugging Face name, its GGUF name and its shape.

    `rotary_heads` is not 0 where rows are query or key heads; some GGUF architectures store those interleaved.
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def decoder_weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights of a decoder with rotary attention and a gated FFN; a tied head is not among them."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield WeightSpec(EMBEDDING, "token_embd.weight", (vocab, hidden))
    for i in range(config.num_hidden_layers):
        hf, gguf = f"model.layers.{i}", f"blk.{i}"
        yield WeightSpec(f"{hf}.input_layernorm.weight", f"{gguf}.attn_norm.weight", (hidden,))
        yield from _attention_weights(config, f"{hf}.self_attn", gguf)
        yield WeightSpec(f"{hf}.post_attention_layernorm.weight", f"{gguf}.ffn_norm.weight", (hidden,))
        ffn = config.intermediate_size
        for name, outputs, inputs in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            yield WeightSpec(f"{hf}.mlp.{name}_proj.weight", f"{gguf}.ffn_{name}.weight", (outputs, inputs))
            if config.mlp_bias:
                yield WeightSpec(f"{hf}.mlp.{name}_proj.bias", f"{gguf}.ffn_{name}.bias", (outputs,))
    yield WeightSpec("model.norm.weight", "output_norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield WeightSpec(HEAD, "output.weight", (vocab, hidden))


def _attention_weights(config: ModelConfig, hf: str, gguf: str) -> Iterator[WeightSpec]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, width, rotary in (
        ("q", config.q_width, heads),
        ("k", config.kv_width, kv_heads),
        ("v", config.kv_width, 0),
    ):
        yield WeightSpec(f"{hf}.{name}_proj.weight", f"{gguf}.attn_{name}.weight", (width, config.hidden_size), rotary)
        if config.attention_bias:
            yield WeightSpec(f"{hf}.{name}_proj.bias", f"{gguf}.attn_{name}.bias", (width,), rotary)
    if config.qk_norm:
        for name in ("q", "k"):
            yield WeightSpec(f"{hf}.{name}_norm.weight", f"{gguf}.attn_{name}_norm.weight", (config.head_dim,))
    yield WeightSpec(f"{hf}.o_proj.weight", f"{gguf}.attn_output.weight", (config.hidden_size, config.q_width))
    if config.output_bias:
        yield WeightSpec(f"{hf}.o_proj.bias", f"{gguf}.attn_output.bias", (config.hidden_size,))


class GraphBuilder:
    """Appends blocks to a graph; every method returns the name of the buffer it wrote."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._nodes: list[Node] = []
        self._buffers: dict[str, int] = {}

    def embed(self) -> str:
        """Embedding of the batch's tokens, [M, hidden]."""
        return self._add("embed", (), "embed", self.config.hidden_size, weights=(EMBEDDING,))

    def attention_block(self, x: str, layer: int) -> str:
        """Attention and its residual: x + o(attention(rope(qkv(norm(x))))), with head norms where there are."""
        config, name, hf = self.config, f"layers.{layer}", f"model.layers.{layer}"
        heads: dict[str, Any] = {
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        y = self.norm(x, f"{name}.attn_norm", f"{hf}.input_layernorm.weight")
        weights: tuple[str, ...] = tuple(f"{hf}.self_attn.{p}_proj.weight" for p in "qkv")
        y = self.linear(y, f"{name}.qkv", config.qkv_width, weights, layer=layer, bias=config.attention_bias)
        if config.qk_norm:
            norms = (f"{hf}.self_attn.q_norm.weight", f"{hf}.self_attn.k_norm.weight")
            attrs = heads | {"eps": config.rms_norm_eps}
            y = self._add("head_norm", (y,), f"{name}.head_norm", config.qkv_width, weights=norms, attrs=attrs)
        attrs = heads | {"inv_freq": config.rope.inv_freq, "attention_factor": config.rope.attention_factor}
        y = self._add("rope", (y,), f"{name}.rope", config.qkv_width, attrs=attrs)
        attrs = heads | {"layer": layer, "scale": config.head_dim**-0.5, "window": config.layer_windows[layer]}
        y = self._add("attention", (y,), f"{name}.attention", config.q_width, attrs=attrs)
        weights = (f"{hf}.self_attn.o_proj.weight",)
        y = self.linear(y, f"{name}.o", config.hidden_size, weights, layer=layer, bias=config.output_bias)
        return self._add("add", (x, y), f"{name}.attn_out", config.hidden_size)

    def ffn_block(self, x: str, layer: int) -> str:
        """FFN and its residual: x + down(act(gate(norm(x))) · up(norm(x)))."""
        config, name, hf = self.config, f"layers.{layer}", f"model.layers.{layer}"
        y = self.norm(x, f"{name}.ffn_norm", f"{hf}.post_attention_layernorm.weight")
        weights: tuple[str, ...] = (f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight")
        width = 2 * config.intermediate_size
        y = self.linear(y, f"{name}.gate_up", width, weights, layer=layer, bias=config.mlp_bias)
        y = self._add("gated_act", (y,), f"{name}.act", config.intermediate_size, attrs={"act": config.hidden_act})
        weights = (f"{hf}.mlp.down_proj.weight",)
        y = self.linear(y, f"{name}.down", config.hidden_size, weights, layer=layer, bias=config.mlp_bias)
        return self._add("add", (x, y), f"{name}.ffn_out", config.hidden_size)

    def finish(self, x: str) -> Graph:
        """Final norm, selection of the wanted rows, head."""
        y = self.norm(x, "final_norm", "model.norm.weight")
        y = self._add("select", (y,), "selected", self.config.hidden_size)
        y = self.linear(y, "lm_head", self.config.vocab_size, (HEAD,), layer=-1, bias=False)
        return Graph(tuple(self._nodes), self._buffers, y)

    def norm(self, x: str, output: str, weight: str) -> str:
        """RMS norm over the whole width."""
        return self._add(
            "rms_norm", (x,), output, self._buffers[x], weights=(weight,), attrs={"eps": self.config.rms_norm_eps}
        )

    def linear(self, x: str, site: str, width: int, weights: tuple[str, ...], *, layer: int, bias: bool) -> str:
        """Fused linear; `site` names its input channels for selectors, and its output buffer."""
        biases = tuple(w.removesuffix("weight") + "bias" if bias else "" for w in weights)
        attrs = {"site": site, "kind": site.rpartition(".")[2], "layer": layer, "biases": biases}
        return self._add("linear", (x,), site, width, weights=weights, attrs=attrs)

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


def decoder(config: ModelConfig) -> Graph:
    """Pre-norm decoder: embedding, attention and gated FFN by turns, head."""
    graph = GraphBuilder(config)
    x = graph.embed()
    for layer in range(config.num_hidden_layers):
        x = graph.attention_block(x, layer)
        x = graph.ffn_block(x, layer)
    return graph.finish(x)
