"""Each check passes the solution, fails planted wrong answers in words, and waits for none."""

import numpy as np
import pytest

from minivit import attention_maps, checks, in_numpy, masking


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax(q @ k.swapaxes(-1, -2) * scale) @ v


def patchify(images, p):
    b, h, w, c = images.shape
    return images.reshape(b, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(b, -1, p * p * c)


def channels_first(images, p):
    b, h, w, c = images.shape
    grid = images.reshape(b, h // p, p, w // p, p, c).transpose(0, 1, 3, 5, 2, 4)
    return grid.reshape(b, -1, p * p * c)


def run_five(step, x=1.0):
    for i in range(5):
        x = step(x, 0.1 / (i + 1))
    return x


def embed(kernel, bias, images):
    patches = patchify(images, len(kernel))
    return patches @ kernel.reshape(-1, len(bias)) + bias


def channels_scrambled(kernel, bias, images):
    patches = patchify(images, len(kernel))
    return patches @ kernel.transpose(2, 0, 1, 3).reshape(-1, len(bias)) + bias


def layer_norm_back(dnormal, normal, deviation):
    shift = dnormal.mean(-1, keepdims=True)
    stretch = (dnormal * normal).mean(-1, keepdims=True)
    return (dnormal - shift - normal * stretch) / deviation


def gelu_slope(x, chained=True):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2) if chained else 1
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * inner


def block(p, x, kept=True):
    normal, _ = in_numpy.layer_norm(p["LayerNorm_0"], x)
    x = x + in_numpy.attention(p["MultiHeadDotProductAttention_1"], normal)[0]
    normal, _ = in_numpy.layer_norm(p["LayerNorm_2"], x)
    return kept * x + in_numpy.mlp(p["MlpBlock_3"], normal)[0]


def post_norm(p, x):
    x = x + in_numpy.attention(p["MultiHeadDotProductAttention_1"], x)[0]
    x, _ = in_numpy.layer_norm(p["LayerNorm_0"], x)
    return in_numpy.layer_norm(p["LayerNorm_2"], x + in_numpy.mlp(p["MlpBlock_3"], x)[0])[0]


def parameter_count(v, biases=True, tokens=1):
    d, m = v.width, v.mlp
    per_block = 4 * (d * d + biases * d) + d * m + biases * m + m * d + biases * d + 4 * d
    table = ((224 // v.patch) ** 2 + tokens) * d
    return 3 * v.patch**2 * d + d + d + table + v.blocks * per_block + 2 * d + 1000 * d + 1000


def adam(p, g, mean, square, step, rate, corrected=True):
    mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
    m, v = mean / (1 - 0.9**step), square / (1 - 0.999**step)
    if not corrected:
        m, v = mean, square
    return p - rate * m / (np.sqrt(v) + 1e-8), mean, square


def cosine(step, base, warmup, total):
    progress = np.clip((step - warmup) / (total - warmup), 0, 1)
    return base * 0.5 * (1 + np.cos(np.pi * progress)) * min(1, step / warmup)


def attention_distance(weights, grid, patch):
    places = np.indices(grid).reshape(2, -1).T * patch
    apart = np.sqrt(((places[:, None] - places) ** 2).sum(-1))
    return (weights * apart).sum(-1).mean()


def rollout(attention, keepdims=True, start=1.0):
    result = np.eye(attention.shape[-1])
    for layer in attention:
        flow = layer.max(0) + start * np.eye(len(result))
        result = flow / flow.sum(-1, keepdims=keepdims) @ result
    return result


def resize_row(values, new, half=False):
    places = np.arange(new) * (len(values) - 1) / (new - 1)
    if half:
        places = ((np.arange(new) + 0.5) * len(values) / new - 0.5).clip(0, len(values) - 1)
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(len(values))))
    return weights @ values


def mean_color(patch, rounded=False):
    total, size = patch.reshape(-1, 3).astype(int).sum(0), patch.size // 3
    levels = np.rint(total / size / 255 * 7).astype(int) if rounded else total // (size * 32)
    return levels @ [64, 8, 1]


def conv2d(x, kernel, stride, symmetric=False):
    if symmetric:
        x, padding = x[None], 1
        return in_numpy.conv2d({"kernel": kernel}, x, stride=stride, padding=padding)[0][0]
    return in_numpy.conv2d({"kernel": kernel}, x[None], stride=stride)[0][0]


SOLUTIONS = {
    "shapes": ((2, 16, 49), (2, 17, 64), (2, 10)),
    "embed": embed,
    "layer_norm_back": layer_norm_back,
    "gelu_slope": gelu_slope,
    "encoder_block": block,
    "parameter_count": parameter_count,
    "adam": adam,
    "cosine": cosine,
    "attention_distance": attention_distance,
    "rollout": rollout,
    "resize_row": resize_row,
    "mean_color": mean_color,
    "conv2d": conv2d,
    "patchify": patchify,
    "softmax": softmax,
    "attention": attention,
    "softmax_back": lambda a, da: a * (da - (da * a).sum(-1, keepdims=True)),
    "traced_once": run_five,
}
WRONG = [
    ("patchify", lambda x, p: x.reshape(len(x), -1, p * p * x.shape[-1]), "entry"),
    ("patchify", channels_first, "entry"),
    ("patchify", lambda x, p: patchify(x.swapaxes(1, 2), p), "patches of"),
    ("patchify", lambda x, p: patchify(x, p)[0], "its shape is"),
    ("patchify", lambda x, p: patchify(x, p + 1), "it raised"),
    ("softmax", lambda s: np.exp(s) / np.exp(s).sum(-1, keepdims=True), "nan"),
    ("softmax", lambda s: np.exp(s - s.max()) / np.exp(s - s.max()).sum(-1, keepdims=True), "nan"),
    ("softmax", lambda s: softmax(s.T).T, "for the scores"),
    ("softmax", lambda s: np.exp(s - s.max(1, keepdims=True)), "it raised"),
    ("attention", lambda q, k, v: attention(q, k, v, 1.0), "entry"),
    ("attention", lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)).swapaxes(-1, -2) @ v, "entry"),
    ("attention", lambda q, k, v: attention(q, k, v, (q.shape[1] * q.shape[-1]) ** -0.5), "entry"),
    ("softmax_back", lambda a, da: a * (1 - a) * da, "entry"),  # the diagonal alone
    ("softmax_back", lambda a, da: a * da, "entry"),
    ("softmax_back", lambda a, da: a * (da - (da * a).sum(-1)[:, None]), "it raised"),
    ("softmax_back", lambda a, da: in_numpy.softmax(a), "return one array, not 2 things"),
    ("softmax_back", lambda a, da: a * (da - (da * a).sum(1, keepdims=True)), "of shape [1]"),
    ("traced_once", lambda step: run_five(step, 1), "JAX traced 2 times"),
    ("traced_once", lambda step: step(1.0, 0.1), "the result is"),
    ("traced_once", lambda step: step(np.ones(3), 0.1), "it raised TypeError"),
    ("shapes", ((2, 16, 49), (2, 16, 64), (2, 10)), "tokens, their shape is not [2, 16, 64]"),
    ("shapes", ((2, 4, 4, 49), (2, 17, 64), (2, 10)), "patches, their shape is not [2, 4, 4, 49]"),
    ("shapes", ((2, 16, 49), (2, 17, 64), (2, 17, 10)), "scores, their shape is not [2, 17, 10]"),
    ("embed", channels_scrambled, "a kernel of [2, 2, 2, 1]"),
    ("embed", lambda k, b, x: embed(k, 0 * b, x), "entry"),
    ("embed", lambda k, b, x: embed(k.swapaxes(0, 1), b, x), "entry"),
    ("layer_norm_back", lambda g, n, d: g / d, "entry"),  # as if mean and deviation were constant
    ("layer_norm_back", lambda g, n, d: (g - g.mean(-1, keepdims=True)) / d, "entry"),
    ("layer_norm_back", lambda g, n, d: layer_norm_back(g, n, 1), "entry"),
    ("gelu_slope", lambda x: gelu_slope(x, chained=False), "for x = ["),
    ("gelu_slope", lambda x: (x > 0).astype(float), "entry"),
    ("gelu_slope", lambda x: gelu_slope(x) - x * 1e-3, "entry"),
    ("encoder_block", post_norm, "entry"),
    ("encoder_block", lambda p, x: block(p, x, kept=False), "entry"),
    ("encoder_block", lambda p, x: block(p, block(p, x)), "entry"),
    ("parameter_count", lambda v: parameter_count(v, biases=False), "for ViT-B/16, it is 86"),
    ("parameter_count", lambda v: parameter_count(v, tokens=0), "but 86567656 is right"),
    ("parameter_count", lambda v: parameter_count(v) + 1, "it is 86567657, but 86567656 is right"),
    ("adam", lambda *a: adam(*a, corrected=False), "after 1 step at rate 0.1"),
    ("adam", lambda p, g, m, s, t, r: adam(p, g, m, s, 1, r), "after 2 steps"),
    ("adam", lambda *a: adam(*a)[0], "return p, mean, square"),
    ("adam", lambda p, g, m, s, t, r: adam(p, g, m, s + 1e-9, t, r), "entry"),
    ("cosine", lambda t, b, w, n: b * 0.5 * (1 + np.cos(np.pi * min(1, t / n))), "it is"),
    ("cosine", lambda t, b, w, n: cosine(t, b, w, n) / min(1, t / w), "in step"),
    ("cosine", lambda t, b, w, n: cosine(t + 1, b, w, n), "in step"),
    ("attention_distance", lambda w, g, p: attention_distance(w, g, 1), "it is"),
    ("attention_distance", lambda w, g, p: attention_distance(w, g[::-1], p), "a grid of"),
    ("attention_distance", lambda w, g, p: attention_distance(w, g, p) * len(w), "a grid of"),
    ("rollout", lambda a: rollout(a, keepdims=False), "attention of shape [1"),
    ("rollout", lambda a: rollout(a, start=0.0), "entry"),
    ("rollout", lambda a: rollout(a[::-1]), "attention of shape [2"),
    ("rollout", lambda a: attention_maps.rollout(a[None])[0], "attention of shape [1, 2"),
    ("resize_row", lambda v, n: resize_row(v, n, half=True), "from 2 positions to 4"),
    ("resize_row", lambda v, n: v[np.arange(n) * len(v) // n], "entry"),
    ("resize_row", lambda v, n: resize_row(v, n)[:-1], "its shape is"),
    ("mean_color", lambda p: mean_color(p, rounded=True), "for the pixels"),
    ("mean_color", lambda p: mean_color(p[..., ::-1]), "for the pixels"),
    ("mean_color", lambda p: p.reshape(-1, 3).sum(0) // 128 @ [64, 8, 1] % 512 + 1, "it is"),
    ("mean_color", lambda p: int((p.mean((0, 1)) / 255 * 8).astype(int) @ [64, 8, 1]), "it is"),
    ("conv2d", lambda x, k, s: conv2d(x, k, s, symmetric=True), "stride 2"),
    ("conv2d", lambda x, k, s: conv2d(x, k[::-1, ::-1], s), "entry"),
    ("conv2d", lambda x, k, s: conv2d(x, k, 1), "its shape is"),
]


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions_pass(name, capsys):
    assert getattr(checks, name)(SOLUTIONS[name])
    assert f"{name}: right" in capsys.readouterr().out


@pytest.mark.parametrize("name", SOLUTIONS)
@pytest.mark.parametrize("kind", ["nothing", "an error"])
def test_not_attempted(name, kind, capsys):
    """Neither an exception nor blame."""

    def stub(*_):
        if kind == "an error":
            raise NotImplementedError

    assert not getattr(checks, name)(stub if callable(SOLUTIONS[name]) else 3 * (None,))
    assert f"{name}: not yet" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "wrong", "words"), WRONG)
