"""Properties of the whole model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minivit import in_jax, in_numpy, optim, params, variants
from minivit.params import flatten, tree_map

VARIANT = variants.Variant("small", patch=4, width=16, mlp=32, heads=2, blocks=2)
SIZE = {"image_size": (8, 12), "channels": 3, "classes": 7}
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(-1, 1, (5, 8, 12, 3))


def model(**options):
    """Random float64 parameters, the head and the biases too."""
    rng = np.random.default_rng(1)
    fresh = params.initialise(VARIANT, 0, **(SIZE | options))
    return tree_map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape), fresh)


def run(twin, p, images, **options):
    if twin == "numpy":
        return in_numpy.vit(p, images, **options)[0]
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda p, x: in_jax.vit(p, x, **options))(p, images))


TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])


@TWINS
def test_without_positions_order_is_invisible(twin):
    """Shuffled patches give the same logits if, and only if, there are no positions."""
    patches = in_numpy.patchify(IMAGES, 4).reshape(5, 6, -1)
    shuffled = patches[:, [3, 1, 5, 0, 4, 2]].reshape(5, 2, 3, -1)
    shuffled = in_numpy.unpatchify(shuffled, 4)
    blind = model(positions=False)
    np.testing.assert_allclose(run(twin, blind, IMAGES), run(twin, blind, shuffled), atol=1e-13)
    p = model()
    assert np.abs(run(twin, p, IMAGES) - run(twin, p, shuffled)).max() > 1e-3


@TWINS
def test_samples_do_not_touch_each_other(twin):
    """Changing one image of a batch changes its own logits alone; a batch of one works."""
    p, other = model(), IMAGES.copy()
    other[2] = -other[2]
    before, after = run(twin, p, IMAGES), run(twin, p, other)
    np.testing.assert_array_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
    assert np.abs(before[2] - after[2]).max() > 1e-3
    alone = run(twin, p, IMAGES[:1])
    assert alone.shape == (1, 7)
    np.testing.assert_allclose(alone[0], before[0], atol=1e-13)


@TWINS
def test_one_patch_and_one_class(twin):
    """ATT-13: no axis of length one is squeezed away."""
    p = model(image_size=(4, 4), classes=1)
    out = {}
    if twin == "numpy":
        logits = in_numpy.vit(p, IMAGES[:1, :4, :4], out=out)[0]
    else:
        logits = in_jax.vit(tree_map(jnp.asarray, p), IMAGES[:1, :4, :4], out=out)
    assert logits.shape == (1, 1)
    assert out["tokens"].shape == (1, 2, 16)
    assert out["pre_logits"].shape == (1, 16)


@TWINS
def test_dropout_sleeps_in_evaluation(twin):
    """ATT-10: without a generator the rate does nothing, to the bit."""
    p = model()
    still = run(twin, p, IMAGES)
    np.testing.assert_array_equal(run(twin, p, IMAGES, rate=0.9), still)
    np.testing.assert_array_equal(run(twin, p, IMAGES, rate=0.9), still)


@pytest.mark.parametrize("layout", ["numpy", "loop"])
def test_no_two_places_share_a_mask(layout, monkeypatch):
    """ATT-11: positions, and in each block attention, GELU and MLP: seven masks, all different."""
    import sys

    twin = "in_numpy" if layout == "numpy" else "in_jax"
    module, masks = sys.modules[f"minivit.{twin}.dropout"], []
    original = module.keep_mask

    def spy(*args):
        masks.append(np.asarray(original(*args)))
        return original(*args) if twin == "in_jax" else masks[-1]

    monkeypatch.setattr(module, "keep_mask", spy)
    if twin == "in_numpy":
        in_numpy.vit(model(), IMAGES, rate=0.5, rng=np.random.default_rng(0))
    else:
        p = tree_map(lambda leaf: jnp.asarray(leaf, "float32"), model())
        in_jax.vit(p, jnp.asarray(IMAGES, "float32"), rate=0.5, rng=jax.random.key(0))
    assert len(masks) == 1 + 2 * 3
    starts = {mask.ravel()[:200].tobytes() for mask in masks}
    assert len(starts) == len(masks)


def test_dropout_sits_in_every_block():
    """A generator wakes it, and the same one repeats it."""
    p = tree_map(lambda leaf: jnp.asarray(leaf, "float32"), model())
    images = jnp.asarray(IMAGES, "float32")
    for layout in (p, params.stack_blocks(tree_map(np.asarray, p))):
        first = in_jax.vit(layout, images, rate=0.5, rng=jax.random.key(0))
        np.testing.assert_array_equal(
            first, in_jax.vit(layout, images, rate=0.5, rng=jax.random.key(0))
        )
        assert (first != in_jax.vit(layout, images, rate=0.5, rng=jax.random.key(1))).all()
        assert (first != in_jax.vit(layout, images)).all()


def test_class_token_row_has_a_position():
    """POS-15: the table's first row belongs to the class token."""
    tokens, _ = in_numpy.add_class_token(np.zeros((1, 1, 1)), np.zeros((1, 4, 1)))
    table = {"pos_embedding": np.array([5.0, 1, 2, 3, 4]).reshape(1, 5, 1)}
    assert in_numpy.add_positions(table, tokens)[0].ravel().tolist() == [5, 1, 2, 3, 4]
    assert in_jax.add_positions(table, tokens).ravel().tolist() == [5, 1, 2, 3, 4]


