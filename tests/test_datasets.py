"""The shipped images, their checks, and the order of training."""

import gzip
import hashlib
import io
import json
import re
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import datasets

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A MINIVIT_DATA with a small, valid train-labels file."""
    (tmp_path / "fashion-mnist").mkdir()
    monkeypatch.setenv("MINIVIT_DATA", str(tmp_path))
    return tmp_path / "fashion-mnist"


def idx(shape, body, magic=(0, 0, 8)):
    header = bytes([*magic, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return gzip.compress(header + bytes(body), mtime=0)  # else the time is in it


def test_fashion_mnist():
    d = datasets.load("fashion-mnist")
    assert d.train_images.shape == (60_000, 28, 28, 1)
    assert d.test_images.shape == (10_000, 28, 28, 1)
    assert d.train_images.dtype == d.test_images.dtype == np.uint8
    for labels, each in ((d.train_labels, 6000), (d.test_labels, 1000)):
        assert np.bincount(labels).tolist() == 10 * [each]
    assert d.classes[9] == "Boot"
    assert d.train_labels[0] == 9


def test_checksums_in_the_readme():
    text = (DATA / "README.md").read_text()
    rows = re.findall(r"([0-9a-f]{64})\W+(\S+\.gz)", text)
    assert len(rows) == 4
    for digest, name in rows:
        content = (DATA / "fashion-mnist" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest


def test_absent_data_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVIT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"fashion-mnist is not in .*MINIVIT_DATA"):
        datasets.load("fashion-mnist")
    with pytest.raises(ValueError, match=r"'mnist'.*fashion-mnist"):
        datasets.load("mnist")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"damaged|starts with"),
        (b"<html>", r"damaged"),
        (idx((4,), range(4))[:-9], r"damaged"),
        (idx((4,), range(4), magic=(0, 0, 13)), r"starts with 00000d01, not 00000801"),
        (idx((5,), range(5)), r"says that it holds \(5,\), not \(4,\)"),
        (idx((4,), range(3)), r"holds 3 bytes of data, not 4"),
        (idx((4,), range(6)), r"holds 6 bytes of data, not 4"),
        (gzip.compress(b"\0\0", mtime=0), r"starts with"),
    ],
    # Bytes as names of tests would be unreadable, and xdist's processes must agree on the names.
    ids=["empty", "html", "cut", "magic", "count", "short", "long", "header"],
)
def test_broken_files(folder, content, message):
    """Wrong magic number, wrong count, too short, too long, not gzip: the path and the fault."""
    path = folder / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        datasets.read_idx(path, (4,))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"\0" * 10**6, gzip.compress(bytes(500_000), mtime=0)])
def test_files_that_are_much_too_large(folder, content):
    """What is foreign is not unpacked: half a megabyte in 500 bytes, 4 bytes are expected."""
    path = folder / "labels.gz"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"labels.gz (holds 1,000,000|starts with)"):
        datasets.read_idx(path, (4,))
    assert tracemalloc.get_traced_memory()[1] < 2 * 10**5
    tracemalloc.stop()


def test_missing_file(folder):
    with pytest.raises(FileNotFoundError, match=r"train-images.*missing.*MINIVIT_DATA"):
        datasets.load("fashion-mnist")


def small(**changes):
    images = np.zeros((2, 4, 4, 1), np.uint8)
    labels = np.array([0, 1])
    fields = {"train_images": images, "train_labels": labels}
    fields |= {"test_images": images, "test_labels": labels}
    return datasets.Dataset("x", ("a", "b"), **(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.array([0, 2])}, "train label 2 is outside 0 to 1"),
        ({"test_labels": np.array([-1, 0])}, "test label -1 is outside 0 to 1"),
        ({"train_images": np.zeros((0, 4, 4, 1))}, "no train images"),
        ({"test_labels": np.array([0])}, "2 test images, 1 label$"),
    ],
)
def test_check(changes, message):
    datasets.check(small())
    with pytest.raises(ValueError, match=message):
        datasets.check(small(**changes))


def test_one_class_is_refused():
    """LOS-06: with one class the loss is always zero, which looks like success."""
    one = datasets.Dataset(
        "x",
        ("a",),
        *(
            getattr(small(), n)
            for n in ("train_images", "train_labels", "test_images", "test_labels")
        ),
    )
    with pytest.raises(ValueError, match="two or more"):
        datasets.check(one)


def test_normalise():
    """IMG-07, IMG-08: [-1, 1] by 127.5, and no wrap-around in uint8."""
    pixels = np.array([0, 1, 127, 128, 255], np.uint8)
    pixels.flags.writeable = False
    x = datasets.normalise(pixels)
    assert x.dtype == np.float32
    np.testing.assert_allclose(x, [-1, -0.9921569, -0.0039216, 0.0039216, 1], atol=1e-7)


def test_normalising_twice_is_refused():
    with pytest.raises(ValueError, match="float32, not uint8"):
        datasets.normalise(np.zeros(3, "float32"))


def test_grey_for_a_model_of_colour():
    grey = np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1)
    colour = datasets.with_channels(grey, 3)
    assert colour.shape == (2, 2, 2, 3)
    assert (colour == grey).all()
    assert datasets.with_channels(colour, 3) is colour
    with pytest.raises(ValueError, match="3 channels, the model expects 1"):
        datasets.with_channels(colour, 1)


def test_resize():
    """IMG-06: height before width; the same size is the same array; a flat image stays flat."""
    images = np.zeros((1, 8, 8, 3), np.uint8)
    images[:, :, :4, 0] = 255
    assert datasets.resize(images, 8, 8) is images
    wide = datasets.resize(images, 32, 64)
    assert wide.shape == (1, 32, 64, 3)
    assert (wide[0, :, :28] == [255, 0, 0]).all()
    assert (wide[0, :, 36:] == 0).all()
    assert (datasets.resize(np.full((2, 8, 8, 1), 9, np.uint8), 5, 3) == 9).all()


def test_epochs_differ_and_repeat():
    """TRN-01."""
    orders = [datasets.epoch_order(20, 0, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(20))
    assert len({tuple(order) for order in orders}) == 3
    datasets.epoch_order.cache_clear()
    np.testing.assert_array_equal(datasets.epoch_order(20, 0, 1), orders[1])
    assert (datasets.epoch_order(20, 1, 0) != orders[0]).any()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5))
def test_batches_are_the_epochs_end_to_end(examples, batch, seed):
    """Nothing is left out or doubled within an epoch, whatever the batch size."""
    stream = np.concatenate([datasets.batch_indices(examples, batch, seed, s) for s in range(6)])
    for start in range(0, len(stream) - examples + 1, examples):
        assert sorted(stream[start : start + examples].tolist()) == list(range(examples))


def test_global_random_state_is_not_touched():
    """TRN-05."""
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    datasets.epoch_order.cache_clear()
    first = datasets.batch_indices(50, 8, 0, 3)
    np.random.seed(1)  # noqa: NPY002
    datasets.epoch_order.cache_clear()
    np.testing.assert_array_equal(datasets.batch_indices(50, 8, 0, 3), first)
    np.random.seed(0)  # noqa: NPY002
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def cifar_archive(folder, classes, monkeypatch):
    """A small archive of the real layout, and its checksum in place of the official one."""
    name, _, train, test, names = datasets.CIFAR[classes]
    rng = np.random.default_rng(0)
    extra = int(classes == 100)
    with tarfile.open(folder / name, "w:gz") as archive:
        members = {names: "\n".join(f"name{i}" for i in range(classes)).encode() + b"\n\n"}
        for i, member in enumerate([*train, test]):
            records = rng.integers(0, 256, (3, 3073 + extra), np.uint8)
            records[:, extra] = [i, i + 1, classes - 1]
            records[0, -3072:] = np.repeat([10, 20, 30], 1024)
            members[member] = records.tobytes()
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setitem(datasets.CIFAR, classes, (name, found, train, test, names))
    monkeypatch.setenv("MINIVIT_DATA", str(folder))
    return folder / name


@pytest.mark.parametrize(("classes", "files"), [(10, 5), (100, 1)])
def test_cifar(classes, files, tmp_path, monkeypatch):
    """Planes become channels, the fine label counts, the names are the archive's."""
    cifar_archive(tmp_path, classes, monkeypatch)
    dataset = datasets.load(f"cifar-{classes}")
    assert dataset.train_images.shape == (3 * files, 32, 32, 3)
    assert dataset.test_images.shape == (3, 32, 32, 3)
    assert (dataset.train_images[0] == [10, 20, 30]).all()
    assert dataset.train_labels[:3].tolist() == [0, 1, classes - 1]
    assert dataset.test_labels.tolist() == [files, files + 1, classes - 1]
    assert dataset.classes[-1] == f"name{classes - 1}"
    assert len(dataset.classes) == classes


