"""profile on the tiny model with ReLU: counts against NumPy, unions and overlaps of known sets, the artifact."""

import json

import numpy as np
import pytest

from activation.relu_llama import write_broken, write_relu
from thinfer.activation.profile import NeuronCounts, head_grams, head_norms, profile
from thinfer.activation.profile_plot import plot_profile
from thinfer.activation.scores import block_sites
from thinfer.activation.threshold import calibrate
from thinfer.calibration.text import token_windows
from thinfer.core.artifact import Artifact
from thinfer.core.profile import UNION_SIZES, ActivationProfile
from thinfer.engine.llm import LLM
from thinfer.engine.runtime import Work
from thinfer.errors import CheckFailed, UsageError
from tiny_llama import FFN, HEADS, LAYERS, write_tiny_llama

TEXT = "The prince came into the room, and all the ladies looked at him with a smile; he bowed. " * 30
SMALL = {"executor": "reference", "tokens": 256, "seq_len": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_relu(tmp_path_factory.mktemp("profile") / "model")


def test_counts_are_those_of_the_inputs_of_down(model, tmp_path):
    found, report = profile(model, tmp_path, texts=[TEXT], **SMALL)
    fired, magnitude = np.zeros((LAYERS, FFN), int), np.zeros((LAYERS, FFN))
    norms = np.zeros((LAYERS, HEADS))
    with LLM(model, executor="reference") as llm:
        windows = token_windows(
            lambda part: llm.tokenizer.encode(part, add_special=False),
            TEXT,
            samples=4,
            held_out=0,
            length=64,
            bos_id=llm.tokenizer.bos_id,
        )
        heads = [s for s in block_sites(llm.engine.model, llm.engine.graph) if s.kind == "o"]

        def watch(batch, site, x):
            _, layer, kind = (*site.split("."), "", "")[:3]
            if kind == "down":
                fired[int(layer)] += (x[4:] != 0).sum(axis=0)
                magnitude[int(layer)] += np.abs(x[4:]).sum(axis=0)
            if kind == "o":
                weight = llm.engine.model.weights.float32(heads[int(layer)].weights[0])
                for h in range(HEADS):
                    own = np.zeros_like(x)
                    own[:, h * 16 : h * 16 + 16] = x[:, h * 16 : h * 16 + 16]
                    norms[int(layer), h] += np.linalg.norm(own[4:] @ weight.T, axis=1).sum()

        for window in windows.windows:
            llm.engine.step([Work(llm.engine.new_sequence(), window, "none")], observe=watch)
    tokens = 4 * 60
    assert sum(found.tokens) == tokens
    assert (found.counts.sum(axis=0) == fired).all()
    assert found.magnitudes.sum(axis=0) == pytest.approx(magnitude, rel=1e-5)
    assert found.head_norms == pytest.approx(norms / tokens, rel=1e-3)
    assert report["exact_zeros"] == pytest.approx(1 - fired.sum() / (tokens * LAYERS * FFN))
    assert 0.3 < report["exact_zeros"] < 0.7
    # Every site's histogram holds all its values; that of `down` has the zeros in bin 0.
    sites = dict(zip(found.sites, found.histograms, strict=True))
    assert sites["layers.1.down"].sum() == tokens * FFN
    assert sites["layers.1.down"][0] == tokens * FFN - fired[1].sum()


def test_unions_grow_and_begin_at_the_density(model, tmp_path):
    found, report = profile(model, tmp_path, texts=[TEXT], **SMALL)
    for union in (found.union_random, found.union_window[:, :6]):
        assert (np.diff(union, axis=1) >= 0).all()
        assert union[:, 0] == pytest.approx(1 - found.sparsity(), abs=0.1)
    # Windows hold 60 tokens past the sinks: 64 in a row there are not.
    assert report["union_window"][-1] is None
    assert report["union_sizes"] == list(UNION_SIZES)
    assert (found.reuse > found.expected_reuse() - 0.05).all()


@pytest.mark.parametrize("pieces", [(512, 1024), (512, 700), (1, 2, 699)])
@pytest.mark.parametrize("windows", [1, 4])  # of the third only some rows are kept for the unions, of the fourth none
def test_a_window_in_pieces_counts_as_a_whole(pieces, windows):
    rng = np.random.default_rng(1)
    shapes = [(1024, 24), (700, 24), (1024, 24), (700, 24)][-windows:]
    whole, cut = NeuronCounts(1, 2, 24), NeuronCounts(1, 2, 24)
    for counts in (whole, cut):
        counts.next_text()
    for shape in shapes:
        for layer in (0, 1):
            x = np.maximum(rng.standard_normal(shape) - 0.8, 0).astype(np.float32)
            whole.add(layer, x, np.zeros(len(x), np.int32))
            for number, piece in enumerate(np.split(x, [p for p in pieces if p < len(x)])):
                cut.add(layer, piece, np.zeros(len(piece), np.int32), continues=number > 0)
    assert (cut.reuse() == whole.reuse()).all()
    for ours, theirs in zip(cut.unions(0), whole.unions(0), strict=True):
        assert not np.isnan(theirs).any()
        assert np.array_equal(ours, theirs)


def test_a_profile_does_not_depend_on_the_batches(model, tmp_path):
    """As with windows of more than 512 tokens; the first batches hold nothing but sinks, or a part of them."""
    options = {**SMALL, "tokens": 384, "seq_len": 96}
    whole, _ = profile(model, tmp_path / "whole", texts=[TEXT], **options)
    for chunk in (1, 3):
        found, _ = profile(model, tmp_path / "cut", texts=[TEXT], **options, chunk=chunk)
        assert found.tokens == whole.tokens
        # A sum in another order may make a zero of what was next to it.
        assert found.reuse == pytest.approx(whole.reuse, abs=1e-3)
        assert found.union_window == pytest.approx(whole.union_window, abs=1e-3)


def test_stock_models_have_no_zeros_and_say_so(tmp_path):
    report = profile(write_tiny_llama(tmp_path / "silu"), tmp_path / "out", texts=[TEXT], **SMALL)[1]
    assert report["exact_zeros"] < 0.01
    assert report["act"] == "silu"
    assert report["power_law"] == pytest.approx(0, abs=0.01)


def test_the_artifact_gives_the_profile_back_and_keeps_thresholds(model, tmp_path):
    calibrate(model, tmp_path, sparsity=0.3, text=TEXT, samples=2, held_out=1, seq_len=64, executor="reference")
    found, report = profile(model, tmp_path, texts=[TEXT, TEXT[5:]], **SMALL)
    artifact = Artifact.read(tmp_path)
    section = artifact.sections["profile"]
    again = ActivationProfile.from_section(section, artifact.tensors)
    assert section["report"] == json.loads(json.dumps(report))
    assert (again.counts == found.counts).all()
    assert again.texts == ("given text", "given text (2)")
    assert report["hot_overlap"]["count"][0][1] > 0.8
    with LLM(tmp_path, executor="reference") as llm:
        assert llm.engine.selector is not None
    calibrate(model, tmp_path, sparsity=0.4, text=TEXT, samples=2, held_out=1, seq_len=64, executor="reference")
    assert "profile.counts" in Artifact.read(tmp_path).tensors
    write_relu(tmp_path / "other", seed=3)
    profile(tmp_path / "other", tmp_path, texts=[TEXT], **SMALL)
    assert set(Artifact.read(tmp_path).sections) == {"profile"}


def test_a_profile_repeats_to_the_byte(model, tmp_path):
    for name in "ab":
        profile(model, tmp_path / name, texts=[TEXT], **SMALL)
    assert (tmp_path / "a/thinfer.json").read_bytes() == (tmp_path / "b/thinfer.json").read_bytes()


def test_pictures_are_drawn(model, tmp_path):
    pytest.importorskip("matplotlib")
    found, _ = profile(model, tmp_path, texts=[TEXT], **SMALL)
    paths = plot_profile(found, tmp_path, "tiny")
    assert sorted(path.name for path in paths) == ["power-law.png", "sparsity.png", "union.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_norms_by_gram_matrices_are_those_of_the_projection(tiny_model):
    site = next(s for s in block_sites(tiny_model, tiny_model.graph) if s.kind == "o")
    x = np.random.default_rng(0).standard_normal((5, site.channels)).astype(np.float32)
    weight = tiny_model.weights.float32(site.weights[0])
    expected = [np.linalg.norm(x[:, h : h + 16] @ weight[:, h : h + 16].T, axis=1) for h in range(0, 64, 16)]
    assert head_norms(x, head_grams(tiny_model, site, HEADS)) == pytest.approx(np.array(expected).T, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be"),
        ({"seq_len": 4}, "past 4 sinks"),
        ({"bogus": 1}, "unknown option bogus"),
        ({"tokens": 10**6}, "give a longer text"),
    ],
)
def test_wrong_options_are_refused(model, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        profile(model, tmp_path / "out", texts=[TEXT], **{"executor": "reference", **options})
    assert not (tmp_path / "out").exists()


def test_broken_weights_are_one_message_and_nothing_is_written(tmp_path):
    model = write_broken(tmp_path / "model")
    with pytest.raises(CheckFailed, match=r"the input of layers\.0\.down is NaN: the model's weights are broken"):
        profile(model, tmp_path / "out", texts=[TEXT], **SMALL)
    assert not (tmp_path / "out").exists()
