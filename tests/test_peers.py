"""The twins against numbers that other implementations computed (fixtures/README.md)."""

import jax
import numpy as np
import pytest

from minivit import in_jax, in_numpy
from minivit.params import flatten, tree_map

MODELS = ["vit_token", "vit_gap", "vit_rep", "vit_nopos", "vit_square"]
# Largest difference of vit_jax in float32 from its own float64: 5e-6, in blocks with values to 8.
SINGLE = {"rtol": 0, "atol": 2e-5}
DOUBLE = {"rtol": 0, "atol": 1e-10}


def run(twin, p, images, **options):
    """Logits and intermediates of a twin."""
    out = {}
    if twin == "numpy":
        in_numpy.vit(p, images, out=out, **options)
        return out
    return jax.tree.map(np.asarray, (in_jax.vit(p, images, out=out, **options), out)[1])


@pytest.mark.parametrize("twin", ["numpy", "jax"])
@pytest.mark.parametrize("model", MODELS)
def test_every_intermediate_of_vit_jax(peers, weights, model, twin):
    f = peers(model)
    out = run(twin, weights(f), f["in/images"])
    recorded = [name for name in f if name.startswith("out/") and name != "out/loss"]
    assert {"out/tokens", "out/block2_attention", "out/logits"} <= set(recorded)
    for name in recorded:
        np.testing.assert_allclose(out[name[4:]], f[name], err_msg=name, **SINGLE)


@pytest.mark.parametrize("twin", ["numpy", "jax"])
@pytest.mark.parametrize("model", MODELS)
def test_vit_jax_in_float64(peers, weights, model, twin):
    f = peers(model)
    with jax.enable_x64(True):
        out = run(twin, weights(f, "float64"), f["in/images"].astype("float64"))
    names = [n for n in f if n.startswith("out64/") and n != "out64/loss"]
    assert "out64/logits" in names
    for name in names:
        np.testing.assert_allclose(out[name[6:]], f[name], err_msg=name, **DOUBLE)


@pytest.mark.parametrize("twin", ["numpy", "jax"])
@pytest.mark.parametrize("form", ["erf", "tanh"])
def test_timm(peers, weights, form, twin):
    """timm's default is the erf form; with `gelu_tanh` it is the official model."""
    f = peers("vit_square")
    out = run(twin, weights(f), f["in/images"], gelu_form=form)
    names = [n for n in f if n.startswith(f"out_timm_{form}/")]
    assert names
    for name in names:
        np.testing.assert_allclose(out[name.split("/")[1]], f[name], err_msg=name, **SINGLE)


def loss_gradients(p, images, labels):
    """Gradients of the mean cross-entropy for weights and images, by hand."""
    logits, back = in_numpy.vit(p, images)
    targets = in_numpy.smooth_labels(labels, logits.shape[-1], dtype=logits.dtype)
    losses, back_loss = in_numpy.softmax_cross_entropy(logits, targets)
    return losses.mean(), *back(back_loss(np.full_like(losses, 1 / len(losses))))


def test_gradients_of_vit_jax(peers, weights):
    f = peers("vit_token")
    loss, dp, dimages = loss_gradients(weights(f), f["in/images"], f["in/labels"])
    np.testing.assert_allclose(loss, f["out/loss"], rtol=1e-6)
    ours = flatten(dp)
    assert {f"grad/{name}" for name in ours} == {n for n in f if n.startswith("grad/")}
    for name, grad in ours.items():
        peer = f[f"grad/{name}"]
        np.testing.assert_allclose(
            grad, peer, rtol=0, atol=2e-4 * np.abs(peer).max() + 1e-6, err_msg=name
        )
    np.testing.assert_allclose(dimages, f["grad_in/images_loss"], rtol=0, atol=1e-6)


def test_gradients_in_float64(peers, weights):
    """All 56 weights and the images, to 1e-9 of the largest entry."""
    f, exact = peers("vit_token"), peers("vit_token_grad64")
    p, images = weights(f, "float64"), f["in/images"].astype("float64")
    _, dp, dimages = loss_gradients(p, images, f["in/labels"])
    for name, grad in flatten(dp).items():
        peer = exact[f"grad64/{name}"]
        # A key's bias has gradient zero, up to rounding: hence the absolute part.
        np.testing.assert_allclose(
            grad, peer, rtol=0, atol=1e-9 * np.abs(peer).max() + 1e-12, err_msg=name
        )
    np.testing.assert_allclose(dimages, exact["grad_in64/images_loss"], rtol=0, atol=1e-9)
    _, back = in_numpy.vit(p, images)
    one_hot = in_numpy.smooth_labels(f["in/labels"], 7, dtype="float64")
    np.testing.assert_allclose(back(one_hot)[1], exact["grad_in64/images_logit"], rtol=0, atol=1e-9)


def test_the_loop_and_the_scan_see_the_same_weights(peers, weights):
    """A layout with stacked blocks gives the same logits in JAX."""
    from minivit.params import stack_blocks

    f = peers("vit_token")
    stacked = stack_blocks(weights(f))
    logits = in_jax.vit(tree_map(jax.numpy.asarray, stacked), f["in/images"])
    np.testing.assert_allclose(logits, f["out/logits"], **SINGLE)
