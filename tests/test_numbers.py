"""Numbers that are hardly numbers: the largest of each type, NaN, infinity, and half precision."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from minivit import attention_maps, evaluate, in_jax, in_numpy, optim, params, variants
from minivit.in_jax.attention import by_size
from minivit.params import flatten, tree_map
from minivit.shapes import pair

TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TYPES = HALVES | {"float32": np.float32}


def run(twin, piece, *args, dy=None, **options):
    """Output and gradients of arrays in their own type, as float64; `dy` is ones unless given."""
    if twin == "numpy":
        y, *_, back = getattr(in_numpy, piece)(*args, **options)
        grads = back(np.ones_like(y) if dy is None else dy)
        grads = grads if isinstance(grads, tuple) else (grads,)
    else:
        function = partial(getattr(in_jax, piece), **options)
        y, back = jax.vjp(function, *(tree_map(jnp.asarray, a) for a in args))
        grads = back(jnp.ones_like(y) if dy is None else jnp.asarray(dy, y.dtype))
    like = args[-1] if piece not in ("softmax_cross_entropy", "sigmoid_cross_entropy") else args[0]
    if piece != "dense":  # NumPy's product of bfloat16 is float32
        assert y.dtype == like.dtype
        for grad, arg in zip(grads, args, strict=False):
            for g, a in zip(flatten(grad).values(), flatten(arg).values(), strict=True):
                assert g.dtype == a.dtype
    return [np.asarray(y, "f8"), *(tree_map(lambda g: np.asarray(g, "f8"), g) for g in grads)]


def same(ours, expected, dtype, roundings=4):
    """Equal but for some roundings of the type, relative to the largest entry or to 1."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, right in zip(ours, expected, strict=False):
        for a, b in zip(flatten(got).values(), flatten(right).values(), strict=True):
            largest = max(1.0, np.abs(b).max())
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a / largest, b / largest, rtol=0, atol=roundings * eps)


def every_number(dtype):
    """All finite numbers of a half-precision type; of float32 every 65,536th bit pattern."""
    if np.dtype(dtype).itemsize == 2:
        x = np.arange(2**16, dtype=np.uint16).view(dtype)
    else:
        x = (np.arange(2**16, dtype=np.uint32) << 16).view(dtype)
        x = np.append(x, [np.finfo(dtype).max, np.finfo(dtype).min])
    with np.errstate(invalid="ignore"):  # a signalling NaN is one of them
        return x[np.isfinite(x)]


