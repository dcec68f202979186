"""One way to read a checkpoint: what a file is decides once, whatever wrapper its names wear."""

import argparse
import json
import re

import numpy as np
import pytest

from minivit import archives, checkpoint, dialects, opening, params, variants
from minivit.params import flatten, tree_map

SMALL = variants.Variant("small", patch=4, width=12, mlp=20, heads=3, blocks=2)
HEADS = json.dumps({"heads": 3})


def model(**options):
    """Random parameters, nothing at a trivial value."""
    rng = np.random.default_rng(0)
    p = params.initialise(SMALL, 0, **({"image_size": 8, "classes": 5} | options))
    return tree_map(lambda leaf: rng.standard_normal(leaf.shape).astype("float32"), p)


def state(dialect="huggingface", prefix="", **arrays):
    """A state dict under its names without wrapper, then below one."""
    plain = dialects.from_official(flatten(model()), dialect)
    plain = {n.removeprefix("vit."): a for n, a in plain.items()} | arrays
    return {prefix + n: a for n, a in plain.items()}


def put(path, arrays, settings="{}"):  # -> path
    """A .safetensors file of them."""
    return archives.write_safetensors(path, arrays, settings)


def distilled(prefix):
    """A DeiT of transformers, with the token that no other model has."""
    token = np.ones((1, 1, 12), "float32")
    return state(prefix=prefix, **{"embeddings.distillation_token": token})


# --- Pixels -----------------------------------------------------------------------------------


def renamed_dinov2(prefix=""):
    """The layer names of DINOv2."""
    words = {"layernorm_before": "norm1", "layernorm_after": "norm2"}
    words |= {"intermediate.dense": "mlp.fc1"}
    result = {}
    for name, array in state(prefix=prefix).items():
        for old, new in words.items():
            name = name.replace(old, new)
        result[re.sub(r"(layer\.\d)\.output\.dense", r"\1.mlp.fc2", name)] = array
    return result


