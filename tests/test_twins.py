"""Every piece, NumPy against JAX: output and all gradients, float64 and float32."""

import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from minivit import in_jax, in_numpy, masking, params, variants
from minivit.params import flatten, tree_map

VARIANT = variants.Variant("small", patch=4, width=12, mlp=20, heads=3, blocks=2)
HYBRID = replace(VARIANT, patch=1, stem=(2, 1), stem_width=4)
RESNET = variants.ResNet("small", units=(2, 1), width=4)
# Permutations, each the gradient of the other (test_patches), and constants: no `back`.
PLAIN = {"patchify", "unpatchify", "guess", "smooth_labels", "sincos2d", "resize_kernel"}


def model(rng, **options):
    """Parameters of a small ViT, nothing at a trivial value."""
    size = {"image_size": (8, 12), "channels": 2, "classes": 5}
    tree = params.initialise(VARIANT, 0, **(size | options))
    return tree_map(lambda leaf: rng.normal(scale=0.5, size=leaf.shape), tree)


def cases():
    """Name of a piece, its arguments, its options. Images are not square, batches not one."""
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    p = model(rng, representation=7)
    block = p["Transformer"]["encoderblock_0"]
    x, images = draw((3, 7, 12)), draw((3, 8, 12, 2))
    targets = in_numpy.smooth_labels([0, 4, 2], 5, 0.1, "float64")
    soft = rng.dirichlet(np.ones(5), 3)
    map_head = {"probe": draw((1, 1, 12)), "LayerNorm_0": block["LayerNorm_0"]}
    map_head["MultiHeadDotProductAttention_0"] = block["MultiHeadDotProductAttention_1"]
    map_head["MlpBlock_0"] = block["MlpBlock_3"]
    chosen = masking.draw_corruption(
        np.random.default_rng(0), 3, 6, share=0.7, parts=(0.4, 0.4, 0.2)
    )
    fates = chosen.masked, chosen.source
    labels = rng.integers(0, 4, (3, 6, 2))
    maskable = {name: value for name, value in p.items() if name not in ("head", "pre_logits")}
    maskable |= {"mask": draw((1, 1, 12)), "prediction": block["MlpBlock_3"]["Dense_0"]}
    colors = maskable | {"prediction": {"kernel": draw((12, 8)), "bias": draw(8)}}
    pixels = maskable | {"prediction": {"kernel": draw((12, 32)), "bias": draw(32)}}
    small = {"image_size": (24, 40), "channels": 2, "classes": 5}
    hybrid, resnet = (
        tree_map(
            lambda leaf: rng.normal(scale=0.5, size=leaf.shape), params.initialise(v, 0, **small)
        )
        for v in (HYBRID, RESNET)
    )
    units, photo = resnet["resnet"], draw((2, 24, 40, 2))
    registers = p | {"cls": draw((1, 3, 12)), "Transformer": dict(p["Transformer"])}
    del registers["Transformer"]["posembed_input"]
    return [
        ("patchify", (images, 4), {}),
        ("patchify", (images, (2, 3)), {}),
        ("unpatchify", (draw((3, 2, 3, 32)), 4), {}),
        ("unpatchify", (draw((3, 4, 32)), 4), {}),
        ("patch_embedding", (p["embedding"], images), {}),
        ("add_class_token", (p["cls"], x[:, 1:]), {}),
        ("add_positions", (p["Transformer"]["posembed_input"], x), {}),
        ("resize", (draw((1, 8, 5)), (4, 5)), {"prefix": 2, "old_grid": (2, 3)}),
        ("sincos2d", (2, 3, 12, "float64"), {}),
        ("resize_kernel", (draw((4, 3, 2, 5)), (3, 6)), {}),
        ("layer_norm", (block["LayerNorm_0"], x), {}),
        ("layer_norm", (block["LayerNorm_0"], x), {"epsilon": 0.1}),
        ("dense", (block["MlpBlock_3"]["Dense_0"], x), {}),
        ("gelu", (3 * x,), {}),
        ("gelu", (3 * x,), {"form": "erf"}),
        ("mlp", (block["MlpBlock_3"], x), {}),
        ("mlp", (block["MlpBlock_3"], x), {"gelu_form": "erf", "rate": 0.4}),
        ("softmax", (3 * x,), {}),
        ("scaled_dot_product", tuple(draw((2, 3, 5, 4)) for _ in range(3)), {}),
        ("scaled_dot_product", tuple(draw((1, 2, 40, 4)) for _ in range(3)), {}),
        ("attention", (block["MultiHeadDotProductAttention_1"], x), {}),
        ("dropout", (x,), {"rate": 0.4}),
        ("encoder_block", (block, x), {}),
        ("encoder_block", (block, x), {"rate": 0.4, "gelu_form": "erf", "epsilon": 1e-3}),
        ("encoder", (p["Transformer"], x), {}),
        ("encoder", (p["Transformer"], x), {"rate": 0.4, "epsilon": 1e-3, "gelu_form": "erf"}),
        ("cross_attention", (block["MultiHeadDotProductAttention_1"], x[:, :2], x), {}),
        ("attention_pool", (map_head, x), {}),
        ("pool", (x,), {}),
        ("pool", (x,), {"class_token": False}),
        ("pre_logits", (p["pre_logits"], x[:, 0]), {}),
        ("head", (p["head"], draw((3, 7))), {}),
        ("vit", (p, images), {}),
        ("vit", (p, images), {"rate": 0.4, "gelu_form": "erf"}),
        ("vit", (model(rng, class_token=False), images), {}),
        ("vit", (model(rng, positions=False, classes=None), images), {}),
        ("vit", (model(rng, class_token=False) | {"MAPHead_0": map_head}, images), {}),
        ("attention_pool", (map_head, x), {"gelu_form": "erf", "epsilon": 0.3}),
        ("vit", (registers, images), {}),
        ("vit", (p, images), {"mean": True}),
        ("classification", (p, images, targets), {}),
        ("classification", (p, images, soft), {"loss": "sigmoid", "rate": 0.4}),
        ("masked_colors", (colors, images, labels, chosen.corrupted, *fates), {}),
        ("masked_pixels", (pixels, images, chosen.corrupted, *fates), {"gelu_form": "erf"}),
        ("corrupt", (maskable["mask"], x[:, 1:], *fates), {}),
        ("masked_vit", (maskable, images, *fates), {}),
        ("over_corrupted", (draw((3, 6)), chosen.corrupted), {}),
        ("color_loss", (draw((3, 6, 8)), labels, chosen.corrupted), {}),
        ("pixel_loss", (draw((3, 6, 8)), draw((3, 6, 8)), chosen.corrupted), {}),
        ("conv2d", ({"kernel": draw((3, 2, 2, 5))}, images), {}),
        ("conv2d", ({"kernel": draw((3, 3, 2, 5))}, images), {"stride": 2}),
        ("conv2d", ({"kernel": draw((3, 3, 2, 5))}, images), {"stride": 2, "padding": 1}),
        ("conv2d", ({"kernel": draw((1, 1, 2, 5))}, images), {"stride": 2, "padding": 0}),
        ("standardise_kernel", (draw((3, 3, 2, 5)),), {}),
        ("standardise_kernel", (draw((3, 3, 2, 5)),), {"form": "bit"}),
        ("std_conv", ({"kernel": draw((3, 3, 2, 5))}, images), {"stride": 2}),
        ("max_pool", (images,), {}),
        ("max_pool", (draw((3, 7, 9, 2)),), {}),
        ("max_pool", (images - 1,), {"padding": 1}),
        ("group_norm", ({"scale": draw(64), "bias": draw(64)}, draw((3, 4, 5, 64))), {}),
        ("group_norm", ({"scale": draw(6), "bias": draw(6)}, draw((3, 4, 5, 6))), {"epsilon": 0.1}),
        ("relu", (x,), {}),
        ("bottleneck", (hybrid["block2"]["unit1"], draw((2, 6, 8, 16))), {"stride": 2}),
        ("bottleneck", (hybrid["block1"]["unit2"], draw((2, 3, 4, 16))), {}),
        ("stem", ({n: v for n, v in hybrid.items() if n[0] in "bcg" and n != "cls"}, photo), {}),
        ("embed", ({n: v for n, v in hybrid.items() if n[0] in "bceg" and n != "cls"}, photo), {}),
        ("embed", ({"embedding": p["embedding"]}, images), {}),
        ("vit", (hybrid, photo), {}),
        ("model", (hybrid, photo), {"rate": 0.4}),
        ("preactivation_unit", (units["block2"]["unit01"], draw((2, 6, 8, 16))), {"stride": 2}),
        ("preactivation_unit", (units["block1"]["unit02"], draw((2, 3, 4, 16))), {}),
        ("bit", (resnet, photo), {}),
        ("model", (resnet, photo), {}),
        ("smooth_labels", (np.array([0, 4, 2]), 5, 0.1, "float64"), {}),
        ("guess", (draw((3, 5)),), {}),
        ("softmax_cross_entropy", (5 * draw((3, 5)), targets), {}),
        ("sigmoid_cross_entropy", (5 * draw((3, 5)), targets), {}),
    ]


