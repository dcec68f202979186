"""The user's own pictures: cases IMG-09 to IMG-18."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, datasets, folders, synthetic, train

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
    """Of each class, never the last picture; every size becomes the model's."""
    two_classes(tmp_path, 20)
    picture(tmp_path / "dog" / "wide.png", BLUE, (90, 10))
    names, images, labels, test_images, test_labels, _ = load(tmp_path)
    assert names == ("cat", "dog")
    assert images.shape == (37, 8, 8, 3)
    assert np.bincount(test_labels).tolist() == [2, 2]
    for part, answers in ((images, labels), (test_images, test_labels)):
        assert (part[answers == 0] == RED).all()
        assert (part[answers == 1] == BLUE).all()
    again = load(tmp_path)
    np.testing.assert_array_equal(again[1], images)
    assert np.bincount(load(two_classes(tmp_path / "few", 2))[4]).tolist() == [1, 1]


def held_out(root):
    """Names of the pictures to test on."""
    return {example.name for example in folders.split(folders.listing(root)[1])[1]}


def test_the_split_is_of_the_names(tmp_path):
    """No seed, no place, no order of a disk decides it; evaluation never sees a trained picture."""
    two_classes(tmp_path / "a", 40)
    held = held_out(tmp_path / "a")
    assert [sum(name.startswith(c) for name in held) for c in ("cat/", "dog/")] == [4, 4]
    # SHA-256 of the names, ten each to test on of a hundred: by hashlib alone.
    ranked = sorted(
        (f"cat/{i}.png" for i in range(40)), key=lambda n: hashlib.sha256(n.encode()).hexdigest()
    )
    assert set(ranked[:4]) < held
    assert {name.split("/")[1] for name in held if name[0] == "c"} != {
        name.split("/")[1] for name in held if name[0] == "d"
    }
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").rename(tmp_path / "elsewhere" / "b")
    moved = tmp_path / "elsewhere" / "b"
    assert held_out(moved) == held
    for i in range(40, 43):  # a picture more replaces one of ten at most
        picture(moved / "cat" / f"{i}.png")
        more = held_out(moved)
        assert len(held - more) <= 1
        held = more


def test_the_split_knows_one_form_of_accents(tmp_path):
    """The same folder copied by a system that writes letters with accents as two characters."""
    held = []
    for form in ("NFC", "NFD"):
        for name in ("é", "ö"):
            for i in range(10):
                name_there = unicodedata.normalize(form, f"{name} {i}.png")
                picture(tmp_path / form / unicodedata.normalize(form, name) / name_there)
        held.append(held_out(tmp_path / form))
    assert held[0] == held[1]
    first, second = (datasets.load(f"folder:{tmp_path / f}", size=(4, 4)) for f in ("NFC", "NFD"))
    assert first.identity() == second.identity()


