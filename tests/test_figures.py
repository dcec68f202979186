"""Figures say what they show; nothing is opened."""

import io
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

import minivit.figures.__main__ as draw
from minivit import (
    architecture,
    attention_maps,
    checkpoint,
    figures,
    images,
    params,
    predict,
    variants,
)
from minivit.figures.__main__ import main as figures_command
from minivit.shapes import pair


def texts(figure):
    """All words of a figure that has been drawn."""
    figure.savefig(io.BytesIO(), dpi=50)
    found = [t.get_text() for a in figure.axes for t in a.texts]
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        found += [
            t.get_text() for t in (axes.get_legend().get_texts() if axes.get_legend() else [])
        ]
    return found


def test_curves():
    """Axes keep their names when there are validations and a test; the unit is the objective's."""
    rows = [
        {"step": s, "loss": 1 / s, "accuracy": 0.1 * s, "learning_rate": 0.1} for s in (1, 2, 3)
    ]
    rows.append({"step": 2, "validation_loss": 0.7, "validation_accuracy": 0.25})
    rows.append({"step": 3, "test_loss": 0.6, "test_accuracy": 0.9})
    found = texts(figures.curves(rows))
    assert {"loss (nats)", "accuracy", "learning rate", "step"} <= set(found)
    assert {"validation 0.250", "test 0.900", "test 0.600"} <= set(found)
    assert "loss (mean square)" in texts(figures.curves(rows, "mean square"))


@pytest.mark.parametrize("channels", [1, 3])
def test_mosaic(channels):
    """A row for each view, a column for each image, and the views' names."""
    views = 4 * [np.zeros((5, 8, 12, channels), np.uint8)]
    figure = figures.mosaic(views)
    assert len(figure.axes) == 20
    assert {"input", "corrupted", "predicted", "target"} <= set(texts(figure))
    assert figure.axes[0].images[0].get_array().shape[:2] == (8, 12)


def test_confusion():
    """Per cent of each row, as numbers where classes are few; an absent class is no fault."""
    counts = np.array([[8, 2, 0], [0, 5, 0], [0, 0, 0]])
    found = texts(figures.confusion(counts, ("a", "b", "c")))
    assert {"80", "20", "100", "predicted", "true"} <= set(found)
    assert "nan" not in found
    some = figures.confusion(np.eye(30, dtype=int), [str(i) for i in range(30)])
    assert not some.axes[0].texts
    assert some.axes[0].get_yticklabels()[29].get_text() == "29"


def test_confusion_of_many_classes():
    """NC-09: the picture does not grow; what is confused most often is named beside it."""
    sizes = set()
    for classes, cells in ((31, 31), (1000, 1000), (21_843, 500)):
        names = [f"class ${i}$" for i in range(classes)]
        figure = figures.confusion(np.eye(cells, dtype=int), names, [(3, 1, 7), (2, 30, 5)])
        sizes.add(tuple(figure.get_size_inches()))
        assert len(figure.axes[0].get_xticks()) < 12
        assert figure.axes[0].get_xlim() == (-0.5, classes - 0.5)
        beside = figure.axes[1]
        assert [bar.get_width() for bar in beside.patches] == [7, 5]
        assert [t.get_text() for t in beside.get_yticklabels()] == [
            r"class \$3\$ → class \$1\$",
            r"class \$2\$ → class \$30\$",
        ]
    assert len(sizes) == 1


def test_data_sizes():
    results = {"ViT": {10: [0.5, 0.7], 100: [0.8, 0.8]}, "ResNet": {10: [0.6], 100: [0.9]}}
    figure = figures.data_sizes(results, [10, 100])
    assert {"ViT", "ResNet", "training images"} <= set(texts(figure))
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata().astype(float), [60, 80])


def titles(figure):
    return [axes.get_title() for axes in figure.get_axes()]


@pytest.mark.parametrize("shape", [(8, 12, 3), (8, 12, 1)])
def test_patches(shape):
    """Each patch of the row is the one whose number it has, row by row."""
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    figure = figures.patches(image, 4)
    whole, *row = figure.get_axes()
    assert whole.get_title() == "8x12 pixels, 6 patches of 4x4"
    assert [axes.get_title() for axes in row] == list("012345")
    for n, axes in enumerate(row):
        y, x = divmod(n, 3)
        expected = image[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].squeeze()
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)
    assert len(figures.patches(image[:4, :4], 4).get_axes()) == 2


