"""Lessons 7 to 12: training, looking inside, other sizes, no labels, convolutions."""

import math

import numpy as np

from .. import attention_maps, masking, optim
from ..in_numpy import softmax
from .judge import answer, answers, checked, compared, difference, generator


def cosine(yours):
    """Lesson 7: `yours(step, base, warmup, total)`, the official schedule -> learning rate."""
    from hypothesis import strategies as st

    def judge(case):
        warmup, more, step = case
        total = warmup + more
        expected = optim.schedule(step, base=0.5, total=total, warmup=warmup)
        words = f"in step {step} of {total}, {warmup} of them warm-up, from a rate of 0.5"
        return words, compared(yours, (step, 0.5, warmup, total), expected)

    return checked("cosine", st.tuples(*3 * [st.integers(1, 12)]), judge)


ADAM = ("p", "mean", "square")


def adam(yours):
    """Lesson 7: `yours(p, g, mean, square, step, rate)` -> p, mean, square; steps count from 1."""
    from hypothesis import strategies as st

    def judge(case):
        steps, size, seed = case
        start, *gradients = generator(seed).standard_normal((steps + 1, size))
        tree, state = {"bias": start}, optim.start({"bias": start})
        for g in gradients:
            tree, state = optim.update(tree, {"bias": g}, state, 0.1)

        def tried():
            p, mean, square = start, np.zeros(size), np.zeros(size)
            for step, g in enumerate(gradients, 1):
                given = [each.copy() for each in (p, g, mean, square)]
                p, mean, square = answers(yours(*given, step, 0.1), ADAM).values()
            return difference(p, tree["bias"], 1e-11)

        return f"for the weights after {steps} step{'s' * (steps > 1)} at rate 0.1", tried

    return checked("adam", st.tuples(*(st.integers(1, n) for n in (4, 3, 99))), judge)


def traced_once(yours):
    """Lesson 8: `yours(step)` runs some steps of a jitted function; it must be traced once."""
    import jax

    def tried():
        traces = []

        def body(x, rate):
            traces.append(1)
            return x - rate * x

        result = float(answer(yours(jax.jit(body))))
        expected = float(np.prod([1 - 0.1 / (i + 1) for i in range(5)], dtype="float32"))
        if abs(result - expected) > 1e-5:
            return f"the result is {result:.5f}, but {expected:.5f} is right"
        if len(traces) != 1:
            return f"the result is right, but JAX traced {len(traces)} times"
        return None

    return checked("traced_once", [5], lambda steps: (f"in {steps} steps", tried))


def distance_loops(weights, grid, patch):  # [N, N] -> pixels
    """The specification: for each query the distance to each key, weighted; a mean over queries."""
    total = 0.0
    for i in range(len(weights)):
        for j in range(len(weights)):
            rows, columns = i // grid[1] - j // grid[1], i % grid[1] - j % grid[1]
            total += weights[i, j] * math.hypot(rows, columns) * patch
    return total / len(weights)


def attention_distance(yours):
    """Lesson 9: `yours(weights, grid, patch)`, [N, N], (rows, columns), P -> pixels."""
    from hypothesis import strategies as st

    def judge(case):
        rows, columns, patch, seed = case
        scores = generator(seed).normal(scale=2, size=(rows * columns, rows * columns))
        weights, _ = softmax(scores)
        expected = distance_loops(weights, (rows, columns), patch)
        words = f"for a grid of {rows}x{columns} patches of {patch} pixels"
        return words, compared(yours, (weights, (rows, columns), patch), expected)

    sides = st.tuples(*(st.integers(1, most) for most in (3, 4, 3, 99)))
    return checked("attention_distance", sides, judge)


def rollout(yours):
    """Lesson 9: `yours(attention)`, heads fused by their maximum, [L, H, N, N] -> [N, N]."""
    from hypothesis import strategies as st

    def judge(case):
        *shape, tokens, seed = case
        scores = generator(seed).normal(scale=2, size=(*shape, tokens, tokens))
        weights, _ = softmax(scores)
        expected = attention_maps.rollout(weights[None], "max")[0]
        words = f"for attention of shape {list(weights.shape)}"
        return words, compared(yours, (weights,), expected)

    return checked("rollout", st.tuples(*(st.integers(1, n) for n in (3, 2, 3, 99))), judge)


def resize_loops(values, new):  # [n, D] -> [new, D]
    """The specification: end points stay, between two neighbours a straight line."""
    old, result = len(values), np.empty((new, values.shape[1]))
    for i in range(new):
        place = i * (old - 1) / max(new - 1, 1)
        left = min(int(place), max(old - 2, 0))
        right, share = min(left + 1, old - 1), place - left
        result[i] = (1 - share) * values[left] + share * values[right]
    return result


def resize_row(yours):
    """Lesson 10: `yours(values, new)`, [n, D] -> [new, D], end points on end points."""
    from hypothesis import strategies as st

    def judge(case):
        old, new, seed = case
        values = generator(seed).standard_normal((old, 2))
        words = f"from {old} positions to {new}"
        return words, compared(yours, (values, new), resize_loops(values, new))

    return checked("resize_row", st.tuples(*(st.integers(2, n) for n in (6, 9, 99))), judge)


def mean_color(yours):
    """Lesson 11: `yours(patch)`, bytes [P, P, 3] -> label below 512, red highest."""
    from hypothesis import strategies as st

    # One colour all over shows what happens at the edges of the boxes.
    byte = st.sampled_from([0, 31, 32, 255]) | st.integers(0, 255)
    plain = st.tuples(byte, byte, byte).map(lambda color: 4 * list(color))
    mixed = st.lists(byte, min_size=12, max_size=12)

    def judge(pixels):
        patch = np.array(pixels, np.uint8).reshape(2, 2, 3)
        expected = masking.color_labels(patch[None], 2)[0, 0, 0]
        return f"for the pixels {patch.tolist()}", compared(yours, (patch,), expected, 0)

    return checked("mean_color", plain | mixed, judge)


def conv_loops(x, kernel, stride):  # [height, width, C], [K, K, C, F] -> [h, w, F]
    """The specification: "SAME" padding as TensorFlow and JAX have it, the odd pixel after."""
    k, filters = kernel.shape[0], kernel.shape[-1]
    size = [-(-n // stride) for n in x.shape[:2]]
    before = [max((m - 1) * stride + k - n, 0) // 2 for m, n in zip(size, x.shape, strict=False)]
    result = np.zeros((*size, filters))
    for y, z, f, i, j in np.ndindex(*size, filters, k, k):
        row, column = y * stride + i - before[0], z * stride + j - before[1]
        if 0 <= row < x.shape[0] and 0 <= column < x.shape[1]:
            result[y, z, f] += x[row, column] @ kernel[i, j, :, f]
    return result


def conv2d(yours):
    """Lesson 12: `yours(x, kernel, stride)`, [height, width, C], [3, 3, C, F] -> [h, w, F]."""
    from hypothesis import strategies as st

    def judge(case):
        stride, height, width, channels, seed = case
        rng = generator(seed)
        x = rng.standard_normal((height, width, channels))
        kernel = rng.standard_normal((3, 3, channels, 2))
        words = f"for a picture of shape {list(x.shape)} and stride {stride}"
        return words, compared(yours, (x, kernel, stride), conv_loops(x, kernel, stride))

    return checked("conv2d", st.tuples(*(st.integers(1, n) for n in (2, 6, 6, 2, 99))), judge)
