"""Train a Vision Transformer: `python -m minivit.train --tiny`.

On two cores that takes about a minute and reaches 87 % on the 10,000 test images of Fashion-MNIST.
`--backend numpy` does the same with the hand-written gradients. `--init FILE` fine-tunes, and
`--objective mean-color` learns from images without labels.
"""

import re
import tempfile
import time
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.train: interrupted")

import numpy as np

from . import (
    checkpoint,
    command,
    datasets,
    engines,
    finetune,
    masking,
    options,
    states,
    variants,
)
from .architecture import image_channels, is_resnet, token_pixels
from .batches import Batches
from .loop import Run
from .machine import keep_memory, leave
from .params import count, initialise, tree_map
from .processes import ALONE, join


def read_init(args):  # -> parameters, description; or two times None
    """The file of --init, and the image size if only it knows."""
    if not args.init:
        return None, None
    params, description = checkpoint.inspect(args.init, head=False)
    if args.image_size is None:
        args.image_size = finetune.image_size(params, description, args.old_grid)
    return params, description


def start(args, dataset, init):  # -> name, parameters
    """Fresh parameters, or those of a checkpoint made ready; a masked objective gets its layer."""
    channels, classes = dataset.train_images.shape[-1], len(dataset.classes)
    if args.init:
        name, params = start_from_file(args, classes, *init)
    else:
        name, args.settings = args.model, {}
        rng = np.random.default_rng([args.seed, datasets.WEIGHTS])
        variant = variants.parse(args.model)
        sizes = {"image_size": args.image_size, "channels": channels, "classes": classes}
        sizes["head_bias"] = args.head_bias
        if args.representation:
            sizes["representation"] = variant.width
        params = initialise(variant, rng, **sizes)
    if args.objective != "classes":
        if "conv_root" in params or is_resnet(params):
            raise ValueError(
                f"--objective {args.objective} hides patches; convolutions see their neighbours. "
                "Choose a model that begins with patches, such as tiny"
            )
        rng = np.random.default_rng([args.seed, datasets.WEIGHTS, 1])
        params = masking.add_prediction(params, args.objective, rng)
        masking.check_share(params, args.image_size, args.corrupt)
        name = f"{name}-{args.objective}"
    return name, params


def start_from_file(args, classes, params, description):  # -> name, parameters
    """The weights of --init, their head new, at the image size that was asked for."""
    grid = args.old_grid or description["grid"]
    args.settings = finetune.settings(description)
    options = {"image_size": args.image_size, "classes": classes, "old_grid": grid}
    options["dialect"] = description["dialect"]
    params = finetune.adapt(params, method=args.positions, seed=args.seed, **options)
    name = re.sub(r"[^\w.-]+", "-", f"{description['variant']}-finetuned")
    return name, tree_map(lambda leaf: leaf.astype("float32"), params)


def open_output(args, name):  # -> folder
    """Make the output folder and prove that it can be written; never one that holds a result."""
    folder = args.output
    if folder is None:
        base = Path("runs") / name.replace("/", "-")
        names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))]
        folder = next(name for name in names if not name.exists())
    for result in ("checkpoint.npz", "metrics.csv", "run.json"):
        if (folder / result).exists():
            raise FileExistsError(f"{folder} holds a {result} already; choose another --output")
    if folder.is_dir() and states.numbered(folder):
        raise FileExistsError(f"{folder} holds states of another run; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"cannot write to {folder}: {error.strerror}; choose another --output"
        ) from None
    return folder


def make_engine(args, params):
    """The twin that was asked for."""
    options = {"objective": args.objective, "rate": args.dropout, "seed": args.seed}
    options |= {"weight_decay": args.weight_decay, "clip": args.clip, "rule": args.optimizer}
    options |= {"freeze": args.freeze, "keep": args.average, "accumulate": args.accumulate}
    given = {"loss": None if args.loss == "softmax" else args.loss, "chunk": args.chunk}
    options["model"] = args.settings | {n: v for n, v in given.items() if v is not None}
    options |= {"dtype": args.dtype, "shard": args.shard, "precision": args.precision}
    return engines.make(args.backend, params, batch_size=args.batch_size, **options)


