"""Train a Vision Transformer: `python -m minivit.train --tiny`.

On two cores that takes about a minute and reaches 87 % on the 10,000 test images of Fashion-MNIST.
`--backend numpy` does the same with the hand-written gradients. `--init FILE` fine-tunes.
"""

import argparse
import csv
import math
import re
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import checkpoint, datasets, evaluate, finetune, optim, variants
from .checkpoint import command_line_warnings
from .interpolation import METHODS
from .params import count, initialise, tree_map
from .shapes import image_shape

METRICS = ("step", "images", "learning_rate", "loss", "accuracy", "test_loss", "test_accuracy")


# What an option is when it is not given: from scratch, and with --init. Fine-tuning is the paper's
# (Table 4), with the averaging of its best results (Table 2) and steps for a laptop.
SCRATCH = {
    "optimizer": "adamw",
    "steps": 2500,
    "learning_rate": 2e-3,
    "decay": "linear",
    "weight_decay": 0.05,
    "average": 0.0,
}
FINETUNE = {
    "optimizer": "sgd",
    "steps": 500,
    "learning_rate": 0.03,
    "decay": "cosine",
    "weight_decay": 0.0,
    "average": 0.9999,
}


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m minivit.train",
        description="Train a Vision Transformer, or fine-tune one, and report on the test images.",
    )

    def option(name, text, **keywords):
        key = name.removeprefix("--").replace("-", "_")
        if key in SCRATCH:
            text += f" (default: {SCRATCH[key]}; with --init {FINETUNE[key]})"
        elif keywords.get("default") is not None:
            text += f" (default: {keywords['default']})"
        p.add_argument(name, help=text, **keywords)

    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--tiny", action="store_true", help="short for --model tiny")
    what.add_argument("--model", help=f"one of {', '.join(variants.NAMES)}, or another patch size")
    what.add_argument("--init", metavar="FILE", help="fine-tune the weights of a checkpoint")
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
    option("--dataset", "data set", default="fashion-mnist")
    option("--backend", "which twin runs", choices=("jax", "numpy"), default="jax")
    option("--steps", "optimiser steps", type=int)
    option("--batch-size", "images a step", type=int, default=64)
    option("--optimizer", "rule", choices=tuple(optim.RULES))
    option("--learning-rate", "its peak", type=float)
    option("--decay", "how it falls after warm-up", choices=("cosine", "linear", "constant"))
    option("--warmup-steps", "how long it rises (default: a tenth of the steps)", type=int)
    option("--weight-decay", "of kernels, times the learning rate", type=float)
    option("--average", "share that the averaged weights keep each step; 0 is off", type=float)
    option("--clip", "global norm of the gradient; 0 is off", type=float, default=1.0)
    option("--dropout", "share of activations to drop", type=float, default=0.0)
    option("--label-smoothing", "share spread over all classes", type=float, default=0.0)
    text = "of weights, order and dropout; dropout also depends on the number of cores"
    option("--seed", text, type=int, default=0)
    option("--log-every", "steps between rows of metrics.csv", type=int, default=50)
    option("--output", "folder to write (default: a new one in runs/)", type=Path)
    return p


def check(args):
    """Refuse what cannot work, before any work starts; fill in what was not given."""
    for name, value in (FINETUNE if args.init else SCRATCH).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.warmup_steps is None:
        args.warmup_steps = args.steps // 10
    limits = dict.fromkeys(("steps", "batch_size", "log_every"), (1, math.inf))
    limits |= dict.fromkeys(("learning_rate", "weight_decay", "clip", "seed"), (0, math.inf))
    limits |= dict.fromkeys(("dropout", "label_smoothing", "average"), (0, 1))
    for name, (least, below) in limits.items():
        if not least <= getattr(args, name) < below:
            option, bound = "--" + name.replace("_", "-"), f"at least {least} and below {below}"
            raise ValueError(f"{option} is {getattr(args, name)}; it must be {bound}")
    if not 0 <= args.warmup_steps <= args.steps:
        raise ValueError(
            f"--warmup-steps {args.warmup_steps} must lie between 0 and --steps {args.steps}"
        )
    args.model = "tiny" if args.tiny else args.model
    if args.model:
        if args.image_size is None:
            args.image_size = (28, 28) if args.model.lower().startswith("tiny") else (224, 224)
        variants.tokens(variants.parse(args.model), args.image_size)