def test_gallery():
    images = [np.full((4, 4, c), 10 * c, np.uint8) for c in (1, 3)]
    figure = figures.gallery(images, ["grey", "colour"])
    assert titles(figure) == ["grey", "colour"]
    shown = [axes.images[0].get_array().ravel()[0] for axes in figure.get_axes()]
    assert shown == [10, 30]
    assert titles(figures.gallery(images[:1], ["grey"])) == ["grey"]


def test_matrices():
    """Every number is written into its cell."""
    array = np.array([[0.25, -1.0], [3.0, 0.5]])
    figure = figures.matrices([array, array.T], ["a", "b"], "key", "query")
    first = figure.get_axes()[0]
    assert [t.get_text() for t in first.texts] == ["0.25", "-1.00", "3.00", "0.50"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("key", "query")
    assert titles(figures.matrices([array], ["a"], "key", "query"))[0] == "a"


def test_lines():
    figure = figures.lines(
        [1, 4, 16], {"a": [1, 2, 3], "b": [3, 2, 1]}, "x", "y", log_x=True, level=2
    )
    (axes,) = figure.get_axes()
    assert len(axes.lines) == 3
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "4", "16"]


def test_ratios():
    """A group for each configuration, our bars in colour, the fastest on top."""
    row = {"config": "tiny", "what": "train", "least": 0.5, "most": 2.0}
    rows = [row | {"contestant": n, "ratio": r} for n, r in (("timm", 1.0), ("minivit JAX", 1.5))]
    rows += [r | {"what": "forward"} for r in rows]
    figure = figures.ratios(rows)
    assert titles(figure) == ["tiny, training step", "tiny, forward pass"]
    bars = figure.get_axes()[0].patches
    assert [bar.get_width() for bar in bars] == [1.0, 1.5]
    assert bars[0].get_facecolor() != bars[1].get_facecolor()


def test_bars():
    """A bar and its number for each name, the first on top; what is too small to see says so."""
    figure = figures.bars(
        {"a": {"x": 2000.0, "y": -500.0, "z": 0.1}, "b": {"x": 1, "y": 2, "z": 3}}
    )
    left, right = figure.get_axes()
    assert (left.get_xlabel(), right.get_xlabel()) == ("a", "b")
    assert [bar.get_width() for bar in left.patches] == [2000.0, -500.0, 0.1]
    assert [t.get_text().strip() for t in left.texts] == ["2e+03", "-500", "≈ 0"]
    assert left.yaxis_inverted()


def test_filters():
    """Zero is mid-grey, the largest entry black or white; an empty filter is no fault."""
    kernels = np.zeros((3, 2, 2, 1))
    kernels[0, 0, 0], kernels[1, 1, 1] = 4.0, -0.1
    figure = figures.filters(kernels, columns=2)
    shown = [axes.images[0].get_array() for axes in figure.get_axes() if axes.images]
    assert [s.ravel().tolist() for s in shown] == [
        [255, 128, 128, 128],
        [128, 128, 128, 0],
        4 * [128],
    ]
    with pytest.raises(ValueError, match="filters of 5 channels are no pictures"):
        figures.filters(np.zeros((1, 2, 2, 5)))


def test_a_title_and_a_key():
    """A picture says what its colours are; the heads' stands beside the image they look at."""
    assert figures.filters(np.zeros((1, 2, 2, 1)), title="filters").get_suptitle() == "filters"
    images, maps = np.zeros((2, 4, 4, 3), np.uint8), np.full((2, 2, 2), 0.25)
    maps[1] = 0  # a map without anything is black, not a division by zero
    for figure in (
        figures.heads(np.ones((2, 2, 2, 2))),
        figures.heads(np.ones((2, 2, 2, 2)), images[0]),
        figures.attention(images, maps, "ab"),
        figures.overlays(images, {"x": maps}, "ab"),
    ):
        assert figure.axes[-1].get_ylabel() == "share of each\nmap's largest weight"
        shown = [image for axes in figure.axes for image in axes.images]
        assert all(image.get_clim() in ((0, 1), (0, 255)) for image in shown)
        figure.savefig(io.BytesIO())
    picture = figures.heads(np.ones((2, 2, 2, 2)), images[0] + 9).axes[0].images[0]
    assert (picture.get_array() == 9).all()