@pytest.mark.parametrize("name", ["test", "val"])
def test_folders_of_their_own(name, tmp_path):
    two_classes(tmp_path / "train", 3)
    two_classes(tmp_path / name, 1)
    names, images, _, test_images, test_labels, _ = load(tmp_path)
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
    arguments = [folders.Example(p, 0) for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    if strict:
        with pytest.raises(ValueError, match=r"3 of 9 pictures: .*cut.jpg .*empty.png"):
            folders.decode(arguments, ["x"], (8, 8), 3, strict=True)
    else:
        with pytest.warns(UserWarning, match=r"left out 3 of 9 pictures: .*cut.jpg") as caught:
            images, _, _ = folders.decode(arguments, ["x"], (8, 8), 3, strict=False)
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
    with pytest.warns(UserWarning, match="the classes 'A', 'a' differ only in case"):
        names, examples = folders.listing(tmp_path)
    assert names == ("1", "10", "11", "2", "A", "B", "a")
    assert [e.path.name for e in examples if e.label == 0] == ["1.png", "10.png", "2.png"]


def test_extensions(tmp_path):
    """IMG-17: capitals count; what is passed over is counted in one line."""
    for name in ("a.jpg", "b.JPG", "c.JPEG", "d.PnG"):
        noise(tmp_path / "x" / name)
        noise(tmp_path / "y" / name)
    for name in ("e.txt", "f", "g.jpg.bak"):
        (tmp_path / "x" / name).write_text("")
    with pytest.warns(
        UserWarning, match=r"3 files that are no pictures are passed over: 1 .*\.txt"
    ):
        names, examples = folders.listing(tmp_path)
    assert len(examples) == 8
    assert names == ("x", "y")


def test_the_same_data_set_at_every_load(tmp_path, monkeypatch):
    """Too large pictures among good ones: threads take no filter of warnings from each other."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)
    for i in range(30):
        picture(tmp_path / "cat" / f"{i}.png", RED)
        picture(tmp_path / "dog" / f"{i}.png", BLUE)
    for i in range(10):  # between the limit and its double, where Pillow would only warn
        picture(tmp_path / "cat" / f"large {i}.png", RED, (40, 40))
    found = set()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # what pytest has set would hide what remains
        before = list(warnings.filters)
        for _ in range(20):
            found.add(load(tmp_path)[1].shape)
            assert list(warnings.filters) == before
    assert len(found) == 1
    assert all(re.search("left out .*large .* too large to be", str(w.message)) for w in told)


@pytest.mark.parametrize(
    ("train_name", "test_name"),
    [("Training", "Testing"), ("train", "valid"), ("TRAIN", "Validation"), ("training", "VAL")],
)
def test_usual_names_of_parts(train_name, test_name, tmp_path):
    """In any case, and never classes of those names."""
    two_classes(tmp_path / train_name, 3)
    two_classes(tmp_path / test_name, 1)
    names, images, _, test_images, *_ = load(tmp_path)
    assert (names, len(images), len(test_images)) == (("cat", "dog"), 6, 2)


def test_several_parts_to_test_on(tmp_path):
    """test/ before val/, which is told; two of one meaning are refused."""
    for name, count in (("train", 3), ("val", 2), ("test", 1), ("notes", 1)):
        two_classes(tmp_path / name, count)
    with pytest.warns(UserWarning, match=r"notes, val beside the parts test, train is not read"):
        assert len(load(tmp_path)[3]) == 2
    two_classes(tmp_path / "Training", 1)
    with pytest.raises(ValueError, match="Training, train, which mean the same part"):
        load(tmp_path)


def test_class_folders_that_hold_only_folders(tmp_path):
    """One storey too many: what was found is shown."""
    two_classes(tmp_path / "north")
    two_classes(tmp_path / "south")
    with pytest.raises(ValueError, match=r"north holds folders .* north/\{cat, dog\}, south/\{"):
        load(tmp_path)
    two_classes(tmp_path / "only" / "test")
    with pytest.raises(ValueError, match=r"only has no folder train .*: test/\{cat, dog\}"):
        load(tmp_path / "only")


def test_a_class_that_is_called_train(tmp_path):
    """A folder of pictures is a class, whatever its name; pictures below its folders count too."""
    for name in ("bus", "train", "valid"):
        picture(tmp_path / name / "a.png")
        picture(tmp_path / name / "more" / "b.png")
    (tmp_path / "train" / "more" / "b.png").rename(tmp_path / "train" / "b.png")
    (tmp_path / "train" / "more").rmdir()
    names, images, *_ = load(tmp_path)
    assert (names, len(images)) == (("bus", "train", "valid"), 3)


def test_a_class_that_is_not_tested(tmp_path):
    """Labels stay those of training: b is absent in val, so c is still 2."""
    for name in "abc":
        picture(tmp_path / "train" / name / "x.png")
    picture(tmp_path / "val" / "a" / "x.png")
    picture(tmp_path / "val" / "c" / "x.png")
    with pytest.warns(UserWarning, match="val has no b: those classes are not tested"):
        assert load(tmp_path)[4].tolist() == [0, 2]


def test_a_class_without_a_usable_picture(tmp_path):
    """In training or in test, broken or only HEIC: named."""
    two_classes(tmp_path / "train")
    two_classes(tmp_path / "test")
    for path in (tmp_path / "test" / "dog").iterdir():
        path.write_bytes(b"")
    with (
        pytest.raises(ValueError, match="no picture of dog can be read"),
        pytest.warns(UserWarning, match="left out 3 of 6 pictures"),
    ):
        load(tmp_path)
    for path in (tmp_path / "test" / "dog").iterdir():
        path.rename(path.with_suffix(".heic"))
    with pytest.raises(ValueError, match=r"dog holds no picture .*3 \.heic \(pip install pillow-h"):
        load(tmp_path)


def test_content_decides(tmp_path):
    """Pictures under any name; what is passed over is counted by its ending, HEIC with a remedy."""
    two_classes(tmp_path)
    for name in ("a", "b.dat"):
        picture(tmp_path / "cat" / name, RED)
    for name in ("x.heic", "y.HEIC", "z.txt"):
        (tmp_path / "cat" / name).write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"3 files .*: 2 \.heic, 1 \.txt \(pip install pillow-"):
        assert len(folders.listing(tmp_path)[1]) == 8
    for name in ("x.heic", "y.HEIC"):
        (tmp_path / "cat" / name).unlink()
    with pytest.warns(UserWarning, match=r": 1 file that is no picture is passed over: 1 \.txt$"):
        folders.listing(tmp_path)


def test_links(tmp_path):
    """Of a class to its own picture: none; to nothing: told, or refused; to another class: told."""
    two_classes(tmp_path)
    (tmp_path / "cat" / "again.png").symlink_to(tmp_path / "cat" / "0.png")
    os.link(tmp_path / "cat" / "1.png", tmp_path / "cat" / "hard.png")
    assert [e.name for e in folders.listing(tmp_path)[1]][:3] == [f"cat/{i}.png" for i in range(3)]
    assert len(folders.listing(tmp_path)[1]) == 6
    (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "cow").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match=r"2 links to nothing: .*cow, .*gone\.png"):
        load(tmp_path)
    with pytest.raises(ValueError, match="2 links to nothing"):
        load(tmp_path, strict=True)
    (tmp_path / "cow").unlink()
    (tmp_path / "dog" / "gone.png").unlink()
    (tmp_path / "dog" / "cat.png").symlink_to(tmp_path / "cat" / "2.png")
    with pytest.warns(UserWarning, match=r"1 file is in two classes, .*cat/2.png = .*dog/cat.png"):
        load(tmp_path)


def test_links_from_test_to_training(tmp_path):
    """A picture that was trained on is told among those to test on."""
    two_classes(tmp_path / "train")
    two_classes(tmp_path / "test")
    (tmp_path / "test" / "cat" / "x.png").symlink_to(tmp_path / "train" / "cat" / "0.png")
    told = r"1 file is in .* training and test: train cat/0\.png = test cat/x\.png"
    with pytest.warns(UserWarning, match=told):
        load(tmp_path)


def test_paths(tmp_path, monkeypatch):
    """~ is the home; a slash at the end changes nothing; no path is said to be none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    two_classes(tmp_path / "photos")
    known = datasets.load("folder:~/photos", size=(8, 8)).identity()
    assert datasets.load(f"folder:{tmp_path}/photos/", size=(8, 8)).identity() == known
    for name in ("folder:", "folder: "):
        with pytest.raises(ValueError, match="folder: is without a path; write folder:PATH"):
            datasets.load(name, size=(8, 8))


def test_names_that_are_no_utf8(tmp_path):
    """Written out, so that they can be printed, compared and stored."""
    for name in (b"caf\xe9", b"caf\xe8"):
        folder = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
        os.mkdir(folder)
        for i in (b"0\xff.png", b"1.png"):
            Image.new("RGB", (2, 2)).save(os.fsdecode(os.fsencode(folder) + b"/" + i), "PNG")
    dataset = datasets.load(f"folder:{tmp_path}", size=(8, 8))
    assert dataset.classes == (r"caf\xe8", r"caf\xe9")
    json.dumps(dataset.identity()).encode()


def test_names_of_classes_that_look_alike(tmp_path):
    """Two forms of one letter: told, and still two classes."""
    for form in ("NFC", "NFD"):
        for i in range(2):
            picture(tmp_path / unicodedata.normalize(form, "é") / f"{i}.png")
    with pytest.warns(UserWarning, match=r"'e\\u0301', '\\xe9' differ only in case or in their"):
        assert len(set(load(tmp_path)[0])) == 2


def test_control_characters_are_not_written(tmp_path):
    """A file's name cannot colour or clear a terminal."""
    two_classes(tmp_path)
    (tmp_path / "cat" / "\33[2J.png").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"cat/\\x1b\[2J\.png cannot be read"):
        load(tmp_path)


