"""The one tokenizer type: text to ids and back, whatever file it came from."""

import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from thinfer.errors import CheckpointError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.formats.json_file import read_json
from thinfer.text.gguf_tokenizer import build_tokenizer

# Beyond so many characters text is cut without the GIL, which other threads need meanwhile; below it is not worth it.
_LONG_TEXT = 2000
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_id: The id of BOS, or None.
        eos_ids: The ids that end generation.
        special_ids: The ids of all control tokens; ``decode`` skips them unless told not to.
        added_tokens: The tokens matched as whole strings before the text is cut, by id.
        named_tokens: The texts of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those the model has.
        vocab_size: The number of ids, added tokens included.

    Example:
        >>> tokenizer = Tokenizer.from_checkpoint(open_checkpoint("model.gguf"))  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello"))  # doctest: +SKIP
        'Hello'
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        named_tokens: Mapping[str, str] | None = None,
        where: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self._prefix, self._suffix = tuple(prefix), tuple(suffix)
        self._lock = threading.Lock()
        self._pieces: dict[int, bytes] = {}
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.added_tokens: Mapping[int, AddedToken] = MappingProxyType(backend.get_added_tokens_decoder())
        self.special_ids = frozenset(i for i, token in self.added_tokens.items() if token.special)
        self.named_tokens: Mapping[str, str] = MappingProxyType(dict(named_tokens or {}))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._alphabet, self.strips_space = _decoder(backend, where)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Return the tokenizer of a checkpoint.

        Raises:
            UnsupportedError: A tokenizer kind that is not supported, or a folder without tokenizer.json.
            CheckpointError: Corrupt tokenizer files.
        """
        if checkpoint.kind == "hf":
            return _from_folder(checkpoint)
        built = build_tokenizer(checkpoint.metadata, str(checkpoint.path))
        return cls(
            built.backend,
            bos_id=built.bos_id,
            eos_ids=built.eos_ids,
            prefix=() if built.bos_id is None or not built.add_bos else (built.bos_id,),
            suffix=built.eos_ids[:1] if built.add_eos else (),
            named_tokens=built.named,
            where=str(checkpoint.path),
        )

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants every text to begin with BOS."""
        return self.bos_id is not None and self.bos_id in self._prefix

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into ids.

        Args:
            text: The text.
            add_special: Put BOS (and EOS) around it where the model's metadata asks for them; a BOS that the text
                itself begins with (with ``parse_special``) is not doubled.
            parse_special: Take the spelling of a control token for the token. False for anything a user wrote: then no
                id in the result, beyond the added ones, is a control token.

        Returns:
            The ids.

        Raises:
            UsageError: Not a string, or one with lone surrogates (bytes that were no UTF-8).

        Example:
            >>> tokenizer.encode("<|im_end|>", parse_special=True)  # doctest: +SKIP
            [2]
        """
        if parse_special:
            ids = self._run(text, False)
        else:
            ids = self._run(text, True)
            if not self.special_ids.isdisjoint(ids):
                # A control token that plain merges can build. Cutting its spelling in two keeps it text.
                ids = [i for piece in self._broken(text) for i in self._run(piece, True)]
        if not add_special:
            return ids
        prefix = self._prefix[1:] if self._prefix and self._prefix[:1] == tuple(ids[:1]) else self._prefix
        return [*prefix, *ids, *self._suffix]

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """Turn ids into text.

        Args:
            ids: The ids.
            skip_special: Leave control tokens out.
            continuation: The ids continue a text, so the space that SentencePiece puts before a text is kept.

        Returns:
            The text; bytes that are no UTF-8 become U+FFFD.

        Raises:
            UsageError: A negative id.

        Example:
            >>> tokenizer.decode([33066])  # doctest: +SKIP
            'Hi'
        """
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        if self.strips_space and not continuation and data.startswith(b" "):
            data = data[1:]
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; empty for an id that the vocabulary only pads.

        Raises:
            UsageError: A negative id.

        Example:
            >>> tokenizer.token_bytes(33066)  # doctest: +SKIP
            b'Hi'
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            if token_id < 0:
                raise UsageError(f"token id {token_id} is negative; ids come from encode or from a model")
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of text that a token stands for, where none is lost before the cut.

        Example:
            >>> len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text.encode())  # doctest: +SKIP
            True
        """
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled exactly so in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def _run(self, text: str, specials_are_text: bool) -> list[int]:
        # The switch is state of the shared object, so two threads must not interleave here.
        with self._lock:
            self._backend.encode_special_tokens = specials_are_text
            try:
                if len(text) > _LONG_TEXT:
                    ids: list[int] = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
                else:
                    ids = self._backend.encode(text, add_special_tokens=False).ids
            except TypeError as error:
                raise UsageError(
                    "the text is not a string of valid Unicode; was it read from a file or a pipe that is not UTF-8?"
                ) from error
        return ids

    def _broken(self, text: str) -> list[str]:
        spellings = sorted((self.added_tokens[i].content for i in self.special_ids), key=len, reverse=True)
        pattern = re.compile("|".join(re.escape(s) for s in spellings if len(s) > 1) or "(?!)")
        cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(cuts)]

    def _spell(self, token_id: int) -> bytes:
        added = self.added_tokens.get(token_id)
        if added is not None:
            content: str = added.content
            return content.encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            values = [self._alphabet.get(char) for char in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _decoder(backend: Backend, where: str) -> tuple[dict[str, int] | None, bool]:
    """Return the byte alphabet (None for SentencePiece) and whether a leading space is stripped."""
    # The state is JSON text, whatever the type stubs say.
    state: dict[str, Any] = json.loads(bytes(backend.decoder.__getstate__())) if backend.decoder else {"type": "none"}
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return _byte_alphabet(), False
    if "Metaspace" in kinds:
        space = next(part for part in parts if part["type"] == "Metaspace")
        return None, space.get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return None, any(part["type"] == "Strip" and part["start"] for part in parts)
    raise UnsupportedError(
        f"{where}: tokenizer decoder {'+'.join(kinds)} is not supported; supported are ByteLevel, Metaspace and"
        " ByteFallback"
    )


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that spell bytes in byte-level BPE: printable Latin-1 as itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    folder = checkpoint.path
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(
            f"{folder}: no tokenizer.json; write one with transformers:"
            f' AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file}: {error}; fetch the file again, or update tokenizers") from error
    # These would cut or fill texts silently.
    backend.no_truncation()
    backend.no_padding()
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    named = _named_tokens(folder, config)
    bos_id = _id_of(backend, named.get("bos_token"))
    eos_id = _id_of(backend, named.get("eos_token"))
    prefix, suffix = _frame(backend)
    if isinstance(config.get("add_bos_token"), bool):
        prefix = (bos_id,) if config["add_bos_token"] and bos_id is not None else ()
    if isinstance(config.get("add_eos_token"), bool):
        suffix = (eos_id,) if config["add_eos_token"] and eos_id is not None else ()
    if bos_id is None:
        bos_id = next(iter(_ids(checkpoint.metadata.get("bos_token_id"))), None)
    ends = [
        *_ids(checkpoint.generation_config.get("eos_token_id")),
        *_ids(checkpoint.metadata.get("eos_token_id")),
        *_ids(eos_id),
    ]
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=ends,
        prefix=prefix,
        suffix=suffix,
        named_tokens=named,
        where=str(file),
    )


def _named_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    special_map = folder / "special_tokens_map.json"
    merged = {**(read_json(special_map) if special_map.is_file() else {}), **config}
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _frame(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return tuple(framed[:start]), tuple(framed[start + len(bare) :])
    return (), ()


def _id_of(backend: Backend, token: str | None) -> int | None:
    found: int | None = backend.token_to_id(token) if token is not None else None
    return found


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
