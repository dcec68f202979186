"""Dense layers and GELU (case NRM-01), and dropout (ATT-10, ATT-11)."""

import jax
import numpy as np
import pytest
import scipy.special

from minivit import in_jax, in_numpy

X = np.array([-3, -1, -0.5, 0, 0.5, 1, 3])
ERF = [-0.00404969, -0.15865525, -0.15426877, 0, 0.34573123, 0.84134475, 2.99595031]
TANH = [-0.00363739, -0.15880801, -0.15428599, 0, 0.34571401, 0.84119199, 2.99636261]


@pytest.mark.parametrize(("form", "values"), [("erf", ERF), ("tanh", TANH)])
def test_gelu_forms(form, values):
    y, _ = in_numpy.gelu(X, form)
    np.testing.assert_allclose(y, values, atol=1e-8)
    single = X.astype("float32")
    # The twins differ by float32's rounding of values up to 3.
    np.testing.assert_allclose(in_numpy.gelu(single, form)[0], in_jax.gelu(single, form), atol=5e-7)


def test_gelu_against_scipy():
    """The standard library's erf is SciPy's; the two forms part by at most 4.7324e-4."""
    x = np.linspace(-6, 6, 4001)
    exact, _ = in_numpy.gelu(x, "erf")
    np.testing.assert_allclose(exact, x * scipy.special.ndtr(x), atol=1e-15)
    gap = np.abs(exact - in_numpy.gelu(x)[0])
    assert gap.max() == pytest.approx(4.7324e-4, abs=1e-8)
    assert abs(x[gap.argmax()]) == pytest.approx(2.699, abs=2e-3)


@pytest.mark.parametrize("twin", [in_numpy, in_jax], ids=["numpy", "jax"])
def test_wrong_arguments(twin):
    with pytest.raises(ValueError, match=r"'relu'.*'tanh' or 'erf'"):
        twin.gelu(X, "relu")
    for rate in (-0.1, 1.0, 2):
        with pytest.raises(ValueError, match=f"rate {rate} must be"):
            twin.dropout(X, rate)


@pytest.mark.parametrize("twin", [in_numpy, in_jax], ids=["numpy", "jax"])
def test_dense_refuses_another_width(twin):
    """A kernel [8, 1] does not fit inputs of width 4, though its size would."""
    with pytest.raises((ValueError, TypeError), match=r"8"):
        twin.dense({"kernel": np.zeros((8, 1)), "bias": np.zeros(1)}, np.zeros((3, 4)))


def drop(twin, step, layer):
    """Ones after dropout at 0.5, for a step and a layer."""
    ones = np.ones(1000, "float32")
    if twin == "numpy":
        rng = np.random.default_rng([0, step])
        for _ in range(layer):
            in_numpy.dropout(ones, 0.5, rng)
        return in_numpy.dropout(ones, 0.5, rng)[0]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), layer)
    return np.asarray(in_jax.dropout(ones, 0.5, key))


@pytest.mark.parametrize("twin", ["numpy", "jax"])
def test_dropout_masks(twin):
    first = drop(twin, 0, 0)
    assert set(np.unique(first)) == {0.0, 2.0}
    assert first.mean() == pytest.approx(1, abs=0.13)  # 4 sigma of 1000 coins
    np.testing.assert_array_equal(first, drop(twin, 0, 0))
    assert (first != drop(twin, 1, 0)).any()
    assert (first != drop(twin, 0, 1)).any()


def test_dropout_gradient_is_the_mask():
    """What was dropped gets no gradient, what was kept the enlarged one."""
    x = np.random.default_rng(0).random((4, 5))
    y, back = in_numpy.dropout(x, 0.3, np.random.default_rng(1))
    np.testing.assert_array_equal(back(x), y)


def test_split_keys_differ():
    from minivit.in_jax.dropout import split

    keys = [jax.random.key_data(k) for k in split(jax.random.key(3), 8)]
    assert len({tuple(k.tolist()) for k in keys}) == 8
