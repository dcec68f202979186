"""A training step on threads and on a mesh of devices."""

import jax
import numpy as np
import pytest

from minivit import optim, params, variants
from minivit.datasets import normalise
from minivit.engine_jax import JaxEngine, batch_mesh
from minivit.engine_numpy import NumPyEngine, loss_and_gradient
from minivit.in_numpy import smooth_labels, vit
from minivit.params import flatten

VARIANT = variants.Variant("small", patch=4, width=16, mlp=32, heads=2, blocks=2)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 8, 12, 3), np.uint8)
LABELS = RNG.integers(0, 7, 24)
OPTIONS = {"weight_decay": 0.1, "clip": 1.0, "smoothing": 0.1}


def model():
    """A small model whose head is not zero, so that every weight has a gradient at once."""
    p = params.initialise(VARIANT, 0, image_size=(8, 12), channels=3, classes=7)
    p["head"]["kernel"] = RNG.normal(scale=0.1, size=(16, 7)).astype("float32")
    return p


def engines(p, batch_size=24, **options):
    return NumPyEngine(p, **options), JaxEngine(p, batch_size=batch_size, **options)


def test_one_step_is_the_plain_one():
    """Threads and devices divide the batch; the gradient is that of the whole batch."""
    p = model()
    targets = smooth_labels(LABELS, 7, 0.1)
    loss, grads, logits = loss_and_gradient(p, normalise(IMAGES), targets)
    expected, _ = optim.update(p, grads, optim.start(p), 1e-3, weight_decay=0.1, clip=1.0)
    for engine in engines(p, **OPTIONS):
        got_loss, accuracy = engine.step(0, IMAGES, LABELS, 1e-3)
        assert float(got_loss) == pytest.approx(float(loss), rel=1e-6)
        assert float(accuracy) == pytest.approx((logits.argmax(-1) == LABELS).mean())
        for name, leaf in flatten(engine.snapshot()).items():
            if "key/bias" in name:  # its gradient is rounding noise, whose sign Adam follows
                continue
            # Adam divides a gradient by its own size: rounding decides the smallest ones.
            np.testing.assert_allclose(
                leaf, flatten(expected)[name], rtol=0, atol=2e-5, err_msg=name
            )


def test_uneven_shares_count_by_their_images():
    """23 images on two threads, or on the one device that divides them."""
    p = model()
    both = engines(p, batch_size=23, **OPTIONS)
    losses = [float(engine.step(0, IMAGES[:23], LABELS[:23], 1e-3)[0]) for engine in both]
    logits, _ = vit(p, normalise(IMAGES[:23]))
    whole, *_ = loss_and_gradient(p, normalise(IMAGES[:23]), smooth_labels(LABELS[:23], 7, 0.1))
    assert len(logits) == 23
    assert losses == pytest.approx(2 * [float(whole)], rel=1e-6)


def test_mesh_divides_the_batch():
    assert jax.device_count() == 2  # conftest.py asks for two
    assert [batch_mesh(n).size for n in (1, 2, 3, 64)] == [1, 2, 1, 2]


def test_training_goes_down_and_is_traced_once():
    engine = JaxEngine(model(), batch_size=24)
    losses = [float(engine.step(s, IMAGES, LABELS, 3e-3)[0]) for s in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.traces == 1


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_same_seed_same_bits(rate):
    """Three steps twice, on both engines; another seed gives other masks."""
    results = []
    for seed in (1, 1, 2):
        for engine in engines(model_once(), seed=seed, rate=rate):
            for s in range(3):
                engine.step(s, IMAGES, LABELS, 1e-3)
            results.append(np.concatenate([v.ravel() for v in flatten(engine.snapshot()).values()]))
    for first, second, other in (results[0::2], results[1::2]):
        np.testing.assert_array_equal(first, second)
        assert (first != other).any() == bool(rate)


def model_once(cache=[]):  # noqa: B006
    """The same model at every call."""
    cache or cache.append(model())
    return cache[0]


def test_logits_of_any_number_of_images():
    """The last partial batch counts, padding does not show, order is kept."""
    p = model()
    expected, _ = vit(p, normalise(IMAGES))
    for engine in engines(p):
        for count in (1, 5, 24):
            logits = engine.logits(IMAGES[:count], batch_size=5)
            np.testing.assert_allclose(logits, expected[:count], rtol=0, atol=1e-5)


def test_snapshot_is_the_official_tree():
    p = model()
    for engine in engines(p):
        assert flatten(engine.snapshot()).keys() == flatten(p).keys()
        for name, leaf in flatten(engine.snapshot()).items():
            np.testing.assert_array_equal(leaf, flatten(p)[name])
