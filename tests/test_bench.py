"""The benchmark itself: who takes part, what is counted. No time is asserted here."""

import csv
import importlib.util

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
    assert "nobody could take part" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--seconds", "-1"], "--seconds is -1.0; it must be at least 0"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--reference", "timm", "--contestants", "minivit JAX"], "--reference timm is not among"),
    ],
)
def test_what_cannot_be(options, message, capsys, tmp_path):
    assert bench.main([*options, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


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
