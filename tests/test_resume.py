"""An interrupted run goes on as if nothing had happened (TRN-02, TRN-12, TRN-13)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, evaluate, states, train
from minivit.engine_jax import JaxEngine
from minivit.engine_numpy import NumPyEngine
from minivit.loop import Run

ENGINES = {"jax": JaxEngine, "numpy": NumPyEngine}
# Everything that has a state: moments, averages, dropout, augmentation, validation, metrics.
RICH = ["--tiny", "--steps", "12", "--batch-size", "16", "--log-every", "5", "--dropout", "0.1"]
RICH += ["--average", "0.9", "--flip", "--shift", "1", "--mixup", "0.2", "--label-smoothing", "0.1"]
RICH += ["--validation", "0.2", "--evaluate-every", "3", "--checkpoint-every", "4"]
MASKED = ["--tiny", "--objective", "mean-color", "--steps", "12", "--batch-size", "16"]
MASKED += ["--checkpoint-every", "5", "--log-every", "4", "--flip"]


LOAD = datasets.load


@pytest.fixture(autouse=True)
def small_data(little_data):
    little_data(100, 20)


@pytest.fixture
def real_data(small_data, monkeypatch):
    """Data sets as they are."""
    monkeypatch.setattr(datasets, "load", LOAD)


class Killed(BaseException):
    """What a killed process can do no more than catch."""


def killed_at(step, engine, monkeypatch):
    """The engine's step of that number does not return."""
    plain = engine.step

    def step_or_die(self, number, *rest):
        if number == step:
            raise Killed
        return plain(self, number, *rest)

    monkeypatch.setattr(engine, "step", step_or_die)


def files(folder):
    """What a finished run leaves, without the options, which name the folder."""
    kept = [p for p in folder.iterdir() if p.name != "run.json" and p.suffix != ".damaged"]
    return {p.name: p.read_bytes() for p in kept}


@pytest.mark.parametrize(
    ("backend", "options", "kills"),
    [("jax", RICH, [7]), ("numpy", RICH, [2, 7, 11]), ("numpy", MASKED, [2, 7, 11])],
    ids=["jax", "numpy", "masked"],
)
def test_killed_and_resumed(backend, options, kills, tmp_path, monkeypatch):
    """Killed before the first state, after it, and at the end: the same bytes in every file."""
    options = [*options, "--backend", backend]
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert train.main([*options, "--output", str(whole)]) == 0
    command = [*options, "--output", str(other)]
    for step in kills:
        with monkeypatch.context() as patch:
            killed_at(step, ENGINES[backend], patch)
            with pytest.raises(Killed):
                train.main(command)
        command = ["--resume", str(other)]
    assert train.main(command) == 0
    assert files(other) == files(whole)
    assert not states.numbered(other)


