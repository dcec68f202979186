"""A training step on threads and on a mesh of devices."""

import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

from minivit import engine_jax, masking, optim, params, variants
from minivit.datasets import normalise
from minivit.engine_jax import SCAN_FROM, JaxEngine, batch_mesh, cast
from minivit.engine_numpy import NumPyEngine, loss_and_gradient
from minivit.in_numpy import smooth_labels, vit
from minivit.params import flatten, tree_map

VARIANT = variants.Variant("small", patch=4, width=16, mlp=32, heads=2, blocks=2)
SCANNED = replace(VARIANT, blocks=SCAN_FROM)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 8, 12, 3), np.uint8)
LABELS = RNG.integers(0, 7, 24)
OPTIONS = {"weight_decay": 0.1, "clip": 1.0}


def batch_of(count=24, smoothing=0.0):
    """The first images, with targets."""
    targets = smooth_labels(LABELS[:count], 7, smoothing)
    return {"images": IMAGES[:count], "targets": targets}


BATCH = batch_of()


def model(variant=VARIANT):
    """A small model whose head is not zero, so that every weight has a gradient at once."""
    p = params.initialise(variant, 0, image_size=(8, 12), channels=3, classes=7)
    p["head"]["kernel"] = RNG.normal(scale=0.1, size=(16, 7)).astype("float32")
    return p


def engines(p, batch_size=24, **options):
    return NumPyEngine(p, **options), JaxEngine(p, batch_size=batch_size, **options)


def all_engines(p, **options):
    """The same, and one whose parameters are divided over the devices."""
    return *engines(p, **options), JaxEngine(p, batch_size=24, shard="fsdp", **options)


@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_one_step_is_the_plain_one(variant):
    """Threads and devices divide the batch; the gradient is that of the whole batch."""
    p = model(variant)
    batch = batch_of(smoothing=0.1)
    loss, grads, expected_accuracy = loss_and_gradient(p, batch)
    # SGD moves by the gradient itself, whose norm is 1, rounded in float32 through all blocks;
    # Adam would enlarge the rounding of its smallest entries.
    options = {"rule": "sgd", "weight_decay": 0.1, "clip": 1.0}
    expected, _ = optim.update(p, grads, optim.start(p, "sgd"), 1.0, **options)
    for engine in all_engines(p, **options):
        got_loss, accuracy = engine.step(0, batch, 1.0)
        assert float(got_loss) == pytest.approx(float(loss), rel=1e-6)
        assert float(accuracy) == pytest.approx(expected_accuracy)
        for name, leaf in flatten(engine.snapshot()).items():
            np.testing.assert_allclose(
                leaf, flatten(expected)[name], rtol=0, atol=4e-6, err_msg=name
            )


