"""The loop of training: a step, and now and then a row, a state, a validation, a picture."""

import contextlib
import csv
import math
import signal
import sys
import time
from functools import partial

import numpy as np
from tqdm import tqdm

from . import checkpoint, command, datasets, evaluate, masking, optim, states
from .architecture import token_grid, token_pixels
from .batches import fit, portion, scores
from .in_numpy import masked_vit
from .machine import ANSWERED
from .params import tree_map
from .progress import progress

METRICS = ["step", "images", "learning_rate", "loss", "accuracy"]
METRICS += ["validation_loss", "validation_accuracy", "test_loss", "test_accuracy"]
SHOWN = 8  # images of a mosaic
CALMER = "lower --learning-rate, or raise --warmup-steps"


class Interrupt:
    """Ctrl-C or SIGTERM asks to stop after the current step; a second Ctrl-C stops at once.

    A step must not be broken off: JAX reuses its input's memory, so half a step leaves nothing.
    """

    def __init__(self):
        self.asked = False
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        ANSWERED.release()  # only now: a Ctrl-C before would be left to nobody

    def ask(self, *_):
        """The signal's handler."""
        self.asked = True
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])

    def close(self):
        """Give the signals back."""
        ANSWERED.acquire(blocking=False)
        for which, handler in self.before.items():
            signal.signal(which, handler)


