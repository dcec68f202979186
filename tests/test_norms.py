"""LayerNorm (cases NRM-03 to NRM-06)."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minivit import in_jax, in_numpy


def normalise(twin, x, scale=1.0, bias=0.0, **options):
    x = np.asarray(x)
    ones = np.ones(x.shape[-1], x.dtype)
    p = {"scale": ones * x.dtype.type(scale), "bias": ones * x.dtype.type(bias)}
    if twin == "numpy":
        return in_numpy.layer_norm(p, x, **options)[0]
    return np.asarray(in_jax.layer_norm(jax.tree.map(jax.numpy.asarray, p), x, **options))


TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])


@TWINS
@pytest.mark.parametrize(
    ("epsilon", "value"), [(None, 0.70710678), (1e-5, 0.30151134), (1e-12, 0.9999995)]
)
def test_epsilon(twin, epsilon, value):
    """The official 1e-6 is the default; on small input the three in use differ."""
    options = {} if epsilon is None else {"epsilon": epsilon}
    y = normalise(twin, np.array([-1e-3, 1e-3], "float32"), **options)
    np.testing.assert_allclose(y, [-value, value], rtol=1e-6)


@TWINS
def test_large_mean(twin):
    """E[x^2] - E[x]^2 would be -8 here in float32."""
    y = normalise(twin, np.array([10001, 10002, 10003, 10004], "float32"))
    np.testing.assert_allclose(y, [-1.341640, -0.447213, 0.447213, 1.341640], atol=1e-6)


@TWINS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [0, 7, 1e4])
def test_constant_row(twin, dtype, value):
    """Zero variance leaves the bias, exactly, and a finite gradient."""
    x = np.full((2, 8), value, dtype)
    np.testing.assert_array_equal(normalise(twin, x, 2, 0.25), np.full((2, 8), 0.25, dtype))
    p = {"scale": np.ones(8, dtype), "bias": np.zeros(8, dtype)}
    _, back = in_numpy.layer_norm(p, x)
    assert np.isfinite(back(np.arange(16, dtype=dtype).reshape(2, 8))[1]).all()
    _, back = jax.vjp(in_jax.layer_norm, p, x)
    assert np.isfinite(back(np.arange(16, dtype=dtype).reshape(2, 8))[1]).all()


@TWINS
def test_population_variance(twin):
    """Divided by n, not n - 1."""
    y = normalise(twin, np.array([1, 2, 3, 4], "float32"))
    np.testing.assert_allclose(y, [-1.341640, -0.447214, 0.447214, 1.341640], atol=2e-6)


@given(arrays(np.float64, (3, 6), elements=st.floats(-100, 100)), st.floats(-50, 50))
def test_shift_changes_nothing(x, shift):
    """Adding a number to all features is invisible; a row has mean 0 and variance at most 1."""
    p = {"scale": np.ones(6), "bias": np.zeros(6)}
    y, _ = in_numpy.layer_norm(p, x)
    moved, _ = in_numpy.layer_norm(p, x + shift)
    # Where the row is nearly constant, epsilon 1e-6 enlarges the rounding of x by up to 1000.
    np.testing.assert_allclose(y, moved, atol=1e-9)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-10)
    assert (y.var(-1) <= 1 + 1e-12).all()


@given(arrays(np.float64, (2, 5), elements=st.floats(-3, 3)))
def test_gradient_is_orthogonal(dy):
    """No gradient flows along the two directions that normalisation removes."""
    x = np.random.default_rng(0).standard_normal((2, 5))
    y, back = in_numpy.layer_norm({"scale": np.ones(5), "bias": np.zeros(5)}, x, epsilon=0)
    _, dx = back(dy)
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-12)
    np.testing.assert_allclose((dx * y).sum(-1), 0, atol=1e-12)
