"""The user's own pictures: cases IMG-09 to IMG-18."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, folders, train

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture(path, color=RED, size=(12, 9)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, format="PNG")
    return path


def noise(path, seed=0):
    """A JPEG that is large enough to be cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(path, format="JPEG")
    return path


def two_classes(root, count=3):
    for i in range(count):
        picture(root / "cat" / f"{i}.png", RED)
        picture(root / "dog" / f"{i}.png", BLUE)
    return root


def load(root, **options):
    return folders.load(root, size=(8, 8), **options)


def test_a_tenth_to_test_on(tmp_path):
    """Seeded, of each class, never the last picture; every size becomes the model's."""
    two_classes(tmp_path, 20)
    picture(tmp_path / "dog" / "wide.png", BLUE, (90, 10))
    names, images, labels, test_images, test_labels = load(tmp_path)
    assert names == ("cat", "dog")
    assert images.shape == (37, 8, 8, 3)
    assert np.bincount(test_labels).tolist() == [2, 2]
    for part, answers in ((images, labels), (test_images, test_labels)):
        assert (part[answers == 0] == RED).all()
        assert (part[answers == 1] == BLUE).all()
    again = load(tmp_path)
    np.testing.assert_array_equal(again[1], images)
    assert np.bincount(load(two_classes(tmp_path / "few", 2))[4]).tolist() == [1, 1]


def test_the_split_is_the_seed_s(tmp_path):
    """The same pictures are held out for the same seed, others for another."""
    examples = [(tmp_path / f"{i}", i % 2) for i in range(100)]
    held = [tuple(p for p, _ in folders.split(examples, seed)[1]) for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]


@pytest.mark.parametrize("name", ["test", "val"])
def test_folders_of_their_own(name, tmp_path):
    two_classes(tmp_path / "train", 3)
    two_classes(tmp_path / name, 1)
    names, images, _, test_images, test_labels = load(tmp_path)
    assert (names, len(images), len(test_images)) == (("cat", "dog"), 6, 2)
    assert test_labels.tolist() == [0, 1]
    picture(tmp_path / name / "cow" / "a.png")
    with pytest.raises(ValueError, match="have different classes; only one of them has cow"):
        load(tmp_path)


def test_grey_for_a_grey_model(tmp_path):
    images = load(two_classes(tmp_path), channels=1)[1]
    assert images.shape == (4, 8, 8, 1)
    assert set(np.unique(images)) == {29, 76}  # the luma of blue and of red


