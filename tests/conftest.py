"""Shared by all tests: JAX with two CPU devices, and the numbers of other implementations."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

from minivit.params import unflatten

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
# The same programs are built again and again: compile each once.
CACHE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
jax.config.update("jax_compilation_cache_dir", CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# New shapes compile, so the first example is slow; derandomised, so that a run can be repeated.
settings.register_profile("minivit", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("minivit")

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
