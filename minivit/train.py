"""Train a Vision Transformer: `python -m minivit.train --tiny`.

On two cores that takes about a minute and reaches 87 % on the 10,000 test images of Fashion-MNIST.
`--backend numpy` does the same with the hand-written gradients. `--init FILE` fine-tunes, and
`--objective mean-color` learns from images without labels.
"""

import contextlib
import io
import itertools
import math
import re
import time
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.train: interrupted")

import numpy as np

from . import (
    command,
    datasets,
    dialects,
    engines,
    finetune,
    masking,
    opening,
    options,
    states,
    variants,
)
from .architecture import image_channels, is_resnet, token_grid, token_pixels
from .augmentation import Augmentation
from .batches import Batches
from .loop import Run
from .machine import check_memory, keep_memory, leave
from .options import parser
from .params import count, initialise, tree_map
from .processes import ALONE, jax_devices, join


def read_init(args):  # -> parameters, description; or two times None
    """The file of --init, and the image size if only it knows."""
    if not args.init:
        return None, None
    params, description = opening.read(args.init, **opening.chosen(args), head=False)
    if args.image_size is None:
        args.image_size = finetune.image_size(params, description)
    return params, description


def start(args, dataset, init):  # -> name, parameters
    """Fresh parameters, or those of a checkpoint made ready; a masked objective gets its layer."""
    channels, classes = dataset.train_images.shape[-1], len(dataset.classes)
    if args.init:
        name, params = start_from_file(args, classes, *init)
    else:
        # Options of `model`, and notes for the checkpoint, of what shapes cannot tell.
        name, args.settings, args.notes = args.model, {}, {}
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
    args.settings = finetune.settings(description)
    folded = description["pixels"] == dialects.FOLDED
    args.notes = {"pixels": dialects.FOLDED} if folded else {}
    options = {"image_size": args.image_size, "classes": classes}
    options |= {"old_grid": description["grid"], "dialect": description["dialect"]}
    params = finetune.adapt(params, method=args.positions or "corners", seed=args.seed, **options)
    name = re.sub(r"[^\w.-]+", "-", f"{description['variant']}-finetuned")
    return name, tree_map(lambda leaf: leaf.astype("float32"), params)


def check_fit(args, init):
    """Refuse before any work what cannot fit: a batch's images, and the input of every block.

    A step takes a multiple of that. What an accelerator holds is not known here.
    """
    if args.backend == "jax" and jax_devices()[0].platform != "cpu":
        return
    size, images = args.image_size, args.batch_size // args.accumulate / args.processes.count
    need = images * math.prod(size) * (4 + args.accumulate)  # float32 [-1, 1], and all the bytes
    params, sizes = init if args.init else (None, vars(variants.parse(args.model)))
    if "blocks" in sizes:  # no ResNet
        grid = token_grid(params, size) if args.init else None
        tokens = math.prod(grid) if grid else variants.tokens(variants.parse(args.model), size)
        kept = tokens * sizes["width"] * (2 if args.dtype == "bfloat16" else 4)
        if args.backend == "numpy":  # all weights of attention
            kept += 4 * sizes["heads"] * tokens**2
        # Below a head that is trained alone JAX keeps nothing; NumPy's `back`s do.
        need += images * kept * (1 if args.freeze and args.backend == "jax" else sizes["blocks"])
    check_memory(need, "a step", remedy(args))


