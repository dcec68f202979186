"""Softmax and attention (cases ATT-01 to ATT-13)."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minivit import in_jax, in_numpy, params, variants
from minivit.params import tree_map

attention = importlib.import_module("minivit.in_jax.attention")  # the function has its name
TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])


def attend(twin, p, x):
    """Output and weights."""
    out = {}
    if twin == "numpy":
        return in_numpy.attention(p, x, out=out)[0], out["attention"]
    y = in_jax.attention(tree_map(jnp.asarray, p), jnp.asarray(x), out=out)
    return np.asarray(y), np.asarray(out["attention"])


def identity(d, h, dtype="float32"):
    """Projections that change nothing."""
    kernel = np.eye(d, dtype=dtype).reshape(d, h, d // h)
    p = {n: {"kernel": kernel, "bias": np.zeros((h, d // h), dtype)} for n in ("query", "key")}
    p["value"] = p["key"]
    return p | {"out": {"kernel": kernel.reshape(h, d // h, d), "bias": np.zeros(d, dtype)}}


@TWINS
def test_scaled_by_the_head_width(twin):
    """ATT-01: 1 / sqrt(D / H), not 1 / sqrt(D)."""
    x = np.zeros((1, 2, 8), "float32")
    x[0, 0, 0] = 2
    _, weights = attend(twin, identity(8, 2), x)
    np.testing.assert_allclose(weights[0, 0, 0], [0.880797, 0.119203], atol=1e-6)


@given(arrays(np.float64, (2, 4, 8), elements=st.floats(-5, 5)))
def test_rows_sum_to_one(x):
    """ATT-02."""
    _, weights = attend("numpy", identity(8, 2, "float64"), x)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-14)
    assert (weights >= 0).all()


@TWINS
def test_float16_does_not_overflow(twin):
    """ATT-04: the raw product of q and k is 102400, beyond float16."""
    d = 64
    x = np.ones((1, 3, d), "float16")
    p = identity(d, 1, "float16")
    p["query"] = p["key"] = {
        "kernel": p["query"]["kernel"] * np.float16(40),
        "bias": np.zeros((1, d), "float16"),
    }
    y, weights = attend(twin, p, x)
    np.testing.assert_allclose(weights, 1 / 3, atol=1e-3)
    np.testing.assert_allclose(y, 1, atol=2e-3)


@TWINS
def test_softmax_of_extremes(twin):
    """ATT-05."""
    s = np.array([[1000, 1000, 0], [-1000, -1000, -1000], [3e38, 0, 0]], "float32")
    result = in_numpy.softmax(s)[0] if twin == "numpy" else in_jax.softmax(s)
    np.testing.assert_allclose(result, scipy.special.softmax(s, axis=-1), atol=1e-7)


@given(arrays(np.float64, (3, 5), elements=st.floats(-30, 30)), st.floats(-100, 100))
def test_softmax_shift(s, shift):
    """Adding a number to a row changes nothing, and no gradient flows along it."""
    a, back = in_numpy.softmax(s)
    # A shift rounds the scores by up to 1e-14.
    np.testing.assert_allclose(in_numpy.softmax(s + shift)[0], a, rtol=1e-12, atol=1e-16)
    np.testing.assert_allclose(back(s).sum(-1), 0, atol=1e-13)


@TWINS
def test_order_of_query_key_value(twin):
    """ATT-08: from the key names by einsum; any swap changes the result."""
    d, h = 4, 2
    numbers = iter(np.arange(1, 1000) / 50)

    def fill(*shape):
        return np.array([next(numbers) for _ in range(np.prod(shape))]).reshape(shape)

    p = {n: {"kernel": fill(d, h, 2), "bias": fill(h, 2)} for n in ("query", "key", "value")}
    p["out"] = {"kernel": fill(h, 2, d), "bias": fill(d)}
    x = np.eye(d)[None]

    def spec(q, k, v):
        q, k, v = (np.einsum("nd,dhk->nhk", x[0], p[n]["kernel"]) + p[n]["bias"] for n in (q, k, v))
        weights = scipy.special.softmax(np.einsum("qhk,shk->hqs", q, k) / np.sqrt(2), axis=-1)
        y = np.einsum("hqs,shk->qhk", weights, v)
        return np.einsum("nhk,hkd->nd", y, p["out"]["kernel"]) + p["out"]["bias"]

    with jax.enable_x64(True):
        y, _ = attend(twin, p, x)
    np.testing.assert_allclose(y[0], spec("query", "key", "value"), rtol=1e-12)
    for swapped in (
        ("key", "query", "value"),
        ("value", "key", "query"),
        ("query", "value", "key"),
    ):
        assert not np.allclose(y[0], spec(*swapped), rtol=1e-3)


@TWINS
def test_permutation_equivariance(twin):
    """Attention does not know order: permuted tokens give permuted outputs."""
    rng = np.random.default_rng(0)
    fresh = params.initialise(variants.Variant("x", 1, 8, 8, 2, 1), rng, image_size=2)
    p = fresh["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
    x, order = rng.standard_normal((2, 6, 8)), rng.permutation(6)
    with jax.enable_x64(True):
        y, _ = attend(twin, p, x)
        permuted, _ = attend(twin, p, x[:, order])
    np.testing.assert_allclose(permuted, y[:, order], atol=1e-14)


@pytest.mark.parametrize(("width", "heads"), [(10, 3), (8, 0), (8, 16)])
def test_heads_must_divide_the_width(width, heads):
    """ATT-03."""
    with pytest.raises(ValueError, match=f"{heads} heads.*width {width}"):
        variants.Variant("x", 4, width, 8, heads, 1)


@pytest.mark.parametrize("tokens", [6, 7])
def test_fused_attention(tokens, monkeypatch):
    """Where cuDNN is, its kernel is asked for; here XLA answers: order of axes, padding, gradient.

    An odd number of tokens gets one that nobody may see: its values would show.
    """
    asked, plain = [], jax.nn.dot_product_attention

    def by_xla(q, k, v, *, implementation, **lengths):
        asked.append((implementation, q.shape, set(lengths)))
        return plain(q, k, v, implementation="xla", **lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, tokens, 8)).astype("float32")
    whole, back = jax.vjp(lambda *x: in_jax.scaled_dot_product(*x)[0], q, k, v)
    fused, back_fused = jax.vjp(attention.fused_dot_product, q, k, v)
    np.testing.assert_allclose(fused, whole, atol=2e-6)  # float32, values near 1
    for ours, theirs in zip(back_fused(whole), back(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)
    assert asked[0][:2] == ("cudnn", (2, tokens + tokens % 2, 3, 8))
    assert asked[0][2] == ({"query_seq_lengths", "key_value_seq_lengths"} if tokens % 2 else set())


class Device:
    """What JAX says of a device."""

    def __init__(self, platform, compute_capability=None):
        self.platform = platform
        if compute_capability:
            self.compute_capability = compute_capability


@pytest.mark.parametrize(
    ("dtype", "width", "device", "expected"),
    [
        ("bfloat16", 64, Device("gpu", "9.0"), True),
        ("float16", 128, Device("gpu", "8.0"), True),
        ("bfloat16", 64, Device("gpu", "10.3"), True),
        ("float32", 64, Device("gpu", "9.0"), False),
        ("bfloat16", 60, Device("gpu", "9.0"), False),
        ("bfloat16", 136, Device("gpu", "9.0"), False),
        ("bfloat16", 64, Device("gpu", "7.5"), False),
        ("bfloat16", 64, Device("gpu", "gfx942"), False),
        ("bfloat16", 64, Device("cpu"), False),
        ("bfloat16", 64, Device("tpu"), False),
    ],
)
def test_where_attention_is_fused(dtype, width, device, expected, monkeypatch):
    """cuDNN's own limits; whoever wants the weights, or chunks, gets them all the same."""
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(attention, "fused_dot_product", lambda q, k, v: v * jnp.nan)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x))
    p = tree_map(lambda x: x.astype(dtype), identity(2 * width, 2))
    x = jnp.ones((1, 3, 2 * width), dtype)
    assert bool(jnp.isnan(in_jax.attention(p, x)).any()) == expected
    for options in ({"out": {}}, {"chunk": 0}, {"chunk": 2}):
        assert not jnp.isnan(in_jax.attention(p, x, **options)).any()
