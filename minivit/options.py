"""The command line of `python -m minivit.train`: its arguments, and what cannot work."""

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path

from . import command, opening, recipes, variants
from .command import number, whole
from .interpolation import METHODS
from .masking import OBJECTIVES
from .optim import RULES
from .shapes import image_shape

PLAIN = recipes.Recipe("")  # the default of everything
NOT_OF_RESNETS = ("dropout", "representation")
OF_ATTENTION = (*NOT_OF_RESNETS, "chunk", "positions", "old_grid")
OF_THE_BACKEND = ("dtype", "precision", "shard", "distributed", "chunk")
LARGEST = 1e30  # of any number: float32 ends at 3e38
SHARE = number(0, 1, open_right=True)
PART = number(0, 1, open_left=True)  # a share that may be all, but not none
CORRUPT = 0.5  # of the patches
ABOUT_CLASSES = ("loss", "head_bias", "representation", "label_smoothing", "mixup", "validation")
# The recipe where none is asked for: from scratch, with --init, and with a masked --objective.
USUAL = ("laptop", "laptop-finetune", "laptop-masked")
IN_RECIPES = [
    name
    for name in asdict(PLAIN)
    if name not in ("name", "models", "source", "sweep", "epochs_tried")
]


def usual(name):  # -> text
    """What an option is when neither it nor a recipe is given."""
    values = [getattr(recipes.find(recipe, "tiny"), name) for recipe in USUAL]
    words = [f"{'off' if v is False else v}" for v in values]
    others = zip(("with --init ", "masked "), words[1:], strict=True)
    return "; ".join([words[0], *(w + v for w, v in others if v != words[0])])


def parser():
    """All arguments."""
    p = command.Parser(
        prog="python -m minivit.train",
        description="Train a Vision Transformer, or fine-tune one, and report on the test images.",
    )

    def option(name, text, group=p, **keywords):
        key = name.removeprefix("--").replace("-", "_")
        if key in IN_RECIPES and "default:" not in text:
            text += f" (default: {usual(key)})"
        elif keywords.get("default") is not None:
            text += f" (default: {keywords['default']})"
        group.add_argument(name, help=text, **keywords)

    what = p.add_mutually_exclusive_group(required=True)
    option("--tiny", "short for --model tiny", what, action="store_true")
    names = ", ".join(variants.NAMES + variants.HYBRIDS + variants.RESNETS)
    option("--model", f"one of {names}, or another patch size", what)
    option("--init", "fine-tune the weights of a checkpoint", what, metavar="FILE")
    text = "go on with an interrupted run, to the bit; its options are those it was started with"
    option("--resume", text, what, metavar="FOLDER", type=Path)
    add_task(option)
    add_schedule(option)
    add_regularisation(option)
    opening.add_reading_options(p.add_argument_group("how the file of --init is read"))
    return p


def add_task(option):
    """What is trained on what."""
    text = (
        f"one of {', '.join(recipes.NAMES)} (default: one of the laptop's); minivit.recipes lists"
    )
    option("--recipe", text, metavar="NAME")
    option(
        "--objective", "classes, or a masked one without labels", choices=["classes", *OBJECTIVES]
    )
    option(
        "--image-size",
        "side or HEIGHTxWIDTH in pixels (default: 224, for tiny 28, for --init its own)",
        type=image_shape,
    )
    option(
        "--positions",
        "how --init's are resized (default: corners)",
        choices=(*METHODS, "random"),
    )
    option("--freeze", "train the head alone", action="store_true")
    text = "fashion-mnist, shapes, shapes:color (or :count, …), cifar-10, cifar-100, folder:PATH"
    option("--dataset", text, default="fashion-mnist")
    option("--strict", "stop at a broken picture of a folder", action="store_true")
    option("--per-class", "train on so many labelled images of each class only", type=whole(1))
    option("--backend", "which twin runs", choices=("jax", "numpy"), default="jax")
    text = "of the computation, jax only; weights, moments, norms, softmax and loss stay float32"
    option("--dtype", text, choices=("float32", "bfloat16"), default="float32")
    text = "of matrix products on GPUs and TPUs: highest forbids TF32 and bfloat16 passes"
    option("--precision", text, choices=("default", "highest"), default="default")
    text = (
        "queries of attention at a time, 0 for all; jax only (default: what suits size and device)"
    )
    option("--chunk", text, type=whole())
    text = "fsdp divides what is trained, and its moments, over the devices; jax only"
    option("--shard", text, choices=("data", "fsdp"), default="data")
    text = "one of several processes that run the same command: Slurm, Open MPI, TPU pods, or the "
    text += "variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; jax only"
    option("--distributed", text, action="store_true")
    option("--output", "folder to write (default: a new one in runs/)", type=Path)
    text = "of weights, order and dropout; dropout also depends on the number of cores"
    option("--seed", text, type=whole(0, 2**64 - 1), default=0)
    option("--log-every", "steps between rows of metrics.csv", type=whole(1), default=50)
    text = "steps between saved states for --resume; 0 is off (default: a tenth of the steps)"
    option("--checkpoint-every", text, type=whole())
    text = "steps between pictures of a masked objective (default: a quarter of the steps)"
    option("--mosaic-every", text, type=whole(1))