CASES = cases()


def pieces(twin):
    """All that a twin offers."""
    return {name for name, f in vars(twin).items() if callable(f)}


def ids(case):
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[2].items())])


@pytest.fixture(autouse=True)
def same_masks(monkeypatch):
    """The twins draw from different generators: here both drop by the shape alone."""

    def mask(rng, rate, shape, dtype):
        keep = np.random.default_rng(sum(shape)).random(shape) >= rate
        return (keep / (1 - rate)).astype(dtype)

    for twin in ("in_numpy", "in_jax"):
        monkeypatch.setattr(sys.modules[f"minivit.{twin}.dropout"], "keep_mask", mask)


def run_numpy(name, args, options):
    """Output, and what `back` makes of a random upstream gradient, also when called again."""
    options = options | ({"rng": np.random.default_rng(0)} if "rate" in options else {})
    result = getattr(in_numpy, name)(*args, **options)
    if name in PLAIN:
        return result, None, ()
    y, back = result[0], result[-1]
    dy = np.asarray(np.random.default_rng(1).standard_normal(y.shape)).astype(y.dtype)
    grads = tree_map(np.copy, {"grads": dict(enumerate(as_tuple(back(dy))))})["grads"]
    again = as_tuple(back(2 * dy))
    for i, grad in grads.items():
        for leaf, double in zip(flatten(grad).values(), flatten(again[i]).values(), strict=True):
            np.testing.assert_allclose(2 * leaf, double, rtol=1e-4, atol=1e-5)
    constants = {"softmax_cross_entropy": 1, "sigmoid_cross_entropy": 1, "resize": 1, "corrupt": 2}
    constants |= {"masked_vit": 2, "over_corrupted": 1, "color_loss": 2, "pixel_loss": 2}
    constants |= {"classification": 1, "masked_colors": 4, "masked_pixels": 3}
    assert len(grads) == len(args) - constants.get(name, 0)
    return y, dy, tuple(grads.values())


