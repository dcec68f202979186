"""The command line: what it writes, and what it says to wrong input."""

import csv
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, options, recipes, states, train, variants
from minivit.in_numpy import vit
from minivit.params import flatten, is_head
from minivit.processes import ALONE

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
    names = [".lock", "checkpoint.npz", "curves.png", "examples.png", "metrics.csv", "run.json"]
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


WRONG = [
    ("--model X/16", "unknown variant 'X/16'"),
    ("--model Ti/16 --image-size 30", "image 30x30 is not divisible by patch 16x16"),
    ("--tiny --steps -5", "--steps is -5; it must be at least 1"),
    ("--tiny --batch-size 70000", "--batch-size 70000 exceeds 60,000 training"),
    ("--tiny --learning-rate nan", "--learning-rate is nan; it must be at least 0"),
    ("--tiny --head-bias nan", "--head-bias is nan"),
    ("--tiny --crop-area 0", "--crop-area is 0; it must be above 0 and at most 1"),
    ("--tiny --dropout 1", "--dropout is 1; it must be at least 0 and below 1"),
    ("--tiny --steps 5 --warmup-steps 9", "--warmup-steps 9 must lie between 0 and --steps 5"),
    ("--tiny --dataset cats", "unknown data set 'cats'"),
    ("--tiny --image-size 30", "image 30x30 is not divisible by patch 7x7"),
    ("--tiny --image-size 70000x7", "--image-size is 70000x7, neither a side nor HEIGHTxWIDTH"),
    (f"--tiny --image-size {'9' * 60}", "neither a side nor HEIGHTxWIDTH of 1 to 10,000 each"),
    ("--tiny --image-size 7000", "a batch is 64 images of 7000x7000: try --batch-size 32"),
    ("--tiny --shift 100000", "--shift 100000 moves images of 28x28 out of sight"),
    ("--init absent.npz", "absent.npz"),
    ("--tiny --recipe best", "unknown recipe 'best'; choose one of laptop"),
    ("--tiny --recipe jft", "recipe jft is for B/*"),
    ("--tiny --steps 3 --epochs 1", "give one of them"),
    ("--tiny --accumulate 3", "--accumulate 3 does not divide 64 images"),
    ("--tiny --per-class 9999", "class T-shirt has 6,000 training images, 9999 per class"),
    ("--tiny --per-class 2", "--batch-size 64 exceeds 20 training images"),
    ("--tiny --objective pixels --corrupt 0.03", "corrupts none of 16 patches"),
    ("--model tiny-hybrid --objective pixels", "convolutions see their neighbours"),
    ("--model tiny/2 --objective downsampled", "2 pixels cannot be shrunk to 4"),
    ("--tiny --dataset shapes:taste", "unknown labels 'taste'"),
    ("--tiny --dataset fashion-mnist:color", "unknown data set 'fashion-mnist:color'"),
    ("--tiny --stepz 3", "unrecognized arguments: --stepz 3"),
    ("", "one of the arguments --tiny --model --init --resume is required"),
]
# What would have no effect is refused, not passed over.
IDLE = {
    "needs --init FILE": ["--tiny --old-grid 4x8", "--tiny --positions corners"],
    "needs a new model, not --init": ["--init x.npz --head-bias -10", "--init x --representation"],
    "needs --validation": ["--tiny --patience 2", "--tiny --evaluate-every 2"],
    "needs a masked --objective": ["--tiny --mosaic-every 2", "--tiny --corrupt 0.5"],
    "needs labels, which --objective pixels does not use": [
        f"--tiny --objective pixels {option}"
        for option in (
            "--mixup 0.2",
            "--per-class 5",
            "--validation 0.1",
            "--loss sigmoid",
            "--freeze",
            "--label-smoothing 0.1",
            "--head-bias 1",
            "--representation",
        )
    ],
    "needs --dataset folder:PATH": ["--tiny --strict"],
    "needs --backend jax": [
        f"--tiny --backend numpy {option}"
        for option in (
            "--dtype bfloat16",
            "--precision highest",
            "--shard fsdp",
            "--chunk 4",
            "--distributed",
        )
    ],
    "needs attention; a ResNet has no such thing": [
        f"--model tiny-resnet {option}"
        for option in ("--dropout 0.1", "--representation", "--chunk 4")
    ],
    "needs --batch-size 2 or more": ["--tiny --batch-size 1 --mixup 0.2"],
}
WRONG += [(arguments, need) for need, each in IDLE.items() for arguments in each]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_values(arguments, message, tmp_path, refusal):
    """One line, status 2, and nothing written."""
    assert message in refusal(train.main, [*arguments.split(), "--output", tmp_path / "new"])
    assert not (tmp_path / "new").exists()


