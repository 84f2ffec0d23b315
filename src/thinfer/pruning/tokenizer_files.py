"""The tokenizer, the chat template and the generation settings of a checkpoint as files of a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinfer.formats.checkpoint import Checkpoint
from thinfer.text.chat import stored_templates
from thinfer.text.gguf_tokenizer import build_tokenizer

_CARRIED = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "generation_config.json",
    "LICENSE*",
)


def carry_tokenizer(source: Checkpoint, folder: Path) -> None:
    """Put the tokenizer, the chat template and the generation settings of a checkpoint into a folder."""
    if source.kind == "hf":
        for pattern in _CARRIED:
            for file in source.path.glob(pattern):
                place = folder / file.relative_to(source.path)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place)
        return
    built = build_tokenizer(source.metadata, str(source.path))
    frame = _frame(built.backend, built.bos_id if built.add_bos else None, built.eos_ids[0] if built.add_eos else None)
    if frame is not None:
        built.backend.post_processor = frame
    built.backend.save(str(folder / "tokenizer.json"))
    templates = stored_templates(source)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": built.add_bos,
        "add_eos_token": built.add_eos,
        **built.named,
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    _write_json(folder / "tokenizer_config.json", config)
    ends = list(built.eos_ids)
    ids = {"bos_token_id": built.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    _write_json(folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None})


def _frame(backend: Any, bos_id: int | None, eos_id: int | None) -> Any:
    """A post-processor that puts BOS and EOS around a text."""
    from tokenizers.processors import TemplateProcessing

    ends = {place: (backend.id_to_token(i), i) for place, i in (("bos", bos_id), ("eos", eos_id)) if i is not None}
    if not ends:
        return None

    def frame(body: str, kind: int) -> str:
        before = f"{ends['bos'][0]}:{kind} " if "bos" in ends else ""
        after = f" {ends['eos'][0]}:{kind}" if "eos" in ends else ""
        return f"{before}{body}:{kind}{after}"

    return TemplateProcessing(
        single=frame("$A", 0),
        pair=f"{frame('$A', 0)} {frame('$B', 1)}",
        special_tokens=list(dict.fromkeys(ends.values())),
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