def test_positions_of_large_grids():
    """Maps for 7 x 7 places, corners included, as in the paper; all where they are few."""
    assert list(draw.some(8)) == list(range(8))
    assert list(draw.some(37)) == [0, 6, 12, 18, 24, 30, 36]
    assert list(draw.some(74)) == [0, 12, 24, 36, 49, 61, 73]
    table = np.random.default_rng(0).standard_normal((1, 1 + 9 * 16, 4))
    whole = attention_maps.position_similarity(table, (9, 16))
    places = [draw.some(9), draw.some(16)]
    cut = attention_maps.position_similarity(table, (9, 16), places=places)
    np.testing.assert_array_equal(cut, whole[np.ix_(*places)])
    p = {"embedding": {"kernel": np.zeros((2, 2, 1, 4))}, "cls": np.zeros((1, 1, 4))}
    p["Transformer"] = {"posembed_input": {"pos_embedding": table}}
    first, second, _ = draw.positions(p, (18, 32)).axes
    assert first.get_title() == "9x16 patches, learned\nmaps of 7x7 of them"
    assert second.get_title() == "18x32 patches, resized\nmaps of 7x7 of them"
    assert first.images[0].get_array().shape == (7 * 10 - 1, 7 * 17 - 1)
    assert [t.get_text() for t in first.get_xticklabels()] == [str(n + 1) for n in places[1]]


NASTY = (r"$x_1^2$ \alpha_b", "a$b", r"\$c\$", "\x1b[31mred\udcff", "y" * 999)