def add_schedule(option):
    """How long, how large, how fast."""
    option("--steps", "optimiser steps", type=whole(1))
    option("--epochs", "the same in passes over the images (default: by --steps)", type=whole(1))
    option("--batch-size", "images a step", type=whole(1))
    option("--accumulate", "divide a batch into parts, to save memory", type=whole(1), default=1)
    option("--optimizer", "rule", choices=tuple(RULES))
    option("--learning-rate", "its peak", type=number(0, LARGEST))
    option("--decay", "how it falls after warm-up", choices=("cosine", "linear", "constant"))
    option("--warmup-steps", "how long it rises (default: a tenth of the steps)", type=whole())
    option("--clip", "global norm of the gradient; 0 is off", type=number(0, LARGEST))
    option("--average", "share that the averaged weights keep each step; 0 is off", type=SHARE)
    option("--loss", "of classes", choices=("softmax", "sigmoid"))
    option("--head-bias", "where the head's biases begin", type=number(-LARGEST, LARGEST))
    text = "a hidden layer of width D before a new model's head"
    option("--representation", text, action=argparse.BooleanOptionalAction)
    text = "share of the training images to hold out; the weights that do best on it are kept"
    option("--validation", text, type=SHARE)
    text = "steps between validations (default: a twentieth of the steps)"
    option("--evaluate-every", text, type=whole(1))
    text = "stop after so many validations that are no better; 0 is off"
    option("--patience", text, type=whole(), default=0)


def add_regularisation(option):
    """What keeps the model from learning its images by heart."""
    option("--weight-decay", "of kernels, times the learning rate", type=number(0, LARGEST))
    option("--dropout", "share of activations to drop", type=SHARE)
    option("--label-smoothing", "share spread over all classes", type=SHARE)
    option("--flip", "mirror half of the images", action=argparse.BooleanOptionalAction)
    option("--crop-area", "least share of the area that a random crop keeps; 1 is off", type=PART)
    option("--shift", "pixels by which images move at random", type=whole())
    option(
        "--mixup", "parameter of the Beta distribution of the shares; 0 is off", type=number(0, 100)
    )
    text = f"share of the patches, for the masked ones (default: {CORRUPT})"
    option("--corrupt", text, type=PART)


def check(args):
    """Fill in from the recipe what was not given, and refuse what cannot work."""
    args.model = "tiny" if args.tiny else args.model
    variant = variants.parse(args.model) if args.model else None
    masked = args.objective not in (None, "classes")
    usual = "laptop-masked" if masked else "laptop-finetune" if args.init else "laptop"
    recipe = recipes.find(
        args.recipe or usual, variants.full_name(variant) if variant else "--init"
    )
    given = {name for name in IN_RECIPES if getattr(args, name) is not None}
    if {"steps", "epochs"} <= given:
        raise ValueError(f"--steps {args.steps} and --epochs {args.epochs}: give one of them")
    resnet = isinstance(variant, variants.ResNet)
    masked = masked or (recipe.objective != "classes" and "objective" not in given)
    given |= {"steps", "epochs"} if given & {"steps", "epochs"} else set()
    by_name = actions()
    for name in (name for name in IN_RECIPES if name not in given):
        # What a masked objective or a ResNet has no use for is not taken from a recipe.
        useless = (masked and name in ABOUT_CLASSES) or (resnet and name in NOT_OF_RESNETS)
        setattr(args, name, checked(by_name[name], getattr(PLAIN if useless else recipe, name)))
    args.own_warmup = "warmup_steps" in given
    args.dataset = resolved(args.dataset)
    if variant and args.image_size is None:
        args.image_size = (28, 28) if variant.name.startswith("tiny") else (224, 224)
    check_together(args, variant)


def actions():  # -> {name: what argparse knows of it}
    """All options but --help."""
    return {a.dest: a for a in parser()._actions if a.dest != "help"}


def checked(action, value):
    """A value from a file that people can edit, or from a recipe, checked as if it were typed."""
    option = action.option_strings[0]
    if action.nargs == 0:  # it is given or not
        if not isinstance(value, bool):
            raise ValueError(f"{option} is {value}, neither true nor false")
        return value
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        value = action.type(text) if action.type else text
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} {error}") from None
    if action.choices and value not in action.choices:
        raise ValueError(f"{option} is {text}; choose one of {', '.join(action.choices)}")
    return value


