"""The command line: what it writes, and what it says to wrong input."""

import csv
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, train
from minivit.params import flatten

SHORT = ["--tiny", "--steps", "4", "--batch-size", "8", "--log-every", "2"]


@pytest.fixture
def small_data(monkeypatch):
    """300 training and 30 test images, so that evaluation is quick."""
    whole = datasets.load("fashion-mnist")

    few = datasets.Dataset(
        whole.name,
        whole.classes,
        whole.train_images[:300],
        whole.train_labels[:300],
        whole.test_images[:30],
        whole.test_labels[:30],
    )
    monkeypatch.setattr(datasets, "load", lambda name: few)


def read_metrics(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_what_a_run_writes(backend, tmp_path, capsys):
    assert train.main([*SHORT, "--backend", backend, "--output", str(tmp_path / "a b")]) == 0
    folder = tmp_path / "a b"
    names = ["checkpoint.npz", "curves.png", "examples.png", "metrics.csv"]
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
    text = capsys.readouterr().out
    for name, value in train.SCRATCH.items():
        shown = " ".join(text.split())
        assert f"(default: {value}; with --init {train.FINETUNE[name]})" in shown
    assert "None" not in text


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
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 100):
        time.sleep(0.1)
    process.send_signal(which)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in out
    assert "Traceback" not in err
    assert checkpoint.load(tmp_path / "x" / "checkpoint.npz")["head"]["kernel"].any()