@TWINS
@pytest.mark.parametrize("form", ["tanh", "erf"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_gelu_of_every_number(twin, form, dtype):
    """Value and slope, up to the largest: x * x overflows there, and 0 times that is NaN."""
    x = every_number(dtype)
    y, slope = run(twin, "gelu", x, form=form)
    right, right_slope = run("numpy", "gelu", x.astype("f8"), form=form)
    eps = float(ml_dtypes.finfo(dtype).eps)
    # 1 + tanh loses what is smaller than a rounding of 1, and x up to 10 multiplies that.
    np.testing.assert_allclose(y, right, rtol=4 * eps, atol=8 * eps)
    np.testing.assert_allclose(slope, right_slope, rtol=0, atol=32 * eps)
    np.testing.assert_allclose(slope[np.abs(x) > 10], (x > 0)[np.abs(x) > 10], rtol=0, atol=1e-20)


def extremes(shape, dtype, size):
    """Normal numbers, the first two at plus and minus a share of the largest of the type."""
    x = np.random.default_rng(0).standard_normal(shape)
    x[..., :2] = np.array([1, -1]) * size * float(ml_dtypes.finfo(dtype).max)
    return x.astype(dtype)


SIZES = pytest.mark.parametrize("size", [1.0, 0.01, 1e-4])
HALF = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)


@TWINS
@HALF
@SIZES
@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
def test_layer_norm_in_half_precision(twin, dtype, size, epsilon):
    """Against float64: squares of bfloat16 overflow float32, and so do sums."""
    x = extremes((3, 8), dtype, size)
    x[2] = np.finfo("float16").max  # a constant row has no deviation but epsilon's
    x[2, 0] *= dtype(0.5) if size < 1 else dtype(1)
    p = {"scale": np.full(8, 0.5, dtype), "bias": np.full(8, 0.25, dtype)}
    dy = np.random.default_rng(1).standard_normal((3, 8)).astype(dtype)
    wide = [tree_map(lambda a: a.astype("f8"), a) for a in (p, x, dy)]
    expected = run("numpy", "layer_norm", *wide[:2], dy=wide[2], epsilon=epsilon)
    same(run(twin, "layer_norm", p, x, dy=dy, epsilon=epsilon), expected, dtype)


@TWINS
@HALF
@SIZES
def test_group_norm_in_half_precision(twin, dtype, size):
    """The same, over pixels and channels of a group."""
    x = extremes((2, 3, 2, 64), dtype, size)
    p = {"scale": np.full(64, 0.5, dtype), "bias": np.full(64, 0.25, dtype)}
    dy = np.random.default_rng(1).standard_normal(x.shape).astype(dtype)
    wide = [tree_map(lambda a: a.astype("f8"), a) for a in (p, x, dy)]
    expected = run("numpy", "group_norm", *wide[:2], dy=wide[2])
    same(run(twin, "group_norm", p, x, dy=dy), expected, dtype)


@TWINS
@HALF
@SIZES
@pytest.mark.parametrize("form", ["official", "bit"])
def test_standardised_kernel_in_half_precision(twin, dtype, size, form):
    """Large filters, small ones, and one that is constant."""
    kernel = extremes((3, 4, 3, 3), dtype, size).transpose(0, 2, 3, 1)  # extreme channels
    kernel[..., 2] = (kernel[..., 2].astype("f8") * 1e-2).astype(dtype)
    kernel[..., 3] = dtype(0.5)
    dy = (0.1 * np.random.default_rng(1).standard_normal(kernel.shape)).astype(dtype)
    wide = kernel.astype("f8"), dy.astype("f8")
    expected = run("numpy", "standardise_kernel", wide[0], dy=wide[1], form=form)
    ours = run(twin, "standardise_kernel", kernel, dy=dy, form=form)
    for i in range(4):  # gradients of constant filters are 1e5 times as large
        same([a[..., i] for a in ours], [a[..., i] for a in expected], dtype, roundings=8)


@TWINS
@HALF
@SIZES
@pytest.mark.parametrize("width", [8, 4096])
def test_softmax_in_half_precision(twin, dtype, size, width):
    """Scores up to the largest; and of 4,096 equal ones, whose sum bfloat16 cannot count."""
    s = extremes((3, width), dtype, size)
    s[0] = 1
    dy = np.random.default_rng(1).standard_normal(s.shape).astype(dtype)
    expected = run("numpy", "softmax", s.astype("f8"), dy=dy.astype("f8"))
    ours = run(twin, "softmax", s, dy=dy)
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    for i in range(3):
        largest = [max(np.abs(a[i]).max(), tiny) for a in expected]
        pairs = ([a[i] / n for a, n in zip(x, largest, strict=True)] for x in (ours, expected))
        same(*pairs, dtype)


@TWINS
@HALF
@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "sigmoid_cross_entropy"])
def test_losses_in_half_precision(twin, dtype, loss):
    """Scores so large that the loss itself just does not overflow."""
    logits = extremes((3, 1000), dtype, 0.25)
    logits[0] = 0
    targets = np.zeros(logits.shape, dtype)
    targets[[0, 1, 2], [0, 1, 0]] = 1
    targets[0] += dtype(1e-4)
    ones = np.ones(3, dtype)
    wide = logits.astype("f8"), targets.astype("f8")
    expected = run("numpy", loss, *wide, dy=ones.astype("f8"))[:2]
    ours = run(twin, loss, logits, targets, dy=ones)[:2]
    for i in range(3):
        same([a[i] for a in ours], [a[i] for a in expected], dtype)