PREFIXES = ["", "deit.", "backbone.", "module.", "module.deit.", "model._orig_mod."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", ["DeiT", "DINOv2", "timm's DeiT"])
def test_imagenet_pixels_are_folded_once(tmp_path, prefix, kind):
    """One model, one answer under every wrapper; a second scaling is refused."""
    arrays = {
        "DeiT": lambda: distilled(prefix),
        "DINOv2": lambda: renamed_dinov2(prefix),
        "timm's DeiT": lambda: state("timm", prefix, dist_token=np.ones((1, 1, 12), "float32")),
    }[kind]()
    path = put(tmp_path / "x.safetensors", arrays)
    p, description = opening.read(path, heads=3)
    expected = dialects.fold_pixels(**model()["embedding"])
    np.testing.assert_array_equal(p["embedding"]["kernel"], expected[0])
    np.testing.assert_array_equal(p["embedding"]["bias"], expected[1])
    assert description["pixels"] == dialects.FOLDED
    for pixels in ("imagenet", "vit"):
        with pytest.raises(ValueError, match="are read so already; leave it out"):
            opening.read(path, heads=3, pixels=pixels)


def test_pixels_that_a_user_must_tell(tmp_path):
    """A plain state dict is taken for a ViT's, and says that this is assumed."""
    path = put(tmp_path / "x.safetensors", state("timm"))
    p, description = opening.read(path, heads=3)
    assert "assumed" in description["pixels"]
    np.testing.assert_array_equal(p["embedding"]["kernel"], model()["embedding"]["kernel"])
    p, description = opening.read(path, heads=3, pixels="imagenet")
    assert description["pixels"] == dialects.FOLDED
    expected, _ = dialects.fold_pixels(**model()["embedding"])
    np.testing.assert_array_equal(p["embedding"]["kernel"], expected)
    grey = checkpoint.save(tmp_path / "grey.npz", model(channels=1))
    with pytest.raises(ValueError, match="is for colour"):
        opening.read(grey, pixels="imagenet")
    resnet = params.initialise(variants.parse("tiny-resnet"), 0, classes=3)
    resnet["resnet"]["head"]["conv2d"]["kernel"] += 1
    with pytest.raises(ValueError, match="begin with patches"):
        opening.read(checkpoint.save(tmp_path / "r.npz", resnet), pixels="imagenet")


@pytest.mark.parametrize("target", ["official", "timm", "huggingface", "huggingface-5.9"])
def test_what_was_folded_is_said_and_remembered(tmp_path, capsys, target):
    """By `show`, by `convert`, and in what is written: another scaling is refused there too."""
    path = put(tmp_path / "dino", renamed_dinov2())
    assert checkpoint.main(["show", str(path), "--heads", "3"]) == 0
    assert "folded from ImageNet" in capsys.readouterr().out
    new = tmp_path / "new"
    assert checkpoint.main(["convert", str(path), str(new), "--to", target, "--heads", "3"]) == 0
    said = capsys.readouterr().out
    assert ("mean 0.5 and deviation 0.5" in said) == (target != "official")
    with pytest.raises(ValueError, match="are read so already"):
        opening.read(new, pixels="imagenet")
    first, second = (flatten(opening.read(p, heads=3)[0]) for p in (path, new))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


# --- Names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.", "module.model."])
@pytest.mark.parametrize("dialect", ["huggingface", "huggingface-5.9", "timm"])
def test_classifiers_in_wrappers(tmp_path, wrapper, dialect):
    """The wrapper is before the body and before the classifier beside it (NC-17)."""
    arrays = dialects.from_official(flatten(model()), dialect)
    path = put(tmp_path / "x", {wrapper + n: a for n, a in arrays.items()})
    p = opening.read(path, heads=3)[0]
    for name, array in flatten(model()).items():
        np.testing.assert_array_equal(flatten(p)[name], array)


NEW = {
    "encoder.layer": "layers",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def since(names):
    """Names as transformers has written them since 5.9, one replacement after the other."""
    result = {}
    for name, array in names.items():
        for old, new in NEW.items():
            name = name.replace(old, new)
        result[name] = array
    return result


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "DINOv2", "DINOv2 in an encoder"])
def test_names_of_transformers(tmp_path, kind):
    """Both generations are read alike (NC-18)."""
    old = {
        "ViT": dialects.from_official(flatten(model()), "huggingface"),
        "DeiT": distilled("deit."),
    }.get(kind, renamed_dinov2("dinov2."))
    new = since(old)
    if kind == "DINOv2 in an encoder":
        new = {n.replace(".layers.", ".encoder.layer."): a for n, a in new.items()}
    assert old.keys() != new.keys()
    first, second = (
        opening.read(put(tmp_path / name, arrays), heads=3)
        for name, arrays in (("old", old), ("new", new))
    )
    assert first[1] == second[1]
    for name, array in flatten(first[0]).items():
        np.testing.assert_array_equal(flatten(second[0])[name], array)


def test_newer_names_are_written_where_asked():
    """The older ones otherwise, which every version reads."""
    flat = flatten(model())
    newer = dialects.from_official(flat, "huggingface-5.9")
    assert newer.keys() == since(dialects.from_official(flat, "huggingface")).keys()
    assert "vit.layers.1.attention.q_proj.weight" in newer
    assert "vit.encoder.layer.1.attention.attention.query.weight" in dialects.from_official(
        flat, "huggingface"
    )


