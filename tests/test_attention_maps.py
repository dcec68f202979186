"""Rollout, distance, likeness of positions, main filters: closed forms and explicit loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import in_numpy, params, variants
from minivit.attention_maps import (
    attention_distance,
    gradient_rollout,
    main_filters,
    of_blocks,
    on_the_grid,
    patch_distances,
    position_similarity,
    rollout,
    rollout_layers,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("case", ["one_prefix", "three_prefix", "no_prefix"])
def test_fixture(peers, case):
    """Explicit float64 loops; 1e-12 is the manifest's tolerance."""
    f = peers("attention_maps")
    attention, out = f[f"in/{case}/attention"], {n: a for n, a in f.items() if case in n}
    grid, prefix = f[f"cfg/{case}/grid"].tolist(), int(f[f"cfg/{case}/prefix"])
    close = {"rtol": 0, "atol": 1e-12}
    layers = rollout_layers(attention)
    np.testing.assert_allclose(layers, out[f"out64/{case}/rollout_layer"], **close)
    for depth in (1, 2, 3):
        expected = out[f"out64/{case}/rollout_partial"][:, depth - 1]
        np.testing.assert_allclose(rollout(attention[:, :depth]), expected, **close)
    if prefix:
        got = on_the_grid(rollout(attention), grid, prefix)
        np.testing.assert_allclose(got, out[f"out64/{case}/rollout_map"], **close)
    for name, renormalise in (("renormalised", True), ("raw", False)):
        got = attention_distance(
            attention, grid, int(f["cfg/patch_size"]), prefix=prefix, renormalise=renormalise
        )
        np.testing.assert_allclose(got, out[f"out64/{case}/distance_{name}"], **close)
        np.testing.assert_allclose(got.mean(0), out[f"out64/{case}/distance_{name}_mean"], **close)


@pytest.mark.parametrize(
    ("fuse", "expected"),
    [
        ("max", [[0.730769, 0.269231], [0.25, 0.75]]),
        ("min", [[0.928571, 0.071429], [0.125, 0.875]]),
        ("mean", [[0.8, 0.2], [0.2, 0.8]]),
    ],
)
def test_rows_are_normalised(fuse, expected):
    """ROL-01."""
    heads = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.3, 0.7], [0.6, 0.4]]])
    np.testing.assert_allclose(rollout(heads[None, None], fuse)[0], expected, atol=1e-6)


def test_the_residual_takes_part():
    """ROL-02."""
    uniform = np.full((1, 1, 2, 3, 3), 1 / 3)
    np.testing.assert_allclose(rollout(uniform)[0], np.full((3, 3), 1 / 6) + np.eye(3) / 2)
    still = np.broadcast_to(np.eye(3), (1, 5, 2, 3, 3))
    np.testing.assert_array_equal(rollout(still)[0], np.eye(3))
    with pytest.raises(ValueError, match="unknown fusion 'median'; choose one of mean, max, min"):
        rollout(uniform, "median")