def test_names_are_literal():
    """Whatever a class, a file or a series is called: no formula, no control character, no end."""
    images = np.zeros((5, 4, 4, 3), np.uint8)
    maps, five, counts = np.ones((5, 2, 2)), range(5), np.ones((5, 5), int)
    named = {name: [1, 2, 3] for name in NASTY}
    labels = [1, 2, 3, 4, 0]
    for figure in (
        figures.gallery(images, NASTY),
        figures.matrices([np.eye(2)] * 5, NASTY, "x", "y"),
        figures.lines([1, 2, 3], named, "x", "y"),
        figures.bars({"a$b_c$": dict.fromkeys(NASTY, 1)}),
        figures.examples(images, five, five, NASTY),
        figures.examples(images, labels, five, NASTY),
        figures.confusion(counts, NASTY),
        figures.confusion(counts, NASTY * 10, [(i, j, 1) for i, j in enumerate(labels)]),
        figures.data_sizes({name: {1: [1]} for name in NASTY}, [1]),
        figures.attention(images, maps, NASTY),
        figures.overlays(images, {name: maps for name in NASTY}, NASTY),
        figures.positions([np.ones((2, 2, 2, 2))] * 5, NASTY),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            figure.savefig(io.BytesIO(), dpi=50)
        shown = []
        for text in figure.findobj(Text):
            words, formula = text._preprocess_math(text.get_text())
            assert not formula, words
            assert words.isprintable() or "\n" in words
            assert max(map(len, words.split("\n"))) <= 60
            shown.append(words)
        for name in (r"$x_1^2$ \alpha", "a$b", r"\$c\$", r"\x1b[31mred"):
            assert any(name in words for words in shown), (name, shown)


@pytest.mark.parametrize("backend", ["module://nonexistent", "TkAgg", "nonsense", "agg", ""])
def test_no_backend_is_needed(backend, tmp_path):
    """NC-10: whatever MPLBACKEND is; one that exists stays chosen, and the variable stays."""
    code = """
import io, os
from minivit import figures
from minivit.figures.__main__ import parser
assert "--images" in parser().format_help()
figures.lines([1, 2], {"a": [1, 2]}, "x", "y").savefig(io.BytesIO())
import matplotlib
print(os.environ["MPLBACKEND"], matplotlib.rcParams._get("backend"), sep="|")"""
    environment = os.environ | {"MPLBACKEND": backend, "DISPLAY": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    kept, chosen = result.stdout.strip().split("|")
    assert kept == backend
    if backend not in ("nonsense", ""):
        assert chosen.lower() == backend.lower()


def test_positions_and_heads_are_tiles():
    """Each map is at its place, also on grids that are no squares; gaps between are empty."""
    rng = np.random.default_rng(0)
    likeness = rng.uniform(-1, 1, (2, 3, 2, 3))
    figure = figures.positions([likeness, likeness], ["before", "after"])
    assert titles(figure)[:2] == ["before", "after"]
    tiles = figure.get_axes()[0].images[0].get_array().filled(np.nan)
    assert tiles.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(tiles[3:5, 8:11], likeness[1, 2])
    assert np.isnan(tiles[2]).all()
    weights = rng.random((4, 2, 2, 3))
    weights[0, 0] = 0  # a head that looks at the class token alone
    figure = figures.heads(weights)
    tiles = figure.get_axes()[0].images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(tiles[9:11, 4:7], weights[3, 1] / weights[3, 1].max())
    assert (tiles[:2, :3] == 0).all()
    assert [t.get_text() for t in figure.get_axes()[0].get_yticklabels()] == list("1234")


def test_distances():
    distance = np.arange(12.0).reshape(2, 3, 2)  # two images, three blocks, two heads
    (axes,) = figures.distances(distance, 4.0).get_axes()
    np.testing.assert_allclose(axes.lines[0].get_ydata(), distance.mean(0)[:, 0])
    np.testing.assert_allclose(axes.lines[2].get_ydata(), distance.mean((0, 2)))
    assert axes.get_ylabel() == "mean attention distance (pixels)"
    assert axes.get_ylim()[0] == 0


def test_overlays():
    """A row for an image, a column for a map, under their names."""
    images = np.zeros((2, 4, 6, 3), np.uint8)
    figure = figures.overlays(images, {"mean": np.ones((2, 2, 3)), "max": np.ones((2, 2, 3))}, "ab")
    axes = figure.get_axes()
    assert [a.get_title() for a in axes[:3]] == ["image", "mean", "max"]
    assert [axes[i].get_ylabel() for i in (0, 3)] == ["a", "b"]
    assert tuple(axes[1].images[1].get_extent()) == (-0.5, 5.5, 3.5, -0.5)


def small(tmp_path, name, **options):  # -> path, parameters
    """A checkpoint of two blocks, or of another model, beside a picture of 8x12."""
    sizes = variants.parse(name) if isinstance(name, str) else name
    p = params.initialise(sizes, 0, **{"image_size": (8, 12), "classes": 3} | options)
    if "head" in p:  # otherwise of zeros, which knows no classes
        p["head"]["kernel"] = np.random.default_rng(1).standard_normal(p["head"]["kernel"].shape)
        p["head"]["kernel"] = p["head"]["kernel"].astype("float32")
    path = checkpoint.save(tmp_path / "model.npz", p)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return path, p


TWO_BLOCKS = variants.Variant("small", (4, 3), 8, 8, 2, 2)
WEIGHTS = {"parts", "filters", "positions"}
LOOKS = {"patches-1-picture", "heads-1-picture", "distance", "rollout"}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (TWO_BLOCKS, {}, WEIGHTS | LOOKS),
        (TWO_BLOCKS, {"class_token": False}, WEIGHTS | LOOKS),
        (TWO_BLOCKS, {"class_token": False, "positions": False}, {"parts", "filters"} | LOOKS),
        (TWO_BLOCKS, {"channels": 1}, WEIGHTS | LOOKS),
        ("tiny-hybrid", {"image_size": (28, 20)}, (WEIGHTS | LOOKS) - {"patches-1-picture"}),
        ("tiny-resnet", {"image_size": 28}, {"parts", "filters"}),
    ],
)
def test_command(tmp_path, name, options, expected, capsys):
    """Every figure that the model can have, for grids and patches that are no squares."""
    path, p = small(tmp_path, name, **options)
    size = options.get("image_size", (8, 12))
    grid = architecture.token_grid(p, size)
    size = "x".join(map(str, pair(size)))
    given = ["--images", str(tmp_path / "picture.png"), "--output", str(tmp_path / "out")]
    given += ["--image-size", size]
    if "posembed_input" in p.get("Transformer", {}):
        given += ["--old-grid", "x".join(map(str, grid))]
    assert figures_command(["--checkpoint", str(path), *given]) == 0
    assert {file.stem for file in (tmp_path / "out").iterdir()} == expected
    said = capsys.readouterr().out
    assert ("no attention" in said) == (name == "tiny-resnet")
    assert ("no positions" in said) == ("positions" not in expected)
    for file in (tmp_path / "out").iterdir():
        assert np.asarray(Image.open(file)).std() > 0


