"""What is used of matplotlib, imported so that pictures depend on no window system."""

import contextlib
import os
import sys


def import_matplotlib():  # -> Figure, MaxNLocator
    """Import it whatever MPLBACKEND is: files need no backend, but nonsense would raise.

    One that exists stays chosen, for notebooks.
    """
    fresh, chosen = "matplotlib" not in sys.modules, os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    finally:
        if chosen is not None:
            os.environ["MPLBACKEND"] = chosen
    if fresh and chosen:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = chosen
    return Figure, MaxNLocator


Figure, MaxNLocator = import_matplotlib()
