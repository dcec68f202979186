"""Training and evaluation with the NumPy twin: one thread a core, each with its share."""

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
from threadpoolctl import ThreadpoolController

from . import optim
from .batches import portion
from .datasets import DROPOUT, normalise
from .engines import busy, joined, token_count
from .in_numpy import OBJECTIVES, model
from .machine import cores
from .params import merge, pack, select, split_frozen, tree_map, unpack


def forward(params, batch, objective="classes", **options):  # -> loss, accuracy, back
    """The objective on a batch; the accuracy is None where it has none."""
    metrics = {}
    batch = batch | {"images": normalise(batch["images"])}
    loss, back = OBJECTIVES[objective](params, **batch, metrics=metrics, **options)
    return loss, metrics.get("accuracy"), back


def loss_and_gradient(params, batch, objective="classes", **options):  # -> loss, gradient, accuracy
    """Forward, then backward by hand."""
    loss, accuracy, back = forward(params, batch, objective, **options)
    grads, _ = back(np.ones_like(loss))
    return loss, grads, accuracy


def divide(batch, parts):  # {name: [B, ...]} -> list of such dictionaries
    """A batch in parts of almost equal length, none of them empty."""
    size = len(batch["images"])
    pieces = {name: np.array_split(array, min(parts, size)) for name, array in batch.items()}
    return [dict(zip(pieces, arrays, strict=True)) for arrays in zip(*pieces.values(), strict=True)]


def weighted_mean(results, batches):
    """The mean over all images of what each batch gave: tuples of numbers and trees."""
    total = sum(len(batch["images"]) for batch in batches)
    weights = [len(batch["images"]) / total for batch in batches]

    def mean(*values):
        if values[0] is None:
            return None
        return sum(w * value for w, value in zip(weights, values, strict=True))

    return tuple(tree_map(mean, *column) for column in zip(*results, strict=True))


class NumPyEngine:
    """Parameters, optimiser state, and the step that changes them.

    NumPy's products and elementwise functions let go of Python's lock, so threads run at the same
    time. One thread a core with BLAS on one thread each is twice as fast as the reverse: the
    elementwise work is then shared too.
    """

    def __init__(
        self,
        params,
        *,
        batch_size=None,
        objective="classes",
        rate=0.0,
        seed=0,
        accumulate=1,
        freeze=False,
        keep=0.0,
        model=None,
        **rule,
    ):
        """A `batch_size` says how many threads a step keeps busy; `objective` is one of OBJECTIVES;
        `accumulate` divides each batch into so many parts, one after the other; `freeze` trains the
        head alone; `keep` averages the weights; `model` are options of `vit` and of the objective;
        `rule`: see optim.update.
        """
        self.objective, self.model, self.accumulate = objective, model or {}, accumulate
        self.frozen, self.trained = split_frozen(params, freeze)
        self.rate, self.seed = rate, seed
        self.keep, self.update = keep, partial(optim.update, **rule)
        self.start = partial(optim.start, rule=rule.get("rule", "adamw"), average=bool(keep))
        self.cores = cores()
        most = busy(token_count(params), batch_size) if batch_size else self.cores
        self.threads = min(self.cores, most)  # of a step
        self.hardware = f"{self.threads} CPU threads"
        self.multiple = 1  # of which a batch to `measure` should be
        self.pool = ThreadPoolExecutor(self.cores)
        self.blas = ThreadpoolController()

    @cached_property
    def packed(self):
        """The trained parameters in long vectors, from the first step on: evaluation needs none."""
        return pack(self.trained)

    @cached_property
    def state(self):
        """The optimiser's, likewise."""
        return self.start(self.packed)

    def share(self, batch, *key):  # -> mean loss, its gradient, accuracy
        """One thread's part of a step, in `accumulate` pieces to bound its memory."""
        rng = np.random.default_rng([self.seed, DROPOUT, *key])
        options = {"objective": self.objective, "rate": self.rate, "rng": rng} | self.model
        results, pieces = [], divide(batch, self.accumulate)
        for piece in pieces:
            with np.errstate(all="ignore"):  # `update` sees and skips what is not finite
                loss, grads, right = loss_and_gradient(
                    merge(self.frozen, self.trained), piece, **options
                )
            results.append((loss, pack(select(grads, self.trained)), right))
        return weighted_mean(results, pieces)

    def step(self, step, batch, learning_rate):  # -> mean loss, accuracy
        """Train on one batch of arrays; every thread's gradient counts by its number of images."""
        shares = divide(batch, self.threads)
        with self.blas.limit(limits=1, user_api="blas"):
            jobs = [self.pool.submit(self.share, s, step, i) for i, s in enumerate(shares)]
            loss, grads, accuracy = weighted_mean([job.result() for job in jobs], shares)
        self.packed, self.state = self.update(
            self.packed, grads, self.state, learning_rate, keep=optim.warm_keep(step, self.keep)
        )
        self.trained = unpack(self.packed, self.trained)
        return loss, accuracy

    def measure(self, batch):  # -> mean loss, accuracy
        """The objective on a batch as it is, without dropout and without training on it."""
        shares, params = divide(batch, self.threads), self.snapshot()

        def of_share(share):
            return forward(params, share, self.objective, **self.model)[:2]

        with self.blas.limit(limits=1, user_api="blas"):
            return weighted_mean(list(self.pool.map(of_share, shares)), shares)

    def logits(self, images, batch_size=None, done=None):  # uint8 [B, ...] -> [B, classes]
        """Class scores of any number of images, the last partial batch included.

        Without a `batch_size` as many at a time as suits their size; `done` is told how many.
        """
        batch_size = min(batch_size or portion(images.shape[1:3]), -(-len(images) // self.cores))
        batch_size = max(1, batch_size)
        batches = [images[i : i + batch_size] for i in range(0, len(images), batch_size)]
        options = {name: value for name, value in self.model.items() if name != "loss"}
        with self.blas.limit(limits=1, user_api="blas"):
            params = self.snapshot()

            def scores(batch):
                with np.errstate(all="ignore"):  # who asks sees what is not finite
                    return model(params, normalise(batch), backward=False, **options)[0]

            return joined(self.pool.map(scores, batches), done)

    def snapshot(self):  # -> official tree of NumPy arrays
        """The parameters as they are saved and evaluated: averaged, if they are averaged."""
        if not self.keep:
            return merge(self.frozen, self.trained)
        return merge(self.frozen, unpack(self.state["average"], self.trained))

    def state_tree(self):  # -> tree of arrays and numbers
        """All that the next step depends on."""
        return {"weights": self.packed, "optimizer": self.state, "frozen": self.frozen}

    def state_shapes(self):  # -> tree whose leaves have shapes
        """Those of `state_tree`."""
        return self.state_tree()

    def load_state(self, tree):
        """Go on from what `state_tree` gave, to the bit."""
        self.packed = tree["weights"]
        self.trained = unpack(self.packed, self.trained)
        # A number was saved as an array without axes, which would widen float32 weights.
        self.state = tree_map(
            lambda leaf: leaf if np.ndim(leaf) else np.asarray(leaf).item(), tree["optimizer"]
        )
        self.frozen = tree.get("frozen", {})

    def restore(self, params):
        """Go back to what `snapshot` gave; the optimiser's moments stay."""
        self.packed = pack(select(params, self.trained))
        self.trained = unpack(self.packed, self.trained)
        self.state |= {"average": self.packed} if self.keep else {}
