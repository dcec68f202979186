"""Official counts, names, and operations against XLA's own analysis."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minivit import architecture, in_jax, params, variants
from minivit.params import flatten

# vit_jax/models_test.py, 1000 classes at 224 pixels.
OFFICIAL = {
    "Ti/16": (5_717_416, 200, 196),
    "S/16": (22_050_664, 200, 196),
    "S/32": (22_878_952, 200, 49),
    "B/16": (86_567_656, 200, 196),
    "B/32": (88_224_232, 200, 49),
    "B/8": (86_576_872, 200, 784),
    "L/16": (304_326_632, 392, 196),
    "L/32": (306_535_400, 392, 49),
    "H/14": (632_045_800, 520, 256),
}
HYBRIDS = {
    "R+Ti/16": (6_337_704, 203, 49),
    "R26+S/32": (36_431_912, 287, 49),
    "R26+B/32": (101_383_976, 287, 49),
    "R50+B/16": (98_659_112, 356, 196),
    "R50+L/32": (328_994_856, 551, 49),
}
# timm 1.0.31's resnetv2_*_bit with 1000 classes.
BIT = {"R50x1": 25_549_352, "R50x3": 217_319_080, "R101x1": 44_541_480, "R152x2": 236_335_208}
MEAN_POOLED = {"B/16": 86_566_120, "B/32": 88_222_696, "S/16": 22_049_896, "S/32": 22_878_184}


@pytest.mark.parametrize(("name", "numbers"), (OFFICIAL | HYBRIDS).items())
def test_official_counts(name, numbers):
    variant = variants.parse(name)
    count, arrays, tokens = numbers
    assert variants.parameter_count(variant) == count
    assert variants.tokens(variant, 224, class_token=False) == tokens
    sizes = {"channels": 3, "classes": 1000}
    assert len(params.named_shapes(variant, tokens + 1, **sizes)) == arrays


@pytest.mark.parametrize(("name", "count"), BIT.items())
def test_counts_of_bit(name, count):
    variant = variants.parse(name)
    assert variants.parameter_count(variant) == count
    shapes = params.resnet_shapes(variant, channels=3, classes=1000)
    assert sum(map(math.prod, shapes.values())) == count


def test_stage_4_or_a_longer_stage_3():
    """Both of the paper's hybrids: the same number of units, four times the tokens."""
    long, short = variants.parse("R50+B/16"), variants.parse("R50+B/32")
    assert (long.stem, short.stem) == ((3, 4, 9), (3, 4, 6, 3))
    assert sum(long.stem) == sum(short.stem)
    assert variants.tokens(long, 224) - 1 == 4 * (variants.tokens(short, 224) - 1)
    assert variants.parse("R50+ViT-B/16") == variants.parse("r50+b_16") == long


def test_the_tiny_families_cost_about_the_same():
    options = {"image_size": 28, "channels": 1, "classes": 10}
    names = ("tiny", "tiny-hybrid", "tiny-resnet")
    flops = [variants.forward_flops(variants.parse(name), **options) for name in names]
    assert max(flops) < 1.2 * min(flops)


@pytest.mark.parametrize(("name", "count"), MEAN_POOLED.items())
def test_official_counts_without_class_token(name, count):
    assert variants.parameter_count(variants.parse(name), class_token=False) == count


def test_counts_with_pre_logits_and_at_384():
    b16 = variants.parse("B/16")
    assert variants.parameter_count(b16, classes=21843, representation=768) == 103_186_515
    assert variants.parameter_count(b16, 384) == 86_859_496
    testing = variants.Variant("testing", 16, 10, 10, 2, 1)
    assert variants.parameter_count(testing) == 21_390


@pytest.mark.parametrize("name", ["tiny", "Ti/16", "S/32", "R+Ti/16"])
@pytest.mark.parametrize("options", [{}, {"class_token": False}, {"representation": 20}])
def test_formula_counts_what_is_initialised(name, options):
    variant = variants.parse(name)
    p = params.initialise(variant, 0, **options)
    assert params.count(p) == variants.parameter_count(variant, **options)
    if not options and (known := (OFFICIAL | HYBRIDS).get(name)):
        assert len(flatten(p)) == known[1]


def test_every_name_is_known():
    for name in variants.NAMES + variants.HYBRIDS + variants.RESNETS:
        assert variants.parse(name).name == name


