"""Train a Vision Transformer: `python -m minivit.train --tiny`.

On two cores that takes about a minute and reaches 87 % on the 10,000 test images of Fashion-MNIST.
`--backend numpy` does the same with the hand-written gradients. `--init FILE` fine-tunes, and
`--objective mean-color` learns from images without labels.
"""

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

from . import (
    checkpoint,
    command,
    datasets,
    evaluate,
    finetune,
    masking,
    optim,
    options,
    states,
    variants,
)
from .architecture import image_channels, is_resnet, token_grid, token_pixels
from .batches import Batches, fit, portion
from .in_numpy import masked_vit
from .params import count, initialise, tree_map

METRICS = ["step", "images", "learning_rate", "loss", "accuracy"]
METRICS += ["validation_loss", "validation_accuracy", "test_loss", "test_accuracy"]
SHOWN = 8  # images of a mosaic


def read_init(args):  # -> parameters, description; or two times None
    """The file of --init, and the image size if only it knows."""
    if not args.init:
        return None, None
    params, description = checkpoint.inspect(args.init, head=False)
    if args.image_size is None:
        args.image_size = finetune.image_size(params, description, args.old_grid)
    return params, description


def load_data(args, channels):
    """The data set; a folder's pictures are decoded at the model's size."""
    if not args.dataset.startswith("folder:"):
        return datasets.load(args.dataset)
    options = {"size": args.image_size, "channels": channels, "seed": args.seed}
    return datasets.load(args.dataset, **options, strict=args.strict)


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
    options["model"] = args.settings | ({} if args.loss == "softmax" else {"loss": args.loss})
    if args.backend == "numpy":
        from .engine_numpy import NumPyEngine

        return NumPyEngine(params, **options)
    from .engine_jax import JaxEngine  # here, so that --help and --backend numpy need no JAX

    if args.precision == "highest":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    return JaxEngine(params, batch_size=args.batch_size, dtype=args.dtype, **options)


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