@pytest.mark.parametrize("dialect", [*dialects.WRITABLE, "dinov2", "bit"])
def test_surplus_arrays_in_every_dialect(tmp_path, dialect):
    """An error by name, or with extra="warn" a warning, from the command line too."""
    source = model()
    if dialect == "bit":
        source = params.initialise(variants.parse("tiny-resnet"), 0, classes=3)
        source["resnet"]["head"]["conv2d"]["kernel"] += 1
    known = dialect in dialects.WRITABLE
    arrays = dialects.from_official(flatten(source), dialect if known else "official")
    arrays = renamed_dinov2() if dialect == "dinov2" else arrays
    torch = dialect in dialects.TABLES
    surplus = {"odd.thing" if torch else "odd/thing": np.ones(2, "int32")}
    if dialect.startswith("big_vision"):
        surplus = {f"params/{n}": a for n, a in surplus.items()}
    path = tmp_path / "x"
    (put if torch else archives.write_npz)(path, arrays | surplus)
    heads = 3 if torch else None
    with pytest.raises(checkpoint.CheckpointError, match=r"extra.* odd.thing"):
        opening.read(path, heads=heads)
    with pytest.warns(UserWarning, match=r"ignored: extra odd.thing \[2\]"):
        loaded, _ = opening.read(path, heads=heads, extra="warn")
    (put if torch else archives.write_npz)(path, arrays)
    assert flatten(loaded).keys() == flatten(opening.read(path, heads=heads)[0]).keys()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"module.classifier.bias": 0, "module.vit.classifier.bias": 0}, "two arrays stand for"),
        ({"module.vit.layers.0.mlp.fc1.bias": 0}, "two arrays stand for"),
        ({"module.vit.layers.5000000000.mlp.fc1.bias": 0}, "no model has a block"),
    ],
)
def test_two_arrays_for_one_place(tmp_path, arrays, says):
    """Never the last one in silence."""
    path = tmp_path / "x"
    ones = {n: np.ones(5, "float32") for n in arrays}
    full = dialects.from_official(flatten(model()), "huggingface")
    put(path, {f"module.{n}": a for n, a in full.items()} | ones)
    with pytest.raises(checkpoint.CheckpointError, match=says):
        opening.read(path, heads=3)


def test_an_array_that_is_a_folder_too(tmp_path):
    """In the dialect whose names are taken apart while it is read."""
    arrays = dialects.from_official(flatten(model()), "big_vision")
    archives.write_npz(tmp_path / "x", arrays | {"params/cls/a/b": np.ones(1, "float32")})
    with pytest.raises(checkpoint.CheckpointError, match="cls/a/b goes through the array cls"):
        checkpoint.load(tmp_path / "x")


def test_layer_scale_of_another_shape(tmp_path):
    """Two short arrays never multiply into a long one."""
    gamma = np.ones(7, "float32")
    path = put(tmp_path / "x", state("timm", **{"blocks.0.ls1.gamma": gamma}))
    with pytest.raises(checkpoint.CheckpointError, match=r"ls1\.gamma has shape \[7\]"):
        checkpoint.load(path, heads=3)


# --- What the options and the settings say ----------------------------------------------------


def test_heads(tmp_path):
    """Needed of an unusual width, refused where they contradict the file."""
    npz = checkpoint.save(tmp_path / "x.npz", model())
    assert opening.read(npz, heads=3)[1]["heads"] == 3
    with pytest.raises(ValueError, match=r"--heads 4: the shapes in .*x\.npz say 3; leave it out"):
        opening.read(npz, heads=4)
    ours = checkpoint.save(tmp_path / "x.safetensors", model(), "timm")
    assert opening.read(ours)[1]["heads"] == 3
    with pytest.raises(ValueError, match="--heads 4: it says 3 itself"):
        opening.read(ours, heads=4)
    for heads in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            opening.read(put(tmp_path / "y", state("timm")), heads=heads)


@pytest.mark.parametrize("words", [{"heads": "abc"}, {"heads": "0"}, {"grid": "[", "epsilon": "-"}])
def test_metadata_of_other_libraries(tmp_path, words):
    """Passed over, whatever it says."""
    from safetensors.numpy import save_file

    wide = variants.Variant("tiny", patch=4, width=64, mlp=128, heads=4, blocks=4)
    flat = flatten(params.initialise(wide, 0, image_size=8, classes=3))
    flat["head/kernel"] = np.eye(64, 3, dtype="float32")
    save_file(dialects.from_official(flat, "timm"), tmp_path / "x", metadata=words)
    description = opening.read(tmp_path / "x")[1]
    assert description["heads"] == 4
    assert description["grid"] == [2, 2]
    assert description["epsilon"] == 1e-6