def test_signs_of_life(tmp_path, monkeypatch):
    """Decoding and drawing say how far they are."""
    told = []

    def progress(work, what, *, total, unit="img"):
        done = list(work)
        told.append((what, len(done), total, unit))
        return done

    for module in (folders, synthetic):
        monkeypatch.setattr(module, "progress", progress)
    load(two_classes(tmp_path))
    synthetic.shapes(train=1200, test=7)
    assert told == [
        ("looking", 2, 2, "class"),
        ("decoding", 4, 4, "img"),
        ("decoding", 2, 2, "img"),
        ("drawing", 3, 3, "chunk"),
        ("drawing", 1, 1, "chunk"),
    ]


def test_memory_is_no_broken_picture(tmp_path, monkeypatch):
    """Too little of it ends the reading; it does not train on what is left."""
    two_classes(tmp_path)

    def fail(path, *_, **__):
        if path.name == "1.png":
            raise MemoryError

    monkeypatch.setattr(folders, "read_at", fail)
    with pytest.raises(MemoryError):
        load(tmp_path)


def test_sizes_beyond_all_memory(tmp_path, monkeypatch):
    """Before any picture is decoded."""
    two_classes(tmp_path)
    monkeypatch.setattr(folders, "read_at", lambda *_, **__: pytest.fail("decoded"))
    for size in ((10**5, 10**7), (int("9" * 60), 8)):
        with pytest.raises(ValueError, match=r"6 pictures of .* of memory, and .* are free"):
            folders.load(tmp_path, size=size)