def test_cifar_that_is_missing_or_changed(tmp_path, monkeypatch):
    path = cifar_archive(tmp_path, 10, monkeypatch)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ValueError, match=r"cifar-10-binary.tar.gz has MD5 .*, not .*; get it again"
    ):
        datasets.load("cifar-10")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-binary.tar.gz is not in .* get it from"):
        datasets.load("cifar-10")


def test_cifar_that_lacks_something(tmp_path, monkeypatch):
    """A file of the archive, or a part of it: one error that names the archive."""
    path = cifar_archive(tmp_path, 10, monkeypatch)
    name, found, train, test, names = datasets.CIFAR[10]
    monkeypatch.setitem(datasets.CIFAR, 10, (name, found, train, "absent.bin", names))
    with pytest.raises(ValueError, match=r"tar\.gz is damaged .*absent\.bin.*; get it again"):
        datasets.load("cifar-10")
    monkeypatch.setitem(datasets.CIFAR, 10, (name, found, train, names, names))
    with pytest.raises(ValueError, match=r"is not a whole number of images; get it again"):
        datasets.load("cifar-10")
    path.write_bytes(gzip.compress(b"no archive"))
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setitem(datasets.CIFAR, 10, (name, digest, train, test, names))
    with pytest.raises(ValueError, match=r"tar\.gz is damaged"):
        datasets.load("cifar-10")


