"""Train a Vision Transformer: `python -m minivit.train --tiny`.

On two cores of a laptop that takes about a minute and reaches 88 % on the 10,000 test images of
Fashion-MNIST. `--backend numpy` does the same with the hand-written gradients.
"""

import argparse
import csv
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import checkpoint, datasets, evaluate, optim, variants
from .params import count, initialise

METRICS = ("step", "images", "learning_rate", "loss", "accuracy", "test_loss", "test_accuracy")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m minivit.train",
        description="Train a Vision Transformer from scratch, and report on the test images.",
        formatter_class=Help,
    )
    size = p.add_mutually_exclusive_group(required=True)
    size.add_argument("--tiny", action="store_true", help="short for --model tiny --image-size 28")
    size.add_argument("--model", help=f"one of {', '.join(variants.NAMES)}, or another patch size")
    p.add_argument("--image-size", type=int, default=224, help="side in pixels, images are resized")
    p.add_argument("--dataset", default="fashion-mnist", help="data set")
    p.add_argument("--backend", choices=("jax", "numpy"), default="jax", help="which twin runs")
    p.add_argument("--steps", type=int, default=2800, help="optimiser steps")
    p.add_argument("--batch-size", type=int, default=64, help="images a step")
    p.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate of AdamW")
    p.add_argument(
        "--decay",
        choices=("cosine", "linear", "constant"),
        default="linear",
        help="how the learning rate falls after the warm-up",
    )
    p.add_argument("--warmup-steps", type=int, help="linear warm-up, by default a tenth of all")
    p.add_argument("--weight-decay", type=float, default=0.05, help="of kernels, times the rate")
    p.add_argument("--clip", type=float, default=1.0, help="global norm of the gradient; 0 is off")
    p.add_argument("--dropout", type=float, default=0.0, help="share of activations to drop")
    p.add_argument("--label-smoothing", type=float, default=0.0, help="share spread over classes")
    p.add_argument("--seed", type=int, default=0, help="of the weights, the order and dropout")
    p.add_argument("--log-every", type=int, default=50, help="steps between rows of metrics.csv")
    p.add_argument("--output", type=Path, help="folder to write, by default a new one in runs/")
    return p


def check(args):
    """Refuse what cannot work, before any work starts; fill in what depends on other values."""
    at_least = {"steps": 1, "batch_size": 1, "image_size": 1, "log_every": 1, "seed": 0}
    at_least |= {"learning_rate": 0, "weight_decay": 0, "clip": 0}
    for name, least in at_least.items():
        if not getattr(args, name) >= least:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(args, name)}; it must be at least {least}")
    for name in ("dropout", "label_smoothing"):
        if not 0 <= getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(args, name)}; it must be in [0, 1)")
    if args.warmup_steps is None:
        args.warmup_steps = args.steps // 10
    if not 0 <= args.warmup_steps <= args.steps:
        raise ValueError(
            f"--warmup-steps {args.warmup_steps} must lie between 0 and --steps {args.steps}"
        )
    if args.tiny:
        args.model, args.image_size = "tiny", 28
    args.variant = variants.parse(args.model)
    variants.tokens(args.variant, args.image_size)


def open_output(args):  # -> folder
    """Make the output folder and prove that it can be written; never one that holds a result."""
    folder = args.output
    if folder is None:
        base = Path("runs") / args.variant.name.replace("/", "-")
        names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))]
        folder = next(name for name in names if not name.exists())
    if (folder / "checkpoint.npz").exists():
        raise FileExistsError(f"{folder} holds a checkpoint already; choose another --output")
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
    options |= {"weight_decay": args.weight_decay, "clip": args.clip}
    if args.backend == "numpy":
        from .engine_numpy import NumPyEngine

        return NumPyEngine(params, **options)
    from .engine_jax import JaxEngine  # here, so that --help and --backend numpy need no JAX

    return JaxEngine(params, batch_size=args.batch_size, **options)


