"""The command line of `python -m minivit.train`: its arguments, and what cannot work."""

import argparse
import math
import warnings
from dataclasses import asdict
from pathlib import Path

from . import recipes, variants
from .augmentation import Augmentation
from .interpolation import METHODS
from .masking import OBJECTIVES
from .optim import RULES
from .shapes import image_shape

PLAIN = recipes.Recipe("")  # the default of everything
NOT_OF_RESNETS = ("dropout", "representation")
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


def parser(defaults=True):
    """All arguments; without `defaults` only what is given comes back."""
    p = argparse.ArgumentParser(
        prog="python -m minivit.train",
        description="Train a Vision Transformer, or fine-tune one, and report on the test images.",
    )

    def option(name, text, group=p, **keywords):
        key = name.removeprefix("--").replace("-", "_")
        if key in IN_RECIPES and "default:" not in text:
            text += f" (default: {usual(key)})"
        elif keywords.get("default") is not None:
            text += f" (default: {keywords['default']})"
        if not defaults:
            keywords["default"] = argparse.SUPPRESS
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
    option("--old-grid", "grid of --init's positions where it is not square: 4x8", type=image_shape)
    option(
        "--positions", "how --init's are resized", choices=(*METHODS, "random"), default="corners"
    )
    option("--freeze", "train the head alone", action="store_true")
    text = "fashion-mnist, shapes, shapes:color (or :count, …), cifar-10, cifar-100, folder:PATH"
    option("--dataset", text, default="fashion-mnist")
    option("--strict", "stop at a broken picture of a folder", action="store_true")
    option("--per-class", "train on so many labelled images of each class only", type=int)
    option("--backend", "which twin runs", choices=("jax", "numpy"), default="jax")
    text = "of the computation, jax only; weights, moments, norms, softmax and loss stay float32"
    option("--dtype", text, choices=("float32", "bfloat16"), default="float32")
    text = "of matrix products on GPUs and TPUs: highest forbids TF32 and bfloat16 passes"
    option("--precision", text, choices=("default", "highest"), default="default")
    text = (
        "queries of attention at a time, 0 for all; jax only (default: what suits size and device)"
    )
    option("--chunk", text, type=int)
    text = "fsdp divides what is trained, and its moments, over the devices; jax only"
    option("--shard", text, choices=("data", "fsdp"), default="data")
    text = "one of several processes that run the same command: Slurm, Open MPI, TPU pods, or the "
    text += "variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; jax only"
    option("--distributed", text, action="store_true")
    option("--output", "folder to write (default: a new one in runs/)", type=Path)
    text = "of weights, order and dropout; dropout also depends on the number of cores"
    option("--seed", text, type=int, default=0)
    option("--log-every", "steps between rows of metrics.csv", type=int, default=50)
    text = "steps between saved states for --resume; 0 is off (default: a tenth of the steps)"
    option("--checkpoint-every", text, type=int)
    text = "steps between pictures of a masked objective (default: a quarter of the steps)"
    option("--mosaic-every", text, type=int)


def add_schedule(option):
    """How long, how large, how fast."""
    option("--steps", "optimiser steps", type=int)
    option("--epochs", "the same in passes over the images (default: by --steps)", type=int)
    option("--batch-size", "images a step", type=int)
    option("--accumulate", "divide a batch into parts, to save memory", type=int, default=1)
    option("--optimizer", "rule", choices=tuple(RULES))
    option("--learning-rate", "its peak", type=float)
    option("--decay", "how it falls after warm-up", choices=("cosine", "linear", "constant"))
    option("--warmup-steps", "how long it rises (default: a tenth of the steps)", type=int)
    option("--clip", "global norm of the gradient; 0 is off", type=float)
    option("--average", "share that the averaged weights keep each step; 0 is off", type=float)
    option("--loss", "of classes", choices=("softmax", "sigmoid"))
    option("--head-bias", "where the head's biases begin", type=float)
    text = "a hidden layer of width D before a new model's head"
    option("--representation", text, action=argparse.BooleanOptionalAction)
    text = "share of the training images to hold out; the weights that do best on it are kept"
    option("--validation", text, type=float)
    text = "steps between validations (default: a twentieth of the steps)"
    option("--evaluate-every", text, type=int)
    text = "stop after so many validations that are no better; 0 is off"
    option("--patience", text, type=int, default=0)


