"""One table: flags, YAML keys and what a result's recipe.yaml holds; mistakes are errors."""

import dataclasses
import subprocess
import sys

import pytest

from thinfer.errors import UsageError
from thinfer.pruning.recipe import Recipe, describe, make_recipe, parse_options, select_matrices

NAMES = [f"model.layers.{i}.mlp.{kind}" for i in range(3) for kind in ("up_proj", "down_proj")]


def test_a_file_and_flags_become_one_recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("version: 1\nmethod: sparsegpt\nsparsity: 0.4\nset: {block: 64}\nrefine: [dsnot]\n")
    recipe = make_recipe({"sparsity": 0.6, "seed": 3}, file)
    assert (recipe.method, recipe.sparsity, recipe.seed) == ("sparsegpt", 0.6, 3)
    assert recipe.make_method().block == 64
    assert [type(part).__name__.lower() for part in recipe.make_refinements()] == ["dsnot"]


def test_its_own_yaml_gives_the_recipe_again(tmp_path):
    recipe = make_recipe({"pattern": "2:4", "set": {"block": 64}, "method": "sparsegpt", "text": "a.txt"})
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    assert make_recipe({}, file) == recipe


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sparsity": 0.5, "sparsty": 1}, "no option sparsty; there are model, method"),
        ({"sparsity": "half"}, "sparsity: "),
        ({}, "how much to prune"),
        ({"sparsity": 1.5}, "from 0 to 1"),
        ({"sparsity": 0.5, "method": "wnada"}, "no pruning method named 'wnada'; there are .*wanda"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "2:4 means sparsity 0.5"),
        ({"pattern": "4:2"}, "0 < n < m"),
        ({"pattern": "2:4", "allocation": "owl"}, "leave --allocation out"),
        ({"sparsity": 0.2, "method": "flap", "refine": ["dsnot"]}, "--refine does not apply"),
        ({"sparsity": 1.0, "method": "shortgpt"}, "leaves no model"),
        ({"sparsity": 0.0, "method": "flap"}, "cuts nothing"),
        ({"sparsity": True}, "sparsity: true is no value"),
        ({"sparsity": 0.5, "set": {"owl.strength": 0.1}}, "owl is not part of this recipe"),
        ({"sparsity": 0.5, "samples": 0}, "samples must be at least 1"),
        ({"sparsity": 0.5, "dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        make_recipe(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"blok": 64}, "no option blok; it has .*block"), ({"block": "many"}, "option block=many")],
)
def test_options_of_a_method_are_checked_for_name_and_type(options, message):
    recipe = make_recipe({"sparsity": 0.5, "method": "sparsegpt", "set": options})
    with pytest.raises(UsageError, match=message):
        recipe.make_method()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "option",
    ["alps.damping", "ria.power", "sparseswaps.tolerance", "dsnot.threshold", "owl.outlier"],
)
def test_an_option_is_a_finite_number(option, value):
    part = option.partition(".")[0]
    given = {"method": part} if part in ("alps", "ria") else {"allocation": part} if part == "owl" else {"refine": part}
    recipe = make_recipe({"sparsity": 0.5, "set": {option: value}, **given})
    with pytest.raises(UsageError, match="not a finite number"):
        recipe.make_method(), recipe.make_allocation(), recipe.make_refinements()


def test_a_refinement_after_quantisation_is_refused_before_any_work():
    recipe = make_recipe({"sparsity": 0.5, "method": "sparsegpt", "set": {"bits": 4}, "refine": ["sparseswaps"]})
    with pytest.raises(UsageError, match="cannot follow quantisation"):
        recipe.make_refinements()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparsity: 0.5\nmethod: ria\nsparsity: 0.9\n", "line 3: sparsity stands twice"),
        ("sparsity: 0.5\nset: {block: 64, block: 32}\n", "block stands twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path, text, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        make_recipe({}, file)


def test_one_name_needs_no_list(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("sparsity: 0.5\nrefine: dsnot\n")
    assert make_recipe({}, file).refine == ("dsnot",)


@pytest.mark.parametrize("text", ["- a\n", "method: [", "version: 9\nsparsity: 0.5\n", "\xff"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"recipe\.yaml"):
        make_recipe({}, file)


def test_every_default_of_a_method_is_described():
    recipe = make_recipe({"sparsity": 0.5, "method": "sparsegpt"})
    assert describe(recipe.make_method()).items() >= {"name": "sparsegpt", "block": 128, "damping": 0.01}.items()


def test_the_seed_of_the_recipe_reaches_methods_that_draw():
    assert make_recipe({"sparsity": 0.2, "method": "llm-pruner", "seed": 7}).make_method().seed == 7
    given = {"sparsity": 0.2, "method": "llm-pruner", "seed": 7, "set": {"seed": 8}}
    assert make_recipe(given).make_method().seed == 8


def test_options_are_read_as_numbers_where_they_are():
    assert parse_options(["a=1", "b.c=1e-3", "d=true", "e=row", "f=none"]) == {
        "a": 1,
        "b.c": 0.001,
        "d": True,
        "e": "row",
        "f": None,
    }
    with pytest.raises(UsageError, match="option=value"):
        parse_options(["block"])


def test_selected_matrices():
    assert select_matrices(NAMES, [], []) == NAMES
    assert select_matrices(NAMES, ["*.up_proj"], ["model.layers.1.*"]) == [NAMES[0], NAMES[4]]
    experts = ["m.0.experts.up[0]", "m.0.experts.up[1]"]
    assert select_matrices(experts, ["*up[1]"], []) == experts[1:]


def test_a_target_that_matches_nothing_is_an_error_that_lists_what_there_is():
    with pytest.raises(UsageError, match=r"matches no matrix; there are model\.layers\.\*\.mlp\.up_proj"):
        select_matrices(NAMES, ["layers\\d*$"], [])
    with pytest.raises(UsageError, match="matches no matrix"):
        select_matrices(NAMES, [], ["lm_head"])
    with pytest.raises(UsageError, match="leave no matrix"):
        select_matrices(NAMES, ["*.up_proj"], ["*"])


def test_the_table_is_made_without_pytorch_and_pydantic():
    code = (
        "import sys; import thinfer.pruning.recipe; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'yaml', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_row_has_a_help():
    hints = {row.name: row.type for row in dataclasses.fields(Recipe)}
    assert all("Help(" in str(hint) for hint in hints.values())