class Interrupt:
    """Ctrl-C asks to stop after the current step; a second one stops at once.

    A step must not be broken off: JAX reuses its input's memory, so half a step leaves nothing.
    """

    def __init__(self):
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.ask)

    def ask(self, *_):
        """The signal's handler."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def close(self):
        """Give the signal back."""
        signal.signal(signal.SIGINT, self.before)


def train(args, engine, dataset, writer):  # -> rows of metrics, steps done
    """The loop: a batch, a step, now and then a row of metrics."""
    size, total = args.batch_size, args.steps
    images, labels = dataset.train_images, dataset.train_labels
    rows, pending, interrupt = [], [], Interrupt()
    try:
        with tqdm(total=total * size, unit="img", unit_scale=True, dynamic_ncols=True) as bar:
            for step in range(total):
                if interrupt.asked:
                    return rows, step
                chosen = datasets.batch_indices(len(images), size, args.seed, step)
                batch = datasets.resize(images[chosen], args.image_size, args.image_size)
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
                    loss, accuracy = np.mean(np.array(pending, np.float64), axis=0).tolist()
                    pending.clear()
                    row = {"step": step + 1, "images": (step + 1) * size, "learning_rate": rate}
                    rows.append(row | {"loss": loss, "accuracy": accuracy})
                    writer.writerow(rows[-1])
                    bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.1%}")
        return rows, total
    finally:
        interrupt.close()


def report(result, dataset, args, seconds):  # -> text
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
    return "\n".join(lines)


def finish(args, folder, engine, dataset, rows, writer):  # -> result
    """Evaluate on every test image, and write the pictures."""
    from . import figures  # matplotlib, only when there is something to draw

    images = datasets.resize(dataset.test_images, args.image_size, args.image_size)
    logits = engine.logits(images)
    result = evaluate.summary(logits, dataset.test_labels)
    row = {"step": args.steps, "images": args.steps * args.batch_size}
    rows.append(row | {"test_loss": result["loss"], "test_accuracy": result["accuracy"]})
    writer.writerow(rows[-1])
    figures.curves(rows).savefig(folder / "curves.png", dpi=100)
    shown = dataset.test_images[:40], dataset.test_labels[:40], logits[:40].argmax(-1)
    figures.examples(*shown, dataset.classes).savefig(folder / "examples.png", dpi=100)
    return result


def run(args):  # -> exit status
    """The whole of a training run."""
    args.start = time.perf_counter()
    check(args)
    dataset = datasets.load(args.dataset)
    if args.batch_size > len(dataset.train_images):
        raise ValueError(
            f"--batch-size {args.batch_size} exceeds {len(dataset.train_images)} training images"
        )
    folder = open_output(args)
    params = initialise(
        args.variant,
        args.seed,
        image_size=args.image_size,
        channels=dataset.train_images.shape[-1],
        classes=len(dataset.classes),
    )
    print(f"{args.variant.name}: {count(params):,} parameters, on {args.backend}, into {folder}")
    engine = make_engine(args, params)
    with open(folder / "metrics.csv", "w", newline="", buffering=1) as file:
        writer = csv.DictWriter(file, METRICS)
        writer.writeheader()
        begun = time.perf_counter()
        rows, steps = train(args, engine, dataset, writer)
        seconds = {"training": time.perf_counter() - begun}
        path = checkpoint.save(folder / "checkpoint.npz", engine.snapshot())
        if steps < args.steps:
            print(f"interrupted after {steps} of {args.steps} steps; the weights are in {path}")
            return 130
        result = finish(args, folder, engine, dataset, rows, writer)
    seconds["all"] = time.perf_counter() - args.start
    print(report(result, dataset, args, seconds))
    print(f"checkpoint.npz, metrics.csv, curves.png and examples.png are in {folder}")
    return 0


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"minivit.train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("minivit.train: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