def test_only_parts_that_are_asked_for(tmp_path, monkeypatch):
    """Evaluation decodes no training picture; what the parts are is known all the same."""
    two_classes(tmp_path, 20)
    whole, seen, read_at = load(tmp_path), [], folders.read_at

    def read(path, *options, **more):
        seen.append(path)
        return read_at(path, *options, **more)

    monkeypatch.setattr(folders, "read_at", read)
    _, images, labels, test_images, _, parts = load(tmp_path, parts=("test",))
    assert len(seen) == len(test_images) == 4
    assert (len(images), len(labels)) == (0, 0)
    np.testing.assert_array_equal(test_images, whole[3])
    assert parts["test"] == whole[5]["test"]
    assert parts["train"] == whole[5]["train"] | {"contents": ""}


def changes(root):
    """What can become of a folder, and what is said of it."""
    yield lambda: None, None
    yield lambda: picture(root / "cat" / "9.png"), "cat has 5 train images now, 4 then"
    yield lambda: (root / "cat" / "9.png").unlink(), None
    yield lambda: (root / "dog").rename(root / "Dog"), "2 classes now, 2 then; only now: Dog; only"
    yield lambda: (root / "Dog").rename(root / "dog"), None
    yield lambda: two_classes(root / "x") and (root / "x" / "cat").rename(root / "cow"), "3 classes"


def test_identity(tmp_path):
    """The same folder elsewhere is the same data set; each change is named."""
    root = tmp_path / "a"
    then = datasets.load(f"folder:{two_classes(root, 5)}", size=(8, 8))
    stored = json.loads(json.dumps(then.identity()))
    shutil.copytree(root, tmp_path / "b")
    moved = datasets.load(f"folder:{tmp_path / 'b'}", size=(4, 4), channels=1)
    datasets.check_identity(stored, moved, "the run")
    assert moved.identity() == stored
    for change, told in changes(root):
        change()
        shutil.rmtree(root / "x", ignore_errors=True)
        now = datasets.load(f"folder:{root}", size=(8, 8))
        assert (now.identity() == stored) == (told is None)
        if told:
            with pytest.raises(ValueError, match=f"is not the data set of the run: {told}"):
                datasets.check_identity(stored, now, "the run")
        else:
            datasets.check_identity(stored, now, "the run")


def test_other_pictures_under_the_same_names(tmp_path):
    """Of equal sizes too; a part that was not decoded cannot tell and does not mind."""
    for i, color in enumerate("abcde"):
        picture(tmp_path / "cat" / f"{color}.png", (i + 50, 0, 0))
        picture(tmp_path / "dog" / f"{color}.png", (0, i + 50, 0))
    name = f"folder:{tmp_path}"
    then = datasets.load(name, size=(8, 8)).identity()
    trained = folders.split(folders.listing(tmp_path)[1])[0][0].path
    size = trained.stat().st_size
    picture(trained, (77, 0, 0))
    assert trained.stat().st_size == size
    now = datasets.load(name, size=(8, 8))
    with pytest.raises(ValueError, match="train images have the same names and other contents"):
        datasets.check_identity(then, now, "the run")
    datasets.check_identity(then, datasets.load(name, size=(8, 8), parts=("test",)), "the run")
    trained.rename(trained.with_name("zzz.png"))
    with pytest.raises(ValueError, match="other names of t"):
        datasets.check_identity(then, datasets.load(name, size=(8, 8)), "the run")


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
