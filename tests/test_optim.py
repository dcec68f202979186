"""Optimiser, schedules, clipping: against optax and vit_jax, and cases OPT-01 to OPT-14."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minivit import optim, params, variants
from minivit.params import flatten, tree_map, unflatten

KINDS = pytest.mark.parametrize("kind", ["numpy", "jax"])


def arrays(kind, tree):
    return tree_map(jnp.asarray if kind == "jax" else np.asarray, tree)


jitted = jax.jit(optim.update, static_argnames=("rule", "clip", "keep", "weight_decay"))


def step(kind, *args, **options):
    """One step; in JAX jitted, as the engine runs it."""
    return (optim.update if kind == "numpy" else jitted)(*args, **options)


def trajectory(peers, kind, rates, **options):
    """Parameters and moments after each of the fixture's 12 steps."""
    f = peers("optim")
    p = arrays(kind, unflatten({n[10:]: a for n, a in f.items() if n.startswith("in/params/")}))
    grads = {n[9:]: a for n, a in f.items() if n.startswith("in/grads/")}
    state = optim.start(p, options.get("rule", "adamw"), average="keep" in options)
    for i, rate in enumerate(rates):
        g = arrays(kind, unflatten({name: a[i] for name, a in grads.items()}))
        p, state = step(kind, p, g, state, rate, **options)
        yield i, p, state


@KINDS
def test_sgd_is_optax(peers, kind):
    """Momentum 0.9; and with clipping under vit_jax's linear schedule."""
    f = peers("optim")
    for i, p, state in trajectory(peers, kind, 12 * [0.01], rule="sgd"):
        close(p, f, "out/sgd/params", i)
        close(state["momentum"], f, "out/sgd/momentum", i)
    rates = [optim.schedule(s, base=0.03, total=12, warmup=3, decay="linear") for s in range(12)]
    np.testing.assert_allclose(rates, f["in/schedule_linear"], atol=1e-8)
    for i, p, _ in trajectory(peers, kind, rates, rule="sgd", clip=1.0):
        close(p, f, "out/sgd_clip_linear/params", i)


@KINDS
def test_averages_are_optax(peers, kind):
    """Polyak averaging from the initial weights, decay 0.9."""
    f = peers("optim")
    for i, _, state in trajectory(peers, kind, 12 * [0.01], weight_decay=0.1, keep=0.9):
        close(state["average"], f, "out/ema_from_init", i)


def test_average_in_numbers():
    """OPT-15: a constant stays; 1 then 2, 3, 4 is 1.561; 0 copies, 1 freezes."""
    two = {"x": np.full(3, 2.0)}
    for keep in (0.0, 0.99, 1.0):
        np.testing.assert_array_equal(optim.polyak(two, two, keep)["x"], 2)
    average = {"x": np.ones(1)}
    for weight in (2.0, 3.0, 4.0):
        average = optim.polyak(average, {"x": np.array([weight])}, 0.9)
    assert average["x"][0] == pytest.approx(1.561)
    assert optim.polyak(average, two, 0.0)["x"][0] == 2
    assert optim.polyak(average, two, 1.0)["x"][0] == pytest.approx(1.561)


def test_average_warms_up():
    """(1 + t) / (10 + t), until the share that was asked for."""
    kept = [optim.warm_keep(t, 0.9999) for t in (0, 10, 89_990, 10**6)]
    assert kept == pytest.approx([0.1, 0.55, 89_991 / 90_000, 0.9999])
    assert optim.warm_keep(500, 0.0) == 0


def close(tree, peer, prefix, i):
    for name, leaf in flatten(tree).items():
        expected = peer[f"{prefix}/{name}"][i]
        bound = 5e-6 * np.maximum(1, np.abs(expected))  # measured between peers: 5e-7
        assert (np.abs(leaf - expected) <= bound).all(), (prefix, name, i)
        assert leaf.dtype == np.float32


@KINDS
def test_adamw_is_optax(peers, kind):
    """Moments too, through an all-zero gradient and one of norm 7e4; decay on kernels alone."""
    f = peers("optim")
    for i, p, state in trajectory(peers, kind, 12 * [0.01], weight_decay=0.1):
        close(p, f, "out/adamw/params", i)
        close(state["mean"], f, "out/adamw/mu", i)
        close(state["square"], f, "out/adamw/nu", i)


@KINDS
@pytest.mark.parametrize("peer", ["adamw_clip_cosine", "bigvision_clip_cosine"])
def test_clip_and_schedule_are_optax_and_big_vision(peers, kind, peer):
    f = peers("optim")
    rates = [optim.schedule(s, base=0.02, total=12, warmup=3) for s in range(12)]
    np.testing.assert_allclose(rates, f["in/schedule_cosine"], atol=1e-8)
    for i, p, _ in trajectory(peers, kind, rates, weight_decay=0.1, clip=1.0):
        close(p, f, f"out/{peer}/params", i)


