"""Lessons 0 to 6: the pieces of a Vision Transformer."""

import numpy as np

from .. import in_numpy, params, variants
from .judge import answers, checked, compared, generator, small_numbers


def patchify_loops(images, p):  # [B, height, width, C] -> [B, N, P*P*C]
    """The specification: patches row by row; inside a patch rows, columns, channels."""
    batch, height, width, channels = images.shape
    columns = width // p
    result = np.empty((batch, height // p * columns, p * p * channels), images.dtype)
    for b, y, x, c in np.ndindex(images.shape):
        n = y // p * columns + x // p
        result[b, n, (y % p * p + x % p) * channels + c] = images[b, y, x, c]
    return result


def patchify(yours):
    """Lesson 1: `yours(images, p)`, [B, height, width, C] -> [B, N, P*P*C]."""
    from hypothesis import strategies as st

    def judge(case):
        batch, rows, columns, p, channels = case
        shape = (batch, rows * p, columns * p, channels)
        images = np.arange(np.prod(shape), dtype=float).reshape(shape)
        words = f"for images of shape {list(shape)}, numbered 0, 1, 2, …, and patches of {p}x{p}"
        return words, compared(yours, (images, p), patchify_loops(images, p))

    sides = st.tuples(*(st.integers(1, most) for most in (2, 3, 3, 3, 3)))
    return checked("patchify", sides, judge)


def softmax(yours):
    """Lesson 4: `yours(s)`, [..., N] -> [..., N], safe for large scores."""
    from hypothesis import strategies as st

    def judge(rows):
        s = np.array(rows, float)
        return f"for the scores {rows}", compared(yours, (s,), in_numpy.softmax(s)[0])

    def nested(shape):
        if not shape:
            return st.integers(-2000, 2000)
        return st.lists(nested(shape[1:]), min_size=shape[0], max_size=shape[0])

    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    return checked("softmax", shapes.flatmap(nested), judge)


def attention_loops(q, k, v):  # 3 x [N, K] -> [N, K]
    """The specification for one head: each query in turn, each key in turn."""
    mixed = np.zeros_like(v)
    for i in range(len(q)):
        scores = [q[i] @ k[j] / np.sqrt(q.shape[1]) for j in range(len(k))]
        weights = np.exp(scores - max(scores))
        weights /= weights.sum()
        for j in range(len(v)):
            mixed[i] += weights[j] * v[j]
    return mixed


def attention(yours):
    """Lesson 4: `yours(q, k, v)`, each [B, H, N, K] -> [B, H, N, K]."""
    from hypothesis import strategies as st

    def judge(case):
        *shape, seed = case
        q, k, v = given = small_numbers(seed, (3, *shape))
        expected = np.array(
            [[attention_loops(*head) for head in zip(*rest)] for rest in zip(q, k, v)]  # noqa: B905
        )
        words = f"for q, k and v of shape {shape}"
        if given.size <= 12:
            words += f", q = {q.tolist()}, k = {k.tolist()}, v = {v.tolist()}"
        return words, compared(yours, (q, k, v), expected)

    sides = st.tuples(*(st.integers(1, most) for most in (2, 3, 4, 3)), st.integers(0, 99))
    return checked("attention", sides, judge)


def softmax_back(yours):
    """Lesson 5: `yours(weights, dweights)`, 2 x [..., N] -> gradient of the scores [..., N]."""
    from hypothesis import strategies as st

    def judge(case):
        shape, seed = case
        scores, dweights = small_numbers(seed, (2, *shape))
        weights, back = in_numpy.softmax(scores)
        words = f"for weights of shape {shape}"
        if weights.size <= 4:
            words += f", {weights.round(4).tolist()}, and their gradient {dweights.tolist()}"
        return words, compared(yours, (weights, dweights), back(dweights))

    shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    return checked("softmax_back", st.tuples(shapes, st.integers(0, 99)), judge)


SHAPES = ("patches", "tokens", "scores")


def shapes(yours, images=(2, 28, 28, 1), patch=7, width=64, classes=10):
    """Lesson 0: three shapes of a ViT with a class token, as tuples: patches, tokens, scores."""
    batch, height, width_of_image, channels = images
    count = height // patch * (width_of_image // patch)
    right = {
        "patches": (batch, count, patch * patch * channels),
        "tokens": (batch, count + 1, width),
        "scores": (batch, classes),
    }

    def judge(name):
        def tried():
            shape = answers(yours, SHAPES)[name].tolist()
            return None if shape == list(right[name]) else f"their shape is not {shape}"

        return f"for the {name}", tried

    return checked("shapes", list(SHAPES), judge)


def embed_loops(kernel, bias, images):  # [P, P, C, D], [D], [B, height, width, C] -> [B, N, D]
    """The specification: a convolution whose stride is its side, number by number."""
    p, _, _, width = kernel.shape
    batch, height, columns = images.shape[0], images.shape[1] // p, images.shape[2] // p
    result = np.empty((batch, height * columns, width))
    for b, n, d in np.ndindex(result.shape):
        top, left = n // columns * p, n % columns * p
        window = images[b, top : top + p, left : left + p]
        result[b, n, d] = (window * kernel[..., d]).sum() + bias[d]
    return result


def embed(yours):
    """Lesson 2: `yours(kernel, bias, images)`, as `embed_loops` takes them -> [B, N, D]."""
    from hypothesis import strategies as st

    def judge(case):
        batch, rows, columns, p, channels, width, seed = case
        rng, shape = generator(seed), (batch, rows * p, columns * p, channels)
        kernel, bias = rng.standard_normal((p, p, channels, width)), rng.standard_normal(width)
        images = rng.standard_normal(shape)
        words = f"for images of shape {list(shape)} and a kernel of {list(kernel.shape)}"
        return words, compared(yours, (kernel, bias, images), embed_loops(kernel, bias, images))

    sides = st.tuples(*(st.integers(1, most) for most in (2, 2, 3, 3, 3, 3, 99)))
    return checked("embed", sides, judge)


def layer_norm_back(yours):
    """Lesson 3: `yours(dnormal, normal, deviation)`, 2 x [..., D], [..., 1] -> [..., D]."""
    from hypothesis import strategies as st

    def judge(case):
        rows, width, seed = case
        x, dnormal = generator(seed).standard_normal((2, rows, width))
        p = {"scale": np.ones(width), "bias": np.zeros(width)}
        normal, back = in_numpy.layer_norm(p, x)
        deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        words = f"for tokens of shape {[rows, width]}"
        # Dividing by a small deviation enlarges rounding.
        tolerance = 1e-8 / deviation.min()
        given = (dnormal, normal, deviation)
        return words, compared(yours, given, back(dnormal)[1], tolerance)

    sides = st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(0, 99))
    return checked("layer_norm_back", sides, judge)


def gelu_slope(yours):
    """Lesson 3: `yours(x)`, the derivative of GELU's tanh form, [...] -> [...]."""
    from hypothesis import strategies as st

    def judge(values):
        x = np.array(values, float) / 4
        _, back = in_numpy.gelu(x)
        return f"for x = {x.tolist()}", compared(yours, (x,), back(np.ones_like(x)))

    return checked("gelu_slope", st.lists(st.integers(-20, 20), min_size=1, max_size=3), judge)


def encoder_block(yours):
    """Lesson 6: `yours(p, x)`, with the names of a block's parameters, [B, N, D] -> [B, N, D]."""
    from hypothesis import strategies as st

    def judge(case):
        batch, tokens, heads, seed = case
        rng, sizes = generator(seed), variants.Variant("small", 4, 2 * heads, 5, heads, 1)
        p = params.initialise(sizes, seed, image_size=4, channels=1)["Transformer"]
        # Every array is drawn, so that no bias or scale hides by being zero or one.
        p = params.tree_map(lambda leaf: rng.standard_normal(leaf.shape), p["encoderblock_0"])
        x = rng.standard_normal((batch, tokens, 2 * heads))
        expected, _ = in_numpy.encoder_block(p, x)
        return f"for tokens of shape {list(x.shape)}", compared(yours, (p, x), expected, 1e-8)

    sides = st.tuples(*(st.integers(1, most) for most in (2, 3, 3, 99)))
    return checked("encoder_block", sides, judge)


COUNTED = ("B/16", "L/16", "H/14")


def parameter_count(yours):
    """Lesson 6: `yours(variant)`, of images of 224x224x3 and 1000 classes -> number."""

    def judge(name):
        variant = variants.parse(name)
        right = variants.parameter_count(variant)
        return f"for ViT-{name}", compared(yours, (variant,), right, 0)

    return checked("parameter_count", list(COUNTED), judge)
