"""Shared by all tests: JAX with two CPU devices, and the numbers of other implementations."""

import math
import os
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

from minivit import datasets, masking
from minivit.params import unflatten
from minivit.shapes import patch_grid

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
# What the programs compute is tested here, not how fast; optimising them takes most of the time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for the commands that tests start
jax.config.update(
    "jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
)
# The same programs are built again and again: both workers, the commands that they start and the
# next run find them compiled.
CACHE = os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# New shapes compile, so the first example is slow; derandomised, so that a run can be repeated.
settings.register_profile("minivit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("minivit")


@pytest.fixture(scope="session")
def corrupt_batch():
    """A corruption of some images, and the batch that a masked objective takes."""

    def draw(images, objective, patch, rng, **shares):
        rows, columns = patch_grid(*images.shape[1:3], patch)
        drawn = masking.draw_corruption(rng, len(images), rows * columns, **shares)
        return masking.masked_batch(images, drawn, objective, patch)

    return draw


@pytest.fixture
def little_data(monkeypatch):
    """Makes `datasets.load` give the first images of Fashion-MNIST, so that runs are quick."""

    def cut(train, test):
        whole = datasets.load("fashion-mnist")
        few = replace(
            whole,
            train_images=whole.train_images[:train],
            train_labels=whole.train_labels[:train],
            test_images=whole.test_images[:test],
            test_labels=whole.test_labels[:test],
        )
        monkeypatch.setattr(datasets, "load", lambda name, **_: few)

    return cut


@pytest.fixture
def refusal(capsys):
    """Calls a command that must not work: status 2, one line that is returned, no other word."""

    def refuse(main, arguments):
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way
            status = end.code
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1), said.err
        return said.err

    return refuse


NUMBERS = ["-1e400", "-1e38", "-1", "-1e-9", "0", "1", "1.5", "1e9", "1e38", "9" * 60, "9" * 6000]
NUMBERS += ["nan", "inf", "-inf", "word", "", "0x10"]


def is_meant(text, kind, least, most, open_left, open_right):
    """Whether a number is one that an option's declared limits allow; written a second time."""
    if not re.fullmatch(
        r"[-+]?\d+" if kind is int else r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text
    ):
        return False
    if kind is int and len(text) > 4000:  # Python reads no longer ones
        return False
    value = Decimal(text)
    above = least == -math.inf or (value > Decimal(least) if open_left else value >= Decimal(least))
    below = most == math.inf or (value < Decimal(most) if open_right else value <= Decimal(most))
    return above and below


@pytest.fixture(scope="session")
def numeric_options():
    """Every option of a command that takes a number, with each of NUMBERS, and if it is meant."""

    def find(parser):  # -> [(option, text, bool)]
        found = []
        for action in parser._actions:
            assert action.type not in (int, float), f"{action.dest} has no limits"
            if limits := getattr(action.type, "limits", None):
                name = action.option_strings[0]
                found += [(name, text, is_meant(text, *limits)) for text in NUMBERS]
        return found

    return find


FOLDERS = ("in/", "out", "grad", "cfg/")


@pytest.fixture(scope="session")
def peers():
    """Arrays of a fixture file: fixtures/README.md says what each is."""

    def read(name):
        with np.load(Path(__file__).parent / "fixtures" / f"{name}.npz", allow_pickle=False) as f:
            return dict(f)

    return read


@pytest.fixture(scope="session")
def weights():
    """The model's weights in a fixture, as a tree of one type."""

    def select(arrays, dtype="float32"):
        chosen = {n: a for n, a in arrays.items() if not n.startswith(FOLDERS)}
        return unflatten({name: array.astype(dtype) for name, array in chosen.items()})

    return select