@TWINS
@HALF
def test_sums_over_rows_in_half_precision(twin, dtype):
    """Gradients that are sums over 4,096 rows: one rounding, not thousands."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4096, 4)).astype(dtype)
    dy = rng.random((4096, 4)).astype(dtype)
    ones = np.ones(4, dtype)
    wide, wide_dy = x.astype("f8"), dy.astype("f8")
    for piece, p in (
        ("dense", {"kernel": np.eye(4, dtype=dtype), "bias": ones}),
        ("layer_norm", {"scale": ones, "bias": ones}),
        ("add_positions", {"pos_embedding": ones[None]}),
    ):
        a, b, da, db = x, wide, dy, wide_dy
        if piece == "add_positions":
            p, a, b, da, db = (
                {"pos_embedding": ones[None, None]},
                *(t[:, None] for t in (a, b, da, db)),
            )
        _, ours, _ = run(twin, piece, p, a, dy=da)
        _, right, _ = run("numpy", piece, tree_map(lambda t: t.astype("f8"), p), b, dy=db)
        eps = float(ml_dtypes.finfo(dtype).eps)
        for name, grad in flatten(right).items():
            # A normalised x of half precision differs a little: its sum by the root of the rows.
            np.testing.assert_allclose(flatten(ours)[name], grad, rtol=eps, atol=64 * eps)


@TWINS
@HALF
def test_means_over_tokens_in_half_precision(twin, dtype):
    """1,024 ones have mean 1; bfloat16 counts to 256."""
    y, _ = run(twin, "pool", np.ones((2, 1024, 3), dtype), class_token=False)
    np.testing.assert_array_equal(y, 1)


@pytest.mark.parametrize("size", [64, 256])
def test_chunks_are_summed_in_float32(size):
    """Many chunks of bfloat16 tokens: gradients are as far from float32's as with few chunks."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((1, 1, 4096, 16)).astype("f4") for _ in range(4))

    def gradient(size):
        return jax.jit(lambda *x: jax.vjp(partial(by_size, chunk=size), *x[:3])[1](x[3]))

    half = [jnp.asarray(a, "bfloat16") for a in (q, k, v, dy)]
    exact = gradient(0)(*(a.astype("float32") for a in half))
    errors = [
        [np.sqrt(np.mean((np.asarray(a, "f4") - b) ** 2)) for a, b in zip(got, exact, strict=True)]
        for got in (gradient(size)(*half), gradient(1024)(*half))
    ]
    # Summed in bfloat16, 64 chunks would be 2.3 times as far off as 4.
    assert np.array(errors[0]) == pytest.approx(errors[1], rel=0.05)


NOT_NUMBERS = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


@NOT_NUMBERS
def test_scores_that_are_not_finite_are_never_right(bad):
    """Both twins, top-k, accuracy by class, and the confusion, which leaves them out."""
    logits = np.array([[3, 1, 0], [bad, 0, 1], [0, bad, 9], [0, 1, 3]], "f4")
    labels = np.array([0, 0, 2, 2])
    assert in_numpy.guess(logits).tolist() == [0, -1, -1, 2]
    assert in_jax.guess(jnp.asarray(logits)).tolist() == [0, -1, -1, 2]
    result = evaluate.summary(logits, labels)
    assert result["accuracy"] == 0.5
    assert result["by_class"][0] == 0.5
    assert [evaluate.top_k(logits, labels, k) for k in (1, 2, 3)] == [0.5, 0.5, 0.5]
    counts = evaluate.confusion(in_numpy.guess(logits), labels, 3)
    assert counts.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match=r"x.npz gives scores .* for 2 of 4 images"):
        evaluate.check_scores(logits, "x.npz")
    evaluate.check_scores(logits[[0, 3]], "x.npz")
    whole = evaluate.summary(np.full((4, 3), bad, "f4"), np.zeros(4, int))
    assert whole["accuracy"] == 0
    assert not np.isfinite(whole["loss"])


def broken_model(classes=2):
    """A small model whose head says NaN."""
    p = params.initialise(
        variants.Variant("x", 4, 8, 8, 2, 1), 0, image_size=8, channels=1, classes=classes
    )
    return p | {
        "head": {"kernel": np.full((8, classes), np.nan, "f4"), "bias": np.zeros(classes, "f4")}
    }