def test_every_number_has_limits(refusal, numeric_options, monkeypatch):
    """Negative, zero, huge, no number at all: what is not meant is refused before any work."""
    monkeypatch.setattr(train, "work", lambda *_: pytest.fail("work began"))
    cases = numeric_options(options.parser())
    assert len({option for option, *_ in cases}) > 20
    for option, text, meant in cases:
        if meant:
            options.parser().parse_args(["--tiny", f"{option}={text}"])
            continue
        line = refusal(train.main, ["--tiny", f"{option}={text}"])
        assert line.startswith(f"minivit.train: error: {option} is {text[:40]}"), line
        assert len(line) < 200


def test_recipes_pass_the_same_checks():
    """Every value of every recipe is one that the command line takes."""
    by_name = options.actions()
    for recipe in recipes.RECIPES:
        for name in options.IN_RECIPES:
            options.checked(by_name[name], getattr(recipe, name))


def test_output_that_cannot_be_written(tmp_path, refusal, monkeypatch):
    """Known before the first step; so is a default that cannot be made."""
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        line = refusal(train.main, [*SHORT, "--output", path])
        assert line.startswith(f"minivit.train: error: cannot write to {path}: ")
    assert file.read_text() == "mine"
    (tmp_path / "runs").write_text("a file of that name")
    monkeypatch.chdir(tmp_path)
    assert "cannot write to runs: Not a directory" in refusal(train.main, SHORT)


RACE = """
import sys, time, types
from contextlib import ExitStack
from pathlib import Path
from minivit import states, train
held = ExitStack()
for round in range(int(sys.argv[2])):
    time.sleep(max(0, float(sys.argv[1]) + 0.1 * round - time.time()))
    for output in (None, Path(f"given-{round}")):
        try:
            folder = train.open_output(types.SimpleNamespace(output=output, held=held), "tiny")
            states.write_options(folder, {"init": None}, "", {})
            print(folder)
        except OSError as error:
            known = "a run is going on", "holds a run.json already"
            print("refused" if any(text in str(error) for text in known) else error)
sys.stdin.read()  # hold all of them until everybody is done
"""


def test_runs_that_start_together(tmp_path):
    """Eight processes at the same instants: each has a folder of its own, or is refused."""
    begin, rounds = time.time() + 5, 10
    command = [sys.executable, "-c", RACE, str(begin), str(rounds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=tmp_path, **pipes) for _ in range(8)]
    lines = [[p.stdout.readline().strip() for _ in range(2 * rounds)] for p in processes]
    for process in processes:
        process.communicate(timeout=60)
    default = [line for each in lines for line in each[::2]]
    names = {"runs/tiny", *(f"runs/tiny-{i}" for i in range(2, 8 * rounds + 1))}
    assert sorted(default) == sorted(names)
    for number, given in enumerate(zip(*(each[1::2] for each in lines), strict=True)):
        assert sorted(given) == [f"given-{number}", *7 * ["refused"]]


def test_a_lock_without_its_process_is_no_obstacle(tmp_path, monkeypatch):
    """What a killed run left; and where the system has no locks, a run goes on without."""
    (tmp_path / ".lock").write_bytes(b"")
    with states.lock(tmp_path), pytest.raises(BlockingIOError, match="run is going on"):
        states.lock(tmp_path).__enter__()
    with states.lock(tmp_path):
        pass

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(states.fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked"), states.lock(tmp_path):
        pass


@pytest.mark.usefixtures("small_data")
def test_pictures_are_tried_before_the_first_step(tmp_path, refusal, monkeypatch):
    """Whatever keeps matplotlib from drawing is known while nothing is lost, and nothing written.

    So is a name of a class that cannot be drawn.
    """

    def broken(*_):
        raise RuntimeError("no fonts here")

    with monkeypatch.context() as patch:
        patch.setattr("minivit.figures.examples", broken)
        line = refusal(train.main, [*SHORT, "--backend", "numpy", "--output", tmp_path / "x"])
    assert "pictures cannot be drawn here: no fonts here" in line
    assert not (tmp_path / "x").exists()


def test_a_reader_that_goes_does_not_end_the_training(tmp_path):
    """`train | head -1`: the rest is silence, and the run ends as any other."""
    command = [sys.executable, "-m", "minivit.train", *SHORT, "--backend", "numpy", "--output"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, str(tmp_path / "x")], **pipes) as process:
        assert b"parameters" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert read_metrics(tmp_path / "x")[-1]["test_accuracy"]
    assert not states.numbered(tmp_path / "x")


