"""What a run needs to go on to the bit: its options once, its state every so often.

`run.json` holds the options as they were resolved. `state-STEP.npz` holds weights, moments,
averages, the best weights so far and the metrics; the generators need no state, since the seed and
the number of the step decide. The newest two are kept: if one is damaged, the other is whole.
"""

import io
import json
import re
import warnings
from pathlib import Path

import numpy as np

from . import checkpoint
from .machine import cores
from .params import flatten, unflatten

KEPT = 2
RECORD = "minivit/record"
# What a resumed run may be told anew, since it decides no number.
FREE = ("resume", "tiny", "output", "start", "augmentation", "settings", "own_warmup", "channels")


def write_options(folder, args):
    """All options of a run, before its first step."""
    options = {n: v for n, v in vars(args).items() if n not in FREE} | {"cores": cores()}
    text = json.dumps(options, indent=1, sort_keys=True, default=str)
    checkpoint.write(folder / "run.json", text.encode())


def read_options(folder, given):  # -> {option: value}
    """The options of the run in a folder; those given again must be the same."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run.json, so no run that could be resumed")
    try:
        options = json.loads(path.read_text())
        if not isinstance(options, dict):
            raise ValueError("it holds no options")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if options.pop("cores", cores()) != cores():
        warnings.warn("another number of cores: the last bits may differ", stacklevel=2)
    if "output" in given:
        raise ValueError(
            f"--output {given['output']}: a resumed run stays in {folder}; leave it out"
        )
    for name, value in given.items():
        value = list(value) if isinstance(value, tuple) else value
        if name not in FREE and value != options.get(name, value):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is {value}, but the run in {folder} was started with "
                f"{options[name]}; leave it out, or start another run"
            )
    return {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}


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


def newest(folder):  # -> step, tree, record; step 0 and two times None where there is none
    """The newest state that is whole; a damaged one is told of."""
    for step, path in numbered(folder):
        try:
            arrays, _ = checkpoint.read_arrays(path)
            record = json.loads(str(arrays.pop(RECORD)))
            return step, unflatten(arrays), record
        except (checkpoint.CheckpointError, KeyError, ValueError) as error:
            warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
    return 0, None, None


def remove(folder):
    """A run that has ended needs no state."""
    for _, path in numbered(folder):
        path.unlink(missing_ok=True)