def start(args, dataset):  # -> name, parameters
    """Fresh parameters, or those of a checkpoint made ready for fine-tuning."""
    channels, classes = dataset.train_images.shape[-1], len(dataset.classes)
    if not args.init:
        options = {"image_size": args.image_size, "channels": channels, "classes": classes}
        args.settings = {}
        rng = np.random.default_rng([args.seed, datasets.WEIGHTS])
        return args.model, initialise(variants.parse(args.model), rng, **options)
    params, description = checkpoint.inspect(args.init, head=False)
    grid = args.old_grid or description["grid"]
    if args.image_size is None:
        args.image_size = finetune.image_size(params, grid)
    args.settings = {name: description[name] for name in ("gelu_form", "epsilon")}
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
    for result in ("checkpoint.npz", "metrics.csv"):
        if (folder / result).exists():
            raise FileExistsError(f"{folder} holds a {result} already; choose another --output")
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
    options = {"rate": args.dropout, "smoothing": args.label_smoothing, "seed": args.seed}
    options |= {"weight_decay": args.weight_decay, "clip": args.clip, "rule": args.optimizer}
    options |= {"freeze": args.freeze, "keep": args.average, "model": args.settings}
    if args.backend == "numpy":
        from .engine_numpy import NumPyEngine

        return NumPyEngine(params, **options)
    from .engine_jax import JaxEngine  # here, so that --help and --backend numpy need no JAX

    return JaxEngine(params, batch_size=args.batch_size, **options)