def test_wrong_answers_fail(name, wrong, words, capsys):
    """With the smallest case, in words."""
    with np.errstate(all="ignore"):
        assert not getattr(checks, name)(wrong)
    said = capsys.readouterr().out
    assert f"{name}: not right yet" in said
    assert words in said
    assert "Traceback" not in said


def test_the_smallest_case_is_small(capsys):
    """One channel too many in the wrong order: two patches of two pixels are enough to see it."""
    checks.patchify(WRONG[0][1])
    assert (
        "for images of shape [1, 2, 4, 1], numbered 0, 1, 2, …, and patches of 2x2"
        in capsys.readouterr().out
    )


def test_what_is_said_of_an_exception(capsys):
    """The case, and the line of the reader's own that raised."""

    def unequal(images, p):
        return patchify(images, p).reshape(5, 7)

    assert not checks.patchify(unequal)
    said = capsys.readouterr().out
    assert "for images of shape [1, 1, 1, 1], numbered" in said
    assert "it raised ValueError in `return patchify(images, p).reshape(5, 7)`: cannot" in said


def test_a_random_answer_to_a_list_of_cases(capsys):
    """The words are those of the call that failed."""
    rng = np.random.default_rng(3)
    assert not checks.parameter_count(lambda v: parameter_count(v) + rng.integers(0, 2))
    assert "None" not in capsys.readouterr().out


