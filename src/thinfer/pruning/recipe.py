"""What a pruning run is asked to do: one table, whose rows are the command line's flags and the keys of a recipe file.

A row is a field of `Recipe`: its name, its type, its default and its help. The command line makes its flags from them,
a YAML file is checked against them, and `recipe.yaml` of a result holds them all.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from yaml import Node

VERSION = 1
STRUCTURED = "structured"
DEFAULT_SAMPLES = 128


@dataclass(frozen=True, slots=True)
class Help:
    """What the command line says about a row; `flag` is its short form."""

    text: str
    flag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A pruning run; values that contradict each other raise UsageError.

    Example:
        >>> Recipe(method="wanda", pattern="2:4").sparsity
        0.5
    """

    # Read by pydantic: a key that is no row is an error.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    model: Annotated[
        str | None, Help("A Hugging Face folder, a .gguf file (its weights are dequantised), or a hub id.", "-m")
    ] = None
    method: Annotated[str, Help("What decides which weights go; `thinfer prune methods` lists all.")] = "wanda"
    sparsity: Annotated[
        float | None, Help("Fraction of the weights of the blocks to remove, 0 to 1; n:m patterns imply it.")
    ] = None
    pattern: Annotated[str, Help("unstructured, or n:m, as 2:4: n weights kept of each m along the input.")] = (
        "unstructured"
    )
    allocation: Annotated[str, Help("How the sparsity is spread over the matrices.")] = "uniform"
    refine: Annotated[tuple[str, ...], Help("Improve the mask further, as sparseswaps; may be repeated.")] = ()
    set: Annotated[
        dict[str, Any],
        Help("An option of the method, as block=64, or of another part, as owl.strength=0.1; may be repeated."),
    ] = field(default_factory=dict)
    target: Annotated[
        tuple[str, ...], Help("Prune only matrices of such names, as '*.mlp.*'; may be repeated. [default: all]")
    ] = ()
    ignore: Annotated[tuple[str, ...], Help("Leave matrices of such names as they are; may be repeated.")] = ()
    true_sequential: Annotated[
        bool, Help("Take the inputs of a matrix after the matrices before it in its block are pruned.")
    ] = False
    text: Annotated[
        Path | None,
        Help('Calibration text: UTF-8, or .jsonl with a "text" a line. [default: an excerpt that ships with thinfer]'),
    ] = None
    samples: Annotated[
        int | None, Help(f"Windows of the text. [default: {DEFAULT_SAMPLES}; without --text those the excerpt has]")
    ] = None
    seqlen: Annotated[int, Help("Tokens of a window; documents are packed.")] = 2048
    seed: Annotated[int, Help("Which windows, and all else that is random.")] = 0
    device: Annotated[str, Help("cpu or cuda; one block at a time is on it.")] = "cpu"
    dtype: Annotated[str, Help("Precision of the model in memory: auto (float32 on the CPU), float32, bfloat16.")] = (
        "auto"
    )
    save_dtype: Annotated[
        str, Help("Precision of the saved weights: auto (the model's own; float32 from a quantised GGUF), or a type.")
    ] = "auto"
    evaluate: Annotated[bool, Help("Measure perplexity before and after.")] = True
    eval_text: Annotated[
        Path | None, Help("Text to measure it on. [default: another excerpt that ships with thinfer]")
    ] = None
    eval_ctx: Annotated[int, Help("Tokens of a window there.")] = 1024
    eval_windows: Annotated[int | None, Help("How many windows there. [default: all, at most 10]")] = None
    eval_stride: Annotated[int, Help("Take every K-th window there.")] = 1

    def __post_init__(self) -> None:
        from thinfer.pruning.base import names

        structured = self.structured
        if not structured and self.method.replace("_", "-") not in names():
            known = ", ".join([*names(), *names(STRUCTURED)])
            raise UsageError(f"no pruning method named {self.method!r}; there are {known}")
        pattern = SparsityPattern.parse(self.pattern)
        if pattern.structured:
            if self.sparsity not in (None, pattern.sparsity):
                raise UsageError(f"pattern {pattern} means sparsity {pattern.sparsity:g}; leave --sparsity out")
            # The way to set a field of a frozen dataclass from inside.
            object.__setattr__(self, "sparsity", pattern.sparsity)
            if self.allocation != "uniform":
                raise UsageError(f"pattern {pattern} prunes every matrix alike; leave --allocation out")
        if self.sparsity is None:
            raise UsageError("how much to prune? --sparsity 0.5, or --pattern 2:4")
        if not 0 <= self.sparsity <= 1:
            raise UsageError(f"sparsity {self.sparsity:g}: a fraction from 0 to 1")
        if structured:
            self._check_structured(pattern)
        lowest = {"samples": 1, "seqlen": 2, "seed": 0, "eval_ctx": 2, "eval_windows": 1, "eval_stride": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        if self.seed >= 2**63:
            raise UsageError(f"seed must be below 2**63, not {self.seed}")
        for name, allowed in (("dtype", ("auto", "float32", "bfloat16")), ("save_dtype", _SAVED)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        self._check_options()

    @property
    def structured(self) -> bool:
        """Whether the method removes whole heads, neurons, channels or layers."""
        from thinfer.pruning.base import names

        return self.method.replace("_", "-") in names(STRUCTURED)

    @property
    def sparsity_pattern(self) -> SparsityPattern:
        """The pattern, parsed."""
        return SparsityPattern.parse(self.pattern)

    @property
    def target_sparsity(self) -> float:
        """The sparsity; n:m patterns have set it."""
        return self.sparsity or 0.0

    def make_method(self) -> Any:
        """The pruning method with its options; one that draws at random has the seed of the recipe."""
        made = _make(self.method, self._options(self.method), STRUCTURED if self.structured else "")
        if "seed" not in self._options(self.method) and any(row.name == "seed" for row in dataclasses.fields(made)):
            made = dataclasses.replace(made, seed=self.seed)
        return made

    def make_allocation(self) -> Any:
        """The allocation with its options."""
        return _make(self.allocation, self._options(self.allocation), "allocation")

    def make_refinements(self) -> list[Any]:
        """The refinements with their options, in the order given."""
        quantised = bool(self.refine) and getattr(self.make_method(), "bits", 0) > 0
        if quantised:
            raise UsageError("a refinement cannot follow quantisation: it changes weights; leave bits out, or --refine")
        return [_make(name, self._options(name), "refine") for name in self.refine]

    def to_dict(self) -> dict[str, Any]:
        """All rows as plain values, ready for YAML and JSON."""
        values = {row.name: getattr(self, row.name) for row in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    def to_yaml(self) -> str:
        """The text of recipe.yaml; `read_recipe` gives the same recipe again."""
        import yaml

        text: str = yaml.safe_dump({"version": VERSION, **self.to_dict()}, sort_keys=False, allow_unicode=True)
        return text

    def _check_structured(self, pattern: SparsityPattern) -> None:
        given = {
            "--pattern": pattern.structured,
            "--allocation": self.allocation != "uniform",
            "--refine": bool(self.refine),
            "--target": bool(self.target),
            "--ignore": bool(self.ignore),
            "--true-sequential": self.true_sequential,
        }
        wrong = [flag for flag, is_given in given.items() if is_given]
        if wrong:
            raise UsageError(f"{self.method} removes whole structures; {', '.join(wrong)} does not apply to it")
        if not 0 < self.target_sparsity < 1:
            what = "leaves no model; use less" if self.target_sparsity else "cuts nothing; use more"
            raise UsageError(f"{self.method} at sparsity {self.target_sparsity:g} {what}")

    def _options(self, name: str) -> dict[str, Any]:
        """Options meant for a part: those with its name before the dot, and for the method those without a dot."""
        chosen = {}
        for key, value in self.set.items():
            part, dot, option = key.rpartition(".")
            if (not dot and name == self.method) or (dot and _same(part, name)):
                chosen[option.replace("-", "_")] = value
        return chosen

    def _check_options(self) -> None:
        parts = [self.method, self.allocation, *self.refine]
        for key in self.set:
            part, dot, _ = key.rpartition(".")
            if dot and not any(_same(part, name) for name in parts):
                raise UsageError(f"option {key}: {part} is not part of this recipe, which has {', '.join(parts)}")


_SAVED = ("auto", "float32", "bfloat16", "float16")


def make_recipe(given: Mapping[str, Any], file: str | Path | None = None) -> Recipe:
    """A recipe from a YAML file and from values that override it.

    Args:
        given: rows by name, those that were given.
        file: a YAML file with rows by name, and ``version``.

    Raises:
        UsageError: the file cannot be read, an unknown key, a value of the wrong type or out of range.

    Example:
        >>> make_recipe({"method": "magnitude", "sparsity": 0.5}).method
        'magnitude'
    """
    from pydantic import TypeAdapter, ValidationError

    values = {**(_read(Path(file)) if file is not None else {}), **given}
    where = f"{file}: " if file is not None else ""
    for name, hint in get_type_hints(Recipe).items():
        value = values.get(name)
        if isinstance(value, str) and hint == tuple[str, ...]:
            values[name] = (value,)
        if isinstance(value, bool) and bool not in (hint, *get_args(hint)):
            raise UsageError(f"{where}{name}: {str(value).lower()} is no value for it")
    try:
        return TypeAdapter(Recipe).validate_python(values)
    except ValidationError as error:
        problems = error.errors()
        unknown = [str(problem["loc"][0]) for problem in problems if problem["type"] == "unexpected_keyword_argument"]
        if unknown:
            known = ", ".join(row.name for row in dataclasses.fields(Recipe))
            raise UsageError(f"{where}no option {', '.join(unknown)}; there are {known}") from error
        first = problems[0]
        raise UsageError(f"{where}{'.'.join(map(str, first['loc'][:1]))}: {first['msg']}") from error


def parse_options(items: Iterable[str]) -> dict[str, Any]:
    """Options from ``name=value`` texts; numbers, true, false, none and lists of numbers are recognised.

    Example:
        >>> parse_options(["block=64", "owl.strength=0.1", "symmetric=true", "sensitivity.probes=[0.3,0.5]"])
        {'block': 64, 'owl.strength': 0.1, 'symmetric': True, 'sensitivity.probes': [0.3, 0.5]}
    """
    options = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {item}: write option=value, as block=64")
        options[name.strip()] = _scalar(text.strip())
    return options


def describe(part: Any) -> dict[str, Any]:
    """Name and every option of a method, refinement or allocation, its defaults included."""
    name = type(part).__module__.rpartition(".")[2].replace("_", "-")
    return {"name": name, **{row.name: _plain(getattr(part, row.name)) for row in dataclasses.fields(part) if row.init}}


def select_matrices(names: Iterable[str], target: Iterable[str], ignore: Iterable[str]) -> list[str]:
    """Names that match one of `target` (all, when there are none) and none of `ignore`.

    ``*`` stands for anything, ``?`` for one character; all else, brackets too, for itself.

    Raises:
        UsageError: a pattern that matches no name, or nothing is left.

    Example:
        >>> select_matrices(["a.0.up", "a.1.up", "a.1.down"], ["*.up"], ["a.0.*"])
        ['a.1.up']
    """
    everything = list(names)
    found = {}
    for pattern in {**dict.fromkeys(target), **dict.fromkeys(ignore)}:
        found[pattern] = {name for name in everything if _matches(name, pattern)}
        if not found[pattern]:
            kinds = dict.fromkeys(
                ".".join("*" if part.isdigit() else part for part in n.split(".")) for n in everything
            )
            raise UsageError(f"{pattern!r} matches no matrix; there are {', '.join(list(kinds)[:16])}")
    wanted = set(everything) if not target else set[str]().union(*(found[pattern] for pattern in target))
    wanted -= set[str]().union(*(found[pattern] for pattern in ignore))
    if not wanted:
        raise UsageError("target and ignore leave no matrix to prune")
    return [name for name in everything if name in wanted]


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("recipes need PyYAML: pip install 'thinfer[prune]'") from error
    try:
        text = path.read_text(encoding="utf-8")
        _require_unique(yaml.compose(text, yaml.SafeLoader), path)
        values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path}: a recipe has rows such as 'method: wanda'")
    if values.pop("version", VERSION) != VERSION:
        raise UsageError(f"{path}: a recipe of another version; this thinfer reads version {VERSION}")
    return values


def _require_unique(node: Node | None, path: Path) -> None:
    """UsageError where a key stands twice: YAML would silently take the last."""
    from yaml import MappingNode

    if not isinstance(node, MappingNode):
        return
    seen = set[str]()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise UsageError(f"{path}: line {key.start_mark.line + 1}: {name} stands twice; leave one of them out")
        seen.add(name)
        _require_unique(value, path)


def _make(name: str, options: Mapping[str, Any], kind: str) -> Any:
    """A part with options of the types that it declares."""
    from pydantic import TypeAdapter, ValidationError

    from thinfer.pruning import base

    # Unknown names and options are its errors; made once without options it says which types they have.
    types = get_type_hints(type(base.make(name, {}, kind)))
    typed = {}
    for option, value in options.items():
        try:
            typed[option] = TypeAdapter(types[option]).validate_python(value) if option in types else value
        except ValidationError as error:
            raise UsageError(f"{name}: option {option}={value}: {error.errors()[0]['msg']}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name}: option {option}={value}: not a finite number")
    return base.make(name, typed, kind)


def _same(one: str, other: str) -> bool:
    return one.replace("_", "-") == other.replace("_", "-")


def _matches(name: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern.replace("[", "[[]"))


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    readers: tuple[Callable[[str], Any], ...] = (json.loads,) if text.startswith("[") else (int, float)
    for read in readers:
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