@TWINS
def test_accuracy_of_objectives_that_are_not_finite(twin):
    """Label 0 is not what a model of NaN means, neither of an image nor of a patch."""
    pieces = in_numpy if twin == "numpy" else in_jax
    p, images = broken_model(), np.zeros((2, 8, 8, 1), "f4")
    targets, metrics = in_numpy.smooth_labels([0, 0], 2), {}
    pieces.classification(p, images, targets, metrics=metrics)
    assert metrics["accuracy"] == 0
    masked = {n: a for n, a in p.items() if n != "head"} | {
        "mask": np.zeros((1, 1, 8), "f4"),
        "prediction": {"kernel": np.full((8, 8), np.nan, "f4"), "bias": np.zeros(8, "f4")},
    }
    every, own = np.ones((2, 4), bool), np.broadcast_to(np.arange(4), (2, 4))
    labels = np.zeros((2, 4, 1), int)
    pieces.masked_colors(masked, images, labels, every, ~every, own, metrics=metrics)
    assert metrics["accuracy"] == 0


def test_few_shot_of_features_that_are_not_finite():
    """A feature that is no number never leads to a right answer."""
    rng = np.random.default_rng(0)
    labels = np.array([0, 1] * 10)
    x = rng.standard_normal((20, 3)) + 9 * labels[:, None]
    bad = x.copy()
    bad[:5] = np.nan
    result = evaluate.few_shot((x, x, bad), (labels,) * 3, np.arange(20), 2)
    np.testing.assert_array_equal(result[0], [1, 0.75])


@TWINS
@NOT_NUMBERS
def test_what_a_loss_leaves_out_may_be_anything(twin, bad):
    """Positions that are not corrupted: neither the loss nor any gradient sees them."""
    rng = np.random.default_rng(0)
    corrupted = np.array([[True, False, True, False], [False, True, True, False]])
    labels = np.where(corrupted[..., None], rng.integers(0, 8, (2, 4, 3)), -99)
    patches = rng.standard_normal((2, 4, 24)).astype("f4")
    clean = rng.standard_normal((2, 4, 24)).astype("f4")
    dirty = np.where(corrupted[..., None], clean, np.float32(bad))
    pieces = in_numpy if twin == "numpy" else in_jax

    def value_and_gradient(name, x, *rest):
        if twin == "numpy":
            y, back = getattr(pieces, name)(x, *rest)
            return y, back(np.ones_like(y))
        return jax.value_and_grad(getattr(pieces, name))(x, *rest)

    asked = np.where(corrupted[..., None], patches, np.float32(bad))
    for name, target, other in (
        ("color_loss", labels, labels),
        ("pixel_loss", patches, asked),
    ):
        expected = value_and_gradient(name, clean, target, corrupted)
        for a, b in zip(value_and_gradient(name, dirty, other, corrupted), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert (np.asarray(expected[1])[~corrupted] == 0).all()
    expected = value_and_gradient("over_corrupted", clean[..., 0], corrupted)
    for a, b in zip(
        value_and_gradient("over_corrupted", dirty[..., 0], corrupted), expected, strict=True
    ):
        np.testing.assert_array_equal(a, b)


@TWINS
def test_a_corruption_passes_on_only_what_it_shows(twin):
    """Embeddings that a mask hides, and gradients where it hides nothing, may be anything."""
    masked = np.array([[True, False, True]])
    source = np.array([[0, 1, 0]])
    x = np.where(masked[..., None], np.float32(np.nan), np.ones((1, 3, 2), "f4"))
    mask = np.zeros((1, 1, 2), "f4")
    y, dmask, dx = run_corrupt(twin, mask, x, masked, source, np.ones_like(x))
    np.testing.assert_array_equal(y[~masked], 1)
    np.testing.assert_array_equal(dmask, 2)
    np.testing.assert_array_equal(dx, np.array([[[0], [1], [0]]]) * np.ones(2))
    dy = np.where(masked[..., None], np.ones_like(x), np.float32(np.inf))
    _, dmask, _ = run_corrupt(twin, mask, np.zeros_like(x), masked, source, dy)
    np.testing.assert_array_equal(dmask, 2)


def run_corrupt(twin, mask, x, masked, source, dy):
    if twin == "numpy":
        y, back = in_numpy.corrupt(mask, x, masked, source)
        return y, *back(dy)
    y, back = jax.vjp(lambda mask, x: in_jax.corrupt(mask, x, masked, source), mask, x)
    return np.asarray(y), *map(np.asarray, back(dy))


@TWINS
@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "sigmoid_cross_entropy"])
def test_an_impossible_class_that_is_not_the_target(twin, loss):
    """A score of -inf at a target of 0 costs nothing and gets no gradient."""
    logits, targets = np.array([[0, -np.inf, 1]], "f4"), np.array([[0, 0, 1]], "f4")
    ours = run(twin, loss, logits, targets)
    expected = run(twin, loss, logits[:, [0, 2]], targets[:, [0, 2]])
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1][:, [0, 2]], expected[1], rtol=1e-6)
    assert ours[1][0, 1] == 0


