"""The command line: what it writes, and what it says to wrong input."""

import csv
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, options, recipes, train
from minivit.in_numpy import vit
from minivit.params import flatten, is_head

SHORT = ["--tiny", "--steps", "4", "--batch-size", "8", "--log-every", "2"]


@pytest.fixture
def small_data(little_data):
    """300 training and 30 test images, so that evaluation is quick."""
    little_data(300, 30)


def read_metrics(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_what_a_run_writes(backend, tmp_path, capsys):
    assert train.main([*SHORT, "--backend", backend, "--output", str(tmp_path / "a b")]) == 0
    folder = tmp_path / "a b"
    names = ["checkpoint.npz", "curves.png", "examples.png", "metrics.csv", "run.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    p = checkpoint.load(folder / "checkpoint.npz")
    assert "Transformer/encoderblock_3/MlpBlock_3/Dense_1/bias" in flatten(p)
    assert p["head"]["kernel"].shape == (64, 10)
    assert p["head"]["kernel"].any()
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == ["2", "4", "4"]
    assert float(rows[0]["loss"]) == pytest.approx(np.log(10), rel=0.2)
    assert rows[-1]["test_accuracy"]
    for picture in ("curves.png", "examples.png"):
        with Image.open(folder / picture) as opened:
            assert opened.size[0] >= 1000
    shown = capsys.readouterr().out
    assert "of 30 test images" in shown
    assert "Sneaker" in shown


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_same_seed_same_bytes(backend, tmp_path):
    for name in ("a", "b"):
        options = ["--backend", backend, "--dropout", "0.1", "--output", str(tmp_path / name)]
        assert train.main([*SHORT, *options]) == 0
    for file in ("checkpoint.npz", "metrics.csv", "curves.png", "examples.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.usefixtures("small_data")
def test_the_twins_train_alike(tmp_path):
    """The same seed, order and rate: after four steps the losses differ by rounding alone."""
    losses = []
    for backend in ("jax", "numpy"):
        train.main([*SHORT, "--backend", backend, "--output", str(tmp_path / backend)])
        rows = read_metrics(tmp_path / backend)
        losses.append([float(row["loss"] or row["test_loss"]) for row in rows])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.usefixtures("small_data")
def test_another_variant_at_another_size(tmp_path):
    """Without --tiny: images are resized to what the model is asked for."""
    options = ["--model", "tiny/8", "--image-size", "32", "--backend", "numpy"]
    assert train.main([*options, *SHORT[1:], "--output", str(tmp_path / "x")]) == 0
    p = checkpoint.load(tmp_path / "x" / "checkpoint.npz")
    assert p["embedding"]["kernel"].shape == (8, 8, 1, 64)
    assert p["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 17, 64)


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_fine_tuning(backend, tmp_path):
    """Pre-train at 28 px; fine-tune at 28x56, not square; then the head alone from there."""
    first, second, third = (tmp_path / name for name in "abc")
    assert train.main([*SHORT, "--backend", backend, "--output", str(first)]) == 0
    common = [*SHORT[1:], "--backend", backend]
    options = ["--init", str(first / "checkpoint.npz"), "--image-size", "28x56"]
    assert train.main([*options, *common, "--output", str(second)]) == 0
    p = flatten(checkpoint.load(second / "checkpoint.npz"))
    assert p["Transformer/posembed_input/pos_embedding"].shape == (1, 1 + 4 * 8, 64)
    options = ["--init", str(second / "checkpoint.npz"), "--freeze", "--learning-rate", "0.1"]
    assert train.main([*options, *common, "--output", str(third)]) == 0  # the file knows its grid
    q = flatten(checkpoint.load(third / "checkpoint.npz"))
    for name in p:
        assert (p[name] != q[name]).any() == name.startswith("head"), name


@pytest.mark.usefixtures("small_data")
def test_divergence_is_told(tmp_path, capsys):
    """A run that can only skip stops, and saves the last weights, which are finite."""
    options = ["--learning-rate", "1e30", "--clip", "0", "--warmup-steps", "0", "--steps", "20"]
    command = ["--tiny", "--backend", "numpy", *options, "--batch-size", "8", "--log-every", "5"]
    with np.errstate(all="ignore"):
        assert train.main([*command, "--output", str(tmp_path / "x")]) == 1
    captured = capsys.readouterr()
    assert "lower --learning-rate" in captured.err
    assert "diverged after" in captured.out
    saved = flatten(checkpoint.load(tmp_path / "x" / "checkpoint.npz"))
    assert all(np.isfinite(leaf).all() for leaf in saved.values())


@pytest.mark.usefixtures("small_data")
def test_default_folders_do_not_overwrite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train.main([*SHORT, "--backend", "numpy"]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "X/16"], "unknown variant 'X/16'"),
        (["--model", "Ti/16", "--image-size", "30"], "image 30x30 is not divisible by patch 16x16"),
        (["--tiny", "--steps", "-5"], "--steps is -5; it must be at least 1 and below inf"),
        (["--tiny", "--steps", "0"], "--steps is 0"),
        (["--tiny", "--batch-size", "0"], "--batch-size is 0"),
        (["--tiny", "--batch-size", "70000"], "--batch-size 70000 exceeds 60000"),
        (["--tiny", "--learning-rate", "-1"], "--learning-rate is -1"),
        (["--tiny", "--learning-rate", "nan"], "--learning-rate is nan"),
        (["--tiny", "--dropout", "1"], "--dropout is 1"),
        (["--tiny", "--label-smoothing", "2"], "--label-smoothing is 2"),
        (["--tiny", "--steps", "5", "--warmup-steps", "9"], "--warmup-steps 9"),
        (["--tiny", "--dataset", "cats"], "unknown data set 'cats'"),
        (["--tiny", "--seed", "-1"], "--seed is -1"),
        (["--tiny", "--learning-rate", "inf"], "--learning-rate is inf"),
        (["--tiny", "--image-size", "30"], "image 30x30 is not divisible by patch 7x7"),
        (["--init", "absent.npz"], "absent.npz"),
        (["--tiny", "--recipe", "best"], "unknown recipe 'best'; choose one of laptop"),
        (["--tiny", "--recipe", "jft"], "recipe jft is for B/*"),
        (["--tiny", "--steps", "3", "--epochs", "1"], "give one of them"),
        (["--tiny", "--epochs", "0"], "--epochs is 0"),
        (["--tiny", "--accumulate", "3"], "--accumulate 3 does not divide 64 images"),
        (["--tiny", "--patience", "2"], "--patience 2 needs --validation"),
        (["--tiny", "--validation", "1"], "--validation is 1"),
        (["--tiny", "--crop-area", "0"], "--crop-area is 0.0; it must be above 0 and at most 1"),
        (["--tiny", "--per-class", "9999"], "class 0 has 6000 training images, 9999 a class"),
        (["--tiny", "--per-class", "2"], "--batch-size 64 exceeds 20 training images"),
        (["--tiny", "--objective", "pixels", "--mixup", "0.2"], "--mixup is about labels"),
        (["--tiny", "--objective", "pixels", "--per-class", "5"], "--per-class is about labels"),
        (["--tiny", "--objective", "pixels", "--validation", "0.1"], "--validation is about"),
        (["--tiny", "--objective", "pixels", "--loss", "sigmoid"], "--loss is about labels"),
        (["--tiny", "--objective", "pixels", "--freeze"], "--freeze is about labels"),
        (["--tiny", "--objective", "pixels", "--corrupt", "0.03"], "corrupts none of 16 patches"),
        (["--model", "tiny-hybrid", "--objective", "pixels"], "convolutions see their neighbours"),
        (
            ["--model", "tiny-resnet", "--dropout", "0.1"],
            "--dropout 0.1: a ResNet has no such thing",
        ),
        (["--model", "tiny-resnet", "--representation"], "a ResNet has no such thing"),
        (["--tiny", "--backend", "numpy", "--dtype", "bfloat16"], "needs --backend jax"),
        (["--init", "x.npz", "--head-bias", "-10"], "are for a new model"),
        (["--model", "tiny/2", "--objective", "downsampled"], "2 pixels cannot be shrunk to 4"),
        (["--tiny", "--dataset", "shapes:taste"], "unknown labels 'taste'"),
        (["--tiny", "--dataset", "fashion-mnist:color"], "unknown data set 'fashion-mnist:color'"),
    ],
)
def test_wrong_values(arguments, message, tmp_path, capsys):
    """One line, status 2, and nothing written."""
    assert train.main([*arguments, "--output", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [[], ["--tiny", "--stepz", "3"], ["--tiny", "--steps", "x"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(arguments)
    assert stop.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path, capsys):
    """CKP-14: known before the first step."""
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        assert train.main([*SHORT, "--output", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint.npz", "metrics.csv"])
def test_a_result_is_not_overwritten(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"precious")
    assert train.main([*SHORT, "--output", str(tmp_path)]) == 2
    assert f"holds a {name} already" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == b"precious"


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 2500; with --init 500; masked 3000)" in shown
    assert "(default: adamw; with --init sgd)" in shown
    assert "(default: off)" in shown
    assert "None" not in shown


def checked(*arguments):
    args = options.parser().parse_args(arguments)
    options.check(args)
    return args


def test_recipes_fill_in_what_is_not_given():
    """Given beats the recipe; the recipe's epochs give way to --steps; the row is the model's."""
    args = checked("--model", "L/16", "--recipe", "jft", "--weight-decay", "0.2")
    assert (args.learning_rate, args.weight_decay, args.epochs) == (4e-4, 0.2, 14)
    assert args.image_size == (224, 224)
    assert args.augmentation.flip
    args = checked("--model", "B/16", "--recipe", "jft", "--no-flip", "--steps", "20000")
    assert (args.steps, args.epochs, args.augmentation.flip) == (20_000, None, False)
    args = checked("--tiny", "--objective", "pixels", "--recipe", "laptop")
    assert (args.objective, args.steps) == ("pixels", 2500)
    args = checked("--tiny", "--epochs", "2")
    options.check_steps(args, 60_000)
    assert (args.steps, args.warmup_steps) == (1875, 187)
    assert checked("--model", "ViT-B_16", "--recipe", "jft").learning_rate == 8e-4
    assert checked("--model", "R50x1", "--recipe", "imagenet").dropout == 0
    assert checked("--model", "vit_tiny").image_size == (28, 28)
    args = checked("--model", "B/16", "--recipe", "imagenet-21k")
    assert (args.loss, args.head_bias, args.representation) == ("sigmoid", -10, True)
    args = checked("--model", "B/16", "--recipe", "imagenet-21k", "--objective", "pixels")
    assert (args.loss, args.head_bias, args.representation) == ("softmax", 0, False)
    with pytest.warns(
        UserWarning, match="warm-up of 10000 steps is for a longer run than 1318 steps"
    ):
        options.check_steps(args, 60_000)
    assert args.warmup_steps == 131
    for recipe in recipes.RECIPES:
        model = {"B/*": "B/16", "*": "B/16", "L/*": "L/16"}.get(recipe.models, recipe.models)
        if not model.startswith("R"):
            assert checked("--model", model, "--recipe", recipe.name).clip == recipe.clip


@pytest.mark.parametrize(
    ("backend", "which"),
    [("jax", signal.SIGINT), ("numpy", signal.SIGINT), ("numpy", signal.SIGTERM)],
)
def test_interruption(backend, which, tmp_path):
    """A polite end: one line, status 130, and the weights so far, whole."""
    command = [sys.executable, "-m", "minivit.train", "--tiny", "--steps", "100000"]
    command += ["--backend", backend, "--log-every", "5", "--output", str(tmp_path / "x")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "x" / "metrics.csv"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        metrics.exists() and len(metrics.read_bytes().splitlines()) > 1
    ):
        time.sleep(0.1)
    process.send_signal(which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in out
    assert "Traceback" not in err
    assert checkpoint.load(tmp_path / "x" / "checkpoint.npz")["head"]["kernel"].any()


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize(
    ("backend", "objective"),
    [("jax", "mean-color"), ("jax", "pixels"), ("numpy", "downsampled"), ("numpy", "pixels")],
)
def test_masked_pretraining(backend, objective, tmp_path, capsys):
    """Pictures on the way, a whole checkpoint, and from there a supervised run."""
    first, second = tmp_path / "a", tmp_path / "b"
    common = [*SHORT[1:], "--backend", backend]
    options = ["--tiny", "--objective", objective, "--mosaic-every", "2"]
    assert train.main([*options, *common, "--output", str(first)]) == 0
    names = {p.name for p in first.iterdir()}
    assert names == {
        "checkpoint.npz",
        "curves.png",
        "metrics.csv",
        "mosaic-2.png",
        "mosaic-4.png",
        "run.json",
    }
    rows = read_metrics(first)
    assert float(rows[-1]["test_loss"]) > 0
    assert bool(rows[-1]["test_accuracy"]) == (objective != "pixels")
    if objective == "mean-color":
        assert float(rows[0]["loss"]) == pytest.approx(np.log(8), rel=0.2)
    p = flatten(checkpoint.load(first / "checkpoint.npz"))
    assert p["mask"].shape == (1, 1, 64)
    assert "predictions     " in show(first / "checkpoint.npz", capsys)
    options = ["--init", str(first / "checkpoint.npz"), "--freeze", "--per-class", "5"]
    options += [*SHORT[1:], "--backend", "numpy"]
    assert train.main([*options, "--output", str(second)]) == 0
    q = flatten(checkpoint.load(second / "checkpoint.npz"))
    assert "mask" not in q
    for name in q:
        assert name.startswith("head") or (p[name] == q[name]).all(), name


def show(path, capsys):
    capsys.readouterr()
    assert checkpoint.main(["show", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("small_data")
def test_the_twins_learn_masked_patches_alike(tmp_path):
    losses = []
    for backend in ("jax", "numpy"):
        options = ["--objective", "mean-color", "--backend", backend]
        assert train.main([*SHORT, *options, "--output", str(tmp_path / backend)]) == 0
        rows = read_metrics(tmp_path / backend)
        losses.append([float(row["loss"] or row["test_loss"]) for row in rows])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_the_best_weights_are_kept(backend, tmp_path, capsys):
    """A rate that soon ruins the model: stopped by patience, back to the best validation."""
    options = ["--validation", "0.3", "--evaluate-every", "5", "--patience", "2"]
    options += ["--steps", "300", "--learning-rate", "0.02", "--decay", "constant"]
    options += ["--batch-size", "32", "--log-every", "5", "--warmup-steps", "0", "--clip", "0"]
    command = ["--tiny", "--backend", backend, *options, "--output", str(tmp_path / "x")]
    assert train.main(command) == 0
    rows = [row for row in read_metrics(tmp_path / "x") if row["validation_accuracy"]]
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    assert int(rows[-1]["step"]) < 300
    best = int(np.argmax(accuracies))
    test = next(row for row in read_metrics(tmp_path / "x") if row["test_loss"])
    assert test["step"] == rows[best]["step"]
    assert best == len(accuracies) - 3
    text = capsys.readouterr().out
    assert f"kept the weights after step {rows[best]['step']}: validation" in text
    # Its own validation again, from the saved file: 90 of the 300 images.
    dataset = datasets.load("fashion-mnist")
    _, images, labels = datasets.hold_out(dataset, 0.3, 0)
    logits, _ = vit(checkpoint.load(tmp_path / "x" / "checkpoint.npz"), datasets.normalise(images))
    assert (logits.argmax(-1) == labels).mean() == pytest.approx(accuracies[best], abs=0.012)


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize(
    ("model", "backend"),
    [("tiny-hybrid", "jax"), ("tiny-hybrid", "numpy"), ("tiny-resnet", "numpy")],
)
def test_the_other_families(model, backend, tmp_path, capsys):
    """Train, look into the file, fine-tune the head alone at the size that the file knows."""
    first, second = tmp_path / "a", tmp_path / "b"
    common = [*SHORT[1:], "--backend", backend]
    assert train.main(["--model", model, *common, "--output", str(first)]) == 0
    path = first / "checkpoint.npz"
    text = show(path, capsys)
    assert re.search(rf"variant +{model}", text)
    assert re.search(r"image_size +\[28, 28\]", text)
    options = ["--init", str(path), "--freeze", "--learning-rate", "0.1"]
    assert train.main([*options, *SHORT[1:], "--backend", "numpy", "--output", str(second)]) == 0
    p, q = (flatten(checkpoint.load(folder / "checkpoint.npz")) for folder in (first, second))
    for name in p:
        assert (p[name] != q[name]).any() == is_head(name), name


@pytest.mark.usefixtures("small_data")
def test_accumulation_and_augmentation_on_the_command_line(tmp_path):
    """Two parts a batch: the same run; all augmentations at once: it runs and repeats."""
    base = [*SHORT, "--backend", "numpy"]
    runs = {"a": [], "b": ["--accumulate", "2"]}
    how = ["--flip", "--crop-area", "0.5", "--shift", "2", "--mixup", "0.2"]
    runs |= {"c": how, "d": how, "e": ["--loss", "sigmoid"]}
    losses = {}
    for name, extra in runs.items():
        assert train.main([*base, *extra, "--output", str(tmp_path / name)]) == 0
        losses[name] = [float(r["loss"] or r["test_loss"]) for r in read_metrics(tmp_path / name)]
    np.testing.assert_allclose(losses["b"], losses["a"], rtol=1e-4)
    assert losses["c"] == losses["d"] != losses["a"]
    assert losses["e"][0] == pytest.approx(10 * np.log(2), rel=0.2)


def test_shapes_in_color(tmp_path, monkeypatch):
    """The drawn set on the command line, here few of it; 8^3 colours to predict."""
    whole = datasets.load
    monkeypatch.setattr(datasets, "load", lambda name, **_: whole(name, train=60, test=20))
    options = ["--model", "tiny/8", "--image-size", "32", "--dataset", "shapes:color"]
    assert train.main([*options, *SHORT[1:], "--output", str(tmp_path / "a")]) == 0
    p = checkpoint.load(tmp_path / "a" / "checkpoint.npz")
    assert p["embedding"]["kernel"].shape == (8, 8, 3, 64)
    assert p["head"]["bias"].shape == (8,)
    options += ["--objective", "mean-color", "--output", str(tmp_path / "b")]
    assert train.main([*options, *SHORT[1:]]) == 0
    assert checkpoint.load(tmp_path / "b" / "checkpoint.npz")["prediction"]["bias"].size == 512