def add_regularisation(option):
    """What keeps the model from learning its images by heart."""
    option("--weight-decay", "of kernels, times the learning rate", type=float)
    option("--dropout", "share of activations to drop", type=float)
    option("--label-smoothing", "share spread over all classes", type=float)
    option("--flip", "mirror half of the images", action=argparse.BooleanOptionalAction)
    option("--crop-area", "least share of the area that a random crop keeps; 1 is off", type=float)
    option("--shift", "pixels by which images move at random", type=int)
    option("--mixup", "parameter of the Beta distribution of the shares; 0 is off", type=float)
    option("--corrupt", "share of the patches, for the masked ones", type=float, default=0.5)


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
    resnet = isinstance(variant, variants.ResNet)
    masked = masked or (recipe.objective != "classes" and "objective" not in given)
    for name in IN_RECIPES:
        if name in given or (name in ("steps", "epochs") and given & {"steps", "epochs"}):
            continue
        # What a masked objective or a ResNet has no use for is not taken from a recipe.
        useless = (masked and name in ABOUT_CLASSES) or (resnet and name in NOT_OF_RESNETS)
        source = PLAIN if useless else recipe
        setattr(args, name, getattr(source, name))
    args.own_warmup = "warmup_steps" in given
    if args.steps is not None and args.epochs is not None:
        raise ValueError(f"--steps {args.steps} and --epochs {args.epochs}: give one of them")
    check_ranges(args)
    if isinstance(args.image_size, int):
        args.image_size = (args.image_size, args.image_size)
    if variant:
        if args.image_size is None:
            args.image_size = (28, 28) if variant.name.startswith("tiny") else (224, 224)
        variants.check_size(variant, args.image_size)
    args.augmentation = Augmentation(args.crop_area, args.shift, args.flip, args.mixup)
    check_together(args)


# What follows from other options, or is of one command line only.
NOT_STORED = ("resume", "tiny", "output", "distributed")


def stored_names():
    """The options that a run is resumed with."""
    return [a.dest for a in parser()._actions if a.dest not in (*NOT_STORED, "help")]


def resume(args, stored):
    """The options that a run was started with, in place of those of this command line."""
    for name, value in stored.items():
        setattr(args, name, value)
    args.augmentation = Augmentation(args.crop_area, args.shift, args.flip, args.mixup)
    check_backend(args)


def check_ranges(args):
    """Each number by itself."""
    limits = dict.fromkeys(("batch_size", "log_every", "accumulate"), (1, math.inf))
    optional = ("steps", "epochs", "mosaic_every", "evaluate_every", "per_class")
    limits |= {name: (1, math.inf) for name in optional if getattr(args, name) is not None}
    limits |= dict.fromkeys(("learning_rate", "weight_decay", "clip", "seed"), (0, math.inf))
    limits |= dict.fromkeys(("shift", "patience", "mixup"), (0, math.inf))
    for name in ("checkpoint_every", "chunk"):
        if getattr(args, name) is not None:
            limits[name] = (0, math.inf)
    limits |= dict.fromkeys(("dropout", "label_smoothing", "average", "validation"), (0, 1))
    for name, (least, below) in limits.items():
        if not least <= getattr(args, name) < below:
            option, bound = "--" + name.replace("_", "-"), f"at least {least} and below {below}"
            raise ValueError(f"{option} is {getattr(args, name)}; it must be {bound}")
    for name in ("crop_area", "corrupt"):
        if not 0 < getattr(args, name) <= 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(args, name)}; it must be above 0 and at most 1")


def check_together(args):
    """What contradicts each other."""
    for name in (*ABOUT_CLASSES, "freeze", "per_class"):
        value = getattr(args, name)
        if args.objective != "classes" and value and value != getattr(PLAIN, name, None):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is about labels, which --objective {args.objective} does not use; "
                "leave it out"
            )
    if args.model and isinstance(variants.parse(args.model), variants.ResNet):
        check_resnet(args)
    check_backend(args)
    if args.patience and not args.validation:
        raise ValueError(f"--patience {args.patience} needs --validation, a share such as 0.02")
    if args.init and (args.representation or args.head_bias):
        raise ValueError("--representation and --head-bias are for a new model, not for --init")
    if args.batch_size % args.accumulate:
        raise ValueError(f"--accumulate {args.accumulate} does not divide {args.batch_size} images")


def check_backend(args):
    """What only JAX can do."""
    plain = {"dtype": "float32", "shard": "data", "distributed": False, "chunk": None}
    for name, usual in plain.items():
        value = getattr(args, name)
        if args.backend == "numpy" and value != usual:
            option = f"--{name}" + ("" if value is True else f" {value}")
            raise ValueError(f"{option} needs --backend jax; NumPy cannot do it")


def check_resnet(args):
    """What only models with attention have."""
    for name in NOT_OF_RESNETS:
        if value := getattr(args, name):
            raise ValueError(f"--{name} {value}: a ResNet has no such thing; leave it out")
    if args.chunk is not None:
        raise ValueError(f"--chunk {args.chunk}: a ResNet has no attention; leave it out")


def check_steps(args, examples):
    """The number of steps and what follows from it, when the number of images is known."""
    if args.batch_size > examples:
        raise ValueError(f"--batch-size {args.batch_size} exceeds {examples} training images")
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
    if not 0 <= args.warmup_steps <= args.steps:
        raise ValueError(
            f"--warmup-steps {args.warmup_steps} must lie between 0 and --steps {args.steps}"
        )
    if args.checkpoint_every is None:
        args.checkpoint_every = max(1, args.steps // 10)
    args.mosaic_every = args.mosaic_every or max(1, args.steps // 4)
    args.evaluate_every = args.evaluate_every or max(1, args.steps // 20)