KINDS = pytest.mark.parametrize("kind", ["numpy", "jax"])


def arrays(kind, tree):
    return tree_map(jnp.asarray if kind == "jax" else np.asarray, tree)


@KINDS
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("share", [1.0, 0.5, 1e-3, 1e-12])
def test_clipping_where_the_norm_overflows(kind, dtype, share):
    """The result has norm `limit` and the gradient's direction, up to the largest number."""
    largest = float(ml_dtypes.finfo(dtype).max)
    grads = {"a": np.array([1, -1, 0.5] * 300), "b": np.array([[0.25]])}
    grads = tree_map(lambda g: (g * largest * share).astype(dtype), grads)
    wide = {n: g.astype("f8") for n, g in grads.items()}
    norm = np.sqrt(sum((g * g).sum() for g in wide.values()))
    clipped, told = optim.clip_by_global_norm(arrays(kind, grads), 0.5)
    limit = min(0.5, norm)
    for name, g in wide.items():
        assert clipped[name].dtype == dtype
        rounding = 2 * float(ml_dtypes.finfo(dtype).eps)
        right = g * (limit / norm)
        np.testing.assert_allclose(np.asarray(clipped[name], "f8"), right, rtol=rounding, atol=1e-7)
    if norm < float(np.finfo("f4").max):
        assert float(told) == pytest.approx(norm, rel=1e-5)
        assert float(optim.global_norm(arrays(kind, grads))) == pytest.approx(norm, rel=1e-5)


@KINDS
@pytest.mark.parametrize("rule", optim.RULES)
def test_a_finite_gradient_is_not_skipped(kind, rule):
    """Clipped, 1e30 is a gradient like any other; infinity is skipped with the rest of its step."""
    p = arrays(kind, {"a": np.ones(4, "f4")})
    steep = arrays(kind, {"a": np.full(4, 1e30, "f4")})
    new, state = optim.update(p, steep, optim.start(p, rule), 0.1, rule=rule, clip=1.0)
    assert int(state["skipped"]) == 0
    expected = 0.9 if rule == "adamw" else 0.95
    np.testing.assert_allclose(new["a"], expected, rtol=1e-6)
    infinite = arrays(kind, {"a": np.array([np.inf, 0, 0, 0], "f4")})
    new, state = optim.update(p, infinite, optim.start(p, rule), 0.1, rule=rule, clip=1.0)
    np.testing.assert_array_equal(new["a"], 1)
    assert int(state["skipped"]) == 1


@KINDS
def test_a_square_that_overflows_is_not_kept(kind):
    """Unclipped, AdamW would remember an infinite square and never move that weight again."""
    p = arrays(kind, {"a": np.ones(2, "f4")})
    steep = arrays(kind, {"a": np.array([1e30, 1], "f4")})
    new, state = optim.update(p, steep, optim.start(p), 0.1)
    assert np.isfinite(np.asarray(state["square"]["a"])).all()
    assert int(state["skipped"]) == 1
    # The sum of many squares may overflow where none of them does: a step like any other.
    p = arrays(kind, {"a": np.ones(1000, "f4")})
    new, state = optim.update(
        p, arrays(kind, {"a": np.full(1000, 1e18, "f4")}), optim.start(p), 0.1
    )
    assert int(state["skipped"]) == 0
    np.testing.assert_allclose(new["a"], 0.9, rtol=1e-6)