def test_command_without_a_head_and_mistakes(tmp_path, capsys, refusal):
    """A masked model has no class to ask for; a broken picture is named and the rest is drawn."""
    path, p = small(tmp_path, TWO_BLOCKS)
    settings = {"class_names": ["a", "b", "c"]}
    headless = {name: part for name, part in p.items() if name != "head"}
    checkpoint.save(path, headless, settings=settings)
    (tmp_path / "broken.png").write_bytes(b"none")
    given = ["--checkpoint", str(path), "--old-grid", "2x4", "--output", str(tmp_path / "out")]
    pictures = [str(tmp_path / name) for name in ("broken.png", "picture.png")]
    assert figures_command([*given, "--images", *pictures]) == 1
    assert "broken.png cannot be read: it is not a picture" in capsys.readouterr().err
    assert (tmp_path / "out" / "rollout.png").exists()
    (tmp_path / "file").write_text("")
    assert figures_command([*given[:-1], str(tmp_path / "file")]) == 2
    assert "file is a file; it must be a folder" in capsys.readouterr().err
    given[-1] = str(tmp_path / "new")
    assert figures_command([*given, "--images", str(tmp_path / "none.png")]) == 2
    assert "none of the pictures could be read" in capsys.readouterr().err
    assert "--crop is 2" in refusal(figures_command, [*given, "--crop", "2"])
    for heads in ("0", "7"):
        assert "--heads" in refusal(figures_command, [*given, "--heads", heads])
    (tmp_path / "labels.txt").write_text("a\nb\n")
    labels = ["--labels", tmp_path / "labels.txt"]
    assert "has no head" in refusal(figures_command, [*given, *labels])
    assert not (tmp_path / "new").exists()  # a mistake comes before any work


def test_command_with_many_pictures_and_strange_names(tmp_path, capsys, monkeypatch):
    """Up to eight, which is said; a name is no formula; a head of zeros speaks for no class."""
    path, p = small(tmp_path, TWO_BLOCKS)
    picture = (tmp_path / "picture.png").read_bytes()
    (tmp_path / "many").mkdir()
    for i in range(10):
        (tmp_path / "many" / rf"{i} a$\frac$b.png").write_bytes(picture)
    given = ["--checkpoint", str(path), "--old-grid", "2x4", "--output", str(tmp_path / "out")]
    given += ["--images", str(tmp_path / "many")]
    assert figures_command(given) == 0
    said = capsys.readouterr().out
    assert "the first 8 of 10 pictures" in said
    assert "no classes" not in said
    labels = tmp_path / "labels.txt"
    labels.write_text("a$b_c$\n" * 3)
    shown, overlays = [], figures.overlays
    monkeypatch.setattr(figures, "overlays", lambda *a: shown.extend(a[2]) or overlays(*a))
    assert figures_command([*given, "--labels", str(labels)]) == 0
    assert [title.split("\n")[1] for title in shown] == 8 * ["a$b_c$"]
    assert len(list((tmp_path / "out").glob("heads-*"))) == 8
    p["head"]["kernel"] *= 0
    checkpoint.save(path, p)
    assert figures_command(given) == 0
    assert "no classes (no head, or one of zeros)" in capsys.readouterr().out


def test_no_more_pictures_are_decoded_than_drawn(tmp_path, capsys, monkeypatch):
    """A broken one is passed over, and the rest of a folder is left alone."""
    path, _ = small(tmp_path, TWO_BLOCKS)
    picture = (tmp_path / "picture.png").read_bytes()
    (tmp_path / "many").mkdir()
    for i in range(20):
        (tmp_path / "many" / f"{i:02}{'x' * 240}.png").write_bytes(picture if i else b"none")
    opened, read_at = [], images.read_at
    monkeypatch.setattr(images, "read_at", lambda *a: opened.append(a) or read_at(*a))
    given = ["--checkpoint", str(path), "--old-grid", "2x4", "--output", str(tmp_path / "out")]
    assert figures_command([*given, "--images", str(tmp_path / "many")]) == 1
    assert len(opened) == 1 + draw.MOST
    assert "the first 8 of 20 pictures" in capsys.readouterr().out


def test_what_cannot_be_written_or_is_no_number(tmp_path, refusal, monkeypatch, capsys):
    """A folder is tried before the model is read; scores that are not finite are not drawn."""
    path, p = small(tmp_path, TWO_BLOCKS)
    given = ["--checkpoint", path, "--old-grid", "2x4", "--images", tmp_path / "picture.png"]
    p["head"]["kernel"][:] = 3e38
    checkpoint.save(path, p)
    assert figures_command([str(a) for a in [*given, "--output", tmp_path / "out"]]) == 2
    assert "model.npz gives scores that are not finite" in capsys.readouterr().err
    monkeypatch.setattr(predict, "read_model", None)
    error = refusal(figures_command, [*given, "--output", "/proc/x"])
    assert "--output /proc/x cannot be written" in error