class Run:
    """One training run: what it trains, what it has seen, what it writes.

    Of several processes all do the same and one writes. What divided parameters are gathered for
    (`snapshot`, `state_tree`) must be asked for by all.
    """

    def __init__(self, args, dataset, held_out, batches, folder, engine):
        self.args, self.dataset, self.held_out = args, dataset, held_out
        self.batches, self.folder, self.engine = batches, folder, engine
        self.leads, self.writer = args.processes.leads, None
        self.first, self.rows, self.pending = 0, [], []
        self.best, self.best_accuracy, self.since_best = None, -1.0, 0

    def write(self, row):
        """A row of metrics.csv."""
        self.rows.append(row)
        if self.writer:
            self.writer.writerow(row)

    def say(self, text):
        """Print it once, not once a process, and not into the moving bar."""
        if self.leads:
            tqdm.write(command.literal(text))

    def complain(self, text):
        """The same for what went wrong."""
        if self.leads:
            print(command.literal(f"minivit.train: error: {text}"), file=sys.stderr)

    def train(self):  # -> steps done, why it ended early
        """The loop: a batch, a step, now and then a row of metrics, a validation, a picture."""
        args, total = self.args, self.args.steps
        if 0 < args.patience <= self.since_best:  # it had ended just before it was killed
            return self.first, "stopped"
        interrupt = Interrupt()
        rate = partial(optim.schedule, base=args.learning_rate, total=total, decay=args.decay)
        try:
            with self.bar() as bar:
                for step in range(self.first, total):
                    if self.asked_to_stop(interrupt, step):
                        self.save_state(step)
                        return step, "interrupted"
                    learning_rate = rate(step, warmup=args.warmup_steps)
                    numbers = self.engine.step(step, self.batches(step), learning_rate)
                    self.pending.append(numbers)
                    if step == self.first:
                        float(numbers[0])  # wait for it
                        seconds = time.perf_counter() - args.start
                        self.say(f"first step after {seconds:.1f} s")
                        bar.set_description()
                    bar.update(args.batch_size)
                    if why := self.after(step + 1, learning_rate, bar):
                        return step + 1, why
            return total, None
        finally:
            interrupt.close()

    def bar(self):
        """The images of all steps; with JAX the first step takes a while to be compiled."""
        size, what = self.args.batch_size, "compiling" if self.args.backend == "jax" else None
        options = {"initial": self.first * size, "unit_scale": True, "delay": 0}
        total = self.args.steps * size
        return progress(None, what, total=total, disable=not self.leads or None, **options)

    def asked_to_stop(self, interrupt, step):  # -> bool
        """Whether to stop before a step; several processes must agree on which."""
        if self.args.processes.count == 1:
            return interrupt.asked
        return step % self.args.log_every == 0 and self.args.processes.any(interrupt.asked)

    def after(self, done, learning_rate, bar):  # -> why to stop
        """What is due when so many steps are done."""
        args, last = self.args, done == self.args.steps
        if done % args.log_every == 0 or last:
            losses, right = np.array(self.pending, np.float64).T
            self.pending.clear()
            if not np.isfinite(losses).any():
                return "diverged"
            row = {"step": done, "images": done * args.batch_size, "learning_rate": learning_rate}
            row["loss"] = float(losses[np.isfinite(losses)].mean())
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
        if not self.leads:
            return
        record = {"rows": self.rows, "pending": np.array(self.pending, np.float64).tolist()}
        record |= {"best_accuracy": self.best_accuracy, "since_best": self.since_best}
        if self.best:
            record["best_step"], tree["best"] = self.best
        record["data"] = self.dataset.identity()
        states.write(self.folder, done, tree, record)

    def load_state(self, tree, record):
        """The reverse of `save_state`."""
        if "data" in record:  # version 0.1 did not note it
            datasets.check_identity(record["data"], self.dataset, f"the state in {self.folder}")
        self.engine.load_state(tree)
        self.rows = record["rows"]
        self.pending = [tuple(numbers) for numbers in record["pending"]]
        self.best_accuracy, self.since_best = record["best_accuracy"], record["since_best"]
        if "best_step" in record:
            self.best = record["best_step"], tree["best"]

    def validate(self, done):  # -> why to stop
        """A row about the held-out images; keep the weights if they are the best so far."""
        images, labels = self.held_out
        logits = self.logits(images, "validation")
        if not np.isfinite(logits).all():
            return "diverged"
        result = evaluate.summary(logits, labels)
        row = {"step": done, "images": done * self.args.batch_size}
        row |= {"validation_loss": result["loss"], "validation_accuracy": result["accuracy"]}
        self.write(row)
        self.since_best += 1
        if result["accuracy"] > self.best_accuracy:
            self.best_accuracy, self.since_best = result["accuracy"], 0
            self.best = done, tree_map(np.copy, self.engine.snapshot())
        return "stopped" if 0 < self.args.patience <= self.since_best else None

    def logits(self, images, what):  # uint8 [B, ...] -> [B, classes]
        """Class scores of images of the data set's own size, in parts that fit into memory."""
        what = what if self.leads else None
        return scores(self.engine, images, self.args.image_size, self.args.channels, what)

    def draw_mosaic(self, done):
        """What a masked model sees and says of some test images, always the same."""
        from . import figures  # matplotlib, only when there is something to draw

        args, params = self.args, self.engine.snapshot()
        if not self.leads:
            return
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
        with progress(None, "test", total=len(images), disable=not self.leads or None) as bar:
            for begin in range(0, len(images), size):
                here = slice(begin, begin + size)
                part = fit(images[here], args.image_size, args.channels)
                rows = drawn.rows(here)
                batch = masking.masked_batch(part, rows, args.objective, self.batches.patch)
                total += len(part) * np.array(self.engine.measure(batch), np.float64)
                bar.update(len(part))
        return (total / len(images)).tolist()

    def test(self, steps):  # -> result, or None where scores are not finite
        """Loss and accuracy on every test image, and the pictures."""
        logits, labels = None, self.dataset.test_labels
        if self.args.objective == "classes":
            logits = self.logits(self.dataset.test_images, "test")
            if not np.isfinite(logits).all():
                return None
            result = evaluate.summary(logits, labels)
        else:
            result = dict(zip(("loss", "accuracy"), self.test_masked(), strict=True))
            if not math.isfinite(result["loss"]):
                return None
        row = {"step": steps, "images": steps * self.args.batch_size}
        row["test_loss"] = result["loss"]
        if math.isfinite(result["accuracy"]):
            row["test_accuracy"] = result["accuracy"]
        self.write(row)
        if self.leads:
            self.draw(logits)
        return result

    def draw(self, logits):
        """The curves, and some test images with what the model says of them."""
        from . import figures

        unit = "mean square" if self.args.objective == "pixels" else "nats"
        figures.curves(self.rows, unit).savefig(self.folder / "curves.png", dpi=100)
        if logits is not None:
            d = self.dataset
            shown = d.test_images[:40], d.test_labels[:40], logits[:40].argmax(-1), d.classes
            figures.examples(*shown).savefig(self.folder / "examples.png", dpi=100)

    def settings(self, params):  # -> dictionary
        """What the shapes of a checkpoint will not tell: classes, data, size, grid and so on."""
        size, grid = self.args.image_size, token_grid(params, self.args.image_size)
        settings = self.args.settings | self.args.notes | {"data": self.dataset.identity()}
        if self.args.objective == "classes":
            settings["class_names"] = list(self.dataset.classes)
        if grid is None:
            settings["image_size"] = list(size)
        else:
            if grid[0] != grid[1]:
                settings["grid"] = list(grid)
            if tuple(n * p for n, p in zip(grid, token_pixels(params), strict=True)) != size:
                settings["image_size"] = list(size)  # a hybrid's convolutions round up
        checkpoint.checked_settings(settings)
        return settings

    def save(self):  # -> path; None where another process writes
        """The checkpoint."""
        params = self.engine.snapshot()
        if not self.leads:
            return None
        path = self.folder / "checkpoint.npz"
        return checkpoint.save(path, params, settings=self.settings(params))

    @contextlib.contextmanager
    def writing(self):
        """Hold the metrics open in the process that writes; say how to go on after a full disk."""
        if not self.leads:
            yield
            return
        try:
            with open(self.folder / "metrics.csv", "w", newline="", buffering=1) as file:
                self.writer = csv.DictWriter(file, METRICS)
                self.writer.writeheader()
                self.writer.writerows(self.rows)
                yield
        except OSError as error:
            if not error.strerror or "--resume" in error.strerror:
                raise
            text = f"{error.strerror}; mend that, then go on with --resume {self.folder}"
            raise OSError(error.errno, text, str(error.filename or self.folder)) from None

    def __call__(self):  # -> exit status
        """Train, save, test."""
        with self.writing():
            begun = time.perf_counter()
            steps, why = self.train()
            seconds = {"training": time.perf_counter() - begun}
            kept = steps
            if self.best:
                kept, weights = self.best
                self.engine.restore(weights)
                better = f"validation {self.best_accuracy:.2%}, the best of {steps} steps"
                self.say(f"kept the weights after step {kept}: {better}")
            path = self.save()
            if why == "diverged":
                self.complain(f"the loss is no longer finite; {CALMER}")
            if why in ("diverged", "interrupted"):
                self.say(f"{why} after {steps} of {self.args.steps} steps; weights: {path}")
                if why == "interrupted":
                    self.say(f"go on with --resume {self.folder}")
                return 130 if why == "interrupted" else 1
            result = self.test(kept)
            if result is None:
                self.complain(f"with the weights in {path} scores are not finite; {CALMER}")
                return 1
        if self.leads:
            states.remove(self.folder)
            seconds["all"] = time.perf_counter() - self.args.start
            print(self.report(result, seconds, steps))
            names = sorted(p.name for p in self.folder.iterdir() if p.name[0] != ".")
            print(command.literal(f"{', '.join(names)} are in {self.folder}"))
        return 0

    def report(self, result, seconds, steps):  # -> text
        """The table at the end."""
        lines, images = [], command.counted(len(self.dataset.test_images), "test image")
        if "by_class" in result:
            lines.append(f"{'class':<14}accuracy")
            pairs = zip(self.dataset.classes, result["by_class"], strict=True)
            lines += [f"{command.literal(name):<14}{share:8.1%}" for name, share in pairs]
            lines.append(f"{'all':<14}{result['accuracy']:8.2%} of {images}")
        elif math.isfinite(result["accuracy"]):
            what = f"of what is asked about {images}"
            lines.append(f"{'right':<14}{result['accuracy']:8.2%} {what}")
        speed = (steps - self.first) * self.args.batch_size / seconds["training"]
        lines += [
            f"{'loss':<14}{result['loss']:8.4f}",
            f"{'training':<14}{seconds['training']:7.1f}s ({speed:.0f} images/s)",
            f"{'whole command':<14}{seconds['all']:7.1f}s",
        ]
        if skipped := int(self.engine.state["skipped"]):
            steps = command.counted(skipped, "step")
            lines.append(f"{steps} would have left the finite numbers and changed nothing")
        return "\n".join(lines)