def test_what_is_said_of_close_and_strange_answers(capsys):
    """Enough digits to differ; a type that is no number."""
    assert not checks.softmax(lambda s: softmax(s) + 1e-8)
    assert "is 1.00000001, but 1 is right" in capsys.readouterr().out
    assert not checks.softmax(lambda s: "one")
    assert "it is of type <U3, not numbers" in capsys.readouterr().out


def test_every_check_is_tested():
    """With a solution, and at least two wrong answers."""
    assert SOLUTIONS.keys() == set(checks.__all__)
    for name in SOLUTIONS:
        assert sum(wrong[0] == name for wrong in WRONG) >= 2, name


def test_labels_of_colours():
    """The lesson's word for a label is the package's."""
    patch = np.random.default_rng(0).integers(0, 256, (5, 7, 7, 3), np.uint8)
    expected = masking.color_labels(patch, 7)[:, 0, 0]
    assert [mean_color(each) for each in patch] == expected.tolist()


def test_checks_leave_the_input_alone():
    """What a reader's function does to its arguments is its own business."""

    def in_place(s):
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        return s

    def back_in_place(weights, dweights):
        dweights -= (dweights * weights).sum(-1, keepdims=True)
        dweights *= weights
        return dweights

    def zeroing(images, p):
        images[:] = 0
        return patchify(images, p)

    assert checks.softmax(in_place)
    assert checks.softmax_back(back_in_place)
    assert not checks.patchify(zeroing)


def test_a_random_answer(capsys):
    """Right now and then: told, not raised."""
    rng = np.random.default_rng(0)
    assert not checks.softmax(lambda s: softmax(s) + (rng.random() < 0.5))
    assert "not right yet" in capsys.readouterr().out
