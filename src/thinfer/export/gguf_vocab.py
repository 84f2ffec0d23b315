"""The GGUF keys of a tokenizer.json.

A GGUF file does not store a tokenizer's pipeline. Byte-level BPE is written as tokens, merges and the name of the way
in which text is cut first; that name is found by cutting probe texts in every way that has one. SentencePiece-like BPE
is written as tokens with scores, which say in what order pairs are joined. What that cannot say is refused: the keys
are read back and must give the same ids for the probe texts.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.formats.json_file import read_json
from thinfer.text.chat import stored_templates
from thinfer.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from thinfer.text.tokenizer import Tokenizer

# Each cuts apart ways of splitting that agree elsewhere: digits, contractions, spaces, line ends, marks, scripts.
PROBES = (
    "Hello World! I'm sure it's FINE; they'll SEE WE'LL see, don't DON'T.",
    "In 2023 a price of 12345.678, x=1 and 3,000,000 then 42%",
    "def add(a, b):\n    return a + b  # sum\r\n\r\n\n\n\tif x:\n\t\ty = {'k': [1, 2]}",
    "x  two   before and \t after  \n  \n ",
    "naïve cafe\u0301 “quotes”… Ünïcödé straße CamelCaseWords iPhone XMLHttp",
    "русский текст, ελληνικά; العربية ١٢٣ हिन्दी中文字符123日本語テキスト、ひらがな한국어",
    "😀👩\u200d👩 ☃ $100 <= |x|^2 ~ `code` a/b/c//d \\n https://example.org/a_b?c=d&e=f",
    "\u00a0nbsp\u200bzero !!!\n\n???/\n ...word",
)

_SPACED = "  two   before and \t after  \n"
# Some vocabularies have a thousand reserved tokens; the first tell how all are treated.
_MOST_MARKS = 64

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


def tokenizer_keys(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """The ``tokenizer.*`` keys of a folder with a tokenizer.json, its chat templates included.

    Args:
        checkpoint: The folder.
        vocab_size: Rows of the embedding; ids without a token are filled up.

    Raises:
        UnsupportedError: No tokenizer.json, or one that GGUF cannot express.
        CheckpointError: A broken one, or one with more tokens than the embedding has rows.

    Example:
        >>> tokenizer_keys(open_checkpoint("folder"), 49152)["tokenizer.ggml.pre"]  # doctest: +SKIP
        'smollm'
    """
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    file = checkpoint.path / "tokenizer.json"
    source = read_json(file)
    model = source.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise UnsupportedError(f"{file}: a tokenizer of type {kind!r} has no GGUF form here; BPE has")
    tokens, types = _tokens(tokenizer, model, vocab_size, str(file))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
    if not merges:
        raise UnsupportedError(f"{file}: a vocabulary without merges has no GGUF form")
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        keys |= {"model": "llama", "pre": "default", "scores": _scores(tokens, merges)}
        keys["add_space_prefix"] = _adds_space(source)
    else:
        keys |= {"model": "gpt2", "pre": _pre_tokenizer(source, model, str(file)), "merges": merges}
    keys |= _special_keys(tokenizer)
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()} | _template_keys(checkpoint)


def compare(original: Tokenizer, written: Tokenizer, where: str) -> list[str]:
    """Compare a tokenizer with what was written of it on the probe texts and the spellings of its added tokens.

    Returns:
        Notes on spaces that GGUF cannot express: SentencePiece-like tokenizers of today put a space before a text only
        where it has none, and none after a control token.

    Raises:
        UnsupportedError: Any other difference.
    """
    marks = [original.added_tokens[i].content for i in sorted(original.added_tokens)[:_MOST_MARKS]]
    for text, special in [*((probe, False) for probe in PROBES), *((mark, True) for mark in marks)]:
        if _differ(original, written, text, special):
            raise UnsupportedError(f"{where}: GGUF cannot express this tokenizer: {text[:40]!r} would give other ids")
    notes = []
    if _differ(original, written, _SPACED, False):
        if not written.strips_space:
            raise UnsupportedError(f"{where}: GGUF cannot express this tokenizer: {_SPACED!r} would give other ids")
        notes.append("a text that begins with a space gets one more of them: GGUF has no key for that")
    if any(_differ(original, written, mark + "x", True) for mark in marks):
        if not written.strips_space:
            raise UnsupportedError(f"{where}: GGUF cannot express how this tokenizer cuts text after a control token")
        notes.append("text after a control token gets a space: GGUF has no key for that")
    return notes


def _differ(original: Tokenizer, written: Tokenizer, text: str, special: bool) -> bool:
    return original.encode(text, parse_special=special) != written.encode(text, parse_special=special)


def _tokens(tokenizer: Tokenizer, model: Mapping[str, Any], vocab_size: int, where: str) -> tuple[list[str], list[int]]:
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: added.content for number, added in tokenizer.added_tokens.items()}
    if max(by_id, default=-1) >= vocab_size:
        raise CheckpointError(
            f"{where}: token id {max(by_id)} is outside the embedding of {vocab_size} rows; the tokenizer is not this"
            " model's"
        )
    unknown = model.get("unk_token")
    tokens, types = [], []
    for number in range(vocab_size):
        token = by_id.get(number)
        added = tokenizer.added_tokens.get(number)
        if token is None:
            kind, token = _UNUSED, f"[PAD{number}]"
        elif token == unknown:
            kind = _UNKNOWN
        elif added is not None:
            kind = _CONTROL if added.special else _USER_DEFINED
        elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        else:
            kind = _NORMAL
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Score every token by the first merge that makes it: SentencePiece joins the pair of the highest score first."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        rank.setdefault(left + right, number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _adds_space(source: Mapping[str, Any]) -> bool:
    for step in (*_steps(source, "normalizer"), *_steps(source, "pre_tokenizer")):
        if step.get("type") == "Prepend":
            return bool(step.get("prepend") == _SPACE)
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _steps(source: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    step = source.get(name)
    if not isinstance(step, dict):
        return []
    children = step.get("normalizers") or step.get("pretokenizers")
    return list(children) if step.get("type") == "Sequence" and isinstance(children, list) else [step]


def _pre_tokenizer(source: Mapping[str, Any], model: Mapping[str, Any], where: str) -> str:
    """The name of the way of cutting text that equals the tokenizer's own on all probes."""
    backend = Backend.from_file(where)
    own = backend.pre_tokenizer
    nfc = [step.get("type") for step in _steps(source, "normalizer")]
    if own is not None and nfc in ([], ["NFC"]):
        pieces = [[piece for piece, _ in own.pre_tokenize_str(text)] for text in PROBES]
        wanted = (bool(nfc), bool(model.get("ignore_merges")))
        for name, entry in PRE_TOKENIZERS.items():
            if (entry.nfc, entry.ignore_merges) == wanted and _cut(entry) == pieces:
                return name
    raise UnsupportedError(
        f"{where}: it cuts or normalises text in a way that GGUF has no name for; the names are"
        f" {', '.join(sorted(PRE_TOKENIZERS))}"
    )


def _cut(entry: PreTokenizer) -> list[list[str]]:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in entry.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    cut = pre_tokenizers.Sequence(steps)
    return [[piece for piece, _ in cut.pre_tokenize_str(text)] for text in PROBES]


def _special_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {
        key: tokenizer.token_id(tokenizer.named_tokens[name])
        for key, name in (("unknown", "unk_token"), ("padding", "pad_token"))
        if name in tokenizer.named_tokens
    }
    named_end = tokenizer.token_id(tokenizer.named_tokens.get("eos_token", ""))
    ends = list(dict.fromkeys(i for i in (named_end, *tokenizer.eos_ids) if i is not None))
    # GGUF has three names for what ends a text or a turn.
    ids |= {"bos": tokenizer.bos_id, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    keys: dict[str, Any] = {f"{name}_token_id": number for name, number in ids.items() if number is not None}
    if tokenizer.bos_id is not None:
        keys["add_bos_token"] = tokenizer.adds_bos
    if ends:
        keys["add_eos_token"] = tokenizer.encode("a")[-1] in ends
    return keys


def _template_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    templates = stored_templates(checkpoint)
    keys: dict[str, Any] = {}
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        keys["tokenizer.chat_templates"] = list(templates)
        keys |= {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
    return keys