def test_official_checksums():
    """As www.cs.toronto.edu/~kriz/cifar.html states them for the binary versions."""
    assert datasets.CIFAR[10][1] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert datasets.CIFAR[100][1] == "03b5dce01913d631647c71ecec9e9cb8"


def test_few_and_held_out():
    """Disjoint, by the seed, each class as often as asked for."""
    whole = datasets.load("shapes:count", train=300, test=10)
    rest, images, labels = datasets.hold_out(whole, 0.2, 0)
    assert (len(rest.train_images), len(images), len(labels)) == (240, 60, 60)
    every = {image.tobytes() for image in np.concatenate([rest.train_images, images])}
    assert len(every) == 300
    other = datasets.hold_out(whole, 0.2, 1)[1]
    assert (other != images).any()
    few = datasets.few(rest, 7, 0)
    assert np.bincount(few.train_labels).tolist() == 5 * [7]
    assert {i.tobytes() for i in few.train_images} <= {i.tobytes() for i in rest.train_images}
    assert few.test_images is whole.test_images
    assert len(datasets.hold_out(whole, 0.001, 0)[1]) == 1
    with pytest.raises(ValueError, match=r"share of 0.9999 leaves nothing of 300"):
        datasets.hold_out(whole, 0.9999, 0)
    for share in (0, 1, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be above 0 and below 1"):
            datasets.hold_out(whole, share, 0)


def test_no_class_is_lost():
    """Held out altogether, or asked for more often than it is there: named."""
    images = np.zeros((20, 4, 4, 1), np.uint8)
    labels = np.array([0] + 19 * [1])
    rare = small(train_images=images, train_labels=labels)
    seed = next(
        s
        for s in range(99)
        if np.random.default_rng([s, datasets.SPLIT, 1]).permutation(20)[0] == 0
    )
    with pytest.raises(ValueError, match="leaves no training image of a; choose a smaller"):
        datasets.hold_out(rare, 0.05, seed)
    with pytest.raises(ValueError, match="class a has 1 training image, 2 per class"):
        datasets.few(rare, 2, 0)
    with pytest.raises(ValueError, match="class 0 has 1 training image, 2 per class"):
        datasets.draw_shots(labels, 2, 2, 0)
    with pytest.raises(ValueError, match="ask for at least one"):
        datasets.few(rare, 0, 0)


def test_streams_of_random_numbers():
    """Each use of a seed has a number of its own."""
    names = "WEIGHTS ORDER DROPOUT AUGMENTATION CORRUPTION SPLIT LOOK TEST DRAWN".split()
    assert sorted(getattr(datasets, name) for name in names) == list(range(1, 10))


def named(*classes):
    """A data set of these classes, each with one image in both parts."""
    images = np.zeros((len(classes), 4, 4, 1), np.uint8)
    labels = np.arange(len(classes), dtype=np.int32)
    return datasets.Dataset("folder:x", classes, images, labels, images, labels)


def test_aligned_by_name():
    """The order of classes is the checkpoint's; other names, case included, are refused."""
    ours = named("cat", "cow", "dog")
    theirs = datasets.aligned(ours, ["dog", "cat", "cow"], "x.npz")
    assert theirs.classes == ("dog", "cat", "cow")
    assert [theirs.classes[i] for i in theirs.test_labels] == ["cat", "cow", "dog"]
    assert theirs.train_labels.tolist() == [1, 2, 0]
    assert datasets.aligned(ours, list(ours.classes), "x.npz") is ours
    twice = named("crane", "crane", "dog")  # as ImageNet has it
    assert datasets.aligned(twice, ["crane", "crane", "dog"], "x.npz") is twice
    for names, told in (
        (["Cat", "cow", "dog"], "knows 3 classes, folder:x has 3 classes; only .*: cat; .*: Cat"),
        (["cat", "dog"], r"x.npz knows 2 classes, folder:x has 3 classes; only folder:x: cow$"),
        (["cat", "cow", "dog", "emu"], r"only x\.npz: emu$"),
    ):
        with pytest.raises(ValueError, match=told):
            datasets.aligned(ours, names, "x.npz")
    with pytest.raises(ValueError, match="in another order"):
        datasets.aligned(twice, ["dog", "crane", "crane"], "x.npz")


def test_identity_of_shipped_sets():
    """By their contents, their options, their names; through JSON, and whatever stands there."""
    fashion = datasets.load("fashion-mnist", parts=("test",))
    assert fashion.train_images.shape == (0, 28, 28, 1)
    # CRC-32 of the test part's two files, unpacked.
    files = ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    contents = [gzip.decompress((DATA / "fashion-mnist" / f).read_bytes()) for f in files]
    crc = " ".join(struct.pack("<I", zlib.crc32(c)).hex() for c in contents)
    assert fashion.parts == {"test": {"contents": crc}}
    options = [{}, {"seed": 1}, {"size": 16}, {"test": 21}, {"train": 31}, {"labels": "color"}]
    sets = [datasets.load("shapes", **({"train": 30, "test": 20} | o)) for o in options]
    assert len({json.dumps(d.identity()) for d in (*sets, fashion)}) == 7
    for dataset in (*sets, fashion):
        datasets.check_identity(json.loads(json.dumps(dataset.identity())), dataset, "x")
    with pytest.raises(
        ValueError, match="is not the data set of x: fashion-mnist now, shapes then"
    ):
        datasets.check_identity(sets[0].identity(), fashion, "x")
    with pytest.raises(ValueError, match="8 classes now, 6 then; only now: red"):
        datasets.check_identity(sets[0].identity(), sets[-1], "x")
    with pytest.raises(ValueError, match="same names and other contents"):
        datasets.check_identity(sets[0].identity(), sets[1], "x")
    broken = fashion.identity() | {"parts": 3}
    for nonsense in (
        None,
        [],
        {},
        {"kind": "fashion-mnist", "classes": 2, "parts": {}},
        "x",
        broken,
    ):
        with pytest.raises(ValueError, match="of x: its record of the data cannot be read"):
            datasets.check_identity(nonsense, fashion, "x")


def test_parts_of_other_sets(tmp_path, monkeypatch):
    """What is asked for is the same, and for drawn sets the rest is not drawn."""
    both, test = (
        datasets.load("shapes", train=9, test=8, parts=p) for p in (("train", "test"), ("test",))
    )
    np.testing.assert_array_equal(both.test_images, test.test_images)
    assert test.train_images.shape == (0, 32, 32, 3)
    datasets.check_identity(both.identity(), test, "x")
    cifar_archive(tmp_path, 10, monkeypatch)
    assert len(datasets.load("cifar-10", parts=("test",)).test_images) == 3
    at = datasets.load_at("shapes", (8, 8), channels=1, strict=True, train=9, test=8)
    np.testing.assert_array_equal(at.train_images, both.train_images)


@pytest.mark.parametrize(
    "options", [{"size": 10**9}, {"train": 10**60}, {"test": 0}, {"train": -1}]
)
def test_drawn_sets_that_cannot_be(options):
    """No memory suffices, or nothing to draw: one line, before anything is drawn."""
    with pytest.raises(ValueError, match=r"of memory, and .* are free|must be at least 1"):
        datasets.load("shapes", **options)
