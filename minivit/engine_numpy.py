"""Training and evaluation with the NumPy twin: one thread a core, each with its share."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from threadpoolctl import ThreadpoolController

from . import optim
from .datasets import DROPOUT, normalise
from .in_numpy import smooth_labels, softmax_cross_entropy, vit
from .machine import cores
from .params import pack, split_frozen, tree_map, unpack


def loss_and_gradient(params, images, targets, **options):  # -> mean loss, gradient, logits
    """Forward, then backward by hand."""
    logits, back = vit(params, images, **options)
    losses, back_loss = softmax_cross_entropy(logits, targets)
    grads, _ = back(back_loss(np.full_like(losses, 1 / len(losses))))
    return losses.mean(), grads, logits


class NumPyEngine:
    """Parameters, optimiser state, and the step that changes them.

    NumPy's products and elementwise functions let go of Python's lock, so threads run at the same
    time. One thread a core with BLAS on one thread each is twice as fast as the reverse: the
    elementwise work is then shared too.
    """

    def __init__(
        self, params, *, rate=0.0, smoothing=0.0, seed=0, freeze=False, keep=0.0, model=None, **rule
    ):
        """`freeze` trains the head alone; `keep` averages the weights; `model` are options of
        `vit`; `rule`: see optim.update.
        """
        self.model = model or {}
        self.frozen, trained = split_frozen(params, freeze)
        self.packed = pack(trained)
        self.trained = unpack(self.packed, trained)  # views, not copies
        self.state = optim.start(self.packed, rule.get("rule", "adamw"), average=bool(keep))
        self.rate, self.smoothing, self.seed = rate, smoothing, seed
        self.keep, self.update = keep, partial(optim.update, **rule)
        self.threads = cores()
        self.pool = ThreadPoolExecutor(self.threads)
        self.blas = ThreadpoolController()

    def share(self, images, labels, rng):  # -> mean loss, its gradient, right answers
        """One thread's part of a step."""
        classes = self.trained["head"]["bias"].size
        targets = smooth_labels(labels, classes, self.smoothing)
        with np.errstate(all="ignore"):  # `update` sees and skips what is not finite
            loss, grads, logits = loss_and_gradient(
                self.frozen | self.trained,
                normalise(images),
                targets,
                rate=self.rate,
                rng=rng,
                **self.model,
            )
        return (
            loss,
            pack({name: grads[name] for name in self.trained}),
            (logits.argmax(-1) == labels).sum(),
        )

    def step(self, step, images, labels, learning_rate):  # -> mean loss, accuracy
        """Train on one batch; every thread's gradient counts by its number of images."""
        threads = min(self.threads, len(images))
        parts = np.array_split(images, threads), np.array_split(labels, threads)
        jobs = [
            (part, answers, np.random.default_rng([self.seed, DROPOUT, step, i]))
            for i, (part, answers) in enumerate(zip(*parts, strict=True))
        ]
        with self.blas.limit(limits=1, user_api="blas"):
            results = list(self.pool.map(lambda job: self.share(*job), jobs))
        weights = [len(part) / len(images) for part, _, _ in jobs]
        grads = tree_map(
            lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)),
            *(grads for _, grads, _ in results),
        )
        self.packed, self.state = self.update(
            self.packed, grads, self.state, learning_rate, keep=optim.warm_keep(step, self.keep)
        )
        self.trained = unpack(self.packed, self.trained)
        loss = sum(w * loss for w, (loss, _, _) in zip(weights, results, strict=True))
        return loss, sum(correct for _, _, correct in results) / len(images)

    def logits(self, images, batch_size=250):  # uint8 [B, ...] -> [B, classes]
        """Class scores of any number of images, the last partial batch included."""
        batches = [images[i : i + batch_size] for i in range(0, len(images), batch_size)]
        with self.blas.limit(limits=1, user_api="blas"):
            params = self.snapshot()

            def scores(batch):
                return vit(params, normalise(batch), **self.model)[0]

            return np.concatenate(list(self.pool.map(scores, batches)))

    def snapshot(self):  # -> official tree of NumPy arrays
        """The parameters as they are saved and evaluated: averaged, if they are averaged."""
        return self.frozen | unpack(self.state.get("average", self.packed), self.trained)
