"""Saving and loading."""

import numpy as np
import pytest

from minivit import checkpoint
from minivit.params import flatten

TREE = {"a": {"kernel": np.arange(6, dtype="float32").reshape(2, 3)}, "b": np.ones(2, "float16")}


@pytest.mark.parametrize("name", ["ck", "ck.npz", "a.b", "with space.npz"])
def test_round_trip(tmp_path, name):
    """CKP-03: the name is used as it is, and no other file is left."""
    path = checkpoint.save(tmp_path / name, TREE)
    assert path == tmp_path / name
    assert [p.name for p in tmp_path.iterdir()] == [name]
    for key, leaf in flatten(checkpoint.load(path)).items():
        np.testing.assert_array_equal(leaf, flatten(TREE)[key])
        assert leaf.dtype == flatten(TREE)[key].dtype


def test_saving_again_over_a_loaded_file(tmp_path):
    """CKP-06: everything was read at once."""
    path = checkpoint.save(tmp_path / "x.npz", TREE)
    p = checkpoint.load(path)
    checkpoint.save(path, {"b": p["b"] * 2})
    np.testing.assert_array_equal(p["a"]["kernel"], TREE["a"]["kernel"])
    assert (checkpoint.load(path)["b"] == 2).all()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path / "x.npz", TREE)
    before = path.read_bytes()

    def broken(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, TREE)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
