"""Each check passes the solution, fails planted wrong answers in words, and waits for none."""

import numpy as np
import pytest

from minivit import checks


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


SOLUTIONS = {
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
    ("traced_once", lambda step: run_five(step, 1), "JAX traced 2 times"),
    ("traced_once", lambda step: step(1.0, 0.1), "The result is"),
    ("traced_once", lambda step: step(np.ones(3), 0.1), "It raised TypeError"),
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

    assert not getattr(checks, name)(stub)
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
    assert "for images of shape [1, 2, 4, 1] and patches of 2x2" in capsys.readouterr().out


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