@KINDS
@pytest.mark.parametrize("keep", [0.9999, 0.999])
def test_an_average_of_constants_does_not_drift(kind, keep):
    """Nor does one of noise about 1, beyond the deviation of so many steps' mean."""
    rng = np.random.default_rng(0)
    average = weights = arrays(kind, {"a": rng.standard_normal(50).astype("f4")})
    follow = jax.jit(optim.polyak) if kind == "jax" else optim.polyak
    share = np.float32(keep) if kind == "jax" else keep
    for _ in range(3000):
        average = follow(average, weights, share)
    np.testing.assert_array_equal(average["a"], weights["a"])
    if kind == "jax":
        return
    average = {"a": np.ones(1000, "f4")}
    for _ in range(30_000):
        average = follow(average, {"a": 1 + rng.standard_normal(1000, "f4")}, share)
    assert abs(average["a"].mean(dtype="f8") - 1) < 5 * np.sqrt((1 - keep) / 2 / 1000) / 2


@HALF
@pytest.mark.parametrize(
    ("old", "new", "width"),
    [((1, 4), (1, 6), 4), ((4, 1), (2, 1), 4), ((2, 3), (3, 2), 1), ((1, 1), (2, 2), 1)],
)
@pytest.mark.parametrize("method", ["corners", "bicubic"])
def test_resize_in_half_precision(dtype, old, new, width, method):
    """Tables of one row, one column or width 1, and their gradients, as JAX has them."""
    table = np.random.default_rng(0).standard_normal((1, 1 + old[0] * old[1], width)).astype(dtype)
    options = {"old_grid": old, "method": method}
    y, back = in_numpy.resize(table, new, **options)
    theirs, back_jax = jax.vjp(lambda t: in_jax.resize(t, new, **options), table)
    assert y.dtype == dtype
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
    same(
        [y.astype("f8"), back(dy).astype("f8")],
        [np.asarray(a, "f8") for a in (theirs, back_jax(jnp.asarray(dy))[0])],
        dtype,
    )
    kernel = np.random.default_rng(2).standard_normal((1, 3, 1, width)).astype(dtype)
    assert in_numpy.resize_kernel(kernel, (2, 3)).dtype == dtype


def lstsq(x, y, constant):
    """The solution of least norm, by singular values of x itself."""
    if constant is None:
        w = np.linalg.lstsq(x - x.mean(0), y - y.mean(0))[0]
        return w, y.mean(0) - x.mean(0) @ w
    w = np.linalg.lstsq(np.hstack([x, np.full((len(x), 1), constant)]), y)[0]
    return w[:-1], constant * w[-1]


RNG = np.random.default_rng(0)
EXAMPLES = {
    "enough": RNG.standard_normal((20, 4)),
    "few": RNG.standard_normal((4, 9)) + 5,
    "repeated": np.repeat(RNG.standard_normal((3, 6)), 4, axis=0),
    "dependent": RNG.standard_normal((30, 3)) @ RNG.standard_normal((3, 8)),
    "constant features": np.ones((5, 3)),
    "zeros": np.zeros((5, 3)),
    "one": RNG.standard_normal((1, 4)),
}


@TWINS
@pytest.mark.parametrize("constant", [None, 1.0])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("classes", [1, 3])
def test_ridge_without_a_penalty(twin, constant, name, classes):
    """As `numpy.linalg.lstsq`, of every shape and rank; a penalty of 1e-300 is none."""
    x = EXAMPLES[name]
    y = evaluate.signs(np.arange(len(x)) % classes, classes)
    expected = lstsq(x, y, constant)
    with jax.enable_x64(True):
        fit = in_numpy.ridge if twin == "numpy" else in_jax.ridge
        weights, bias = fit(x, y, [0.0, 1e-300], constant)
    for w, b in zip(np.asarray(weights), np.asarray(bias), strict=True):
        np.testing.assert_allclose(w, expected[0], atol=1e-10)
        np.testing.assert_allclose(b, expected[1], atol=1e-10)


