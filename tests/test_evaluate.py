"""Metrics (cases LOS-03, LOS-05) and few-shot evaluation (FEW-01 to FEW-05)."""

import io
import tracemalloc

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minivit import (
    batches,
    checkpoint,
    datasets,
    evaluate,
    in_jax,
    in_numpy,
    masking,
    params,
    variants,
)
from minivit.progress import progress


def test_every_example_counts_once():
    """LOS-03: no mean of batch means."""
    logits = np.array([[1, 0], [1, 0], [1, 0], [1, 0], [0, 1]], "float32")
    result = evaluate.summary(logits, np.zeros(5, int))
    assert result["accuracy"] == pytest.approx(0.8)
    expected = (4 * np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 5
    assert result["loss"] == pytest.approx(expected, rel=1e-6)
    assert result["by_class"][0] == pytest.approx(0.8)
    assert np.isnan(result["by_class"][1])


def test_top_k():
    """LOS-05: k may exceed the number of classes."""
    logits = np.array([[3.0, 2, 1], [1, 2, 3]])
    assert evaluate.top_k(logits, np.array([1, 0])) == 0
    assert evaluate.top_k(logits, np.array([1, 0]), 2) == 0.5
    assert evaluate.top_k(logits, np.array([1, 0]), 5) == 1


def scores(features, labels, classes, l2, at):
    weights, bias = evaluate.ridge(np.array(features), labels, classes, l2)
    return np.array(at) @ weights + bias, weights


@pytest.mark.parametrize("shift", [0, 10_000])
def test_ridge_does_not_shrink_the_bias(shift):
    """FEW-01, FEW-02: also for float32 features with a large mean."""
    x = (np.arange(4.0)[:, None] + shift).astype("float32")
    at, weights = scores(x, [0, 0, 1, 1], 2, 1.0, x[3:])
    assert weights[0, 1] == pytest.approx(2 / 3, abs=1e-6)
    assert at[0, 1] == pytest.approx(1.0, abs=1e-6)
    at, _ = scores(x, [0, 1, 1, 1], 2, 1e6, x[[0, 3]])
    np.testing.assert_allclose(at[:, 1], [0.49999, 0.5], atol=1e-5)


def test_ridge_with_fewer_examples_than_features():
    """FEW-03: scikit-learn's numbers, and both forms agree."""
    x = np.array([[1, 0, 2, 0, 0], [0, 1, 0, 3, 0], [1, 1, 0, 0, 1]], float)
    weights, bias = evaluate.ridge(x, [1, 0, 1], 2, 0.5)
    expected = [0.17125382, -0.03669725, 0.07339450, -0.51376147, 0.13455657]
    np.testing.assert_allclose(weights[:, 1], expected, atol=1e-8)
    assert bias[1] == pytest.approx(0.66360856, abs=1e-8)
    repeated = np.concatenate([x, x])  # six examples: solved by features
    primal, _ = evaluate.ridge(repeated, [1, 0, 1, 1, 0, 1], 2, 1.0)
    np.testing.assert_allclose(primal, weights, atol=1e-10)


@given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 99), st.sampled_from([None, 100.0]))
def test_ridge_is_the_minimum(examples, width, seed, constant):
    """The gradient of what it minimises is zero, for every penalty at once."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((examples, width)) + 3, rng.standard_normal((examples, 2))
    penalties = np.array([0.01, 1.0, 100.0])
    weights, bias = in_numpy.ridge(x, y, penalties, constant)
    for w, b, l2 in zip(weights, bias, penalties, strict=True):
        error = x @ w + b - y
        np.testing.assert_allclose(x.T @ error + l2 * w, 0, atol=1e-8)
        penalty = 0 if constant is None else l2 * b / constant**2
        np.testing.assert_allclose(error.sum(0) + penalty, 0, atol=1e-8)


@pytest.mark.parametrize("shape", [(24, 6), (9, 14)], ids=["primal", "dual"])
@pytest.mark.parametrize("constant", [None, 100.0])
def test_ridge_twins(shape, constant):
    """float64 alike to rounding; float32 to what its normal equations lose."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(shape), rng.standard_normal((shape[0], 3))
    penalties = [0.5, 16.0]
    ours = in_numpy.ridge(x, y, penalties, constant)
    single = in_jax.ridge(x.astype("f4"), y.astype("f4"), penalties, constant)
    with jax.enable_x64(True):
        theirs = in_jax.ridge(x, y, penalties, constant)
    for a, b, c in zip(ours, theirs, single, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
        assert c.dtype == "float32"
        # With a constant of 100 the largest eigenvalue is 1e4 times the others.
        np.testing.assert_allclose(a, c, rtol=0, atol=2e-6 if constant is None else 2e-3)


@pytest.mark.parametrize("case", ["tall", "wide"])
def test_big_vision_few_shot(case, peers, monkeypatch):
    """Whitening with the shots' own statistics, the bias a penalised feature of 100."""
    arrays = peers("fewshot")
    part = {n.split("/")[-1]: a for n, a in arrays.items() if n.startswith(f"in/{case}/")}
    train, test = evaluate.whiten(part["train_x"].astype("f8"), part["test_x"].astype("f8"))
    classes = part["train_y"].max() + 1
    targets = evaluate.signs(part["train_y"], classes)
    for l2 in (0.5, 16, 1024):
        weights, bias = in_numpy.ridge(train, targets, [l2], evaluate.CONSTANT)
        expected = {n.split("/")[-1]: a for n, a in arrays.items() if f"64/{case}/l2_{l2}/" in n}
        np.testing.assert_allclose(weights[0], expected["weights"][:-1], atol=1e-9)
        np.testing.assert_allclose(bias[0], 100 * expected["weights"][-1], atol=1e-9)
        scores = test @ weights[0] + bias[0]
        np.testing.assert_allclose(scores, expected["test_scores"], atol=1e-9)
        np.testing.assert_array_equal(scores.argmax(-1), expected["test_pred"])
        # The whole evaluation, through `few_shot`, with this penalty alone.
        monkeypatch.setattr(evaluate, "PENALTIES", np.array([l2]))
        features = (part["train_x"], part["test_x"], part["test_x"])
        labels = (part["train_y"], part["test_y"], part["test_y"])
        shots = np.arange(len(train))
        for backend in ("numpy", "jax"):
            options = {"variant": "big_vision", "backend": backend}
            accuracies = evaluate.few_shot(features, labels, shots, classes, **options)
            np.testing.assert_allclose(accuracies, float(expected["accuracy"]), atol=1e-6)
        official = arrays[f"out/{case}/l2_{l2}/bigvision_weights"]
        tolerance = {0.5: 1e-3, 16: 3e-4, 1024: 1e-6}[l2]  # theirs is float32
        np.testing.assert_allclose(weights[0], official[:-1], atol=tolerance)


@pytest.mark.parametrize("variant", ["free", "big_vision"])
def test_twins_of_the_evaluation(variant):
    """Both solve in float64, so that also small penalties give the same answers."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 90)
    features = (rng.random((90, 60)) + 5 + 0.3 * labels[:, None]).astype("float32")
    parts = [features[:50], features[50:70], features[70:]]
    cut = [labels[:50], labels[50:70], labels[70:]]
    ours, theirs = (
        evaluate.few_shot(parts, cut, np.arange(50), 3, variant=variant, backend=backend)
        for backend in ("numpy", "jax")
    )
    np.testing.assert_array_equal(ours, theirs)


def test_the_penalty_is_chosen_on_held_out_images():
    """Held-out images like large penalties, test images small ones: the first decide.

    The features are one strong wrong hint and many weak right ones, or the reverse.
    """
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 100)
    sign = 2.0 * labels[:, None] - 1
    x = rng.standard_normal((200, 20)) + 0.8 * sign
    held = np.where(rng.random((200, 20)) < 0.5, x, -x[:, ::-1])
    parts, answers = (x, held, x[::-1]), (labels, labels, labels[::-1])
    draws = {4: [datasets.draw_shots(labels, 2, 4, s) for s in range(4)]}
    results = np.stack([evaluate.few_shot(parts, answers, d, 2) for d in draws[4]])
    by_held, by_test = results[..., 0].mean(0), results[..., 1].mean(0)
    assert by_held.argmax() != by_test.argmax()
    ((k, accuracies, penalty),) = evaluate.few_shot_table(parts, answers, draws, 2)
    assert k == 4
    assert penalty == evaluate.PENALTIES[by_held.argmax()]
    np.testing.assert_array_equal(accuracies, results[:, by_held.argmax(), 1])


def test_whitening_is_by_the_shots():
    """Held-out images are moved by the training images' mean, not by their own."""
    train, other = np.array([[0.0], [2.0]]), np.array([[10.0], [10.0]])
    np.testing.assert_allclose(evaluate.whiten(train, other)[1], 9, rtol=1e-4)


def test_shots():
    """FEW-05: never fewer, never twice, always the same."""
    labels = np.repeat([0, 1, 2], [2, 5, 7])
    with pytest.raises(
        ValueError, match="class 0 has 2 training images, 5 per class are asked for"
    ):
        datasets.draw_shots(labels, 3, 5, seed=0)
    with pytest.raises(ValueError, match="class 3 has 0 training images"):
        datasets.draw_shots(labels, 4, 2, seed=0)
    chosen = datasets.draw_shots(labels, 3, 2, seed=1)
    assert labels[chosen].tolist() == [0, 0, 1, 1, 2, 2]
    assert len(set(chosen)) == 6
    np.testing.assert_array_equal(chosen, datasets.draw_shots(labels, 3, 2, seed=1))
    assert any((datasets.draw_shots(labels, 3, 2, seed=s) != chosen).any() for s in range(2, 6))


def test_confusion():
    counts = evaluate.confusion([0, 1, 1, 2], np.array([0, 0, 1, 2]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A classifier whose head is right about brightness, and a masked model; little data."""
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 60).astype(np.int32)
    images = rng.integers(0, 100, (120, 8, 8, 1)) + 120 * labels[:, None, None, None]
    few = datasets.Dataset(
        "day",
        ("night", "day"),
        images[:80].astype("u1"),
        labels[:80],
        images[80:].astype("u1"),
        labels[80:],
    )
    monkeypatch.setattr(datasets, "load", lambda name, **_: few)
    variant = variants.Variant("x", 4, 16, 24, 2, 1)
    p = params.initialise(variant, 0, image_size=8, channels=1, classes=2)
    p["head"]["kernel"] = rng.standard_normal((16, 2)).astype("float32")
    masked = masking.add_prediction(p, "mean-color", 0)
    return [str(checkpoint.save(tmp_path / f"{n}.npz", t)) for n, t in (("a", p), ("b", masked))]


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_command(files, backend, tmp_path, capsys):
    """Accuracy and a picture; top-5 is left out of two classes."""
    assert evaluate.main(["--checkpoint", files[0], "--backend", backend]) == 0
    shown = capsys.readouterr().out
    assert "of 40 test images of day" in shown
    assert "top-5" not in shown
    with Image.open(tmp_path / "a.confusion.png") as picture:
        assert picture.size[0] > 200


@pytest.mark.parametrize("backend", ["jax", "numpy"])
@pytest.mark.parametrize("extra", [[], ["--ridge", "big_vision", "--features", "mean"]])
def test_few_shot_command(files, backend, extra, capsys):
    """Both rows of the table, for a masked model too; raw pixels tell day from night."""
    command = ["--checkpoint", files[1], "--few-shot", "1", "5", "--draws", "2"]
    assert evaluate.main([*command, "--backend", backend, *extra]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["images", "per", "class", "1", "5"]
    pixels = next(line for line in lines if line.startswith("raw pixels"))
    assert float(pixels.split()[-3]) > 95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--features", "mean"], "--features is for --few-shot"),
        (["--ridge", "big_vision"], "--ridge is for --few-shot"),
        (["--few-shot", "1", "--output", "x.png"], "--output is for the confusion"),
        (["--few-shot", "1", "--labels", "x"], "--labels is for the classes of the checkpoint"),
        (["--strict"], "--strict needs --dataset folder:PATH"),
        (["--few-shot", "70"], "training images, 70 per class are asked for; ask for fewer"),
        (
            [],
            "knows no classes, day has 2 classes; ask what its features are worth with --few-shot",
        ),
        (["--image-size", "9", "--few-shot", "1"], "image 9x9 is not divisible by patch 4x4"),
    ],
)
def test_wrong_values(files, arguments, message, refusal):
    assert message in refusal(evaluate.main, ["--checkpoint", files[1], *arguments])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("absent/x.png", "there is no folder absent"),
        ("/proc/x.png", "--output /proc/x.png cannot be written"),  # of a superuser too
        ("x.npz", "x.npz must end in .png, .pdf or .svg"),
        ("folder.png", "folder.png is a folder"),
    ],
)
def test_what_cannot_be_written(files, output, message, refusal, monkeypatch, tmp_path):
    """Known before there is an engine, let alone a score."""
    monkeypatch.setattr(evaluate, "prepare", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert message in refusal(evaluate.main, ["--checkpoint", files[0], "--output", output])
    assert {p.name for p in tmp_path.iterdir()} == {"a.npz", "b.npz", "folder.png"}


@pytest.fixture
def pets(tmp_path):
    """A checkpoint that tells dark from bright by name, and makes folders of such pictures."""
    size = variants.Variant("x", 4, 8, 16, 2, 1)
    p = params.initialise(size, 0, image_size=8, channels=1, classes=2, class_token=False)
    p["Transformer"]["encoder_norm"]["scale"][:] = 0  # all features are the bias then,
    p["Transformer"]["encoder_norm"]["bias"][:] = 1  # and the second class always wins
    p["head"]["kernel"][:, 1] = 1
    checkpoint.save(tmp_path / "named.npz", p, settings={"class_names": ["cat", "dog"]})
    checkpoint.save(tmp_path / "bare.npz", p)

    def make(name, *classes, train=b"broken"):
        for label, each in enumerate(classes):
            for part in ("train", "test"):
                folder = tmp_path / name / part / each
                folder.mkdir(parents=True)
                for i in range(3 + 4 * label):
                    picture = Image.new("L", (8, 8), 200 * label + i)
                    picture.save(folder / f"{i}.png")
                    if part == "train" and train:
                        (folder / f"{i}.png").write_bytes(train)
        return ["--dataset", f"folder:{tmp_path / name}", "--backend", "numpy"]

    return tmp_path, make


def test_classes_are_matched_by_name(pets, refusal, capsys):
    """NC-01: the second class is "dog" in the file; another order of folders does not matter.

    No picture to train on is opened: all of them are broken.
    """
    folder, make = pets
    given = ["--checkpoint", str(folder / "named.npz")]
    assert evaluate.main([*given, *make("pets", "cat", "dog")]) == 0
    assert " 70.00% of 10 test images" in capsys.readouterr().out
    for classes in (("cat", "Dog"), ("kitten", "dog"), ("cat", "dog", "eel")):
        error = refusal(evaluate.main, [*given, *make("-".join(classes), *classes)])
        assert f"only folder:{folder}" in error
        assert "--few-shot" in error
    labels = folder / "labels.txt"
    labels.write_text("dog\ncat\n")  # so the second class is the cat
    assert evaluate.main([*given, *make("more", "cat", "dog"), "--labels", str(labels)]) == 0
    assert " 30.00% of 10 test images" in capsys.readouterr().out


def test_a_file_without_names(pets, refusal, capsys):
    """Then the number of classes is all that can be compared, and that is said."""
    folder, make = pets
    given = ["--checkpoint", str(folder / "bare.npz")]
    assert evaluate.main([*given, *make("ab", "a", "b")]) == 0
    assert "bare.npz does not name its classes" in capsys.readouterr().out
    assert "bare.npz knows 2 classes" in refusal(evaluate.main, [*given, *make("3", *"abc")])
    absent = ["--labels", str(folder / "absent.txt")]
    assert "absent.txt" in refusal(evaluate.main, [*given, *make("4", "a", "b"), *absent])


def test_features_know_no_names(pets, capsys):
    """`--few-shot` fits classes of its own, whatever they are called."""
    folder, make = pets
    for name, classes in (("one", ("cat", "dog")), ("two", ("Cat", "wolf"))):
        given = ["--checkpoint", str(folder / "named.npz"), "--few-shot", "1", "--draws", "1"]
        assert evaluate.main([*given, *make(name, *classes, train=None)]) == 0
        assert "per cent of 10 test images, mean and deviation of 1 draw\n" in (
            capsys.readouterr().out
        )


@pytest.mark.parametrize("extra", [[], ["--few-shot", "1"]])
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_scores_that_are_no_numbers(pets, extra, backend, capsys):
    """Finite weights whose scores are not: one line that names the file, and no accuracy."""
    folder, make = pets
    p = checkpoint.load(folder / "bare.npz")
    p["Transformer"]["encoder_norm"]["bias"][:] = 3e38
    p["head"]["kernel"][:] = 3e38
    p["embedding"]["kernel"][:] = p["embedding"]["bias"][:] = 3e38
    checkpoint.save(folder / "wild.npz", p)
    given = ["--checkpoint", str(folder / "wild.npz"), *extra, *make("pets", *"ab", train=None)]
    with np.errstate(all="ignore"):
        assert evaluate.main([*given, "--backend", backend]) == 2
    said = capsys.readouterr()
    assert "wild.npz gives scores that are not finite for" in said.err
    assert "top-1" not in said.out
    assert not list(folder.glob("*.confusion.png"))


def test_what_is_confused():
    """Wrong answers alone, by how often; no answer (-1) is none."""
    labels = np.array([0, 0, 1, 1, 1, 2, 2])
    found = evaluate.confused(np.array([0, 1, 0, 0, -1, 1, 2]), labels)
    assert found == [(1, 0, 2), (0, 1, 1), (2, 1, 1)]
    assert evaluate.confused(np.array([0, 1, 0, 0, -1, 1, 2]), labels, 1) == [(1, 0, 2)]
    assert evaluate.confused(labels, labels) == []


def test_the_confusion_of_very_many_classes():
    """NC-09: no array of classes times classes, and a picture of one size."""
    classes, rng = 21_843, np.random.default_rng(0)
    labels = rng.integers(0, classes, 3000).astype(np.int32)
    tracemalloc.start()
    large = evaluate.draw_confusion(
        np.maximum(labels - 1, 0), labels, [str(i) for i in range(classes)]
    )
    large.savefig(io.BytesIO(), dpi=100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60e6  # bytes; the matrix of all classes would take 3.8e9
    small = evaluate.draw_confusion(labels % 31, labels % 31, [str(i) for i in range(31)])
    assert tuple(large.get_size_inches()) == tuple(small.get_size_inches())
    share = large.axes[0].images[0].get_array()
    np.testing.assert_allclose(share.sum(1)[share.sum(1) > 0], 100)


def test_signs_of_life(files, monkeypatch):
    """All that takes long has a bar that says what it is."""
    begun = []

    def bar(iterable=None, what=None, **options):
        begun.append((what, options.get("disable")))
        return progress(iterable, what, **options)

    for module in (batches, evaluate):
        monkeypatch.setattr(module, "progress", bar)
    given = ["--checkpoint", files[1], "--backend", "numpy"]
    assert evaluate.main([*given, "--few-shot", "1", "--draws", "1"]) == 0
    assert begun == 3 * [("scoring", None)] + 2 * [("fitting", None)]