@pytest.mark.parametrize("strict", [False, True])
def test_broken_pictures(strict, tmp_path):
    """IMG-09, IMG-10: named in one warning and left out, or an error; Pillow stays as it was."""
    two_classes(tmp_path)
    cut = noise(tmp_path / "cat" / "cut.jpg")
    cut.write_bytes(cut.read_bytes()[:1500])
    (tmp_path / "dog" / "empty.png").write_bytes(b"")
    (tmp_path / "dog" / "text.jpg").write_text("not a picture")
    (tmp_path / "dog" / "folder.png").mkdir()
    arguments = [(p, 0) for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    if strict:
        with pytest.raises(ValueError, match=r"3 of 9 pictures: .*cut.jpg .*empty.png"):
            folders.decode(arguments, (8, 8), 3, strict=True)
    else:
        with pytest.warns(UserWarning, match=r"left out 3 of 9 pictures: .*cut.jpg") as caught:
            images, _ = folders.decode(arguments, (8, 8), 3, strict=False)
        assert (len(images), len(caught)) == (6, 1)


def test_an_empty_class(tmp_path):
    """IMG-12: named, instead of labels that shift."""
    two_classes(tmp_path)
    (tmp_path / "cow").mkdir()
    with pytest.raises(ValueError, match=r"cow holds no picture .*; fill it or remove it"):
        load(tmp_path)


def test_nothing_to_find(tmp_path):
    """IMG-13: five faults, each with the path and what was expected."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("")
    picture(tmp_path / "loose" / "a.png")
    file = picture(tmp_path / "file.png")
    for path, message in (
        ("empty", "empty holds no folders of classes; expected"),
        ("text", "text holds no folders of classes; expected"),
        ("absent", "absent does not exist; expected .*CLASS/PICTURE"),
        (file.name, "file.png is a file; expected"),
        ("loose", "loose holds pictures but no folders of classes; expected"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            load(tmp_path / path)
    picture(tmp_path / "single" / "cat" / "a.png")
    picture(tmp_path / "single" / "cat" / "b.png")
    with pytest.raises(ValueError, match="1 class; a classifier needs two"):
        datasets.load(f"folder:{tmp_path / 'single'}", size=(8, 8))
    picture(tmp_path / "single" / "dog" / "a.png")
    with pytest.raises(ValueError, match="dog holds one picture"):
        load(tmp_path / "single")


def test_hidden_things(tmp_path):
    """IMG-14: no class of that name, no shifted label, no sample."""
    two_classes(tmp_path, 2)
    picture(tmp_path / ".ipynb_checkpoints" / "a.png")
    picture(tmp_path / "__MACOSX" / "c.png")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "cat" / "._a.png").write_bytes(b"x")
    names, images, *_ = load(tmp_path)
    assert (names, len(images)) == (("cat", "dog"), 2)


def test_order(tmp_path):
    """IMG-15: classes sorted as text, whatever the order on the disk; pictures too."""
    for name in ("B", "2", "a", "11", "A", "1", "10"):
        for i in ("2", "10", "1"):
            picture(tmp_path / name / f"{i}.png")
    names, examples = folders.listing(tmp_path)
    assert names == ("1", "10", "11", "2", "A", "B", "a")
    assert [p.name for p, label in examples if label == 0] == ["1.png", "10.png", "2.png"]


def test_extensions(tmp_path):
    """IMG-17: capitals count; what is passed over is counted in one line."""
    for name in ("a.jpg", "b.JPG", "c.JPEG", "d.PnG"):
        noise(tmp_path / "x" / name)
        noise(tmp_path / "y" / name)
    for name in ("e.txt", "f", "g.jpg.bak"):
        (tmp_path / "x" / name).write_text("")
    with pytest.warns(UserWarning, match="3 files that are no pictures are passed over"):
        names, examples = folders.listing(tmp_path)
    assert len(examples) == 8
    assert names == ("x", "y")


def test_a_whole_story_with_odd_names(tmp_path):
    """IMG-18: train, show, predict and evaluate in a plain locale, in a folder with a space."""
    root = tmp_path / "my photos"
    for i in range(4):
        picture(root / "ångström 猫" / f"é 🐱 {i}.png", RED)
        picture(root / "dog" / f"{i}.png", BLUE)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONIOENCODING"] = "ascii"
    output = tmp_path / "the output"

    def run(module, *arguments):
        command = [sys.executable, "-m", f"minivit.{module}", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode("ascii")

    options = ["--tiny", "--steps", "40", "--batch-size", "6", "--backend", "numpy"]
    run("train", *options, "--dataset", f"folder:{root}", "--output", output)
    file = output / "checkpoint.npz"
    assert checkpoint.inspect(file)[1]["class_names"] == ["dog", "ångström 猫"]
    text = run("predict", root / "dog" / "0.png", "--checkpoint", file, "--crop", "1")
    assert text.splitlines()[1].endswith("dog")
    arguments = ["--checkpoint", file, "--dataset", f"folder:{root}", "--backend", "numpy"]
    assert "100.00% of 2 test images" in run("evaluate", *arguments)
    run("checkpoint", "show", file)
    assert run("finetune", file, "--image-size", "28", "--dataset", f"folder:{root}")


def test_strict_on_the_command_line(tmp_path, capsys):
    """Before the first step, and before a folder is made."""
    two_classes(tmp_path / "in")
    (tmp_path / "in" / "dog" / "empty.png").write_bytes(b"")
    command = ["--tiny", "--dataset", f"folder:{tmp_path / 'in'}", "--strict", "--batch-size", "2"]
    assert train.main([*command, "--output", str(tmp_path / "out")]) == 2
    assert "empty.png" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [{"grid": "2x2"}, {"image_size": [28]}, {"class_names": 3}, {"epsilon": -1}, {"gelu_form": 1}],
)
def test_settings_that_make_no_sense(settings, tmp_path):
    """A file's own words are not believed blindly."""
    from minivit import params, variants

    p = params.initialise(variants.Variant("x", 4, 8, 16, 2, 1), 0, image_size=8, classes=2)
    says = f"{next(iter(settings))} is"
    with pytest.raises(ValueError, match=says):  # nor are they written
        checkpoint.save(tmp_path / "x.npz", p, settings=settings)
    note = {checkpoint.SETTINGS: np.array(json.dumps(settings))}
    checkpoint.write_npz(tmp_path / "x.npz", params.flatten(p) | note)
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load(tmp_path / "x.npz")