def test_resume_after_the_end(tmp_path, capsys):
    """Killed after the last state but before it was removed; and asked for once too often."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "remove", lambda folder: None)
        assert train.main([*options, str(tmp_path / "b")]) == 0
    assert [step for step, _ in states.numbered(tmp_path / "b")] == [12, 8]
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "b")]) == 2
    assert "that run has ended" in capsys.readouterr().err


def test_a_polite_interruption_resumes(tmp_path, monkeypatch):
    """Ctrl-C saves a state at once, between two regular ones."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    plain = NumPyEngine.step

    def interrupt(self, step, *rest):
        if step == 5:
            signal.raise_signal(signal.SIGINT)
        return plain(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(NumPyEngine, "step", interrupt)
        assert train.main([*options, str(tmp_path / "b")]) == 130
    assert states.numbered(tmp_path / "b")[0][0] == 6
    assert (tmp_path / "b" / "checkpoint.npz").exists()
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


@pytest.mark.filterwarnings("default")
def test_a_damaged_state_is_passed_over(tmp_path, monkeypatch, capsys):
    """The one before it goes on; with none left, the run begins again, all to the same bytes."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    for damaged in (1, 2):
        folder = tmp_path / f"b{damaged}"
        with monkeypatch.context() as patch:
            killed_at(9, NumPyEngine, patch)
            with pytest.raises(Killed):
                train.main([*options, str(folder)])
        for _, path in states.numbered(folder)[:damaged]:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
        capsys.readouterr()
        assert train.main(["--resume", str(folder)]) == 0
        assert capsys.readouterr().err.count("damaged or incomplete") == damaged
        assert files(folder) == files(tmp_path / "a")


def test_the_newest_by_number(tmp_path):
    """TRN-13: not by the order of names, and nothing that only looks like a state."""
    for name in ("state-9.npz", "state-10.npz", "state-100.npz.tmp", "notes.txt", "state-x.npz"):
        (tmp_path / name).write_bytes(b"")
    assert [step for step, _ in states.numbered(tmp_path)] == [10, 9]


RECORD = {"rows": [], "pending": [], "best_accuracy": 0.5, "since_best": 1}


def test_damaged_states_are_put_aside(tmp_path):
    """They are not counted among the two that are kept, and go with the others at the end."""
    like = {"weights": np.zeros(3)}
    for step in (4, 6):
        states.write(tmp_path, step, {"weights": np.arange(3.0)}, RECORD)
    (tmp_path / "state-6.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.warns(UserWarning, match=r"state-6.npz is damaged .* is passed over"):
        step, tree, record = states.newest(tmp_path, like)
    assert (step, record) == (4, RECORD)
    np.testing.assert_array_equal(tree["weights"], np.arange(3.0))
    assert (tmp_path / "state-6.npz.damaged").exists()
    states.write(tmp_path, 5, {"weights": np.arange(3.0)}, RECORD)
    assert [step for step, _ in states.numbered(tmp_path)] == [5, 4]
    states.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_state_that_can_be_read_is_not_damaged(tmp_path):
    """One that does not fit is somebody's: an error, and it stays."""
    states.write(tmp_path, 4, {"weights": np.arange(3.0)}, RECORD)
    states.write(tmp_path, 6, {"weights": np.arange(4.0)}, RECORD)
    np.savez(tmp_path / "state-9.npz", weights=np.zeros(3))
    before = files(tmp_path)
    for like, message in (
        ({"weights": np.zeros(3)}, r"state-9.npz is no state of a run"),
        (
            {"weights": np.zeros(3)},
            r"state-6.npz: its weights is of shape \[4\], this run's of \[3",
        ),
        ({"bias": np.zeros(3)}, r"state-6.npz has no bias"),
    ):
        with pytest.raises(ValueError, match=message):
            states.newest(tmp_path, like)
        assert files(tmp_path) == before
        (tmp_path / "state-9.npz").unlink(missing_ok=True)
        before.pop("state-9.npz", None)
    states.write(tmp_path, 7, {"weights": np.arange(3.0)}, {"rows": []})
    with pytest.raises(ValueError, match="its record lacks best_accuracy, pending, since_best"):
        states.newest(tmp_path, like)


def interrupted(folder, *options, at=6):
    """A run of the NumPy twin that was killed at a step."""
    with pytest.MonkeyPatch.context() as patch:
        killed_at(at, NumPyEngine, patch)
        with pytest.raises(Killed):
            train.main([*RICH, "--backend", "numpy", "--output", str(folder), *map(str, options)])


EDITS = {
    "steps": [(0, "--steps is 0; it must be at least 1"), ("many", "--steps is many, not a whole")],
    "dropout": [(float("nan"), "--dropout is nan"), (1, "--dropout is 1; it must be")],
    "flip": [("yes", "--flip is yes, neither true nor false")],
    "loss": [
        ("hinge", "--loss is hinge; choose one of softmax, sigmoid"),
        (None, "--loss is miss"),
    ],
    "image_size": [([28, 0], "--image-size is 28x0"), ([28, 30], "not divisible by patch 7x7")],
    "seed": [(-1, "--seed is -1"), (2.5, "--seed is 2.5, not a whole number")],
    "chunk": [(4, "--chunk 4 needs --backend jax")],
    "corrupt": [(0.5, "--corrupt 0.5 needs a masked")],
    "accumulate": [(5, "--accumulate 5 does not divide 16 images")],
    "data": [(None, "is damaged")],
}


def test_an_edited_record_passes_the_same_checks(tmp_path, refusal):
    """Whatever stands in run.json is checked as if it had been typed, and nothing is touched."""
    interrupted(tmp_path / "a")
    path = tmp_path / "a" / "run.json"
    record, before = json.loads(path.read_text()), files(tmp_path / "a")
    for name, values in EDITS.items():
        for value, message in values:
            path.write_text(json.dumps(record | {name: value}))
            line = refusal(train.main, ["--resume", tmp_path / "a"])
            assert message in line
            assert "run.json" in line
            assert files(tmp_path / "a") == before


@pytest.mark.filterwarnings("default")
def test_all_states_damaged(tmp_path, refusal, capsys):
    """After Ctrl-C there is a checkpoint too; that run has not ended and begins again."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    interrupted(tmp_path / "b")
    for _, path in states.numbered(tmp_path / "b"):
        path.write_bytes(b"")
    (tmp_path / "b" / "checkpoint.npz").write_bytes(b"of Ctrl-C")
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert "goes on after step 0 of 12" in capsys.readouterr().out
    assert files(tmp_path / "b") == files(tmp_path / "a")
    assert "that run has ended" in refusal(train.main, ["--resume", tmp_path / "b"])


@pytest.fixture
def photos(tmp_path):
    """Makes a folder of pictures of two classes."""

    def make(name="photos", classes=("cat", "dog"), count=30):
        for label, folder in enumerate(tmp_path / name / c for c in classes):
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.random.default_rng([label, i]).integers(0, 256, (9, 9, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
        return tmp_path / name

    return make


def add_a_class(photos):
    shutil.copytree(photos / "cat", photos / "owl")


def add_a_picture(photos):
    shutil.copy(photos / "cat" / "3.png", photos / "cat" / "90.png")


def rename_a_class(photos):
    (photos / "cat").rename(photos / "eel")


def exchange_a_picture(photos):
    Image.new("RGB", (9, 9), "red").save(photos / "dog" / "5.png")


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_a_class, "3 classes now, 2 then"),
        (add_a_picture, "cat has"),
        (rename_a_class, "only now: eel"),
        (exchange_a_picture, "other contents"),
    ],
)
def test_another_data_set_is_refused(change, message, photos, tmp_path, refusal):
    """With the difference named, before anything is touched; and with the old one it goes on."""
    data, whole, killed = photos(), tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(data, tmp_path / "copy")
    command = ["--dataset", f"folder:{data}"]
    options = [*RICH, "--backend", "numpy", *command]
    assert train.main([*options, "--output", str(whole)]) == 0
    interrupted(killed, *command)
    before = files(killed)
    change(data)
    line = refusal(train.main, ["--resume", killed])
    assert str(killed) in line
    assert message in line
    assert files(killed) == before
    shutil.rmtree(data)
    (tmp_path / "copy").rename(data)
    assert train.main(["--resume", str(killed)]) == 0
    assert files(killed) == files(whole)


@pytest.mark.usefixtures("real_data")
def test_data_that_moved(photos, tmp_path, refusal, monkeypatch):
    """A relative path is found from elsewhere; after a move, where the command line says."""
    data, whole, killed = photos(), tmp_path / "whole", tmp_path / "killed"
    monkeypatch.chdir(tmp_path)
    command = ["--dataset", "folder:photos"]
    options = [*RICH, "--backend", "numpy", *command]
    assert train.main([*options, "--output", str(whole)]) == 0
    for at in (5, 9):
        interrupted(killed / str(at), *command, at=at)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train.main(["--resume", str(killed / "5")]) == 0
    assert files(killed / "5") == files(whole)
    data.rename(tmp_path / "elsewhere" / "moved")
    line = refusal(train.main, ["--resume", killed / "9"])
    assert "photos does not exist" in line
    assert "--dataset folder:PLACE says where it is now" in line
    other = photos("other", count=29)
    line = refusal(train.main, ["--resume", killed / "9", "--dataset", f"folder:{other}"])
    assert str(killed / "9") in line
    line = refusal(train.main, ["--resume", killed / "9", "--dataset", "fashion-mnist"])
    assert "--dataset is fashion-mnist, but the run in" in line
    assert train.main(["--resume", str(killed / "9"), "--dataset", "folder:moved"]) == 0
    assert files(killed / "9") == files(whole)


@pytest.mark.usefixtures("real_data")
@pytest.mark.filterwarnings("default")
def test_the_split_belongs_to_the_data(photos, tmp_path, capsys):
    """Whatever the seed, train and evaluate test on the same pictures, none of them trained on."""
    data = f"folder:{photos()}"
    for seed in ("0", "1"):
        output = tmp_path / seed
        command = ["--tiny", "--backend", "numpy", "--dataset", data, "--seed", seed]
        command += ["--steps", "30", "--batch-size", "16", "--output", str(output)]
        assert train.main(command) == 0
        said = capsys.readouterr().out
        trained = re.search(r"all +(\S+)% of (\d+) test images", said).groups()
        loss = re.search(r"loss +(\S+)", said)[1]
        command = ["--backend", "numpy", "--checkpoint", str(output / "checkpoint.npz")]
        assert evaluate.main([*command, "--dataset", data]) == 0
        said = capsys.readouterr().out
        assert re.search(r"top-1 +(\S+)% of (\d+) test images", said).groups() == trained
        assert re.search(r"loss +(\S+)", said)[1] == loss


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--seed", "1"], "--seed is 1, but the run in {} was started with 0; leave it out"),
        (["--steps", "20"], "--steps is 20, but the run in {} was started with 12"),
        (["--backend", "jax"], "--backend is jax, but the run in {} was started with numpy"),
        (["--output", "x"], "--output x: a resumed run stays in {}"),
    ],
)
def test_another_setting_is_refused(extra, message, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        killed_at(6, NumPyEngine, patch)
        with pytest.raises(Killed):
            train.main([*RICH, "--backend", "numpy", "--output", str(tmp_path / "a")])
    before = files(tmp_path / "a")
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "a"), *extra]) == 2
    assert message.format(tmp_path / "a") in capsys.readouterr().err
    assert files(tmp_path / "a") == before
    assert train.main(["--resume", str(tmp_path / "a"), "--seed", "0"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no run.json"), ("{", "is damaged"), ("[]", "it lacks"), ("{}", "it lacks")],
)
def test_no_run_to_resume(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_version_0_1(tmp_path, refusal):
    """It noted neither its data nor how its file is read, and options that it had no use for."""
    options = ["--tiny", "--steps", "12", "--batch-size", "16", "--backend", "numpy"]
    options += ["--checkpoint-every", "4", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        killed_at(7, NumPyEngine, patch)
        with pytest.raises(Killed):
            train.main([*options, str(tmp_path / "b")])
    path, state = tmp_path / "b" / "run.json", tmp_path / "b" / "state-4.npz"
    record = json.loads(path.read_text())
    for name in ("data", "heads", "pixels", "extra"):
        del record[name]
    record |= {"positions": "corners", "corrupt": 0.5, "mosaic_every": 3, "evaluate_every": 1}
    arrays, note = states.read(state)
    del note["data"]
    arrays[states.RECORD] = np.array(json.dumps(note))
    checkpoint.write_npz(state, arrays)
    path.write_text(json.dumps(record | {"dataset": "folder:photos"}))
    assert "start another run" in refusal(train.main, ["--resume", tmp_path / "b"])
    path.write_text(json.dumps(record))
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_other_devices():
    """Another order of sums is told; other dropout masks are refused."""
    states.check_devices("2 cpu devices", "2 cpu devices", 0.1)
    with pytest.warns(UserWarning, match="was started on 2 cpu devices, not on 8 gpu devices"):
        states.check_devices("2 cpu devices", "8 gpu devices", 0.0)
    with pytest.raises(ValueError, match=r"with --dropout 0.1 the rest would be another run"):
        states.check_devices("2 cpu devices", "4 cpu devices", 0.1)


def test_one_process_a_run(tmp_path, monkeypatch, capsys):
    """While a run is alive, nobody resumes it; a killed one is free at once."""
    options = [*RICH, "--backend", "numpy", "--output", str(tmp_path / "a")]
    plain, seen = NumPyEngine.step, []

    def resume_meanwhile(self, step, *rest):
        if step == 6:
            seen.append(train.main(["--resume", str(tmp_path / "a")]))
        return plain(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(NumPyEngine, "step", resume_meanwhile)
        assert train.main(options) == 0
    assert seen == [2]
    assert "a run is going on in" in capsys.readouterr().err


def test_states_of_another_run_are_not_touched(tmp_path, capsys):
    """Neither overwritten nor mistaken for one's own."""
    (tmp_path / "state-7.npz").write_bytes(b"precious")
    assert train.main([*RICH, "--output", str(tmp_path)]) == 2
    assert "holds states of another run" in capsys.readouterr().err
    assert (tmp_path / "state-7.npz").read_bytes() == b"precious"


def test_resuming_a_fine_tuning(tmp_path, monkeypatch, capsys):
    """From another working directory; but not when the file it began with has changed."""
    first, second = tmp_path / "a", tmp_path / "b"
    short = ["--steps", "6", "--batch-size", "8", "--backend", "numpy", "--checkpoint-every", "2"]
    assert train.main(["--tiny", *short, "--output", str(first)]) == 0
    monkeypatch.chdir(first)
    command = ["--init", "checkpoint.npz", "--freeze", *short, "--output"]
    assert train.main([*command, str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        killed_at(3, NumPyEngine, patch)
        with pytest.raises(Killed):
            train.main([*command, str(second)])
    monkeypatch.chdir(tmp_path)
    content = (first / "checkpoint.npz").read_bytes()
    other = checkpoint.load(first / "checkpoint.npz")
    other["head"]["bias"] = other["head"]["bias"] + 1
    checkpoint.save(first / "checkpoint.npz", other)
    assert train.main(["--resume", str(second)]) == 2
    assert "is not the file that the run in" in capsys.readouterr().err
    (first / "checkpoint.npz").write_bytes(content)
    assert train.main(["--resume", str(second)]) == 0
    assert files(second) == files(tmp_path / "whole")


def last_line(arguments, capsys):  # -> what was said last to standard error
    """Of a run that ends with status 2."""
    assert train.main(arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_full_disk_while_metrics_are_written(tmp_path, monkeypatch, capsys):
    """Which the system tells without a file: the run's folder is named, and how to go on."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(Run, "write", full)
        line = last_line([*options, str(tmp_path / "b")], capsys)
    assert f"{tmp_path / 'b'}: No space left on device" in line
    assert f"--resume {tmp_path / 'b'}" in line
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch, capsys):
    """The error names the disk's fault, no half file is left, and the run can go on."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    plain = os.replace

    def full(source, target):
        if Path(target).name == "state-8.npz":
            raise OSError(28, "No space left on device")
        return plain(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        line = last_line([*options, str(tmp_path / "b")], capsys)
    assert f"{tmp_path / 'b' / 'state-8.npz'}: " in line
    assert "free some space" in line
    assert "--resume" in line
    assert [step for step, _ in states.numbered(tmp_path / "b")] == [4]
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_sigkill(tmp_path):
    """A real process, killed three times at seeded moments after its first state; then left."""
    base = [sys.executable, "-m", "minivit.train"]
    options = ["--tiny", "--steps", "400", "--batch-size", "8", "--backend", "numpy", "--per-class"]
    options += ["20", "--checkpoint-every", "20", "--log-every", "7", "--dropout", "0.1"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    subprocess.run([*base, *options, "--output", str(whole)], check=True, capture_output=True)
    command = [*base, *options, "--output", str(other)]
    rng, reached = np.random.default_rng(0), []
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = states.numbered(other)[:1] if other.exists() else []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if other.exists() and states.numbered(other)[:1] != before:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        reached.append(states.numbered(other)[0][0])
        command = [*base, "--resume", str(other)]
    assert reached == sorted(set(reached))
    subprocess.run(command, capture_output=True, check=True)
    for name in ("checkpoint.npz", "metrics.csv"):
        assert (other / name).read_bytes() == (whole / name).read_bytes()
