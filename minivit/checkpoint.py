"""Read and write checkpoints under the official names."""

import contextlib
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from .params import flatten, unflatten


class CheckpointError(ValueError):
    """A file that cannot be used, with its path and the fault."""


def save(path, params):  # -> Path
    """Write parameters to an `.npz` file whose keys are their '/'-joined names.

    The bytes go to a temporary file beside the target, are flushed to the disk, and are then
    renamed, so a kill at any moment leaves the old file or the new one, whole.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **flatten(params))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def load(path):  # -> nested dictionaries of arrays
    """Read an `.npz` file, all of it, without ever unpickling."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return unflatten({name: archive[name] for name in archive.files})
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole .npz checkpoint: {error}") from None