def test_clipping_is_optax(peers):
    f = peers("optim")
    grads = {n[9:]: a for n, a in f.items() if n.startswith("in/grads/")}
    for i in range(12):
        clipped, norm = optim.clip_by_global_norm({n: a[i] for n, a in grads.items()}, 1.0)
        np.testing.assert_allclose(norm, f["out/clip/global_norm"][i], rtol=1e-6)
        close(unflatten(clipped), f, "out/clip/grads", i)


@pytest.mark.parametrize("total_warmup", [(20, 5), (20, 0), (5, 5)])
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_schedule_is_vit_jax(peers, total_warmup, decay):
    """The peer divides by zero where total equals warm-up: there, a pure ramp."""
    f = peers("schedules")
    total, warmup = total_warmup
    key = f"total{total}_warmup{warmup}"
    for s, expected in zip(f[f"in/steps_{key}"], f[f"out/{decay}/{key}"], strict=True):
        rate = optim.schedule(s, base=0.03, total=total, warmup=warmup, decay=decay)
        assert isinstance(rate, float)
        if total == warmup and s >= total:
            assert rate == 0.03
        else:
            assert rate == pytest.approx(expected, abs=1e-8)


def test_schedule_ends_where_it_is_told(peers):
    f = peers("schedules")
    expected = f["out/linear_end0.002/total20_warmup5"]
    options = {"base": 0.03, "total": 20, "warmup": 5, "decay": "linear", "end": 0.002}
    rates = [optim.schedule(s, **options) for s in f["in/steps_total20_warmup5"]]
    np.testing.assert_allclose(rates, expected, atol=1e-8)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("kind", [int, jnp.int32, np.int64])
def test_warmup_of_zero(decay, kind):
    """OPT-01."""
    rates = [optim.schedule(kind(s), base=1, total=10, decay=decay, end=0.0) for s in (0, 5, 10)]
    assert rates == pytest.approx([1, 0.5, 0])


def test_schedule_curve():
    """OPT-04, OPT-06: every value, and past the end the last one."""
    cosine = [0, 0.5, 1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060, 0, 0, 0]
    linear = [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0]
    for decay, values in (("cosine", cosine), ("linear", linear)):
        options = {"base": 1, "total": 10, "warmup": 2, "decay": decay, "end": 0.0}
        rates = [optim.schedule(s, **options) for s in range(13)]
        assert rates == pytest.approx(values, abs=1e-6)
        assert {optim.schedule(s, **options) for s in (10, 11, 15, 20, 1000)} == {rates[10]}


def test_schedule_never_exceeds_its_base():
    """Not even where the base is below the end of the linear decay."""
    for base in (0, 1e-6, 1e-3):
        assert max(optim.schedule(s, base=base, total=9, decay="linear") for s in range(12)) == base


def test_schedule_that_cannot_be():
    with pytest.raises(ValueError, match=r"11 steps.*10 steps"):
        optim.schedule(0, base=1, total=10, warmup=11)
    with pytest.raises(ValueError, match="'exponential'"):
        optim.schedule(0, base=1, total=10, decay="exponential")
    assert optim.schedule(3, base=1, total=10, warmup=10) == pytest.approx(0.3)  # OPT-02


@KINDS
def test_adam_in_numbers(kind):
    """OPT-08: bias correction, and epsilon outside the root."""
    p = arrays(kind, {"x": np.ones(1)})
    state = optim.start(p)
    with jax.enable_x64(True):
        for gradient, expected in ((1.0, 0.9), (-2.0, 0.9366103535)):
            p, state = step(kind, p, {"x": p["x"] * 0 + gradient}, state, 0.1)
            assert float(p["x"][0]) == pytest.approx(expected, abs=1e-7)
    p = arrays(kind, {"x": np.zeros(1, "float32")})
    p, _ = step(kind, p, {"x": p["x"] + np.float32(1e-8)}, optim.start(p), 1.0)
    assert float(p["x"][0]) == pytest.approx(-0.5, rel=1e-5)


