"""Training and evaluation with the JAX twin: one program, on a mesh of all local devices."""

import contextlib
import re
import warnings
from functools import partial

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from . import optim
from .datasets import normalise
from .in_jax import OBJECTIVES, model
from .machine import cores
from .params import (
    flatten,
    merge,
    pack,
    select,
    split_frozen,
    stack_blocks,
    tree_map,
    unflatten,
    unpack,
    unstack_blocks,
)
from .shapes import depth

# Few blocks are faster written out, 12 are faster scanned; the gradient's cost grows faster than
# the depth where XLA sees all blocks at once.
SCAN_FROM = 6
EVERYWHERE, SHARED = PartitionSpec(), PartitionSpec("batch")


def use_all_cores():
    """Let JAX see every CPU core as a device of its own.

    One program a core on its share of the batch scales better than several threads inside each
    operation. It works before JAX's first use only; later the devices stay as they are. A number
    that somebody chose before is respected.
    """
    if jax.config.jax_num_cpu_devices < 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores())


def batch_mesh(batch_size):
    """A mesh over as many local devices as divide the batch."""
    devices = jax.local_devices()
    count = max(n for n in range(1, len(devices) + 1) if batch_size % n == 0)
    if count < len(devices):
        warnings.warn(
            f"a batch of {batch_size} divides over {count} of {len(devices)} devices; a multiple "
            f"of {len(devices)} would use them all",
            stacklevel=3,
        )
    return jax.make_mesh((count,), ("batch",), devices=devices[:count])


def stacked(params):
    """Many blocks on a leading axis, few as they are."""
    many = depth(params.get("Transformer", {})) >= SCAN_FROM
    return stack_blocks(params) if many else params


NORM = re.compile(r"(Norm_\d+|encoder_norm|gn\w*|group_norm)/\w+$")


def cast(params, dtype):
    """The weights in the type of the computation; norms stay as they are."""
    flat = flatten(params)
    return unflatten({n: x if NORM.search(n) else x.astype(dtype) for n, x in flat.items()})


def objective_loss(trained, frozen, batch, *, objective, dtype="float32", **options):
    # -> loss, accuracy
    """What is differentiated, by its first argument."""
    metrics = {"accuracy": jax.numpy.nan}
    batch = batch | {"images": normalise(batch["images"]).astype(dtype)}
    params = cast(merge(frozen, trained), dtype)
    loss = OBJECTIVES[objective](params, **batch, metrics=metrics, **options)
    return loss, jax.numpy.float32(metrics["accuracy"])


