"""Convolutions, the hybrid and BiT: closed forms, official numbers, cases D and E."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import architecture, in_jax, in_numpy, params, variants
from minivit.params import flatten
from minivit.shapes import feature_grid, padded

TWINS = pytest.mark.parametrize("twin", [in_numpy, in_jax], ids=["numpy", "jax"])
RNG = np.random.default_rng(0)


def first(result):
    """The output of either twin."""
    return np.asarray(result[0] if isinstance(result, tuple) else result)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 7]),
    st.integers(1, 3),
    st.sampled_from(["SAME", 0, 1, 3]),
    st.integers(0, 9),
)
def test_convolution_is_its_definition(height, width, side, stride, padding, seed):
    """One output number at a time, from a padded image."""
    rng = np.random.default_rng(seed)
    x, kernel = rng.standard_normal((2, height, width, 3)), rng.standard_normal((side, side, 3, 4))
    pads = padded(x.shape, (side, side), stride, padding)
    inside = np.pad(x, ((0, 0), *pads, (0, 0)))
    if min(inside.shape[1:3]) < side:
        return
    y, _ = in_numpy.conv2d({"kernel": kernel}, x, stride=stride, padding=padding)
    if padding == "SAME":
        assert y.shape[1:3] == (-(-height // stride), -(-width // stride))
    for i in range(y.shape[1]):
        for j in range(y.shape[2]):
            seen = inside[:, i * stride : i * stride + side, j * stride : j * stride + side]
            expected = np.einsum("byxc,yxcf->bf", seen, kernel)
            np.testing.assert_allclose(y[:, i, j], expected, atol=1e-12)


@TWINS
def test_same_padding_puts_the_odd_pixel_after(twin):
    """HYB-01: `[1, 2, 3, 4]` by 3 with stride 2 gives `[3, 4]`; padding never wins."""
    for row, expected in (([1, 2, 3, 4], [3, 4]), ([-1, -2, -3, -4], [-1, -3])):
        x = np.array(row, "float32")[None, None, :, None]
        assert first(twin.max_pool(x))[0, 0, :, 0].tolist() == expected
    for side, pooled in ((112, 56), (5, 3)):
        assert first(twin.max_pool(np.zeros((1, side, side, 1), "float32"))).shape[1] == pooled


@TWINS
def test_zeros_take_part_in_bit_pooling(twin):
    """BiT pads with zeros, which win over negative numbers."""
    x = np.full((1, 4, 4, 1), -5, "float32")
    pooled = first(twin.max_pool(x, padding=1))[0, :, :, 0]
    assert pooled.tolist() == [[0, 0], [0, -5]]


@TWINS
def test_the_first_of_equals_gets_the_gradient(twin):
    """After a ReLU ties are the rule; both twins send it to the same pixel."""
    x = np.zeros((1, 4, 4, 1), "float32")
    if twin is in_numpy:
        dx = in_numpy.max_pool(x)[1](np.ones((1, 2, 2, 1), "float32"))
    else:
        dx = jax.grad(lambda x: in_jax.max_pool(x).sum())(x)
    assert np.argwhere(np.asarray(dx)[0, :, :, 0]).tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]


@TWINS
@pytest.mark.parametrize("form", ["official", "bit"])
def test_weight_standardisation(twin, form):
    """NRM-06, NRM-08: mean 0 and population deviation 1, divided, not multiplied."""
    kernel = (5 * RNG.standard_normal((4, 4, 32, 8)) + 3).astype("float32")
    normal = first(twin.standardise_kernel(kernel, form)).astype("float64")
    np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(normal.std((0, 1, 2)), 1, atol=1e-5)
    single = np.array([1.0, 2, 3, 4], "float32").reshape(4, 1, 1, 1)
    expected = [-1.341640, -0.447214, 0.447214, 1.341640]
    np.testing.assert_allclose(
        first(twin.standardise_kernel(single, form)).ravel(), expected, atol=2e-5
    )


@TWINS
@pytest.mark.parametrize("form", ["official", "bit"])
def test_a_constant_filter(twin, form):
    """NRM-05: it becomes 0, with a finite gradient."""
    kernel = np.full((3, 3, 2, 4), 0.25, "float32")
    if twin is in_numpy:
        normal, back = in_numpy.standardise_kernel(kernel, form)
        grad = back(np.ones_like(normal))
    else:
        normal, back = jax.vjp(lambda k: in_jax.standardise_kernel(k, form), kernel)
        (grad,) = back(np.ones_like(kernel))
    np.testing.assert_array_equal(normal, 0)
    assert np.isfinite(grad).all()


@TWINS
def test_group_norm(twin):
    """NRM-04 to NRM-06: any offset, constants, and the groups are neighbouring channels."""
    x = RNG.standard_normal((2, 5, 6, 64)).astype("float32")
    p = {"scale": np.ones(64, "float32"), "bias": np.zeros(64, "float32")}
    y = first(twin.group_norm(p, x)).reshape(2, 30, 32, 2)
    np.testing.assert_allclose(y.mean((1, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(y.std((1, 3)), 1, atol=1e-4)
    # An offset of 1e4 leaves float32 numbers 1e-3 apart.
    np.testing.assert_allclose(first(twin.group_norm(p, x + 1e4)).reshape(y.shape), y, atol=5e-3)
    same = {"scale": np.full(64, 2, "float32"), "bias": np.full(64, 0.25, "float32")}
    np.testing.assert_array_equal(first(twin.group_norm(same, np.full_like(x, 7))), 0.25)
    small = np.tile(np.array([-1e-3, 1e-3], "float32"), 32).reshape(1, 1, 1, 64)
    for epsilon in (1e-6, 1e-5):
        expected = 1e-3 / np.sqrt(1e-6 + epsilon)
        np.testing.assert_allclose(
            first(twin.group_norm(p, small, epsilon)).ravel()[1], expected, rtol=1e-5
        )
    with pytest.raises(ValueError, match="48 channels do not divide into 32 groups"):
        twin.group_norm(p, np.zeros((1, 2, 2, 48), "float32"))


def compare(out, arrays, names, tolerance):
    """Intermediates of the fixtures, cut to the first image and channels as their README says."""
    for ours, theirs in names.items():
        expected = arrays[f"out/{theirs}"]
        got = np.asarray(out[ours])[: len(expected), ..., : expected.shape[-1]]
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=ours)


@TWINS
@pytest.mark.parametrize("name", ["hybrid_48x48", "hybrid_64x48", "hybrid_stem_only"])
def test_official_hybrids(twin, name, peers, weights):
    """float32 within what two float32 codes differ by; float64 sees GroupNorm's epsilon too."""
    arrays = peers(name)
    squeezed = {
        n: a.reshape(-1) if a.shape[:-1] == (1, 1, 1) and "gn" in n else a
        for n, a in arrays.items()
    }
    out = {}
    logits = first(twin.vit(weights(squeezed), arrays["in/images"], out=out))
    np.testing.assert_allclose(logits, arrays["out/logits"], rtol=0, atol=2e-5)
    names = {n: n for n in ("stem_pool", "patch_embedding", "tokens", "block0", "encoded")}
    names |= {f"stem_block{b}": f"stem_block{b}_first32" for b in (1, 2)}
    compare(out, arrays, {a: b for a, b in names.items() if f"out/{b}" in arrays}, 1e-4)
    with jax.enable_x64(True):
        exact = first(twin.vit(weights(squeezed, "float64"), arrays["in/images"].astype("float64")))
    np.testing.assert_allclose(exact, arrays["out64/logits"], rtol=0, atol=1e-10)


