"""Training and evaluation with the JAX twin: one program, on a mesh of all local devices."""

import contextlib
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import optim
from .datasets import normalise
from .engine_numpy import cores
from .in_jax import smooth_labels, softmax_cross_entropy, vit
from .params import pack, stack_blocks, tree_map, unpack, unstack_blocks
from .shapes import depth

# Few blocks are faster written out, 12 are faster scanned; the gradient's cost grows faster than
# the depth where XLA sees all blocks at once.
SCAN_FROM = 6
EVERYWHERE, SHARED = PartitionSpec(), PartitionSpec("batch")


def use_all_cores():
    """Let JAX see every CPU core as a device of its own.

    One program a core on its share of the batch scales better than several threads inside each
    operation. It works before JAX's first use only; later the devices stay as they are.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cores())


def batch_mesh(batch_size):
    """A mesh over as many local devices as divide the batch."""
    devices = jax.local_devices()
    count = max(n for n in range(1, len(devices) + 1) if batch_size % n == 0)
    return jax.make_mesh((count,), ("batch",), devices=devices[:count])


def mean_loss(params, images, labels, *, smoothing, **options):  # -> loss, share of right answers
    """What is differentiated."""
    logits = vit(params, normalise(images), **options)
    targets = smooth_labels(labels, logits.shape[-1], smoothing)
    loss = softmax_cross_entropy(logits, targets).mean()
    return loss, (logits.argmax(-1) == labels).mean()


class JaxEngine:
    """Parameters, optimiser state, and the jitted step that changes them in place.

    The parameters live on every device, many blocks stacked and all leaves end to end. Each
    device computes the gradient of its share of the batch, and all take the mean.
    """

    def __init__(self, params, *, batch_size, rate=0.0, smoothing=0.0, seed=0, **adamw):
        use_all_cores()
        self.rate, self.smoothing, self.adamw = rate, smoothing, adamw
        self.traces = 0
        self.mesh = batch_mesh(batch_size)
        # On CPUs a step's all-reduce holds a thread while it waits for the other devices; with a
        # second step in flight none may be left to run them, and XLA gives up ("may be stuck").
        self.wait = self.mesh.size > 1 and self.mesh.devices[0].platform == "cpu"
        params = tree_map(np.asarray, params)
        if depth(params["Transformer"]) > SCAN_FROM:
            params = stack_blocks(params)
        self.like = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        packed = pack(params)
        state = tree_map(np.asarray, optim.adamw_init(packed))
        self.params, self.state, self.key = jax.device_put(
            (packed, state, jax.random.key(seed)), NamedSharding(self.mesh, EVERYWHERE)
        )
        on_mesh = partial(jax.shard_map, mesh=self.mesh)
        inputs = (EVERYWHERE, EVERYWHERE, EVERYWHERE, SHARED, SHARED, EVERYWHERE, EVERYWHERE)
        step = on_mesh(self.device_step, in_specs=inputs, out_specs=EVERYWHERE)
        scores = on_mesh(self.device_logits, in_specs=(EVERYWHERE, SHARED), out_specs=SHARED)
        self.jitted_step = jax.jit(step, donate_argnums=(0, 1))
        self.jitted_logits = jax.jit(scores)

    def device_step(self, params, state, key, images, labels, step, learning_rate):
        """What every device does in a step, on its share of the batch."""
        self.traces += 1
        rng = None
        if self.rate:
            device = jax.lax.axis_index("batch")
            rng = jax.random.fold_in(jax.random.fold_in(key, step), device)
        # Marked as differing between devices: else autodiff adds the gradients up by itself.
        local = unpack(jax.lax.pcast(params, "batch", to="varying"), self.like)
        gradient = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, accuracy), grads = gradient(
            local, images, labels, smoothing=self.smoothing, rate=self.rate, rng=rng
        )
        loss, accuracy, grads = jax.lax.pmean((loss, accuracy, pack(grads)), "batch")
        params, state = optim.adamw(params, grads, state, learning_rate, **self.adamw)
        return params, state, loss, accuracy

    def device_logits(self, params, images):
        """Class scores of a device's share of the images."""
        return vit(unpack(params, self.like), normalise(images))

    def on_devices(self, batch):
        """A batch divided over the mesh."""
        return jax.device_put(batch, NamedSharding(self.mesh, SHARED))

    def step(self, step, images, labels, learning_rate):  # -> mean loss, accuracy
        """Train on one batch of uint8 images and labels."""
        self.params, self.state, loss, accuracy = self.jitted_step(
            self.params,
            self.state,
            self.key,
            *self.on_devices((images, labels)),
            np.int32(step),
            np.float32(learning_rate),
        )
        if self.wait:
            jax.block_until_ready(self.params)
        return loss, accuracy

    def logits(self, images, batch_size=1000):  # uint8 [B, ...] -> [B, classes]
        """Class scores of any number of images.

        The last batch is filled up with zeros, whose scores are dropped: one shape, compiled once.
        """
        batch_size = -(-batch_size // self.mesh.size) * self.mesh.size
        results = []
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            padded = np.zeros((batch_size, *images.shape[1:]), images.dtype)
            padded[: len(batch)] = batch
            scores = self.jitted_logits(self.params, self.on_devices(padded))
            results.append(np.asarray(scores)[: len(batch)])
        return np.concatenate(results)

    def snapshot(self):  # -> official tree of NumPy arrays
        """The parameters as they are saved, blocks under their own names."""
        return unstack_blocks(unpack(tree_map(np.asarray, self.params), self.like))