def open_output(args, name):  # -> folder, held for this run
    """Make the output folder and prove that it can be written; never one that holds a result."""
    folder = args.output
    if folder is not None:
        check_empty(folder)
    try:
        if folder is None:
            folder = new_folder(Path("runs") / name.replace("/", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        args.held.enter_context(states.lock(folder))
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(
            f"cannot write to {folder or 'runs'}: {error.strerror}; choose another --output"
        ) from None
    check_empty(folder)  # once more: now nobody else can begin here
    return folder


def check_empty(folder):
    """Refuse a folder that holds what a run would overwrite."""
    for result in ("checkpoint.npz", "metrics.csv", "run.json"):
        if (folder / result).exists():
            raise FileExistsError(f"{folder} holds a {result} already; choose another --output")
    if folder.is_dir() and states.numbered(folder):
        raise FileExistsError(f"{folder} holds states of another run; choose another --output")


def new_folder(base):  # -> path
    """A folder that did not exist: of that name, or with the next number that is free."""
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
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
    """The images of this run; those of a resumed one must be what they were."""
    folder_options, held_out = {"channels": channels, "strict": args.strict}, None
    try:
        dataset = datasets.load_at(args.dataset, args.image_size, **folder_options)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not args.resume:
            raise
        raise type(error)(f"{error}; --dataset folder:PLACE says where it is now") from None
    if args.resume and args.data:  # version 0.1 did not note it
        datasets.check_identity(args.data, dataset, f"the run in {args.resume}")
    options.check_shift(args, *dataset.train_images.shape[1:3])
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
        corrupt=args.corrupt or 0,
        augmentation=Augmentation(args.crop_area, args.shift, args.flip, args.mixup),
        processes=args.processes,
    )


def prepare(args):  # -> Run
    """All that can fail because of what a user asked for, before the first step."""
    if not args.resume:
        options.check(args)
    init = read_init(args)
    if args.init:
        options.check_needs(args, is_resnet(init[0]))
    check_fit(args, init)
    dataset, held_out = read_data(args, init[1]["channels"] if args.init else 3)
    options.complete(args, len(dataset.train_images))
    name, params = start(args, dataset, init)
    batches = make_batches(args, dataset, params)
    engine, folder = make_engine(args, params), args.resume
    if args.processes.leads:
        rehearse(dataset)
    args.processes.check()  # before anything is written, and before what needs all of them
    if not args.resume and args.processes.leads:
        folder = open_output(args, name)
    run = Run(args, dataset, held_out, batches, folder, engine)
    if args.resume:
        go_on(args, run)
    elif args.processes.leads:
        stored = {option: getattr(args, option) for option in options.stored_names()}
        states.write_options(folder, stored, engine.hardware, dataset.identity())
    where = f"{args.backend}, {engine.hardware}"
    if args.processes.count > 1:
        where += f" of {args.processes.count} processes"
    where += f", {args.shard}" if args.shard != "data" else ""
    run.settings(params)  # what the checkpoint will say is checked before it is needed
    run.say(f"{name}: {count(params):,} parameters, on {where}, into {folder}")
    return run


def rehearse(dataset):
    """Draw what the end will draw, where it would cost hours to find out that it cannot be."""
    try:
        from . import figures

        one = dataset.test_images[:1], dataset.test_labels[:1], dataset.test_labels[:1]
        figures.curves([{"step": 1, "loss": 1.0}]).savefig(io.BytesIO())
        figures.examples(*one, dataset.classes).savefig(io.BytesIO())
    except Exception as error:
        if command.out_of_memory(error):
            raise
        raise OSError(f"pictures cannot be drawn here: {error}") from None


def go_on(args, run):
    """A run made ready to continue where it was interrupted."""
    states.check_devices(args.devices, run.engine.hardware, args.dropout)
    with args.processes.leader_first():  # it puts damaged states aside
        run.first, *state = states.newest(run.folder, run.engine.state_shapes(), run.leads)
        if state[0] is None and states.ended(run.folder):
            raise FileExistsError(
                f"{run.folder} has a checkpoint.npz but no state: that run has ended"
            )
    args.processes.check()  # one may have found nothing
    args.processes.same("newest states", run.first)
    if state[0] is not None:
        run.load_state(*state)
    run.say(f"{run.folder} goes on after step {run.first} of {args.steps}")


def take_up(args, argv):
    """The options of the run to be resumed, which nobody else may hold."""
    if not (args.resume / "run.json").is_file():
        raise FileNotFoundError(f"{args.resume} holds no run.json, so no run that could be resumed")
    if args.processes.leads:
        args.held.enter_context(states.lock(args.resume))
    given = options.given(argv)
    if "dataset" in given:
        given["dataset"] = options.resolved(given["dataset"])
    names = options.stored_names()
    stored, args.devices, args.data = states.read_options(args.resume, given, names)
    try:
        options.resume(args, stored)
    except ValueError as error:
        raise ValueError(f"{args.resume / 'run.json'}: {error}") from None
    changed = (*states.MAY_CHANGE, "dataset")
    options.resume(args, {name: given[name] for name in changed if name in given})


def work(args, argv):  # -> exit status
    """The whole command."""
    if args.distributed:
        if args.backend == "numpy":
            raise ValueError("--distributed needs --backend jax; NumPy cannot do it")
        args.processes = join()
    if not args.processes.leads:
        warnings.simplefilter("ignore")  # process 0 says them
    with contextlib.ExitStack() as args.held:
        with args.processes.together():
            if args.resume:
                take_up(args, argv)
            run = prepare(args)
        return run()


def remedy(args):  # -> text
    """What helps where memory is short; a resumed run's options are settled."""
    if not args.batch_size or not args.image_size:
        return "try a smaller --image-size"
    size, parts = args.batch_size, 2 * args.accumulate
    helps = {
        f"--batch-size {size // 2}": not args.resume and size > 1,
        f"--accumulate {parts}": not args.resume and size % parts == 0,
        "--shard fsdp": args.backend == "jax" and args.shard == "data",
        "a smaller --image-size": not args.resume,
        "a larger machine": args.resume,
    }
    *others, last = (text for text, does in helps.items() if does)
    images = f"{command.counted(size, 'image')} of {'x'.join(map(str, args.image_size))}"
    return f"a batch is {images}: try {', '.join(others)}{' or ' if others else ''}{last}"


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    begun = time.perf_counter()
    keep_memory()
    command.start()
    args = parser().parse_args(argv)
    args.processes, args.start = ALONE, begun
    try:
        status = command.run(
            "train", lambda: work(args, argv), remedy=lambda: remedy(args), patient=True
        )
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