@pytest.mark.usefixtures("small_data")
@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("objective", ["classes", "pixels"])
def test_weights_that_say_nothing_are_told(objective, tmp_path, capsys):
    """One step into nowhere, whose own loss was finite: no "10 % and loss nan" with status 0."""
    options = ["--learning-rate", "1e30", "--clip", "0", "--warmup-steps", "0", "--steps", "1"]
    options += ["--objective", objective, "--batch-size", "8", "--backend", "numpy"]
    assert train.main(["--tiny", *options, "--output", str(tmp_path / "x")]) == 1
    said = capsys.readouterr()
    path = tmp_path / "x" / "checkpoint.npz"
    assert said.err.splitlines()[-1].startswith(
        f"minivit.train: error: with the weights in {path} scores are not finite; lower"
    )
    assert "loss" not in said.out
    assert not any(row["test_loss"] for row in read_metrics(tmp_path / "x"))


@pytest.mark.usefixtures("small_data")
def test_validation_that_is_no_number_ends_the_run(tmp_path, capsys, monkeypatch):
    """It is a divergence like that of the training loss, and the weights are saved."""
    monkeypatch.setattr(
        "minivit.loop.scores", lambda _, images, *rest: np.full([len(images), 10], np.nan)
    )
    options = ["--validation", "0.2", "--evaluate-every", "2", "--backend", "numpy"]
    assert train.main([*SHORT, *options, "--output", str(tmp_path / "x")]) == 1
    said = capsys.readouterr()
    assert "diverged after 2 of 4 steps" in said.out
    assert "lower --learning-rate" in said.err
    assert (tmp_path / "x" / "checkpoint.npz").exists()


@pytest.mark.usefixtures("small_data")
def test_memory_that_does_not_suffice(tmp_path, refusal, monkeypatch):
    """The error names the batch and the options that help."""

    def fail(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr("minivit.engines.make", fail)
    line = refusal(train.main, [*SHORT, "--output", tmp_path / "x"])
    assert "out of memory; a batch is 8 images of 28x28: try" in line
    assert "--batch-size 4, --accumulate 2, --shard fsdp or a smaller --image-size" in line
    assert not (tmp_path / "x").exists()


def test_what_a_step_keeps_is_counted(monkeypatch):
    """The images and every block's input; of a head that is trained alone one block's."""
    given = options.parser().parse_args(["--tiny", "--batch-size", "64", "--freeze"])
    options.check(given)
    given.processes, tiny = ALONE, variants.parse("tiny")

    def refused(**changed):
        vars(given).update(changed)
        try:
            train.check_fit(given, None)
        except MemoryError as error:
            return str(error)

    one = 64 * 17 * tiny.width * 4
    monkeypatch.setattr("minivit.machine.memory", lambda: 64 * 28 * 28 * 5 + one)
    assert not refused()
    assert "try --batch-size 32, --accumulate 2, --shard fsdp or a smaller" in refused(freeze=False)
    assert "a larger machine" in refused(resume="runs/tiny", backend="numpy")
    monkeypatch.setattr("minivit.machine.memory", lambda: 64 * 28 * 28 * 5 + tiny.blocks * one)
    assert not refused(backend="jax")


@pytest.mark.parametrize("name", ["checkpoint.npz", "metrics.csv"])
def test_a_result_is_not_overwritten(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"precious")
    assert train.main([*SHORT, "--output", str(tmp_path)]) == 2
    assert f"holds a {name} already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [name]
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
    assert args.flip
    args = checked("--model", "B/16", "--recipe", "jft", "--no-flip", "--steps", "20000")
    assert (args.steps, args.epochs, args.flip) == (20_000, None, False)
    args = checked("--tiny", "--objective", "pixels", "--recipe", "laptop")
    assert (args.objective, args.steps) == ("pixels", 2500)
    args = checked("--tiny", "--epochs", "2")
    options.complete(args, 60_000)
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
        options.complete(args, 60_000)
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
        ".lock",
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


def test_no_number_is_made_where_there_is_no_accuracy(tmp_path):
    """JAX's own search for NaN finds none: pixels have no accuracy, so none is computed."""
    command = [sys.executable, "-m", "minivit.train", *SHORT, "--objective", "pixels", "--output"]
    result = subprocess.run(
        [*command, str(tmp_path / "x")],
        env={**os.environ, "JAX_DEBUG_NANS": "1"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert not any(row["accuracy"] or row["test_accuracy"] for row in read_metrics(tmp_path / "x"))
