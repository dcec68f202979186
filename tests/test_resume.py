"""An interrupted run goes on as if nothing had happened (TRN-02, TRN-12, TRN-13)."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from minivit import checkpoint, datasets, states, train
from minivit.engine_jax import JaxEngine
from minivit.engine_numpy import NumPyEngine

ENGINES = {"jax": JaxEngine, "numpy": NumPyEngine}
# Everything that has a state: moments, averages, dropout, augmentation, validation, metrics.
RICH = ["--tiny", "--steps", "12", "--batch-size", "16", "--log-every", "5", "--dropout", "0.1"]
RICH += ["--average", "0.9", "--flip", "--shift", "1", "--mixup", "0.2", "--label-smoothing", "0.1"]
RICH += ["--validation", "0.2", "--evaluate-every", "3", "--checkpoint-every", "4"]
MASKED = ["--tiny", "--objective", "mean-color", "--steps", "12", "--batch-size", "16"]
MASKED += ["--checkpoint-every", "5", "--log-every", "4", "--flip"]


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    whole = datasets.load("fashion-mnist")
    few = datasets.Dataset(
        whole.name,
        whole.classes,
        whole.train_images[:100],
        whole.train_labels[:100],
        whole.test_images[:20],
        whole.test_labels[:20],
    )
    monkeypatch.setattr(datasets, "load", lambda name: few)


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
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "run.json"}


@pytest.mark.parametrize("backend", ["jax", "numpy"])
@pytest.mark.parametrize("options", [RICH, MASKED], ids=["rich", "masked"])
def test_killed_and_resumed(backend, options, tmp_path, monkeypatch):
    """Killed before the first state, after it, and at the end: the same bytes in every file."""
    options = [*options, "--backend", backend]
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert train.main([*options, "--output", str(whole)]) == 0
    command = [*options, "--output", str(other)]
    for step in (2, 7, 11):
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
    states.write(tmp_path, 11, {"weights": np.arange(3.0)}, {"rows": []})
    step, tree, record = states.newest(tmp_path)
    assert (step, record) == (11, {"rows": []})
    np.testing.assert_array_equal(tree["weights"], np.arange(3.0))
    assert [step for step, _ in states.numbered(tmp_path)] == [11, 10]


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
    [(None, "holds no run.json"), ("{", "is damaged"), ("[]", "is damaged: it holds no options")],
)
def test_no_run_to_resume(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_another_number_of_cores_is_told(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"cores": 1000, "seed": 3}))
    with pytest.warns(UserWarning, match="another number of cores"):
        assert states.read_options(tmp_path, {})["seed"] == 3


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch, capsys):
    """The error names the disk's fault, no half file is left, and the run can go on."""
    options = [*RICH, "--backend", "numpy", "--output"]
    assert train.main([*options, str(tmp_path / "a")]) == 0
    plain = checkpoint.write

    def full(path, content):
        if path.name == "state-8.npz":
            raise OSError(28, "No space left on device", str(path))
        return plain(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        assert train.main([*options, str(tmp_path / "b")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [step for step, _ in states.numbered(tmp_path / "b")] == [4]
    assert train.main(["--resume", str(tmp_path / "b")]) == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_sigkill(tmp_path):
    """A real process, killed at moments of its own, three times; then left to end."""
    base = [sys.executable, "-m", "minivit.train"]
    options = ["--tiny", "--steps", "40", "--batch-size", "8", "--backend", "numpy", "--per-class"]
    options += ["20", "--checkpoint-every", "3", "--log-every", "7", "--dropout", "0.1"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    subprocess.run([*base, *options, "--output", str(whole)], check=True, capture_output=True)
    command = [*base, *options, "--output", str(other)]
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = states.numbered(other)[:1] if other.exists() else []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if other.exists() and states.numbered(other)[:1] != before:
                break
            time.sleep(0.002)
        process.kill()
        process.wait()
        if (other / "checkpoint.npz").exists():
            break
        command = [*base, "--resume", str(other)]
    subprocess.run([*base, "--resume", str(other)], capture_output=True)
    for name in ("checkpoint.npz", "metrics.csv"):
        assert (other / name).read_bytes() == (whole / name).read_bytes()
