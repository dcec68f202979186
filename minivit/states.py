"""What a run needs to go on to the bit: its options once, its state every so often.

`run.json` holds the options as they were resolved. `state-STEP.npz` holds weights, moments,
averages, the best weights so far and the metrics; the generators need no state, since the seed and
the number of the step decide. The newest two are kept: if one is damaged, the other is whole.
"""

import contextlib
import hashlib
import io
import json
import re
import warnings
from pathlib import Path

import numpy as np

from . import checkpoint
from .params import flatten, unflatten

with contextlib.suppress(ImportError):  # Windows has no such locks
    import fcntl

KEPT = 2
RECORD = "minivit/record"
MAY_CHANGE = ("checkpoint_every", "shard", "chunk")  # decide no number, up to the last bits


def digest(path):
    """A file's SHA-256."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_options(folder, options, devices):
    """All options of a run and what it runs on, before its first step."""
    record = dict(options, devices=devices)
    if options["init"]:  # from wherever it is resumed, and only from the same weights
        record |= {"init": str(Path(options["init"]).resolve()), "digest": digest(options["init"])}
    text = json.dumps(record, indent=1, sort_keys=True, default=str)
    checkpoint.write(folder / "run.json", text.encode())


def read_options(folder, given, names):  # -> {option: value}, devices
    """The options of the run in a folder; those given again must be the same."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run.json, so no run that could be resumed")
    try:
        options = json.loads(path.read_text())
        if missing := sorted({*names, "devices"} - {*options}):
            raise ValueError(f"it lacks {', '.join(missing[:5])}; another version wrote it?")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if "output" in given:
        raise ValueError(
            f"--output {given['output']}: a resumed run stays in {folder}; leave it out"
        )
    for name, value in given.items():
        value = list(value) if isinstance(value, tuple) else value
        if name in options and name not in MAY_CHANGE and value != options[name]:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is {value}, but the run in {folder} was started with "
                f"{options[name]}; leave it out, or start another run"
            )
    if options["init"] and options["digest"] != digest(options["init"]):
        raise ValueError(f"{options['init']} is not the file that the run in {folder} began with")
    options |= {name: given[name] for name in MAY_CHANGE if name in given}
    stored = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items() if n in names}
    return stored, options["devices"]


def check_devices(then, now, dropout):
    """Sums in another order differ in their last bits; dropout's masks differ altogether."""
    if then == now:
        return
    text = f"the run was started on {then}, not on {now}"
    if dropout:
        raise ValueError(f"{text}; with --dropout {dropout} the rest would be another run")
    warnings.warn(f"{text}: the last bits may differ", stacklevel=2)


def lock(folder):  # -> a file that holds the lock until it is closed, also by a kill
    """Refuse a second process on the same run."""
    file = open(folder / "run.json")  # noqa: SIM115
    if "fcntl" in globals():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise BlockingIOError(f"a run is going on in {folder}; wait for it") from None
    return file


def write(folder, step, tree, record):
    """A whole state or none; then the states that are older than the newest two go."""
    buffer = io.BytesIO()
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(tree).items()}
    np.savez(buffer, **arrays, **{RECORD: np.array(json.dumps(record))})
    checkpoint.write(folder / f"state-{step}.npz", buffer.getbuffer())
    for _, path in numbered(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def numbered(folder):  # -> [(step, path)], the newest first
    """States by their number, not by their name's order (TRN-13)."""
    found = [(re.fullmatch(r"state-(\d+)\.npz", p.name), p) for p in Path(folder).iterdir()]
    return sorted(((int(m[1]), p) for m, p in found if m), reverse=True)


def read(path, like):  # -> tree, record
    """A state that fits the engine whose own state is `like`."""
    arrays, _ = checkpoint.read_arrays(path)
    record = json.loads(str(arrays.pop(RECORD)))
    if lacking := {"rows", "pending", "best_accuracy", "since_best"} - {*record}:
        raise ValueError(f"its record lacks {', '.join(sorted(lacking))}")
    for name, leaf in flatten(like).items():
        shape = np.shape(leaf)
        if name not in arrays or arrays[name].shape != shape:
            raise ValueError(f"it has no {name} of shape {list(shape)}")
    return unflatten(arrays), record


def newest(folder, like, mend=True):  # -> step, tree, record; 0, None, None where there is none
    """The newest state that is whole; a damaged one is told of, and with `mend` put aside."""
    for step, path in numbered(folder):
        try:
            return step, *read(path, like)
        except (checkpoint.CheckpointError, KeyError, ValueError, TypeError) as error:
            warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
            if mend:
                path.rename(path.with_name(path.name + ".damaged"))
    return 0, None, None


def remove(folder):
    """A run that has ended needs no state."""
    for _, path in numbered(folder):
        path.unlink(missing_ok=True)
