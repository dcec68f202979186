"""How a check finds the smallest case that goes wrong, and says it in words."""

import traceback
from pathlib import Path

import numpy as np

NOT_YET = "not yet. Put your answer in place of `None` (or is a `return` missing?)"


def smallest(cases, fails):  # strategy, or a list with the simplest case first -> case
    """The simplest case that fails; hypothesis finds and shrinks it."""
    from hypothesis import Phase, find, settings
    from hypothesis.errors import NoSuchExample

    if isinstance(cases, list):
        for case in cases:
            if fails(case):
                return case
        raise NoSuchExample("none of the list")
    quiet = settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
    )
    return find(cases, fails, settings=quiet)


def checked(name, cases, judge):  # -> bool
    """Try the reader's function on many cases; say in words what the smallest failing one shows.

    `judge(case)` returns the case in words, and a function that says what is wrong, or None.
    """
    from hypothesis.errors import Flaky, NoSuchExample

    def fault(case):
        words, tried = judge(case)
        try:
            wrong = tried()
        except NotImplementedError:
            raise
        except Exception as error:  # a reader's function may raise anything
            wrong = raised(error)
        return wrong and f"{words}, {wrong}"

    said = []  # the words of the last failure: the simplest, when the search has ended

    def fails(case):
        words = fault(case)
        if words is not None:
            said.append(words)
        return words is not None

    try:
        smallest(cases, fails)
    except NotImplementedError:
        print(f"{name}: {NOT_YET}")
        return False
    except Flaky:
        print(f"{name}: not right yet. The same input gives another answer each time")
        return False
    except NoSuchExample:
        print(f"{name}: right, in every case tried.")
        return True
    print(f"{name}: not right yet. The smallest case: {said[-1]}")
    return False


def raised(error):  # -> words
    """What was raised, and in which line of the reader's own."""
    places = ("site-packages", str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(place in frame.filename for place in places)]
    line = f" in `{own[-1].line}`" if own and own[-1].line else ""
    return f"it raised {type(error).__name__}{line}: {error}"


def answer(result):  # -> array
    """What a function returned; nothing means that it was not written yet."""
    if result is None:
        raise NotImplementedError
    if isinstance(result, tuple):
        raise TypeError(
            f"return one array, not {len(result)} things (the package's own pieces return two: the "
            "result and a function)"
        )
    return np.asarray(result)


def answers(result, names):  # -> {name: array}
    """Several results that are returned side by side."""
    if result is None:
        raise NotImplementedError
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        raise TypeError(f"return {', '.join(names)}, in this order")
    if any(part is None for part in result):
        raise NotImplementedError
    return {name: np.asarray(part) for name, part in zip(names, result, strict=True)}


def difference(got, expected, tolerance=1e-9):  # -> words, or None where they agree
    """Shape first, then the first entry that differs."""
    expected = np.asarray(expected)
    if got.dtype.kind not in "fiub":
        return f"it is of type {got.dtype}, not numbers"
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)}, but {list(expected.shape)} is right"
    close = np.isclose(got, expected, rtol=0, atol=tolerance)
    if close.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    yours, right = got[place], expected[place]
    whole = float(yours).is_integer() and float(right).is_integer()
    digits = 15 if whole or f"{yours:.6g}" == f"{right:.6g}" else 6
    entry = f"entry {list(place)}" if place else "it"
    return f"{entry} is {yours:.{digits}g}, but {right:.{digits}g} is right"


def compared(yours, given, expected, tolerance=1e-9):  # -> function: words or None
    """Call a reader's function on copies of what is given, and compare with what is right."""

    def tried():
        copies = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
        with np.errstate(all="ignore"):
            return difference(answer(yours(*copies)), expected, tolerance)

    return tried


def by_differences(f, x, dy, step=1e-5):  # -> gradient of (f(x) * dy).sum() at x
    """Central differences, the judge of all derivations; lesson 3 builds them, and the step."""
    slope = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = x.copy()
        moved[place] += step
        up = (f(moved) * dy).sum()
        moved[place] -= 2 * step
        slope[place] = (up - (f(moved) * dy).sum()) / (2 * step)
    return slope


def generator(seed):
    """Numbers that a case's seed decides."""
    return np.random.default_rng(seed)


def small_numbers(seed, shape):
    """Halves between -2 and 2, which can be followed by hand."""
    return generator(seed).integers(-4, 5, shape) / 2