def accumulated(function, batch, parts):
    """The mean of `function(part, number)` over equal parts of a batch, one after the other."""
    if parts == 1:
        return function(batch, 0)
    batch = tree_map(lambda x: x.reshape(parts, len(x) // parts, *x.shape[1:]), batch)
    # Only the sum is kept, and one part's activations at a time.
    first = function(tree_map(lambda x: x[0], batch), 0)

    def body(total, numbered):
        return jax.tree.map(jax.numpy.add, total, function(*numbered)), None

    rest = tree_map(lambda x: x[1:], batch), jax.numpy.arange(1, parts)
    total, _ = jax.lax.scan(body, first, rest)
    return jax.tree.map(lambda x: x / parts, total)


class JaxEngine:
    """Parameters, optimiser state, and the jitted step that changes them in place.

    The parameters live on every device, many blocks stacked and all leaves end to end. Each
    device computes the gradient of its share of the batch, and all take the mean.
    """

    def __init__(
        self,
        params,
        *,
        batch_size,
        objective="classes",
        rate=0.0,
        seed=0,
        accumulate=1,
        freeze=False,
        keep=0.0,
        model=None,
        dtype="float32",
        **rule,
    ):
        """`objective` is one of OBJECTIVES; `accumulate` divides each batch into so many parts, one
        after the other; `freeze` trains the head alone; `keep` averages the weights; `model` are
        options of `vit` and of the objective; `dtype` is that of the computation, while weights,
        moments, norms, softmax and loss stay float32; `rule`: see optim.update.
        """
        self.model, self.dtype, self.accumulate = model or {}, dtype, accumulate
        self.options = self.model | {"objective": objective, "dtype": dtype}
        use_all_cores()
        self.rate, self.keep, self.rule = rate, keep, rule
        self.traces = 0
        self.mesh = batch_mesh(batch_size // accumulate)
        self.devices = f"{self.mesh.size} {self.mesh.devices[0].platform} devices"
        self.multiple = self.mesh.size  # of which a batch to `measure` should be
        # On CPUs a step's all-reduce holds a thread while it waits for the other devices; with a
        # second step in flight none may be left to run them, and XLA gives up ("may be stuck").
        self.wait = self.mesh.size > 1 and self.mesh.devices[0].platform == "cpu"
        frozen, trained = split_frozen(stacked(tree_map(np.asarray, params)), freeze)
        self.like = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trained)
        packed = pack(trained)
        state = optim.start(packed, rule.get("rule", "adamw"), average=bool(keep))
        state = tree_map(lambda leaf: np.array(leaf), state)  # donated: no array may appear twice
        self.params, self.state, self.frozen, self.key = jax.device_put(
            (packed, state, frozen, jax.random.key(seed)), NamedSharding(self.mesh, EVERYWHERE)
        )
        on_mesh = partial(jax.shard_map, mesh=self.mesh)
        inputs = (*4 * [EVERYWHERE], SHARED, *3 * [EVERYWHERE])
        step = on_mesh(self.device_step, in_specs=inputs, out_specs=EVERYWHERE)
        inputs = (EVERYWHERE, EVERYWHERE, SHARED)
        scores = on_mesh(self.device_logits, in_specs=inputs, out_specs=SHARED)
        measure = on_mesh(self.device_measure, in_specs=inputs, out_specs=EVERYWHERE)
        self.jitted_step = jax.jit(step, donate_argnums=(0, 1))
        self.jitted_logits, self.jitted_measure = jax.jit(scores), jax.jit(measure)

    def device_step(self, params, state, frozen, key, batch, step, learning_rate, keep):
        """What every device does in a step, on its share of the batch."""
        self.traces += 1
        if self.rate:
            key = jax.random.fold_in(jax.random.fold_in(key, step), jax.lax.axis_index("batch"))
        # Marked as differing between devices: else autodiff adds the gradients up by itself.
        local = unpack(jax.lax.pcast(params, "batch", to="varying"), self.like)
        gradient = jax.value_and_grad(objective_loss, has_aux=True)

        def part(batch, number):
            rng = jax.random.fold_in(key, number) if self.rate else None
            options = self.options | {"rate": self.rate, "rng": rng}
            (loss, accuracy), grads = gradient(local, frozen, batch, **options)
            return loss, accuracy, pack(grads)

        # One all-reduce, not four: on a CPU each holds a thread of those that have work to do.
        vector, split = ravel_pytree(accumulated(part, batch, self.accumulate))
        loss, accuracy, grads = split(jax.lax.pmean(vector, "batch"))
        params, state = optim.update(params, grads, state, learning_rate, keep=keep, **self.rule)
        return params, state, loss, accuracy

    def device_logits(self, params, frozen, images):
        """Class scores of a device's share of the images."""
        options = {name: value for name, value in self.model.items() if name != "loss"}
        params = cast(merge(frozen, unpack(params, self.like)), self.dtype)
        scores = model(params, normalise(images).astype(self.dtype), **options)
        return scores.astype("float32")

    def device_measure(self, params, frozen, batch):
        """The objective on a device's share of a batch."""
        result = objective_loss(unpack(params, self.like), frozen, batch, **self.options)
        return jax.lax.pmean(jax.numpy.stack(result), "batch")

    def on_devices(self, batch):
        """A batch divided over the mesh."""
        return jax.device_put(batch, NamedSharding(self.mesh, SHARED))

    def step(self, step, batch, learning_rate):  # -> mean loss, accuracy
        """Train on one batch of arrays, images and what else the objective takes."""
        size, parts = len(batch["images"]), self.mesh.size * self.accumulate
        if size % parts:
            raise ValueError(
                f"{size} images do not divide over {self.mesh.size} devices"
                + (f" times {self.accumulate} parts" if self.accumulate > 1 else "")
            )
        batch = self.on_devices(batch)
        self.finish()  # the batch was made while the last step ran
        self.params, self.state, loss, accuracy = self.jitted_step(
            self.params,
            self.state,
            self.frozen,
            self.key,
            batch,
            np.int32(step),
            np.float32(learning_rate),
            np.float32(optim.warm_keep(step, self.keep)),
        )
        return loss, accuracy

    def measure(self, batch):  # -> mean loss, accuracy
        """The objective on a batch as it is, without dropout and without training on it."""
        self.finish()
        if rest := len(batch["images"]) % self.mesh.size:
            # Padding would count in a mean: the few that are left over go to one device.
            whole = {name: array[:-rest] for name, array in batch.items()}
            batch = {name: array[-rest:] for name, array in batch.items()}
            params = unpack(tree_map(np.asarray, self.averaged()), self.like)
            few = objective_loss(params, tree_map(np.asarray, self.frozen), batch, **self.options)
            if not len(whole["images"]):
                return tuple(map(float, few))
            many, size = self.measure(whole), len(whole["images"])
            return tuple(
                (size * a + rest * float(b)) / (size + rest) for a, b in zip(many, few, strict=True)
            )
        result = self.jitted_measure(self.averaged(), self.frozen, self.on_devices(batch))
        return tuple(np.asarray(result).tolist())

    def finish(self):
        """Wait for the last step, where two in flight could block each other."""
        if self.wait:
            jax.block_until_ready(self.params)

    def logits(self, images, batch_size=1000):  # uint8 [B, ...] -> [B, classes]
        """Class scores of any number of images.

        The last batch is filled up with zeros, whose scores are dropped: one shape, compiled once.
        """
        self.finish()
        batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        results = []
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            padded = np.zeros((batch_size, *images.shape[1:]), images.dtype)
            padded[: len(batch)] = batch
            scores = self.jitted_logits(self.averaged(), self.frozen, self.on_devices(padded))
            results.append(np.asarray(scores)[: len(batch)])
        return np.concatenate(results)

    def averaged(self):
        """The trained parameters, averaged if they are averaged."""
        return self.state.get("average", self.params)

    def snapshot(self):  # -> official tree of NumPy arrays
        """The parameters as they are saved and evaluated, blocks under their own names."""
        trained = unpack(tree_map(np.asarray, self.averaged()), self.like)
        return unstack_blocks(merge(tree_map(np.asarray, self.frozen), trained))

    def state_tree(self):  # -> tree of NumPy arrays
        """All that the next step depends on."""
        self.finish()
        tree = {"weights": self.params, "optimizer": self.state, "frozen": self.frozen}
        return tree_map(np.asarray, tree)

    def load_state(self, tree):
        """Go on from what `state_tree` gave, to the bit."""
        trees = tree["weights"], tree["optimizer"], tree.get("frozen", {})
        where = NamedSharding(self.mesh, EVERYWHERE)
        self.params, self.state, self.frozen = jax.device_put(trees, where)

    def restore(self, params):
        """Go back to what `snapshot` gave; the optimiser's moments stay."""
        self.finish()
        packed = pack(select(stacked(params), self.like))
        copies = [tree_map(np.array, packed) for _ in range(2)]  # donated: none may appear twice
        where = NamedSharding(self.mesh, EVERYWHERE)
        self.params, average = jax.device_put(copies, where)
        self.state |= {"average": average} if self.keep else {}