class Run:
    """One training run: what it trains, what it has seen, what it writes."""

    def __init__(self, args, dataset, held_out, batches, folder, engine):
        self.args, self.dataset, self.held_out = args, dataset, held_out
        self.batches, self.folder, self.engine = batches, folder, engine
        self.first, self.rows, self.pending = 0, [], []
        self.best, self.best_accuracy, self.since_best = None, -1.0, 0

    def write(self, row):
        """A row of metrics.csv."""
        self.rows.append(row)
        self.writer.writerow(row)

    def train(self):  # -> steps done, why it ended early
        """The loop: a batch, a step, now and then a row of metrics, a validation, a picture."""
        args, total = self.args, self.args.steps
        if 0 < args.patience <= self.since_best:  # it had ended just before it was killed
            return self.first, "stopped"
        interrupt = Interrupt()
        pause = 0.1 if sys.stderr.isatty() else 15  # a log file needs no moving bar
        bar = partial(tqdm, unit="img", unit_scale=True, dynamic_ncols=True, mininterval=pause)
        rate = partial(optim.schedule, base=args.learning_rate, total=total, decay=args.decay)
        try:
            done = self.first * args.batch_size
            with bar(total=total * args.batch_size, initial=done) as bar:
                for step in range(self.first, total):
                    if interrupt.asked:
                        self.save_state(step)
                        bar.write(f"go on with --resume {self.folder}")
                        return step, "interrupted"
                    learning_rate = rate(step, warmup=args.warmup_steps)
                    numbers = self.engine.step(step, self.batches(step), learning_rate)
                    self.pending.append(numbers)
                    if step == self.first:
                        float(numbers[0])  # wait for it
                        bar.write(f"first step after {time.perf_counter() - args.start:.1f} s")
                    bar.update(args.batch_size)
                    if why := self.after(step + 1, learning_rate, bar):
                        return step + 1, why
            return total, None
        finally:
            interrupt.close()

    def after(self, done, learning_rate, bar):  # -> why to stop
        """What is due when so many steps are done."""
        args, last = self.args, done == self.args.steps
        if done % args.log_every == 0 or last:
            losses, right = np.array(self.pending, np.float64).T
            self.pending.clear()
            if not np.isfinite(losses).any():
                return "diverged"
            row = {"step": done, "images": done * args.batch_size, "learning_rate": learning_rate}
            row["loss"] = float(np.nanmean(losses))
            if np.isfinite(right).any():
                row["accuracy"] = float(np.nanmean(right))
            self.write(row)
            words = [f"{name} {row[name]:.3f}" for name in ("loss", "accuracy") if name in row]
            bar.set_postfix_str(", ".join(words), refresh=False)
        if args.objective != "classes" and (done % args.mosaic_every == 0 or last):
            self.draw_mosaic(done)
        why = None
        if self.held_out and (done % args.evaluate_every == 0 or last):
            why = self.validate(done)
        if args.checkpoint_every and done % args.checkpoint_every == 0:
            self.save_state(done)
        return why

    def save_state(self, done):
        """All that decides what the steps after `done` do, in one file."""
        tree = self.engine.state_tree()
        record = {"rows": self.rows, "pending": np.array(self.pending, np.float64).tolist()}
        record |= {"best_accuracy": self.best_accuracy, "since_best": self.since_best}
        if self.best:
            record["best_step"], tree["best"] = self.best
        states.write(self.folder, done, tree, record)

    def load_state(self, tree, record):
        """The reverse of `save_state`."""
        self.engine.load_state(tree)
        self.rows = record["rows"]
        self.pending = [tuple(numbers) for numbers in record["pending"]]
        self.best_accuracy, self.since_best = record["best_accuracy"], record["since_best"]
        if "best_step" in record:
            self.best = record["best_step"], tree["best"]

    def validate(self, done):  # -> why to stop
        """A row about the held-out images; keep the weights if they are the best so far."""
        images, labels = self.held_out
        result = evaluate.summary(self.logits(images), labels)
        row = {"step": done, "images": done * self.args.batch_size}
        row |= {"validation_loss": result["loss"], "validation_accuracy": result["accuracy"]}
        self.write(row)
        self.since_best += 1
        if result["accuracy"] > self.best_accuracy:
            self.best_accuracy, self.since_best = result["accuracy"], 0
            self.best = done, tree_map(np.copy, self.engine.snapshot())
        return "stopped" if 0 < self.args.patience <= self.since_best else None

    def logits(self, images):  # uint8 [B, ...] -> [B, classes]
        """Class scores of images of the data set's own size, in parts that fit into memory."""
        args = self.args
        size = max(args.batch_size // args.accumulate, portion(args.image_size))
        parts = np.array_split(images, max(1, len(images) // 1000))
        fitted = (fit(part, args.image_size, args.channels) for part in parts)
        return np.concatenate([self.engine.logits(part, size) for part in fitted])

    def draw_mosaic(self, done):
        """What a masked model sees and says of some test images, always the same."""
        from . import figures  # matplotlib, only when there is something to draw

        args, params = self.args, self.engine.snapshot()
        images = fit(self.dataset.test_images[:SHOWN], args.image_size, args.channels)
        drawn = self.batches.corruption(args.image_size, len(images), 0, datasets.LOOK)
        batch = masking.masked_batch(images, drawn, args.objective, self.batches.patch)
        said, _ = masked_vit(
            params, datasets.normalise(images), batch["masked"], batch["source"], **args.settings
        )
        views = masking.mosaic(batch, said, args.objective, self.batches.patch)
        digits = len(str(args.steps))
        path = self.folder / f"mosaic-{done:0{digits}}.png"
        figures.mosaic(views).savefig(path, dpi=100)

    def test_masked(self):  # -> loss, accuracy
        """The masked objective on every test image, with a corruption of its own."""
        images, args = self.dataset.test_images, self.args
        size = portion(args.image_size, self.engine.multiple)
        drawn = self.batches.corruption(args.image_size, len(images), 0, datasets.TEST)
        total = np.zeros(2)
        for begin in range(0, len(images), size):
            here = slice(begin, begin + size)
            part = fit(images[here], args.image_size, args.channels)
            fates = masking.Corruption(*(array[here] for array in vars(drawn).values()))
            batch = masking.masked_batch(part, fates, args.objective, self.batches.patch)
            total += len(part) * np.array(self.engine.measure(batch), np.float64)
        return (total / len(images)).tolist()

    def test(self, steps):  # -> result
        """Loss and accuracy on every test image, and the pictures."""
        from . import figures

        if self.args.objective == "classes":
            images, labels = self.dataset.test_images, self.dataset.test_labels
            logits = self.logits(images)
            result = evaluate.summary(logits, labels)
            shown = images[:40], labels[:40], logits[:40].argmax(-1), self.dataset.classes
            figures.examples(*shown).savefig(self.folder / "examples.png", dpi=100)
        else:
            result = dict(zip(("loss", "accuracy"), self.test_masked(), strict=True))
        row = {"step": steps, "images": steps * self.args.batch_size}
        row["test_loss"] = result["loss"]
        if math.isfinite(result["accuracy"]):
            row["test_accuracy"] = result["accuracy"]
        self.write(row)
        unit = "mean square" if self.args.objective == "pixels" else "nats"
        figures.curves(self.rows, unit).savefig(self.folder / "curves.png", dpi=100)
        return result

    def save(self):  # -> path
        """The checkpoint; what its shapes will not tell travels along."""
        params, size = self.engine.snapshot(), self.args.image_size
        settings, grid = dict(self.args.settings), token_grid(params, size)
        if self.args.objective == "classes":
            settings["class_names"] = self.dataset.classes
        if grid is None:
            settings["image_size"] = size
        else:
            if grid[0] != grid[1]:
                settings["grid"] = grid
            if tuple(n * p for n, p in zip(grid, token_pixels(params), strict=True)) != size:
                settings["image_size"] = size  # a hybrid's convolutions round up
        return checkpoint.save(self.folder / "checkpoint.npz", params, settings=settings)

    def __call__(self):  # -> exit status
        """Train, save, test."""
        path = self.folder / "metrics.csv"
        with self.lock, open(path, "w", newline="", buffering=1) as file:
            self.writer = csv.DictWriter(file, METRICS)
            self.writer.writeheader()
            self.writer.writerows(self.rows)
            begun = time.perf_counter()
            steps, why = self.train()
            seconds = {"training": time.perf_counter() - begun}
            kept = steps
            if self.best:
                kept, weights = self.best
                self.engine.restore(weights)
                better = f"validation {self.best_accuracy:.2%}, the best of {steps} steps"
                print(f"kept the weights after step {kept}: {better}")
            path = self.save()
            if why == "diverged":
                print(DIVERGED, file=sys.stderr)
            if why in ("diverged", "interrupted"):
                print(f"{why} after {steps} of {self.args.steps} steps; the weights are in {path}")
                return 130 if why == "interrupted" else 1
            result = self.test(kept)
        states.remove(self.folder)
        seconds["all"] = time.perf_counter() - self.args.start
        print(self.report(result, seconds, steps))
        print(f"{', '.join(sorted(p.name for p in self.folder.iterdir()))} are in {self.folder}")
        return 0

    def report(self, result, seconds, steps):  # -> text
        """The table at the end."""
        lines, images = [], len(self.dataset.test_images)
        if "by_class" in result:
            lines.append(f"{'class':<14}accuracy")
            pairs = zip(self.dataset.classes, result["by_class"], strict=True)
            lines += [f"{name:<14}{share:8.1%}" for name, share in pairs]
            lines.append(f"{'all':<14}{result['accuracy']:8.2%} of {images} test images")
        elif math.isfinite(result["accuracy"]):
            what = f"of what is asked about {images} test images"
            lines.append(f"{'right':<14}{result['accuracy']:8.2%} {what}")
        speed = (steps - self.first) * self.args.batch_size / seconds["training"]
        lines += [
            f"{'loss':<14}{result['loss']:8.4f}",
            f"{'training':<14}{seconds['training']:7.1f}s ({speed:.0f} images/s)",
            f"{'whole command':<14}{seconds['all']:7.1f}s",
        ]
        if skipped := int(self.engine.state["skipped"]):
            lines.append(f"{skipped} steps had a gradient that was not finite and changed nothing")
        return "\n".join(lines)


DIVERGED = (
    "minivit.train: error: the loss is no longer finite; "
    "lower --learning-rate, or raise --warmup-steps"
)


def prepare(args):  # -> Run
    """All that can fail because of what a user asked for."""
    if not args.resume:
        options.check(args)
    init, held_out = read_init(args), None
    if args.init and is_resnet(init[0]):
        options.check_resnet(args)
    dataset = load_data(args, init[1]["channels"] if args.init else 3)
    if args.per_class:
        dataset = datasets.few(dataset, args.per_class, args.seed)
    if args.validation:  # of the few labels, if they are few
        dataset, *held_out = datasets.hold_out(dataset, args.validation, args.seed)
    if not args.resume:
        options.check_steps(args, len(dataset.train_images))
    name, params = start(args, dataset, init)
    args.channels = image_channels(params)
    datasets.with_channels(dataset.train_images[:1], args.channels)
    batches = Batches(
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
    )
    folder = args.resume or open_output(args, name)
    run = Run(args, dataset, held_out, batches, folder, make_engine(args, params))
    if args.resume:
        go_on(args, run)
    else:
        stored = {option: getattr(args, option) for option in options.stored_names()}
        states.write_options(folder, stored, run.engine.devices)
        run.lock = states.lock(folder)
        print(f"{name}: {count(params):,} parameters, on {args.backend}, into {folder}")
    return run


def go_on(args, run):
    """A run made ready to continue where it was interrupted."""
    states.check_devices(args.devices, run.engine.devices, args.dropout)
    run.lock = states.lock(run.folder)
    run.first, *state = states.newest(run.folder, run.engine.state_tree())
    if state[0] is not None:
        run.load_state(*state)
    elif (run.folder / "checkpoint.npz").exists():
        run.lock.close()
        raise FileExistsError(f"{run.folder} has a checkpoint.npz but no state: that run has ended")
    print(f"{run.folder} goes on after step {run.first} of {args.steps}")


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    begun = time.perf_counter()
    args = options.parser().parse_args(argv)

    def work():
        args.start = begun
        if args.resume:
            given = vars(options.parser(defaults=False).parse_args(argv))
            stored = states.read_options(args.resume, given, options.stored_names())
            options.resume(args, stored[0])
            args.devices = stored[1]
        return prepare(args)()

    return command.run("train", work)


if __name__ == "__main__":
    sys.exit(main())