@KINDS
def test_decay_rule(kind):
    """OPT-09, OPT-10: lr times decay, on kernels only; every leaf of a ViT is listed."""
    variant = variants.Variant("x", 2, 4, 8, 2, 2)
    p = params.initialise(variant, 0, image_size=4, channels=1, classes=3, representation=4)
    p = arrays(kind, tree_map(lambda leaf: leaf + np.float32(0.5), p))
    zero = tree_map(lambda leaf: leaf * 0, p)
    new, _ = step(kind, p, zero, optim.start(p), 0.1, weight_decay=0.1)
    still, _ = step(kind, p, zero, optim.start(p), 0.0, weight_decay=0.1)
    decayed = set()
    for name, before in flatten(p).items():
        np.testing.assert_array_equal(flatten(still)[name], before)
        if (flatten(new)[name] != before).any():
            np.testing.assert_allclose(flatten(new)[name], 0.99 * before, rtol=1e-6)
            decayed.add(name)
    attention = "MultiHeadDotProductAttention_1"
    inside = [f"{attention}/{n}/kernel" for n in ("query", "key", "value", "out")]
    inside += ["MlpBlock_3/Dense_0/kernel", "MlpBlock_3/Dense_1/kernel"]
    expected = {f"Transformer/encoderblock_{i}/{n}" for i in range(2) for n in inside}
    assert decayed == expected | {"embedding/kernel", "pre_logits/kernel", "head/kernel"}


def test_clipping_edges():
    """OPT-11, OPT-12: one factor for all leaves; zero gradients; limit 0 is off."""
    grads = {"a": np.array([3.0]), "b": np.array([4.0])}
    clipped, norm = optim.clip_by_global_norm(grads, 1)
    assert norm == 5
    np.testing.assert_allclose([clipped["a"][0], clipped["b"][0]], [0.6, 0.8])
    for limit in (5, 10, 0, None):
        same, _ = optim.clip_by_global_norm(grads, limit)
        np.testing.assert_array_equal([same["a"], same["b"]], [[3], [4]])
    same, _ = optim.clip_by_global_norm(grads, np.inf)
    np.testing.assert_array_equal(same["a"], [3])
    zero = {"a": np.zeros(2)}
    for limit in (1, 0):
        np.testing.assert_array_equal(optim.clip_by_global_norm(zero, limit)[0]["a"], 0)


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("clip", [0, 1.0])
def test_a_gradient_that_is_not_finite(kind, bad, clip):
    """OPT-14: nothing moves, the step is counted, and the next healthy one is as if first."""
    p = arrays(kind, {"a": np.ones(3, "float32"), "b": np.ones(2, "float32")})
    state = optim.start(p)
    broken = arrays(kind, {"a": np.array([0, bad, 0], "float32"), "b": np.ones(2, "float32")})
    healthy = arrays(kind, {"a": np.ones(3, "float32"), "b": np.ones(2, "float32")})
    skipped, after = step(kind, p, broken, state, 0.1, clip=clip)
    for name in ("a", "b"):
        np.testing.assert_array_equal(skipped[name], p[name])
        np.testing.assert_array_equal(after["mean"][name], state["mean"][name])
        np.testing.assert_array_equal(after["square"][name], state["square"][name])
    assert int(after["skipped"]) == 1
    assert float(after["mean_weight"]) == 0
    one, state_one = step(kind, p, healthy, state, 0.1, clip=1.0)
    two, state_two = step(kind, skipped, healthy, after, 0.1, clip=1.0)
    np.testing.assert_array_equal(one["a"], two["a"])
    assert int(state_two["skipped"]) == 1
    assert int(state_one["skipped"]) == 0


@KINDS
@pytest.mark.parametrize("rule", optim.RULES)
def test_weights_that_would_not_be_finite(kind, rule):
    """A step too large for float32 is skipped and counted too: no infinity is ever saved."""
    p = arrays(kind, {"a": -3e38 * np.ones(3, "float32")})
    state = optim.start(p, rule, average=True)
    steep = arrays(kind, {"a": 9 * np.ones(3, "float32")})
    kept, after = step(kind, p, steep, state, 3e38, rule=rule, keep=0.5)
    for tree in (kept, after["average"]):
        np.testing.assert_array_equal(tree["a"], p["a"])
    assert int(after["skipped"]) == 1


@pytest.mark.parametrize("rate", [np.float64(1e-3), 1e-3])
def test_float32_stays_float32(rate):
    """TRN-11: a NumPy scalar as the rate does not widen the weights; both kinds agree."""
    rng = np.random.default_rng(0)
    p = {"a": {"kernel": rng.standard_normal(5).astype("float32")}}
    ours, theirs = arrays("numpy", p), arrays("jax", p)
    states = [optim.start(ours), optim.start(theirs)]
    for _ in range(3):
        g = {"a": {"kernel": rng.standard_normal(5).astype("float32")}}
        options = {"weight_decay": 0.1, "clip": 1.0}
        ours, states[0] = step("numpy", ours, g, states[0], rate, **options)
        theirs, states[1] = step("jax", theirs, arrays("jax", g), states[1], rate, **options)
    for leaf in flatten({"p": ours, "m": states[0]["mean"], "v": states[0]["square"]}).values():
        assert leaf.dtype == np.float32
    np.testing.assert_allclose(ours["a"]["kernel"], theirs["a"]["kernel"], atol=1e-6)
