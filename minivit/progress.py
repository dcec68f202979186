"""A sign of life for what takes longer than a moment: how many of how many, and how long yet."""

from tqdm import tqdm


def progress(iterable=None, what=None, *, total=None, unit="img", **options):  # -> tqdm
    """A bar on standard error, in every command the same; nothing where that is no terminal.

    `what` is said before the numbers, `unit` after them. It appears after a second, so that quick
    work stays quiet, and goes when the work is done. Options are tqdm's.
    """
    usual = {"disable": None, "delay": 1, "leave": False, "dynamic_ncols": True}
    return tqdm(iterable, what, total, unit=unit, **(usual | options))
