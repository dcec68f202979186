"""The benchmark itself: who takes part, what is counted. No time is asserted here."""

import csv
import importlib.util
import io
import json
import subprocess
import sys

import pytest

from minivit import bench, contestants, machine, peers
from minivit.contestants import CONFIGS, Task


def rows(folder):
    return list(csv.DictReader((folder / "bench.csv").read_text().splitlines()))


def test_a_small_run(tmp_path, capfd):
    """Both twins and the limit, as a table, a CSV and a picture; ratios to the reference."""
    names = ["minivit JAX", "minivit NumPy", "matrix product"]
    options = ["--config", "tiny", "--batch", "4", "--rounds", "2", "--seconds", "0.01"]
    options += ["--reference", "minivit NumPy", "--output", str(tmp_path), "--contestants", *names]
    assert bench.main(options) == 0
    said = capfd.readouterr().out
    for what, title in (("train", "training step"), ("forward", "forward pass")):
        assert f"tiny, {title}, 4 images, float32" in said
        found = {row["contestant"]: row for row in rows(tmp_path) if row["what"] == what}
        assert found.keys() == {"minivit JAX", "minivit NumPy"}
        assert float(found["minivit NumPy"]["ratio"]) == 1
        for row in found.values():
            assert 0 < float(row["least"]) <= float(row["ratio"]) <= float(row["most"])
            images = float(row["images_per_second"])
            per_image = Task("tiny", what, 1).flops
            assert float(row["gflops"]) == pytest.approx(images * per_image / 1e9)
            assert float(row["share_of_limit"]) > 0
            assert float(row["resident_mb"]) > 20
    assert float(found["minivit JAX"]["first_call_seconds"]) > 0
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_who_is_not_installed_is_left_out(tmp_path, capfd):
    """By name and reason; without anybody that is the end."""
    absent = [n for n in ("timm", "flax") if importlib.util.find_spec(n) is None]
    if not absent:
        pytest.skip("all peers are installed")
    options = ["--config", "tiny", "--rounds", "1", "--seconds", "0", "--output", str(tmp_path)]
    assert bench.main([*options, "--contestants", absent[0]]) == 2
    error = capfd.readouterr().err
    assert f"left out: {absent[0]} (ModuleNotFoundError" in error
    assert "no contestant could take part" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--seconds", "-1"], "--seconds is -1; it must be at least 0"),
        (["--seconds", "1e308"], "--seconds is 1e308; it must be at least 0 and at most 3,600"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--reference", "timm", "--contestants", "minivit JAX"], "--reference timm is not among"),
        (["--output", "/proc/x"], "--output /proc/x cannot be written"),
    ],
)
def test_what_cannot_be(options, message, refusal, tmp_path, monkeypatch):
    """Before anybody is started."""
    monkeypatch.setattr(bench, "Worker", None)
    assert message in refusal(bench.main, ["--output", tmp_path / "new", *options])
    assert not (tmp_path / "new").exists()


def test_a_reference_that_is_not_installed(refusal, monkeypatch):
    """Known before the work, with what helps."""
    monkeypatch.setattr(bench, "Worker", None)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    error = refusal(bench.main, ["--reference", "timm compiled"])
    assert "--reference timm compiled needs pip install torch timm" in error
    assert peers.absent("minivit JAX") == []
    assert {*peers.NEEDS} == {name.removesuffix(" compiled") for name in peers.PEERS}


def start(monkeypatch, **programs):
    """Contestants that are short programs instead."""
    real = subprocess.Popen

    def popen(command, **options):
        name = json.loads(command[-1])["contestant"]
        return real([sys.executable, "-c", programs[name]], **options)

    monkeypatch.setattr(bench.subprocess, "Popen", popen)
    monkeypatch.setattr(bench, "contestants", lambda: programs)


GOOD = """
import json, sys
print("a library says hello")
print(json.dumps({"first": 1, "flops": 1}), flush=True)
for line in sys.stdin:
    print("7"); print(json.dumps({"seconds": int(line), "resident": 1}), flush=True)"""
DIES = GOOD.replace("for line in sys.stdin:", "for line in range(2, 4):")  # in the first round
KILLED = "import os; os.kill(os.getpid(), 9)"


def test_contestants_that_die(monkeypatch, tmp_path, capsys, refusal):
    """The others go on; a reference that dies ends everything, with its reason."""
    start(monkeypatch, **{"minivit JAX": GOOD, "minivit NumPy": DIES, "timm": KILLED})
    options = ["--config", "tiny", "--what", "train", "--rounds", "2", "--output", str(tmp_path)]
    assert bench.main(options) == 0
    said = capsys.readouterr()
    assert "left out: minivit NumPy (ended with status 0)\n" in said.err
    assert "left out: timm (killed by the system, which does so where memory is short" in said.err
    assert [row["contestant"] for row in rows(tmp_path)] == ["minivit JAX"]
    for name in ("timm", "minivit NumPy"):
        monkeypatch.setattr(bench, "absent", lambda name: [])
        error = refusal(bench.main, [*options, "--reference", name])
        assert f"--reference {name} did not take part: " in error


def test_the_first_error_is_the_one_that_is_told(monkeypatch, tmp_path, capsys):
    """A contestant that says why it ends is asked no more."""
    last = """
for line in sys.stdin:
    print(json.dumps({"error": "out of memory"}), flush=True); break"""
    start(monkeypatch, **{"minivit JAX": GOOD, "timm": GOOD[: GOOD.index("for line")] + last})
    options = ["--config", "tiny", "--what", "train", "--rounds", "1", "--output", str(tmp_path)]
    assert bench.main(options) == 0
    assert "left out: timm (out of memory)\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "out of memory; try a smaller --batch"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 bytes"), "out of memory; try a smaller --batch"),
        (ValueError("a\nb\x1b[2J"), r"ValueError: a b\x1b[2J"),
    ],
)
def test_faults_of_contestants(error, text):
    assert contestants.fault(error) == text


def test_a_fault_between_calls_is_told(monkeypatch, capsys):
    """Not only one while it is built: the reason reaches the table."""

    def build(task):
        calls = iter([None, MemoryError()])

        def run(count):
            if error := next(calls):
                raise error

        return run

    monkeypatch.setattr(contestants, "contestants", lambda: {"x": build})
    monkeypatch.setattr(machine, "keep_memory", lambda: None)
    spec = json.dumps(vars(Task("tiny", "train", 1)) | {"contestant": "x"})
    monkeypatch.setattr(sys, "argv", ["", spec])
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    contestants.main()
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first.keys() == {"first", "flops"}
    assert second == {"error": "out of memory; try a smaller --batch"}


def test_operations():
    """A training step is three forward passes; a batch so many images."""
    for config in CONFIGS:
        one = Task(config, "forward", 1).flops
        assert Task(config, "train", 5).flops == 15 * one
    # Of a ViT-B/16 at 224 the field says 17.6 thousand million multiply-adds; here both count.
    assert Task("B/16", "forward", 1).flops == pytest.approx(2 * 17.6e9, rel=0.02)


def test_every_contestant_is_ours_or_a_peer():
    assert contestants.contestants().keys() == {*contestants.OURS, *peers.PEERS}


def test_memory_may_be_kept_anywhere():
    """Where there is no glibc nothing is called, and nothing is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.ctypes, "CDLL", lambda name: object())
        machine.keep_memory()