def read_data(args, channels):  # -> data set, held-out images and labels or None
    """The images of this run."""
    folder_options = {"channels": channels, "seed": args.seed, "strict": args.strict}
    dataset, held_out = datasets.load_at(args.dataset, args.image_size, **folder_options), None
    if args.per_class:
        dataset = datasets.few(dataset, args.per_class, args.seed)
    if args.validation:  # of the few labels, if they are few
        dataset, *held_out = datasets.hold_out(dataset, args.validation, args.seed)
    return dataset, held_out


def make_batches(args, dataset, params):
    """From the number of a step to its arrays."""
    args.channels = image_channels(params)
    datasets.with_channels(dataset.train_images[:1], args.channels)
    return Batches(
        dataset.train_images,
        dataset.train_labels,
        len(dataset.classes),
        batch_size=args.batch_size,
        image_size=args.image_size,
        patch=None if is_resnet(params) else token_pixels(params),
        channels=args.channels,
        seed=args.seed,
        objective=args.objective,
        smoothing=args.label_smoothing,
        corrupt=args.corrupt,
        augmentation=args.augmentation,
        processes=args.processes,
    )


def prepare(args):  # -> Run
    """All that can fail because of what a user asked for."""
    if not args.resume:
        options.check(args)
    init = read_init(args)
    if args.init and is_resnet(init[0]):
        options.check_resnet(args)
    dataset, held_out = read_data(args, init[1]["channels"] if args.init else 3)
    if not args.resume:
        options.check_steps(args, len(dataset.train_images))
    name, params = start(args, dataset, init)
    batches = make_batches(args, dataset, params)
    engine, folder = make_engine(args, params), args.resume
    args.processes.check()  # before anything is written, and before what needs all of them
    if not args.resume and args.processes.leads:
        folder = open_output(args, name)
    run = Run(args, dataset, held_out, batches, folder, engine)
    if args.resume:
        go_on(args, run)
    elif args.processes.leads:
        stored = {option: getattr(args, option) for option in options.stored_names()}
        states.write_options(folder, stored, engine.hardware)
        run.lock = states.lock(folder)
    where = f"{args.backend}, {engine.hardware}"
    if args.processes.count > 1:
        where += f" of {args.processes.count} processes"
    where += f", {args.shard}" if args.shard != "data" else ""
    run.say(f"{name}: {count(params):,} parameters, on {where}, into {folder}")
    return run


def go_on(args, run):
    """A run made ready to continue where it was interrupted."""
    states.check_devices(args.devices, run.engine.hardware, args.dropout)
    with args.processes.leader_first():  # it puts damaged states aside
        if run.leads:
            run.lock = states.lock(run.folder)
        run.first, *state = states.newest(run.folder, run.engine.state_shapes(), run.leads)
        if state[0] is None and (run.folder / "checkpoint.npz").exists():
            if run.leads:
                run.lock.close()
            raise FileExistsError(
                f"{run.folder} has a checkpoint.npz but no state: that run has ended"
            )
    args.processes.check()  # one may have found nothing
    args.processes.same("newest states", run.first)
    if state[0] is not None:
        run.load_state(*state)
    run.say(f"{run.folder} goes on after step {run.first} of {args.steps}")


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    begun = time.perf_counter()
    keep_memory()
    args = options.parser().parse_args(argv)
    args.processes = ALONE

    def work():
        args.start = begun
        if args.distributed:
            options.check_backend(args)
            args.processes = join()
        if not args.processes.leads:
            warnings.simplefilter("ignore")  # process 0 says them
        with args.processes.together():
            if args.resume:
                given = vars(options.parser(defaults=False).parse_args(argv))
                stored = states.read_options(args.resume, given, options.stored_names())
                options.resume(args, stored[0])
                args.devices = stored[1]
            run = prepare(args)
        return run()

    try:
        status = command.run("train", work)
    except Exception:
        if args.processes.count > 1:
            traceback.print_exc()
        args.processes.leave(1)
        raise
    if status:
        args.processes.leave(status)
    return status


if __name__ == "__main__":
    leave(main())