def as_tuple(grads):
    return grads if isinstance(grads, tuple) else (grads,)


def run_jax(name, args, options, dy):
    """The same through `jax.vjp`."""
    options = options | ({"rng": jax.random.key(0)} if "rate" in options else {})
    arrays = [i for i, a in enumerate(args) if isinstance(a, dict | np.ndarray)]

    def piece(*values):
        filled = list(args)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        y = getattr(in_jax, name)(*filled, **options)
        return y[0] if name == "scaled_dot_product" else y

    values = [args[i] for i in arrays]
    if name in PLAIN:
        return piece(*values), ()
    y, back = jax.vjp(jax.jit(piece), *values)
    return y, back(dy)


def compare(ours, theirs, tolerance):
    """Trees of arrays, relative to the largest entry of each, or to 0.1 where all are smaller."""
    ours, theirs = flatten(ours), flatten(theirs)
    assert list(ours) == list(theirs)
    for name, a in ours.items():
        b = np.asarray(theirs[name])
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(0.1, np.abs(b).max()))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_float64(case):
    """The same mathematics: only rounding, a few hundred times 1e-16, may differ."""
    y, dy, grads = run_numpy(*case)
    with jax.enable_x64(True):
        y_jax, grads_jax = run_jax(*case, dy)
        compare(y, y_jax, 1e-12)
        for ours, theirs in zip(grads, grads_jax, strict=False):
            compare(ours, theirs, 1e-11)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_float32(case):
    """What users see: float32 stays float32, and differs by some hundred roundings of 6e-8."""

    def single(a):
        return a.astype("float32") if getattr(a, "dtype", None) == "float64" else a

    name, args, options = case
    args = tuple("float32" if isinstance(a, str) else tree_map(single, a) for a in args)
    y, dy, grads = run_numpy(name, args, options)
    y_jax, grads_jax = run_jax(name, args, options, dy)
    compare(y, y_jax, 1e-5)
    for ours, theirs in zip(grads, grads_jax, strict=False):
        compare(ours, theirs, 4e-5)


def directional(name, args, options, index, direction, step=1e-6):
    """Slope along a direction by central differences: error of order step^2 and 1e-16 / step."""

    def value(sign):
        moved = list(args)
        moved[index] = tree_map(lambda a, d: a + sign * step * d, args[index], direction)
        y, dy, _ = run_numpy(name, tuple(moved), options)
        return (y * dy).sum()

    return (value(1) - value(-1)) / (2 * step)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] not in PLAIN], ids=ids)