def test_old_grid(tmp_path):
    """Rows and columns of the file's positions, or an error that counts them."""
    path = checkpoint.save(tmp_path / "x", model(), settings={"image_size": [8, 8]})
    description = opening.read(path, old_grid=(1, 4))[1]
    assert description["grid"] == [1, 4]
    assert description["image_size"] is None
    with pytest.raises(ValueError, match=r"--old-grid 3x4: .* has 4 positions, not 12"):
        opening.read(path, old_grid=(3, 4))
    bare = checkpoint.save(tmp_path / "y", model(positions=False))
    with pytest.raises(ValueError, match="no table of positions; leave it out"):
        opening.read(bare, old_grid=(2, 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"image_size": [70_000_000, 70_000_000]},
        {"image_size": [16, 16]},
        {"image_size": [9, 8]},
        {"grid": [1, 10**9]},
        {"grid": [True, 4]},
        {"grid": [2, 3]},
        {"epsilon": float("nan")},
        {"epsilon": True},
        {"gelu_form": ["tanh"]},
        {"class_names": ["a", "b"]},
        {"class_names": [1, 2, 3, 4, 5]},
        {"data": "pets"},
        {"data": {"classes": "abc"}},
        {"heads": 4},
        {"heads": "three"},
        {"pixels": "none"},
    ],
)
def test_settings_that_people_edited(tmp_path, settings):
    """Each that cannot be is a fault of the file, by name, before anything is computed."""
    arrays = flatten(model()) | {checkpoint.SETTINGS: np.array(json.dumps(settings))}
    archives.write_npz(tmp_path / "x.npz", arrays)
    (name,) = settings
    says = rf"x\.npz: .*({name}|not divisible)"
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load(tmp_path / "x.npz")


def test_no_image_is_too_large_for_a_model_without_positions(tmp_path):
    """The limit of a side holds where no table of positions contradicts."""
    for size, fine in (([10_000, 4], True), ([10_004, 4], False)):
        note = np.array(json.dumps({"image_size": size}))
        arrays = flatten(model(positions=False)) | {checkpoint.SETTINGS: note}
        archives.write_npz(tmp_path / "x", arrays)
        if fine:
            assert checkpoint.inspect(tmp_path / "x")[1]["image_size"] == size
            continue
        with pytest.raises(checkpoint.CheckpointError, match="image_size is"):
            checkpoint.load(tmp_path / "x")


def test_the_data_set_travels_along(tmp_path):
    """Saved, read, and kept by `convert`; what is no setting is refused."""
    data = {"name": "folder", "classes": ["cat", "dog"], "fingerprint": "f00d"}
    settings = {"data": data, "class_names": list("abcde")}
    path = checkpoint.save(tmp_path / "x.npz", model(), settings=settings)
    assert checkpoint.main(["convert", str(path), str(tmp_path / "y"), "--to", "timm"]) == 0
    for name in ("x.npz", "y"):
        description = opening.read(tmp_path / name)[1]
        assert description["data"] == data
        assert description["class_names"] == list("abcde")
    for wrong in ({"nonsense": 1}, {"epsilon": float("inf")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            checkpoint.save(tmp_path / "z", model(), settings=wrong)
    assert not (tmp_path / "z").exists()


def test_class_names(tmp_path):
    """A file's lines, else what the checkpoint knows, else numbers."""
    assert opening.class_names({"classes": 2}) == ["class 0", "class 1"]
    assert opening.class_names({"classes": 2, "class_names": ["a", "b"]}) == ["a", "b"]
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffcafé\r\nb\x85c\n\n".encode())
    assert opening.class_names({"classes": 2}, file) == ["café", "b\x85c"]
    with pytest.raises(ValueError, match=r"names\.txt names 2 classes, the checkpoint has 3"):
        opening.class_names({"classes": 3}, file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"names\.txt is not UTF-8"):
        opening.class_names({"classes": 3}, file)
    with pytest.raises(ValueError, match="no head"):
        opening.class_names({"classes": None})


def test_options_of_every_command(tmp_path):
    """What the parser gives is what `read` takes."""
    parser = argparse.ArgumentParser()
    opening.add_reading_options(parser)
    path = put(tmp_path / "x", state("timm"))
    given = ["--heads", "3", "--pixels", "imagenet", "--old-grid", "1x4", "--extra", "warn"]
    description = opening.read(path, **opening.chosen(parser.parse_args(given)))[1]
    assert (description["heads"], description["grid"]) == (3, [1, 4])
    assert opening.read(path, **opening.chosen(parser.parse_args(["--heads", "3"])))
    for wrong in (["--heads", "0"], ["--heads", "1e9"], ["--pixels", "clip"], ["--old-grid", "0"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