@given(st.sampled_from(["mean", "max", "min"]), st.integers(1, 4), st.integers(0, 99))
def test_rows_of_a_rollout_sum_to_one(fuse, depth, seed):
    scores = np.random.default_rng(seed).normal(scale=3, size=(2, depth, 3, 5, 5))
    weights, _ = in_numpy.softmax(scores)
    flow = rollout(weights, fuse)
    np.testing.assert_allclose(flow.sum(-1), 1, rtol=1e-12)
    assert (flow >= 0).all()
    order = np.random.default_rng(seed).permutation(3)
    np.testing.assert_allclose(rollout(weights[:, :, order], fuse), flow, rtol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_weights_before_dropout(rate):
    """ROL-04: what a model records sums to one, with dropout and without."""
    p = params.initialise(variants.Variant("s", 4, 8, 8, 2, 2), 0, image_size=8, channels=1)
    out, rng = {}, np.random.default_rng(0)
    in_numpy.vit(p, RNG.standard_normal((2, 8, 8, 1)), rate=rate, rng=rng, out=out)
    for i in range(2):
        np.testing.assert_allclose(out[f"block{i}_attention"].sum(-1), 1, rtol=1e-6)


def test_distances():
    """DIS-01 and DIS-02: closed forms, with the class token left out both ways."""
    far = (0 + 16 + 16 + 16 * 2**0.5) / 4
    identity = np.broadcast_to(np.eye(5), (1, 2, 3, 5, 5))
    np.testing.assert_array_equal(attention_distance(identity, (2, 2), 16), 0)
    uniform = np.full((1, 2, 3, 5, 5), 0.2)
    np.testing.assert_allclose(attention_distance(uniform, (2, 2), 16), far)
    raw = attention_distance(uniform, (2, 2), 16, renormalise=False)
    np.testing.assert_allclose(raw, 10.925483, atol=1e-6)
    assert raw.shape == (1, 2, 3)
    large = np.full((1, 1, 1, 196, 196), 1 / 196)
    got = attention_distance(large, (14, 14), 16, prefix=0)
    np.testing.assert_allclose(got, 116.492227, atol=1e-6)
    with pytest.raises(ValueError, match="5 tokens are not 1 and a grid of 2x3"):
        attention_distance(uniform, (2, 3), 16)


def test_distances_of_patches_that_are_no_squares():
    """Rows of 2 pixels, columns of 3."""
    d = patch_distances((2, 2), (2, 3))
    np.testing.assert_allclose(d[0], [0, 3, 2, 13**0.5])
    np.testing.assert_array_equal(d, d.T)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_likeness_of_positions(rows, columns, prefix, seed):
    """A cosine: one with itself, symmetric, blind to length."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((1, prefix + rows * columns, 6))
    likeness = position_similarity(table, (rows, columns), prefix=prefix)
    assert likeness.shape == (rows, columns, rows, columns)
    np.testing.assert_allclose(np.einsum("ijij->ij", likeness), 1)
    np.testing.assert_allclose(likeness, likeness.transpose(2, 3, 0, 1))
    longer = table * rng.uniform(1, 9, (1, table.shape[1], 1))
    np.testing.assert_allclose(
        position_similarity(longer, (rows, columns), prefix=prefix), likeness
    )


def test_main_filters():
    """A planted direction comes first; components are orthonormal, their signs settled."""
    planted = np.zeros((4, 4, 3))
    planted[1, 2, 0], planted[3, 3, 1] = 0.8, -0.6
    amounts = RNG.normal(scale=9, size=50)
    kernel = planted[..., None] * amounts + 0.01 * RNG.standard_normal((4, 4, 3, 50))
    found = main_filters(kernel + 5.0, 6)
    assert found.shape == (6, 4, 4, 3)
    np.testing.assert_allclose(found[0], planted, atol=0.01)
    flat = found.reshape(6, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(main_filters(-kernel, 1)[0], found[0], atol=1e-6)


def test_gradient_of_attention():
    """What `back` says of each weight is what a change of that weight alone does."""
    sizes = variants.Variant("s", 4, 8, 8, 2, 1)
    p = params.initialise(sizes, 0, image_size=8, channels=1)["Transformer"]["encoderblock_0"]
    p = params.tree_map(lambda x: RNG.normal(size=x.shape), p["MultiHeadDotProductAttention_1"])
    x, dy, out = RNG.standard_normal((2, 3, 8)), RNG.standard_normal((2, 3, 8)), {}
    _, back = in_numpy.attention(p, x, out=out)
    back(dy)
    value = np.einsum("bnd,dhk->bhnk", x, p["value"]["kernel"]) + p["value"]["bias"][:, None]

    def result(weights):  # [B, H, N, N] -> number
        mixed = np.einsum("bhqn,bhnk->bqhk", weights, value)
        return (np.einsum("bqhk,hkd->bqd", mixed, p["out"]["kernel"]) * dy).sum()

    # Linear in the weights, so a difference is exact up to rounding.
    for place in np.ndindex(out["attention"].shape):
        moved = out["attention"].copy()
        moved[place] += 1
        slope = result(moved) - result(out["attention"])
        np.testing.assert_allclose(out["attention_gradient"][place], slope, atol=1e-11)


def test_model_says_every_block_s_gradient():
    """Stacked in the order of the blocks; without `out` nothing is kept."""
    p = params.initialise(variants.Variant("s", 4, 8, 8, 2, 3), 0, image_size=8, channels=1)
    p["head"]["kernel"] = RNG.standard_normal(p["head"]["kernel"].shape)
    out = {}
    scores, back = in_numpy.vit(p, RNG.standard_normal((2, 8, 8, 1)), out=out)
    weights = of_blocks(out)
    assert weights.shape == (2, 3, 2, 5, 5)
    np.testing.assert_array_equal(weights[:, 2], out["block2_attention"])
    back(RNG.standard_normal(scores.shape))
    gradient = of_blocks(out, "attention_gradient")
    np.testing.assert_array_equal(gradient[:, 0], out["block0_attention_gradient"])
    # The class token alone is read: nobody else's row matters in the last block.
    assert (gradient[:, 2, :, 1:] == 0).all()
    assert (gradient[:, 2, :, 0] != 0).any()


@given(st.integers(1, 4), st.integers(0, 99))
def test_gradient_rollout(depth, seed):
    """Rows sum to one; what speaks against the class counts nothing, and no head comes first."""
    rng = np.random.default_rng(seed)
    weights, _ = in_numpy.softmax(rng.standard_normal((2, depth, 3, 5, 5)))
    gradient = rng.standard_normal(weights.shape)
    flow = gradient_rollout(weights, gradient)
    np.testing.assert_allclose(flow.sum(-1), 1, rtol=1e-12)
    assert (flow >= 0).all()
    order = rng.permutation(3)
    again = gradient_rollout(weights[:, :, order], gradient[:, :, order])
    np.testing.assert_allclose(again, flow, rtol=1e-12)
    still = gradient_rollout(weights, -np.abs(gradient))
    np.testing.assert_array_equal(still, np.broadcast_to(np.eye(5), still.shape))
    np.testing.assert_allclose(gradient_rollout(weights, np.ones_like(weights)), rollout(weights))