@pytest.mark.parametrize("freeze", [False, True])
def test_large_blocks_with_few_images_are_written_out(monkeypatch, freeze):
    """The same step as the scan's; and a state that either of them goes on from, to the bit."""
    p = model(SCANNED)
    batch = {name: array[:2] for name, array in batch_of().items()}

    def engine(share):
        monkeypatch.setattr(engine_jax, "STATE", share)
        # SGD, since Adam would enlarge the rounding of the smallest gradients.
        options = {"rule": "sgd", "weight_decay": 0.1, "clip": 1.0, "freeze": freeze}
        return JaxEngine(p, batch_size=2, **options)

    written, scanned = engine(4), engine(0)
    which = "frozen" if freeze else "like"
    assert "encoderblock_0" in getattr(written, which)["Transformer"]
    assert "encoderblock" in getattr(scanned, which)["Transformer"]
    for step in range(2):
        losses = [float(each.step(step, batch, 1e-3)[0]) for each in (written, scanned)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        states = [flatten(each.state_tree()) for each in (written, scanned)]
        for name, leaf in states[0].items():
            np.testing.assert_allclose(leaf, states[1][name], rtol=0, atol=1e-5, err_msg=name)
        shapes = flatten(written.state_shapes())
        assert {n: np.shape(x) for n, x in states[0].items()} == {
            n: np.shape(x) for n, x in shapes.items()
        }
        for each, other in ((written, scanned), (scanned, written)):
            other.load_state(each.state_tree())
            for name, leaf in flatten(each.snapshot()).items():
                np.testing.assert_array_equal(leaf, flatten(other.snapshot())[name])


def test_uneven_shares_count_by_their_images():
    """23 images on two threads, or on the one device that divides them."""
    p = model()
    with pytest.warns(UserWarning, match="batch of 23 divides over 1 of 2 devices"):
        both = engines(p, batch_size=23, **OPTIONS)
    losses = [float(engine.step(0, batch_of(23), 1e-3)[0]) for engine in both]
    whole, *_ = loss_and_gradient(p, batch_of(23))
    assert losses == pytest.approx(2 * [float(whole)], rel=1e-6)


def test_mesh_divides_the_batch():
    assert jax.device_count() == 2  # conftest.py asks for two
    assert [batch_mesh(n).size for n in (2, 64)] == [2, 2]
    for n in (1, 3):
        with pytest.warns(UserWarning, match="a multiple of 2"):
            assert batch_mesh(n).size == 1
    with pytest.raises(ValueError, match="3 images do not divide over 2 devices"):
        JaxEngine(model(), batch_size=4).step(0, batch_of(3), 1e-3)


def test_every_step_has_its_own_masks():
    """ATT-11: the same weights and batch at another step, another dropout."""
    for make in (0, 1):
        losses = [
            float(engines(model_once(), rate=0.5)[make].step(s, BATCH, 0.0)[0]) for s in (0, 1, 0)
        ]
        assert losses[0] == losses[2] != losses[1]


def test_training_goes_down_and_is_traced_once():
    engine = JaxEngine(model(), batch_size=24)
    losses = [float(engine.step(s, BATCH, 3e-3)[0]) for s in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.traces == 1


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_same_seed_same_bits(rate):
    """Three steps twice, on both engines; another seed gives other masks."""
    results = []
    for seed in (1, 1, 2):
        for engine in engines(model_once(), seed=seed, rate=rate):
            for s in range(3):
                engine.step(s, BATCH, 1e-3)
            results.append(np.concatenate([v.ravel() for v in flatten(engine.snapshot()).values()]))
    for first, second, other in (results[0::2], results[1::2]):
        np.testing.assert_array_equal(first, second)
        assert (first != other).any() == bool(rate)


def model_once(cache=[]):  # noqa: B006
    """The same model at every call."""
    cache or cache.append(model())
    return cache[0]


def test_options_of_the_model():
    """The erf form and another epsilon reach training and evaluation in both engines."""
    p, options = model_once(), {"gelu_form": "erf", "epsilon": 1e-2}
    logits, _ = vit(p, normalise(IMAGES), **options)
    loss, *_ = loss_and_gradient(p, BATCH, **options)
    for engine in engines(p, model=options):
        np.testing.assert_allclose(engine.logits(IMAGES), logits, rtol=0, atol=1e-5)
        assert float(engine.step(0, BATCH, 0.0)[0]) == pytest.approx(float(loss), rel=1e-5)


def test_logits_of_any_number_of_images():
    """The last partial batch counts, padding does not show, order is kept."""
    p = model()
    expected, _ = vit(p, normalise(IMAGES))
    for engine in all_engines(p):
        for count in (1, 5, 24):
            logits = engine.logits(IMAGES[:count], batch_size=5)
            np.testing.assert_allclose(logits, expected[:count], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_snapshot_is_the_official_tree(variant):
    p = model(variant)
    for engine in all_engines(p):
        assert flatten(engine.snapshot()).keys() == flatten(p).keys()
        for name, leaf in flatten(engine.snapshot()).items():
            np.testing.assert_array_equal(leaf, flatten(p)[name])


@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_frozen_and_averaged(variant):
    """`freeze` moves the head alone, `keep` saves and evaluates the average; in both engines."""
    p = model(variant)
    for engine in all_engines(p, freeze=True, rule="sgd"):
        engine.step(0, BATCH, 0.1)
        for name, leaf in flatten(engine.snapshot()).items():
            assert (leaf != flatten(p)[name]).any() == name.startswith("head"), name
    for plain, averaged in zip(engines(p), engines(p, keep=0.9), strict=True):
        plain.step(0, BATCH, 1e-2)
        averaged.step(0, BATCH, 1e-2)
        expected = optim.polyak(p["head"], plain.snapshot()["head"], optim.warm_keep(0, 0.9))
        for name, leaf in expected.items():
            np.testing.assert_allclose(averaged.snapshot()["head"][name], leaf, atol=1e-6)
        logits, _ = vit(averaged.snapshot(), normalise(IMAGES))
        np.testing.assert_allclose(averaged.logits(IMAGES), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_accumulation_is_the_whole_batch(variant):
    """Three parts one after the other: the same gradient, loss and accuracy, up to rounding."""
    p = model(variant)
    for whole, parts in zip(
        engines(p, rule="sgd"), engines(p, rule="sgd", accumulate=3), strict=True
    ):
        expected, got = whole.step(0, BATCH, 1.0), parts.step(0, BATCH, 1.0)
        np.testing.assert_allclose(np.array(got, float), np.array(expected, float), rtol=1e-6)
        for name, leaf in flatten(parts.snapshot()).items():
            np.testing.assert_allclose(leaf, flatten(whole.snapshot())[name], rtol=0, atol=4e-6)
    with pytest.raises(ValueError, match="22 images do not divide over 2 devices times 3 parts"):
        JaxEngine(p, batch_size=24, accumulate=3).step(0, batch_of(22), 1.0)


def test_accumulation_drops_by_part():
    """Dropout's masks of the parts differ.

    All images are the same, one a part. Were the masks the same too, then two parts on each of two
    devices (or threads) would have the loss of one part on each.
    """
    one, options = {name: array[:1] for name, array in BATCH.items()}, {"rate": 0.5}
    for number in (0, 1):
        losses = []
        for parts in (1, 2):
            batch = {name: array.repeat(2 * parts, axis=0) for name, array in one.items()}
            pair = engines(model_once(), batch_size=2 * parts, accumulate=parts, **options)
            losses.append(float(pair[number].step(0, batch, 0.0)[0]))
        assert losses[0] != losses[1]


def test_accumulation_needs_no_more_images_than_it_has():
    """Four parts of four images: one device; two parts: both."""
    sizes = []
    for parts in (2, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = JaxEngine(model_once(), batch_size=4, accumulate=parts)
        engine.step(0, batch_of(4), 0.0)
        sizes.append(engine.mesh.size)
    assert sizes == [2, 1]


def test_measure_counts_every_image(corrupt_batch):
    """Also those that do not divide over the devices; without dropout."""
    p = masking.add_prediction(model_once(), "mean-color", 0)
    batch = corrupt_batch(IMAGES[:5], "mean-color", (4, 4), np.random.default_rng(0))
    for count in (1, 4, 5):
        part = {name: array[:count] for name, array in batch.items()}
        loss, _, accuracy = loss_and_gradient(p, part, "mean-color")
        for engine in all_engines(p, objective="mean-color", rate=0.5):
            np.testing.assert_allclose(engine.measure(part), [loss, accuracy], rtol=1e-5)


@pytest.mark.parametrize("objective", masking.OBJECTIVES)
def test_masked_objectives(objective, corrupt_batch):
    """Both engines train on the same corruption, and agree with the plain gradient."""
    rng = np.random.default_rng(0)
    p = masking.add_prediction(model(), objective, 0)
    p["prediction"]["kernel"] += 0.1 * rng.standard_normal(p["prediction"]["kernel"].shape, "f4")
    batch = corrupt_batch(IMAGES, objective, (4, 4), rng)
    loss, grads, accuracy = loss_and_gradient(p, batch, objective)
    expected, _ = optim.update(p, grads, optim.start(p, "sgd"), 1.0, rule="sgd", clip=1.0)
    for engine in all_engines(p, objective=objective, rule="sgd", clip=1.0):
        before = engine.measure(batch)
        got = engine.step(0, batch, 1.0)
        wanted = np.array([loss, accuracy], float)  # None becomes NaN
        np.testing.assert_allclose(np.array(before, float), wanted, rtol=1e-5)
        np.testing.assert_allclose(np.array(got, float), wanted, rtol=1e-5)
        assert (before[1] is None) == (got[1] is None) == (objective == "pixels")
        for name, leaf in flatten(engine.snapshot()).items():
            np.testing.assert_allclose(leaf, flatten(expected)[name], rtol=0, atol=4e-6)
    assert (accuracy is None) == (objective == "pixels")


@pytest.mark.parametrize("keep", [0.0, 0.9])
@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_restore(variant, keep):
    """Back to the bit, for evaluation, saving and further steps."""
    for engine in all_engines(model(variant), keep=keep):
        engine.step(0, BATCH, 1e-2)
        best, scores = tree_map(np.copy, engine.snapshot()), engine.logits(IMAGES)
        for s in range(1, 3):
            engine.step(s, BATCH, 1e-2)
        assert (engine.logits(IMAGES) != scores).any()
        engine.restore(best)
        for name, leaf in flatten(engine.snapshot()).items():
            np.testing.assert_array_equal(leaf, flatten(best)[name])
        np.testing.assert_array_equal(engine.logits(IMAGES), scores)
        engine.step(3, BATCH, 1e-2)


@pytest.mark.parametrize("keep", [0.0, 0.9])
@pytest.mark.parametrize("done", [0, 2])
def test_a_state_in_memory_is_loaded_to_the_bit(keep, done):
    """As one from a file: another engine goes on from it, also from before the first step."""
    for number in range(3):
        first, second = (all_engines(model_once(), keep=keep)[number] for _ in range(2))
        for step in range(done):
            first.step(step, BATCH, 1e-2)
        saved = tree_map(np.copy, first.state_tree())
        shapes = {name: np.shape(leaf) for name, leaf in flatten(second.state_shapes()).items()}
        assert {name: np.shape(leaf) for name, leaf in flatten(saved).items()} == shapes
        second.step(0, BATCH, 1e-1)
        second.load_state(first.state_tree())
        losses = [float(engine.step(done, BATCH, 1e-2)[0]) for engine in (first, second)]
        assert losses[0] == losses[1]
        for name, leaf in flatten(first.state_tree()).items():
            np.testing.assert_array_equal(leaf, flatten(second.state_tree())[name], err_msg=name)


def test_evaluation_needs_little_memory():
    """No moments; NumPy takes the arrays as they are, and JAX's CPU devices share one copy."""
    p = model(SCANNED)
    plain, shared = NumPyEngine(p), JaxEngine(p)
    for engine in (plain, shared):
        engine.logits(IMAGES)
        assert "state" not in vars(engine)
    for name, leaf in flatten(plain.snapshot()).items():
        assert leaf is flatten(p)[name]
    for leaf in jax.tree.leaves(shared.params):
        places = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        assert (len(leaf.addressable_shards), len(places)) == (2, 1)


def test_what_devices_share_is_written_by_none():
    """A step gives each device its own weights; the arrays of the caller stay what they were."""
    p = model()
    before = tree_map(np.copy, p)
    for engine in (*engines(p), NumPyEngine(p), JaxEngine(p)):
        engine.step(0, BATCH, 1e-2)
        for name, leaf in flatten(p).items():
            np.testing.assert_array_equal(leaf, flatten(before)[name])
    parts = [shard.data for shard in jax.tree.leaves(engine.params)[0].addressable_shards]
    np.testing.assert_array_equal(*parts)


def test_evaluation_is_filled_up(recwarn):
    """Whatever the number of images: no warning about devices, and progress is told of each."""
    p, counts = model(), []
    expected, _ = vit(p, normalise(IMAGES[:23]))
    for engine in (NumPyEngine(p), JaxEngine(p), JaxEngine(p, batch_size=24)):
        counts.append([])
        logits = engine.logits(IMAGES[:23], done=counts[-1].append)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert [sum(each) for each in counts] == [23, 23, 23]
    assert not recwarn.list


def test_nothing_that_is_no_number(corrupt_batch):
    """JAX_DEBUG_NANS finds no NaN where an objective has no accuracy."""
    p = masking.add_prediction(model_once(), "pixels", 0)
    batch = corrupt_batch(IMAGES[:5], "pixels", (4, 4), np.random.default_rng(0))
    even = {name: array[:4] for name, array in batch.items()}
    for shard in ("data", "fsdp"):
        engine = JaxEngine(p, batch_size=4, objective="pixels", shard=shard)
        with jax.debug_nans(True):
            assert engine.step(0, even, 1e-3)[1] is None
            loss, accuracy = engine.measure(batch)
        assert np.isfinite(loss)
        assert accuracy is None


@pytest.mark.parametrize("variant", [VARIANT, SCANNED], ids=["loop", "scan"])
def test_half_precision(variant):
    """bfloat16 computes, float32 remembers; the losses stay within a few per cent."""
    p = model(variant)
    plain, half = (JaxEngine(p, batch_size=24, dtype=t) for t in ("float32", "bfloat16"))
    losses = [[float(e.step(s, BATCH, 3e-3)[0]) for s in range(20)] for e in (plain, half)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[1] != losses[0]
    assert losses[1][-1] < 0.8 * losses[1][0]
    for name, leaf in flatten(half.state_tree()).items():
        assert np.asarray(leaf).dtype in ("float32", "int32"), name
    assert half.logits(IMAGES).dtype == "float32"
    np.testing.assert_allclose(half.measure(BATCH)[0], losses[1][-1], rtol=0.3)


def test_norms_are_not_cast():
    """What normalises keeps its float32, in all three families."""
    for name in ("tiny", "tiny-hybrid", "tiny-resnet"):
        p = params.initialise(variants.parse(name), 0, image_size=28, channels=1, classes=3)
        for leaf, array in flatten(cast(p, "float16")).items():
            norm = leaf.split("/")[-1] in ("scale", "gamma", "beta") or "Norm" in leaf
            norm = norm or "norm" in leaf or "gn" in leaf
            assert (array.dtype == "float32") == norm, leaf
