"""How a check finds the smallest case that goes wrong, and says it in words."""

import numpy as np

NOT_YET = "not yet. Replace `return None` in this cell by your answer."


def smallest(cases, fails):  # strategy, or a list with the simplest case first -> case
    """The simplest case that fails; hypothesis finds and shrinks it."""
    from hypothesis import Phase, find, settings
    from hypothesis.errors import NoSuchExample

    if isinstance(cases, list):
        failing = [case for case in cases if fails(case)]
        if not failing:
            raise NoSuchExample("none of the list")
        return failing[0]
    quiet = settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
    )
    return find(cases, fails, settings=quiet)


def checked(name, cases, judge):  # -> bool
    """Try `judge(case)` on many cases; say in words what the smallest failing one shows."""
    from hypothesis.errors import Flaky, NoSuchExample

    def fault(case):
        try:
            return judge(case)
        except NotImplementedError:
            raise
        except Exception as error:  # a reader's function may raise anything
            return f"it raised {type(error).__name__}: {error}"

    try:
        case = smallest(cases, lambda case: fault(case) is not None)
    except NotImplementedError:
        print(f"{name}: {NOT_YET}")
        return False
    except Flaky:
        print(f"{name}: not right yet. The same input gives another answer each time")
        return False
    except NoSuchExample:
        print(f"{name}: right, in every case tried.")
        return True
    print(f"{name}: not right yet. The smallest case: {fault(case)}")
    return False


def answer(result):
    """What a function returned; nothing means that it was not written yet."""
    if result is None:
        raise NotImplementedError
    return np.asarray(result)


def answers(result, names):  # -> {name: array}
    """Several results that are returned side by side."""
    if result is None:
        raise NotImplementedError
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        raise TypeError(f"return {', '.join(names)}, in this order")
    return {name: answer(part) for name, part in zip(names, result, strict=True)}


def difference(got, expected, tolerance=1e-9):  # -> words, or None where they agree
    """Shape first, then the first entry that differs."""
    expected = np.asarray(expected)
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)}, not {list(expected.shape)}"
    close = np.isclose(got, expected, rtol=0, atol=tolerance)
    if close.all():
        return None
    if not got.ndim:
        return f"it is {got:.9g}, not {expected:.9g}"
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    return f"entry {list(place)} is {got[place]:.6g}, not {expected[place]:.6g}"


def generator(seed):
    """Numbers that a case's seed decides."""
    return np.random.default_rng(seed)