@TWINS
@pytest.mark.parametrize(("dtype", "folder"), [("float32", "grad"), ("float64", "grad64")])
def test_official_hybrid_gradients(twin, dtype, folder, peers, weights):
    """Of the loss, by 19 arrays of the stem and around it."""
    arrays, expected = peers("hybrid_48x48"), peers("hybrid_48x48_grad")
    p, images = weights(arrays, dtype), arrays["in/images"].astype(dtype)
    targets = in_numpy.smooth_labels(arrays["in/labels"], 7, dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        if twin is in_numpy:
            loss, back = in_numpy.classification(p, images, targets)
            grads, _ = back(np.ones_like(loss))
        else:
            grads = jax.grad(in_jax.classification)(p, images, targets)
        grads = flatten(jax.tree.map(np.asarray, grads))
    relative, absolute = (2e-4, 1e-6) if dtype == "float32" else (1e-9, 1e-12)
    for name, wanted in expected.items():
        if name.startswith(folder + "/"):
            tolerance = relative * np.abs(wanted).max() + absolute
            got = grads[name.removeprefix(folder + "/")]
            np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance, err_msg=name)


@TWINS
def test_official_bit(twin, peers, weights):
    """Zero padding, epsilons and the order before the activation."""
    arrays, out = peers("bit_64x64"), {}
    p = weights(arrays)
    logits = first(twin.bit(p, arrays["in/images"], out=out))
    np.testing.assert_allclose(logits, arrays["out/logits"], rtol=0, atol=2e-5)
    names = {"root_conv": "root_conv_first4", "root": "root_first16"}
    names |= {f"stem_block{b}": f"block{b}_first32" for b in (1, 2)}
    for ours, theirs in names.items():
        compare(out, arrays, {ours: theirs}, 1e-4 * np.abs(arrays[f"out/{theirs}"]).max())
    with jax.enable_x64(True):
        exact = first(twin.model(weights(arrays, "float64"), arrays["in/images"].astype("float64")))
    np.testing.assert_allclose(exact, arrays["out64/logits"], rtol=0, atol=1e-10)
    del p["resnet"]["head"]
    features = first(twin.bit(p, arrays["in/images"]))
    np.testing.assert_allclose(features, arrays["out/features"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        ("R50+B/16", 224, (14, 14)),
        ("R50+B/16", 256, (16, 16)),
        ("R50+B/16", 32, (2, 2)),
        ("R50+B/16", 220, (14, 14)),
        ("R50+L/32", 224, (7, 7)),
        ("R+Ti/16", 224, (7, 7)),
        ("tiny-hybrid", 28, (4, 4)),
        ("tiny-hybrid", (32, 50), (4, 7)),
    ],
)
def test_token_grid(name, size, grid):
    """HYB-03: the real rounding of the convolutions, as the model itself has it."""
    variant = variants.parse(name)
    assert variants.tokens(variant, size) == grid[0] * grid[1] + 1
    height, width = (size, size) if isinstance(size, int) else size
    if variant.width < 200:
        small = params.initialise(variant, 0, image_size=size, channels=3, classes=2)
        assert architecture.token_grid(small, size) == grid
        images = np.zeros((1, height, width, 3), "float32")
        assert first(in_numpy.embed(small, images)).shape[1:3] == grid