@TWINS
def test_patches_in_a_row_are_a_square(twin):
    """Without a grid: the square, or an error that says that there is none."""
    pieces = in_numpy if twin == "numpy" else in_jax
    images = np.random.default_rng(0).random((2, 6, 6, 3))
    patches = np.asarray(pieces.patchify(images, 2))
    np.testing.assert_allclose(pieces.unpatchify(patches.reshape(2, 9, 12), 2), images, rtol=1e-6)
    for wrong in (
        patches[:, :2].reshape(2, 6, 12),
        patches[0, 0],
        patches[:, :0].reshape(2, 0, 12),
    ):
        with pytest.raises(ValueError, match=r"form no square; reshape them"):
            pieces.unpatchify(wrong, 2)


@TWINS
def test_options_that_nobody_knows(twin):
    """A ResNet ignores what a ViT takes, not what is misspelt; a loss has two names."""
    pieces = in_numpy if twin == "numpy" else in_jax
    resnet = params.initialise(
        variants.ResNet("x", (1,), 4), 0, image_size=8, channels=1, classes=2
    )
    images = np.zeros((1, 8, 8, 1), "f4")
    pieces.model(resnet, images, gelu_form="erf", epsilon=1e-3, mean=False)
    with pytest.raises(ValueError, match=r"unknown option 'gelu_from'; there are .*gelu_form"):
        pieces.model(resnet, images, gelu_from="erf")
    with pytest.raises(ValueError, match="unknown loss 'hinge'; choose 'softmax' or 'sigmoid'"):
        pieces.classification(resnet, images, np.ones((1, 2), "f4"), loss="hinge")
    with pytest.raises(TypeError, match="nonsense"):
        params.initialise(variants.ResNet("x", (1,), 4), 0, nonsense=1)


@TWINS
def test_settings_reach_the_attention_head(twin):
    """GELU's form and epsilon are those of the whole model, its pooling MLP included."""
    pieces = in_numpy if twin == "numpy" else in_jax
    rng = np.random.default_rng(0)
    p = params.initialise(
        variants.Variant("x", 4, 8, 8, 2, 1), 0, image_size=8, channels=1, class_token=False
    )
    block = p["Transformer"]["encoderblock_0"]
    pool = {"probe": np.ones((1, 1, 8), "f4"), "LayerNorm_0": block["LayerNorm_0"]}
    pool |= {"MultiHeadDotProductAttention_0": block["MultiHeadDotProductAttention_1"]}
    p |= {"MAPHead_0": tree_map(np.copy, pool | {"MlpBlock_0": block["MlpBlock_3"]})}
    del p["head"]
    images, options = (
        rng.standard_normal((2, 8, 8, 1)).astype("f4"),
        {"gelu_form": "erf", "epsilon": 0.3},
    )
    out = {}
    y = pieces.vit(p, images, out=out, **options)
    pooled = pieces.attention_pool(p["MAPHead_0"], out["encoded"], **options)
    y, pooled = (a[0] if twin == "numpy" else a for a in (y, pooled))
    np.testing.assert_allclose(y, pooled, rtol=1e-6)


def test_small_things():
    """Integers of NumPy, lists of labels, and a head that looks at the class token alone."""
    assert pair(np.int64(4)) == (4, 4)
    np.testing.assert_array_equal(in_jax.smooth_labels([0, 2], 3), np.eye(3)[[0, 2]])
    with pytest.raises(ValueError, match="label smoothing 2 must be"):
        in_jax.smooth_labels([0], 3, 2)
    attention = np.zeros((1, 1, 2, 5, 5))
    attention[:, :, 0, :, 0] = 1
    attention[:, :, 1] = 0.2
    distances = attention_maps.attention_distance(attention, (2, 2), 16)[0, 0]
    assert distances[0] == 0
    assert distances[1] == pytest.approx(16 * (2 + np.sqrt(2)) / 4)
    table = np.ones((1, 5, 3))
    table[0, 1] = 0
    similarity = attention_maps.position_similarity(table, (2, 2))
    assert similarity[0, 0].tolist() == [[0, 0], [0, 0]]
    assert similarity[0, 1, 1, 1] == pytest.approx(1)
