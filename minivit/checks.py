"""Checks of the course's exercises: right, not yet, or the smallest case that goes wrong.

A check takes the reader's function, compares it with a specification in plain loops on cases that
hypothesis finds and shrinks, and prints what it saw. It returns whether all was right, and raises
nothing: a notebook runs from top to bottom with no exercise done.
"""

import numpy as np

from . import in_numpy

NOT_YET = "not yet. Replace `return None` in this cell by your answer."


def checked(name, cases, judge):  # -> bool
    """Try `judge(case)` on many cases; say in words what the smallest failing one shows."""
    from hypothesis import Phase, find, settings
    from hypothesis.errors import Flaky, NoSuchExample

    def fault(case):
        try:
            return judge(case)
        except NotImplementedError:
            raise
        except Exception as error:  # a reader's function may raise anything
            return f"it raised {type(error).__name__}: {error}"

    quiet = settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
    )
    try:
        smallest = find(cases, lambda case: fault(case) is not None, settings=quiet)
    except NotImplementedError:
        print(f"{name}: {NOT_YET}")
        return False
    except Flaky:
        print(f"{name}: not right yet. The same input gives another answer each time")
        return False
    except NoSuchExample:
        print(f"{name}: right, in every case tried.")
        return True
    print(f"{name}: not right yet. The smallest case: {fault(smallest)}")
    return False


def answer(result):
    """What a function returned; nothing means that it was not written yet."""
    if result is None:
        raise NotImplementedError
    return np.asarray(result)


def difference(got, expected, tolerance=1e-9):  # -> words, or None where they agree
    """Shape first, then the first entry that differs."""
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)}, not {list(expected.shape)}"
    close = np.isclose(got, expected, rtol=0, atol=tolerance)
    if close.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    return f"entry {list(place)} is {got[place]:.6g}, not {expected[place]:.6g}"


def generator(seed):
    """Numbers that a case's seed decides."""
    return np.random.default_rng(seed)


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
        wrong = difference(answer(yours(images.copy(), p)), patchify_loops(images, p))
        return wrong and f"for images of shape {list(shape)} and patches of {p}x{p}, {wrong}"

    sides = st.tuples(*(st.integers(1, most) for most in (2, 3, 3, 3, 3)))
    return checked("patchify", sides, judge)


def softmax(yours):
    """Lesson 4: `yours(s)`, [..., N] -> [..., N], safe for large scores."""
    from hypothesis import strategies as st

    def judge(rows):
        s = np.array(rows, float)
        with np.errstate(all="ignore"):
            got = answer(yours(s.copy()))
        expected, _ = in_numpy.softmax(s)
        wrong = difference(got, expected, 1e-9)
        return wrong and f"for the scores {rows}, {wrong}"

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
        q, k, v = generator(seed).standard_normal((3, *shape))
        expected = np.array(
            [[attention_loops(*head) for head in zip(*rest)] for rest in zip(q, k, v)]  # noqa: B905
        )
        wrong = difference(answer(yours(q.copy(), k.copy(), v.copy())), expected, 1e-9)
        return wrong and f"for q, k and v of shape {list(shape)}, {wrong}"

    sides = st.tuples(*(st.integers(1, most) for most in (2, 3, 4, 3)), st.integers(0, 99))
    return checked("attention", sides, judge)


def softmax_back(yours):
    """Lesson 5: `yours(weights, dweights)`, 2 x [..., N] -> gradient of the scores [..., N]."""
    from hypothesis import strategies as st

    def judge(case):
        rows, n, seed = case
        s, dweights = generator(seed).standard_normal((2, rows, n))
        weights, back = in_numpy.softmax(s)
        got = answer(yours(weights.copy(), dweights.copy()))
        wrong = difference(got, back(dweights), 1e-9)
        return wrong and f"for {rows} rows of {n} weights, {wrong}"

    sides = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
    return checked("softmax_back", sides, judge)


def traced_once(yours):
    """Lesson 8: `yours(step)` runs some steps of a jitted function; it must be traced once."""
    import jax

    traces = []

    def body(x, rate):
        traces.append(1)
        return x - rate * x

    try:
        result = float(answer(yours(jax.jit(body))))
    except NotImplementedError:
        print(f"traced_once: {NOT_YET}")
        return False
    except Exception as error:  # a reader's function may raise anything
        print(f"traced_once: not right yet. It raised {type(error).__name__}: {error}")
        return False
    expected = float(np.prod([1 - 0.1 / (i + 1) for i in range(5)], dtype="float32"))
    if abs(result - expected) > 1e-5:
        print(f"traced_once: not right yet. The result is {result:.5f}, not {expected:.5f}")
        return False
    if len(traces) != 1:
        print(
            f"traced_once: not right yet. The result is right, but JAX traced {len(traces)} times"
        )
        return False
    print("traced_once: right, the result and the number of traces.")
    return True