def test_the_remedy_for_a_size_that_does_not_fit():
    """It speaks of the image, and what it advises is accepted (HYB-03)."""
    variant = variants.parse("R+Ti/16")
    for size in ((220, 220), (56, 56), (16, 300)):
        with pytest.raises(ValueError, match=f"image {size[0]}x{size[1]} gives a feature map") as e:
            variants.tokens(variant, size)
        advised = tuple(map(int, re.search(r"resize it to (\d+)x(\d+)", str(e.value)).groups()))
        assert variants.tokens(variant, advised) > 1


@TWINS
@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid", "tiny-resnet"])
def test_all_families_start_alike(twin, name):
    """Every class equally likely, so the first loss is log(classes); pixels must be normalised."""
    options = {"image_size": 28, "channels": 1, "classes": 5, "head_bias": -2.0}
    p = params.initialise(variants.parse(name), 0, **options)
    images = RNG.standard_normal((2, 28, 28, 1)).astype("float32")
    np.testing.assert_array_equal(first(twin.model(p, images)), -2)
    with pytest.raises(ValueError, match=r"pixels are uint8; apply datasets.normalise"):
        twin.model(p, np.zeros((2, 28, 28, 1), np.uint8))


@TWINS
def test_half_precision(twin):
    """float16 weights run, and a deviation of 300 does not overflow its square."""
    p = {"scale": np.ones(32, "float16"), "bias": np.zeros(32, "float16")}
    x = (300 * RNG.standard_normal((1, 8, 8, 32))).astype("float16")
    y = first(twin.group_norm(p, x))
    assert y.dtype == np.float16
    np.testing.assert_allclose(y.std((1, 2)), 1, atol=0.01)
    hybrid = params.initialise(
        variants.parse("tiny-hybrid"), 0, image_size=28, channels=1, classes=5
    )
    half = params.tree_map(lambda leaf: leaf.astype("float16"), hybrid)
    images = RNG.standard_normal((2, 28, 28, 1)).astype("float32")
    features = params.without_head(half), params.without_head(hybrid)
    a, b = (first(twin.model(body, images)) for body in features)
    np.testing.assert_allclose(a, b, atol=0.1)


def test_decay_is_for_kernels():
    """OPT-10 on the other families: no norm's scale or gamma, no bias."""
    for name in ("tiny-hybrid", "tiny-resnet"):
        flat = flatten(params.initialise(variants.parse(name), 0, image_size=28, channels=1))
        for leaf in flat:
            last = leaf.split("/")[-1]
            assert params.is_kernel(leaf) == (last == "kernel"), leaf
            others = ("scale", "bias", "gamma", "beta", "cls", "pos_embedding")
            assert last == "kernel" or last in others


@given(st.integers(1, 300), st.integers(1, 4))
def test_both_paddings_round_alike(side, stages):
    """BiT's numbers and the hybrid's SAME: the same sizes, which `feature_grid` tells."""
    same = fixed = side
    for kernel, pad in [(7, 3), (3, 1)] + (stages - 1) * [(3, 1)]:
        same, fixed = -(-same // 2), (fixed + 2 * pad - kernel) // 2 + 1
    assert (same, fixed) == feature_grid(side, side, stages)


def test_a_resnet_has_no_dropout():
    p = params.initialise(variants.parse("tiny-resnet"), 0, channels=1, classes=3)
    for twin in (in_numpy, in_jax):
        with pytest.raises(ValueError, match=r"no dropout; rate 0.1 must be 0"):
            twin.model(p, np.zeros((1, 28, 28, 1), "float32"), rate=0.1)


@TWINS
def test_a_fresh_hybrid_unit_is_its_shortcut(twin):
    """The last scale of each unit begins at zero."""
    p = params.initialise(variants.parse("tiny-hybrid"), 0, image_size=28, channels=1, classes=3)
    unit, x = p["block1"]["unit1"], RNG.standard_normal((2, 7, 7, 16)).astype("float32")
    shortcut = first(twin.group_norm(unit["gn_proj"], first(twin.std_conv(unit["conv_proj"], x))))
    np.testing.assert_allclose(first(twin.bottleneck(unit, x)), shortcut.clip(0), atol=1e-6)


def test_channels_that_do_not_fit():
    with pytest.raises(ValueError, match="the last of 3 channels"):
        in_numpy.conv2d({"kernel": np.zeros((3, 3, 3, 8))}, np.zeros((1, 5, 5, 1)))