class Interrupt:
    """Ctrl-C or SIGTERM asks to stop after the current step; a second Ctrl-C stops at once.

    A step must not be broken off: JAX reuses its input's memory, so half a step leaves nothing.
    """

    def __init__(self):
        self.asked = False
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}

    def ask(self, *_):
        """The signal's handler."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def close(self):
        """Give the signals back."""
        for which, handler in self.before.items():
            signal.signal(which, handler)


DIVERGED = (
    "minivit.train: error: the loss is no longer finite; "
    "lower --learning-rate, or raise --warmup-steps"
)


def engine_images(images, args):  # uint8 [B, ...] -> uint8 [B, height, width, C]
    """Images as the model was made for: its size, and its number of channels."""
    return datasets.resize(datasets.with_channels(images, args.channels), *args.image_size)


def train(args, engine, dataset, writer):  # -> rows of metrics, steps done, why it ended early
    """The loop: a batch, a step, now and then a row of metrics."""
    size, total = args.batch_size, args.steps
    images, labels = dataset.train_images, dataset.train_labels
    rows, pending, interrupt = [], [], Interrupt()
    try:
        pause = 0.1 if sys.stderr.isatty() else 15  # a log file needs no moving bar
        bar = partial(tqdm, unit="img", unit_scale=True, dynamic_ncols=True, mininterval=pause)
        with bar(total=total * size) as bar:
            for step in range(total):
                if interrupt.asked:
                    return rows, step, "interrupted"
                chosen = datasets.batch_indices(len(images), size, args.seed, step)
                batch = engine_images(images[chosen], args)
                rate = optim.schedule(
                    step,
                    base=args.learning_rate,
                    total=total,
                    warmup=args.warmup_steps,
                    decay=args.decay,
                )
                pending.append(engine.step(step, batch, labels[chosen], rate))
                if step == 0:
                    float(pending[0][0])  # wait for it
                    bar.write(f"first step after {time.perf_counter() - args.start:.1f} s")
                bar.update(size)
                if len(pending) == args.log_every or step + 1 == total:
                    numbers = np.array(pending, np.float64)
                    if not np.isfinite(numbers[:, 0]).any():
                        print(DIVERGED, file=sys.stderr)
                        return rows, step + 1, "diverged"
                    loss, accuracy = np.nanmean(numbers, axis=0).tolist()
                    pending.clear()
                    row = {"step": step + 1, "images": (step + 1) * size, "learning_rate": rate}
                    rows.append(row | {"loss": loss, "accuracy": accuracy})
                    writer.writerow(rows[-1])
                    bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.1%}", refresh=False)
        return rows, total, None
    finally:
        interrupt.close()


def report(result, dataset, args, seconds, skipped):  # -> text
    """The table at the end."""
    lines = [f"{'class':<14}accuracy"]
    pairs = zip(dataset.classes, result["by_class"], strict=True)
    lines += [f"{name:<14}{share:8.1%}" for name, share in pairs]
    speed = args.steps * args.batch_size / seconds["training"]
    lines += [
        f"{'all':<14}{result['accuracy']:8.2%} of {len(dataset.test_labels)} test images",
        f"{'loss':<14}{result['loss']:8.4f}",
        f"{'training':<14}{seconds['training']:7.1f}s ({speed:.0f} images/s)",
        f"{'whole command':<14}{seconds['all']:7.1f}s",
    ]
    if skipped:
        lines.append(f"{skipped} steps had a gradient that was not finite and changed nothing")
    return "\n".join(lines)


def finish(args, folder, engine, dataset, rows, writer):  # -> result
    """Evaluate on every test image, and write the pictures."""
    from . import figures  # matplotlib, only when there is something to draw

    parts = np.array_split(dataset.test_images, max(1, len(dataset.test_images) // 1000))
    size = max(args.batch_size, min(500, 50_000 // math.prod(args.image_size)))
    logits = np.concatenate([engine.logits(engine_images(part, args), size) for part in parts])
    result = evaluate.summary(logits, dataset.test_labels)
    row = {"step": args.steps, "images": args.steps * args.batch_size}
    rows.append(row | {"test_loss": result["loss"], "test_accuracy": result["accuracy"]})
    writer.writerow(rows[-1])
    figures.curves(rows).savefig(folder / "curves.png", dpi=100)
    shown = dataset.test_images[:40], dataset.test_labels[:40], logits[:40].argmax(-1)
    figures.examples(*shown, dataset.classes).savefig(folder / "examples.png", dpi=100)
    return result


def prepare(args):  # -> data set, output folder, engine
    """All that can fail because of what a user asked for."""
    check(args)
    dataset = datasets.load(args.dataset)
    if args.batch_size > len(dataset.train_images):
        raise ValueError(
            f"--batch-size {args.batch_size} exceeds {len(dataset.train_images)} training images"
        )
    name, params = start(args, dataset)
    *args.patch, args.channels, _ = params["embedding"]["kernel"].shape
    datasets.with_channels(dataset.train_images[:1], args.channels)
    folder = open_output(args, name)
    print(f"{name}: {count(params):,} parameters, on {args.backend}, into {folder}")
    return dataset, folder, make_engine(args, params)


def settings(args):
    """What the checkpoint's names and shapes will not tell."""
    rows, columns = (n // p for n, p in zip(args.image_size, args.patch, strict=True))
    return args.settings | ({} if rows == columns else {"grid": [rows, columns]})


def run(args, dataset, folder, engine):  # -> exit status
    """Train, save, evaluate."""
    with open(folder / "metrics.csv", "w", newline="", buffering=1) as file:
        writer = csv.DictWriter(file, METRICS)
        writer.writeheader()
        begun = time.perf_counter()
        rows, steps, why = train(args, engine, dataset, writer)
        seconds = {"training": time.perf_counter() - begun}
        path = checkpoint.save(
            folder / "checkpoint.npz", engine.snapshot(), settings=settings(args)
        )
        if why:
            print(f"{why} after {steps} of {args.steps} steps; the weights are in {path}")
            return 130 if why == "interrupted" else 1
        result = finish(args, folder, engine, dataset, rows, writer)
    seconds["all"] = time.perf_counter() - args.start
    print(report(result, dataset, args, seconds, int(engine.state["skipped"])))
    print(f"checkpoint.npz, metrics.csv, curves.png and examples.png are in {folder}")
    return 0


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    args.start = time.perf_counter()
    try:
        with command_line_warnings():
            try:
                work = prepare(args)
            except ValueError as error:  # later, it would be our own fault
                print(f"minivit.train: error: {error}", file=sys.stderr)
                return 2
            return run(args, *work)
    except OSError as error:
        print(f"minivit.train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("minivit.train: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
