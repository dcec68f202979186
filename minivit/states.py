"""What a run needs to go on to the bit: its options once, its state every so often.

`run.json` holds the options as they were resolved. `state-STEP.npz` holds weights, moments,
averages, the best weights so far and the metrics; the generators need no state, since the seed and
the number of the step decide. The newest two are kept: if one is damaged, the other is whole.
"""

import contextlib
import hashlib
import json
import re
import warnings
from pathlib import Path

import numpy as np

from . import checkpoint
from .params import flatten, unflatten

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

KEPT = 2
RECORD = "minivit/record"
LOCK, DAMAGED = ".lock", ".damaged"
MAY_CHANGE = ("checkpoint_every", "shard", "chunk")  # decide no number, up to the last bits


def digest(path):
    """A file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_options(folder, options, devices, data):
    """All options of a run, what it runs on and what its data set is, before its first step."""
    record = dict(options, devices=devices, data=data)
    if options["init"]:  # from wherever it is resumed, and only from the same weights
        record |= {"init": str(Path(options["init"]).resolve()), "digest": digest(options["init"])}
    text = json.dumps(record, indent=1, sort_keys=True, default=str)
    checkpoint.write(folder / "run.json", text.encode())


def read_options(folder, given, names):  # -> {option: value}, devices, identity of the data
    """The options of the run in a folder; of those given again only MAY_CHANGE may differ."""
    path = Path(folder) / "run.json"
    try:
        record = grown(json.loads(path.read_text()))
        if missing := sorted({*names, "devices", "data"} - {*record}):
            raise ValueError(f"it lacks {', '.join(missing[:5])}; another version wrote it?")
        if not isinstance(record["data"], dict):
            raise ValueError("it does not say what the data set was")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if "output" in given:
        raise ValueError(
            f"--output {given['output']}: a resumed run stays in {folder}; leave it out"
        )
    for name, value in ((n, v) for n, v in given.items() if n in names):
        value = list(value) if isinstance(value, tuple) else value
        pair = str(value), str(record[name])
        moved = name == "dataset" and all(text.startswith("folder:") for text in pair)
        if value != record[name] and name not in MAY_CHANGE and not moved:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is {value}, but the run in {folder} was started with "
                f"{record[name]}; leave it out, or start another run"
            )
    if record["init"] and record.get("digest") != digest(record["init"]):
        raise ValueError(f"{record['init']} is not the file that the run in {folder} began with")
    return {name: record[name] for name in names}, record["devices"], record["data"]


def grown(record):  # -> record
    """That of a run of version 0.1, which noted less of its data and more of its idle options.

    The test pictures of its folder were drawn by its seed; today their names decide.
    """
    if "data" in record or not {"dataset", "init", "objective", "validation"} <= {*record}:
        return record
    if str(record["dataset"]).startswith("folder:"):
        raise ValueError("version 0.1 chose other test pictures of a folder; start another run")
    idle = [] if record["init"] else ["positions"]
    idle += ["corrupt", "mosaic_every"] if record["objective"] == "classes" else []
    idle += [] if record["validation"] else ["evaluate_every"]
    since = {"data": {}, "heads": None, "pixels": None, "extra": "error"}
    return since | record | dict.fromkeys(idle)


def check_devices(then, now, dropout):
    """Sums in another order differ in their last bits; dropout's masks differ altogether."""
    if then == now:
        return
    text = f"the run was started on {then}, not on {now}"
    if dropout:
        raise ValueError(f"{text}; with --dropout {dropout} the rest would be another run")
    warnings.warn(f"{text}: the last bits may differ", stacklevel=2)


@contextlib.contextmanager
def lock(folder):
    """Hold a run's folder; another process that wants it meanwhile is refused.

    The system ends a lock with the process that holds it, however that ends; the file stays, since
    two processes could each lock a file of their own if one took it away.
    """
    with open(Path(folder) / LOCK, "ab") as file:
        try:
            seize(file)
        except (BlockingIOError, PermissionError):
            raise BlockingIOError(
                f"a run is going on in {folder}; wait for it, or choose another folder"
            ) from None
        yield


def seize(file):
    """Lock an open file, or raise BlockingIOError or (Windows) PermissionError."""
    if fcntl is None:
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some network drives have no locks
        warnings.warn(f"{file.name} cannot be locked ({error.strerror})", stacklevel=4)


def write(folder, step, tree, record):
    """A whole state or none; then the states that are older than the newest two go."""
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(tree).items()}
    arrays[RECORD] = np.array(json.dumps(record))
    checkpoint.write_npz(Path(folder) / f"state-{step}.npz", arrays)
    for _, path in numbered(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def numbered(folder):  # -> [(step, path)], the newest first
    """States by their number, not by their name's order."""
    found = [(re.fullmatch(r"state-(\d+)\.npz", p.name), p) for p in Path(folder).iterdir()]
    return sorted(((int(m[1]), p) for m, p in found if m), reverse=True)


def read(path):  # -> arrays, record
    """A state as it was written; a file that cannot be read is a CheckpointError."""
    arrays, _ = checkpoint.read_arrays(path)
    try:
        record = json.loads(str(arrays.pop(RECORD)))
        lacking = {"rows", "pending", "best_accuracy", "since_best"} - {*record}
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"{path} is no state of a run; move it out of the folder") from None
    if lacking:
        raise ValueError(f"{path}: its record lacks {', '.join(sorted(lacking))}")
    return arrays, record


def fitting(path, arrays, like):  # -> tree
    """The arrays as the engine takes them whose own state is `like`."""
    for name, leaf in flatten(like).items():
        shape = list(np.shape(leaf))
        if name not in arrays:
            raise ValueError(f"{path} has no {name}; this run's is of shape {shape}")
        if (found := list(arrays[name].shape)) != shape:
            raise ValueError(f"{path}: its {name} is of shape {found}, this run's of {shape}")
    return unflatten(arrays)


def newest(folder, like, mend=True):  # -> step, tree, record; 0, None, None where there is none
    """The newest state that can be read; one that cannot is told of, and with `mend` put aside.

    One that can be read and does not fit is another run's: an error, and it stays where it is.
    """
    for step, path in numbered(folder):
        try:
            arrays, record = read(path)
        except checkpoint.CheckpointError as error:
            warnings.warn(f"{error}; this state is passed over", stacklevel=2)
            if mend:
                path.rename(path.with_name(path.name + DAMAGED))
            continue
        return step, fitting(path, arrays, like), record
    return 0, None, None


def ended(folder):  # -> bool
    """Whether nothing is left to go on with: the weights are saved and no state was put aside."""
    folder = Path(folder)
    kept = numbered(folder) or list(folder.glob(f"state-*{DAMAGED}"))
    return (folder / "checkpoint.npz").exists() and not kept


def remove(folder):
    """A run that has ended needs no state, and none that is damaged."""
    for path in (*(p for _, p in numbered(folder)), *Path(folder).glob(f"state-*{DAMAGED}")):
        path.unlink(missing_ok=True)