@TWINS
def test_wrong_image_size(twin):
    """The position table says which size it was made for."""
    with pytest.raises(ValueError, match=r"5 tokens.*7 of width 16"):
        run(twin, model(), np.zeros((1, 8, 8, 3)))


@TWINS
def test_wrong_pixels(twin):
    """Raw bytes would run, and give scores without meaning."""
    with pytest.raises(ValueError, match=r"uint8; apply datasets\.normalise"):
        run(twin, model(), np.zeros((1, 8, 12, 3), np.uint8))


def test_a_missing_block_is_named():
    p = model()
    del p["Transformer"]["encoderblock_0"]
    with pytest.raises(ValueError, match="encoderblock_0 is missing among 1"):
        run("numpy", p, IMAGES)


def test_fresh_model_knows_nothing():
    """A zero head gives equal scores, so the loss is exactly log K."""
    p = params.initialise(VARIANT, 0, **SIZE)
    logits = run("numpy", p, IMAGES.astype("float32"))
    np.testing.assert_array_equal(logits, 0)
    losses, _ = in_numpy.softmax_cross_entropy(logits, in_numpy.smooth_labels([0] * 5, 7))
    np.testing.assert_array_equal(losses, np.log(np.float32(7)))


def test_gradient_is_zero_where_nothing_flows():
    """Behind a zero head only the head learns."""
    p = params.initialise(VARIANT, 0, **SIZE)
    targets = in_numpy.smooth_labels([0, 1, 2, 3, 4], 7)
    _, back = in_numpy.classification(p, IMAGES.astype("float32"), targets)
    grads, _ = back(np.float32(1))
    for name, grad in flatten(grads).items():
        assert (np.abs(grad).max() > 0) == name.startswith("head/"), name


def test_gradient_of_one_image_stays_in_it():
    """The scores of image 2 depend on image 2."""
    logits, back = in_numpy.vit(model(), IMAGES)
    dy = np.zeros_like(logits)
    dy[2] = RNG.standard_normal(7)
    _, dimages = back(dy)
    np.testing.assert_array_equal(np.delete(dimages, 2, 0), 0)
    assert (dimages[2] != 0).all()


def test_last_patch_reaches_every_earlier_place():
    """Attention is not causal: each token of the last block sees every patch."""
    out = {}
    p = model()

    def token(images, i):
        out.clear()
        in_jax.vit(p, images, out=out)
        return out["block1"][0, i].sum()

    for i in range(7):
        grads = jax.grad(token)(jnp.asarray(IMAGES[:1], "float32"), i)
        assert (jnp.abs(grads) > 0).all()


def test_overfits_one_batch():
    """Twenty images with random labels are learnt by heart: the model can learn at all."""
    p = params.initialise(VARIANT, 0, **SIZE)
    state = optim.start(p)
    images = np.random.default_rng(2).uniform(-1, 1, (20, 8, 12, 3)).astype("float32")
    labels = np.random.default_rng(3).integers(0, 7, 20)
    targets = in_numpy.smooth_labels(labels, 7)
    for step in range(250):
        metrics = {}
        loss, back = in_numpy.classification(p, images, targets, metrics=metrics)
        grads, _ = back(np.float32(1))
        p, state = optim.update(p, grads, state, 5e-3 if step < 150 else 1e-3, clip=1.0)
    assert loss < 1e-2
    assert metrics["accuracy"] == 1
    assert {leaf.dtype for leaf in flatten(p).values()} == {np.dtype("float32")}


@pytest.mark.parametrize("name", ["tiny", "tiny-resnet"])
def test_without_a_way_back(name):
    """The same scores to the bit; nothing of a ViT's blocks is kept for gradients."""
    p = params.initialise(variants.parse(name), 0, image_size=28, channels=1, classes=3)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 28, 28, 1)).astype("float32")
    scores, _ = in_numpy.model(p, images)
    np.testing.assert_array_equal(in_numpy.model(p, images, backward=False)[0], scores)