@pytest.mark.parametrize("name", ["B/16", "b16", "ViT-B_16", "vit_b16", "vit-b/16", " B-16 "])
def test_spellings(name):
    assert variants.parse(name) == variants.parse("B/16")


def test_patch_size_by_name():
    assert variants.parse("tiny/4").patch == 4
    assert variants.parse("tiny").patch == 7
    assert variants.parse("H").patch == 14


@pytest.mark.parametrize("name", ["", "X/16", "B/0", "B/", "B/-1", "16", "B/16/16", "B/1.5"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"unknown variant.*Ti/16"):
        variants.parse(name)


@pytest.mark.parametrize("field", ["patch", "width", "mlp", "blocks"])
def test_sizes_must_be_positive(field):
    sizes = {"patch": 4, "width": 8, "mlp": 8, "heads": 2, "blocks": 1} | {field: -2}
    with pytest.raises(ValueError, match=f"{field} is -2"):
        variants.Variant("x", **sizes)


def test_patches_need_not_be_square():
    variant = variants.Variant("x", (4, 2), 8, 16, 2, 1)
    p = params.initialise(variant, 0, image_size=(8, 6), channels=3, classes=5)
    assert params.count(p) == variants.parameter_count(variant, (8, 6), classes=5)
    assert p["embedding"]["kernel"].shape == (4, 2, 3, 8)
    assert variants.forward_flops(variant, (8, 6)) > 0


@pytest.mark.parametrize(
    ("name", "size", "channels", "classes"),
    [
        ("tiny", 28, 1, 10),
        ("tiny/4", 28, 1, 10),
        ("Ti/16", 224, 3, 1000),
        ("B/32", (64, 96), 3, 7),
        ("R26+S/32", 224, 3, 1000),
        ("R50x1", (224, 256), 3, 10),
        ("tiny-resnet", 256, 3, 10),
    ],
)
def test_operations_against_xla(name, size, channels, classes):
    """Within 5 % of XLA's count before optimisation, which knows nothing of the formula.

    XLA leaves out what a convolution multiplies with its padding, so maps must not be small.
    """
    variant = variants.parse(name)
    sizes = {"image_size": size, "channels": channels, "classes": classes}
    p = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        params.initialise(variant, 0, **sizes),
    )
    images = jax.ShapeDtypeStruct((4, *np.broadcast_to(size, 2), channels), jnp.float32)
    counted = jax.jit(in_jax.model).lower(p, images).cost_analysis()["flops"] / 4
    formula = variants.forward_flops(variant, size, channels=channels, classes=classes)
    assert formula == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("name", ["tiny", "B/16", "tiny-hybrid", "R+Ti/16", "tiny-resnet"])
def test_parts_are_the_whole(name):
    """Every array belongs to one part, and every part has operations."""
    variant = variants.parse(name)
    size, more = 28 if "tiny" in name else 224, {"representation": 5} if name == "tiny" else {}
    flat = params.flatten(params.initialise(variant, 0, image_size=size, **more))
    found = architecture.parameters_by_part(flat)
    assert sum(found.values()) == params.count(flat)
    assert set(found) == set(variants.flops_by_part(variant, size))
    assert list(found) == [part for part in architecture.PARTS if part in found]


def test_operations_of_other_heads():
    """A hidden layer before the head; a masked model's predictions for every patch; none."""
    tiny, rest = variants.parse("tiny"), {"channels": 1, "classes": 0}
    assert "head" not in variants.flops_by_part(tiny, 28, **rest)
    hidden = variants.flops_by_part(tiny, 28, channels=1, classes=10, representation=5)["head"]
    assert hidden == (2 * 64 * 5 + 2 * 5) + (2 * 5 * 10 + 10)
    masked = variants.flops_by_part(tiny, 28, predictions=128, **rest)["head"]
    assert masked == 16 * (2 * 64 * 128 + 128)


def test_parts_of_b16():
    """By hand: 12 blocks of 4 (D^2 + D), and of 2 D M + M + D."""
    flat = params.flatten(params.initialise(variants.parse("B/16"), 0))
    found = architecture.parameters_by_part(flat)
    assert found["attention"] == 12 * 4 * (768**2 + 768)
    assert found["MLP"] == 12 * (2 * 768 * 3072 + 3072 + 768)
    assert found["head"] == 768 * 1000 + 1000
    assert found["norms"] == 25 * 2 * 768
    assert found["embedding"] == 768 * 768 + 768 + 768 + 197 * 768