def test_finite_differences(case):
    """The hand-derived gradients, without any other library to believe."""
    _, args, _ = case
    _, _, grads = run_numpy(*case)
    rng = np.random.default_rng(2)
    for index, grad in enumerate(grads):
        direction = tree_map(lambda a: rng.standard_normal(a.shape), args[index])
        slope = directional(*case, index, direction)
        pairs = zip(flatten(grad).values(), flatten(direction).values(), strict=True)
        assert slope == pytest.approx(sum((g * d).sum() for g, d in pairs), rel=1e-7, abs=1e-7)


def test_every_piece_has_a_case():
    """A new piece cannot be forgotten here, nor live in one twin alone.

    scan_blocks has no NumPy twin: it is held to the loop below. `ridge` gives two arrays and no
    gradient: test_evaluate.
    """
    tested = {name for name, _, _ in CASES} | {"ridge"}
    assert pieces(in_numpy) == tested
    assert pieces(in_jax) - {"scan_blocks"} == tested


def test_scanned_blocks_equal_the_loop():
    """Stacking the blocks changes neither the result nor the gradient."""
    p, images = next(c[1] for c in CASES if c[0] == "vit")
    with jax.enable_x64(True):
        loop, loop_back = jax.vjp(in_jax.vit, p, images)
        scan, scan_back = jax.vjp(in_jax.vit, params.stack_blocks(p), images)
        np.testing.assert_allclose(loop, scan, rtol=1e-12)
        dy = np.ones_like(loop)
        unstacked = params.unstack_blocks(tree_map(np.asarray, scan_back(dy)[0]))
        compare(tree_map(np.asarray, loop_back(dy)[0]), unstacked, 1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 10**9])
@pytest.mark.parametrize("p", [model(np.random.default_rng(3))], ids=["vit"])
def test_chunked_attention(chunk, p):
    """Queries in chunks, whether these divide the seven tokens or not: value and gradient."""
    images = np.random.default_rng(4).standard_normal((3, 8, 12, 2))
    with jax.enable_x64(True):
        whole, back = jax.vjp(partial(in_jax.vit, chunk=0), p, images)
        parts, back_parts = jax.vjp(jax.jit(partial(in_jax.vit, chunk=chunk)), p, images)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)
        dy = np.random.default_rng(5).standard_normal(whole.shape)
        for ours, theirs in zip(back_parts(dy), back(dy), strict=True):
            compare(tree_map(np.asarray, {"x": ours}), {"x": theirs}, 1e-11)


def test_many_tokens_go_by_chunks():
    """By default above a thousand tokens: no array of all weights is left in the program."""
    p = {"query": {"kernel": np.ones((4, 1, 4), "f4"), "bias": np.zeros((1, 4), "f4")}}
    p |= {n: p["query"] for n in ("key", "value")}
    p["out"] = {"kernel": np.ones((1, 4, 4), "f4"), "bias": np.zeros(4, "f4")}
    gradient = jax.grad(lambda p, x: in_jax.attention(p, x).sum(), argnums=(0, 1))
    for tokens in (1024, 1025):
        text = jax.jit(gradient).lower(p, np.ones((1, tokens, 4), "f4")).as_text()
        assert (f"{tokens}x{tokens}xf32" in text) == (tokens == 1024)


def test_intermediates_are_the_same():
    """Both twins record the same names and arrays, also under jit."""
    p, images = next(c[1] for c in CASES if c[0] == "vit")
    ours = {}
    in_numpy.vit(p, images, out=ours)

    def record(p, images):
        out = {}
        in_jax.vit(p, images, out=out)
        return out

    with jax.enable_x64(True):
        theirs = jax.jit(record)(p, images)
        compare(ours, theirs, 1e-12)
    assert {"tokens", "block1", "block0_attention", "encoded", "logits"} < set(ours)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_in_jax(dtype):
    """A half-precision model stays in its type and near the float32 one."""
    p, images = next(c[1] for c in CASES if c[0] == "vit")
    p, images = tree_map(lambda a: jax.numpy.asarray(a, "float32"), {"p": p, "x": images}).values()
    full = in_jax.vit(p, images)
    half = in_jax.vit(*(tree_map(partial(jax.numpy.asarray, dtype=dtype), t) for t in (p, images)))
    assert half.dtype == dtype
    # bfloat16 keeps 8 bits: after two blocks some per cent of the largest score.
    np.testing.assert_allclose(half.astype("float32"), full, atol=0.05 * np.abs(full).max())