def resolved(dataset):
    """A folder by its whole path, so that a run finds it from wherever it is resumed."""
    kind, _, path = dataset.partition(":")
    if kind != "folder" or not path:
        return dataset
    return f"folder:{Path(path).expanduser().resolve()}"


# What follows from other options, or is of one command line only.
NOT_STORED = ("resume", "tiny", "output", "distributed")


def stored_names():
    """The options that a run is resumed with."""
    return [name for name in actions() if name not in NOT_STORED]


def given(argv):  # -> {name: value}
    """What stands on a command line, without any default."""
    absent = object()
    space = argparse.Namespace(**dict.fromkeys(actions(), absent))
    found = vars(parser().parse_args(argv, space))
    return {name: value for name, value in found.items() if value is not absent}


def resume(args, stored):
    """The options that a run was started with, in place of those of this command line."""
    by_name = actions()
    for name, value in stored.items():
        value = checked(by_name[name], value)
        if value is None and name in (*IN_RECIPES, "checkpoint_every") and name != "epochs":
            raise ValueError(f"{by_name[name].option_strings[0]} is missing")
        setattr(args, name, value)
    args.own_warmup = True
    check_together(args, variants.parse(args.model) if args.model else None)


def check_together(args, variant):
    """What contradicts each other, or would be passed over in silence."""
    if variant:
        variants.check_size(variant, args.image_size)
    check_needs(args, isinstance(variant, variants.ResNet))
    if args.batch_size % args.accumulate:
        batch = command.counted(args.batch_size, "image")
        raise ValueError(f"--accumulate {args.accumulate} does not divide {batch}")


# Values that ask for nothing.
IDLE = (None, False, 0, "softmax", "float32", "default", "data", "error")


def check_needs(args, resnet):
    """Refuse every option that would have no effect, and say what it needs."""
    masked = args.objective != "classes"
    folder, jax = args.dataset.startswith("folder:"), args.backend == "jax"
    labels = f"labels, which --objective {args.objective} does not use"
    needs = [
        (args.init, "--init FILE", ("positions", "heads", "pixels", "old_grid", "extra")),
        (not args.init, "a new model, not --init", ("head_bias", "representation")),
        (args.validation, "--validation, a share such as 0.02", ("evaluate_every", "patience")),
        (masked, "a masked --objective such as mean-color", ("mosaic_every", "corrupt")),
        (not masked, labels, (*ABOUT_CLASSES, "freeze", "per_class")),
        (folder, "--dataset folder:PATH", ("strict",)),
        (jax, "--backend jax; NumPy cannot do it", OF_THE_BACKEND),
        (not resnet, "attention; a ResNet has no such thing", OF_ATTENTION),
        (args.batch_size != 1, "--batch-size 2 or more", ("mixup",)),
    ]
    for met, need, names in needs:
        for name in names:
            if not met and (value := getattr(args, name)) not in IDLE:
                option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise ValueError(f"{option} needs {need}")


def check_shift(args, height, width):
    """Images that move by more than their own size are not seen any more."""
    if args.shift >= min(height, width):
        raise ValueError(
            f"--shift {args.shift} moves images of {height}x{width} out of sight; it must be below "
            f"{min(height, width)}"
        )


def complete(args, examples):
    """The number of steps and what follows from it, when the number of images is known."""
    if args.batch_size > examples:
        there = command.counted(examples, "training image")
        raise ValueError(f"--batch-size {args.batch_size} exceeds {there}")
    if args.epochs is not None:
        args.steps = max(1, args.epochs * examples // args.batch_size)
    if args.warmup_steps is None:
        args.warmup_steps = args.steps // 10
    elif args.warmup_steps > args.steps and not args.own_warmup:
        warnings.warn(
            f"the recipe's warm-up of {args.warmup_steps} steps is for a longer run than "
            f"{args.steps} steps; it takes {args.steps // 10} here",
            stacklevel=2,
        )
        args.warmup_steps = args.steps // 10
    if args.warmup_steps > args.steps:
        raise ValueError(
            f"--warmup-steps {args.warmup_steps} must lie between 0 and --steps {args.steps}"
        )
    if args.checkpoint_every is None:
        args.checkpoint_every = max(1, args.steps // 10)
    # What the run has no use for stays open, so that a resumed one can be checked alike.
    if args.objective != "classes":
        args.mosaic_every = args.mosaic_every or max(1, args.steps // 4)
        args.corrupt = args.corrupt or CORRUPT
    if args.validation:
        args.evaluate_every = args.evaluate_every or max(1, args.steps // 20)
