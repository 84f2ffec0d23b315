"""Llama GGUF files with quantised weights of chosen types, wide enough for several partial sums; no tokenizer."""

from pathlib import Path

import gguf
import numpy as np

from formats.gguf_files import K_BYTES, stored_bytes

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 512, 8, 2, 64, 768, 300

# Type of each tensor by its name; "" is the type of those not named.
MIXES = {
    "Q4_0": {"": "Q4_0", "output": "Q8_0"},
    "Q8_0": {"": "Q8_0"},
    "K": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "Q5_K", "output": "Q6_K"},
    "float beside": {"": "Q4_1", "attn_v": "F16", "attn_output": "Q5_1", "ffn_up": "Q5_0", "token_embd": "BF16"},
}


def stored(rng: np.random.Generator, rows: int, inputs: int, kind: str) -> np.ndarray:
    """Raw rows of random weights whose products keep the size of their input."""
    size = 1.4 / np.sqrt(inputs)
    raw = stored_bytes((rng.standard_normal((rows, inputs)) * size).astype(np.float32), kind, rng)
    if kind in K_BYTES:
        # Random quants: their scales are set so that the weights have mean 0 and the same size as the others.
        blocks = raw.reshape(-1, K_BYTES[kind])
        spread = {"Q4_K": 190, "Q5_K": 400, "Q6_K": 1360}[kind]
        d = np.float16(size / spread)
        if kind == "Q6_K":
            blocks[:, -2:] = d[None].view(np.uint8)
        else:
            mean = 7.5 if kind == "Q4_K" else 15.5
            blocks[:, :4] = np.array([d, np.float16(float(d) * mean)]).view(np.uint8)
    return raw


def write_tiny_gguf(
    path: Path,
    types: dict[str, str],
    *,
    layers: int = 2,
    hidden: int = HIDDEN,
    ffn: int = FFN,
    vocab: int = VOCAB,
    arch: str = "llama",
    keys: dict[str, str | float] | None = None,
) -> Path:
    """Write the file, with further keys below the architecture's name, and return it."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    for name, value in (keys or {}).items():
        add_key = writer.add_string if isinstance(value, str) else writer.add_float32
        add_key(f"{arch}.{name}", value)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)

    def add(name: str, rows: int, inputs: int) -> None:
        kind = types.get(name.rsplit(".", 1)[-1], types[""])
        data = stored(rng, rows, inputs, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", vocab, hidden)
    add("output", vocab, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        block = f"blk.{layer}."
        writer.add_tensor(f"{block}attn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(f"{block}ffn_norm.weight", np.ones(hidden, np.float32))
        add(f"{block}attn_q", HEADS * HEAD_DIM, hidden)
        add(f"{block}attn_k", KV_HEADS * HEAD_DIM, hidden)
        add(f"{block}attn_v", KV_HEADS * HEAD_DIM, hidden)
        add(f"{block}attn_output", hidden, HEADS * HEAD_DIM)
        add(f"{block}ffn_gate", ffn, hidden)
        add(f"{block}ffn_up", ffn, hidden)
        add(f"{block}ffn_down", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
