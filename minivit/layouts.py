"""How parameters lie on a mesh: whole on every device, or a share of them on each.

A layout turns the tree of trained parameters into vectors (`store`) and back (`load`); says where
those lie (`specs`); and on a device makes of them what the model takes and of gradients what the
optimiser takes. Both are data parallel: each device has its share of the batch.
"""

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from .params import pack, stack_blocks, tree_map, unpack, unstack_blocks
from .shapes import depth

EVERYWHERE, SHARED = PartitionSpec(), PartitionSpec("batch")


def shapes(tree):
    """What `unpack` and `jax.eval_shape` need to know of it."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def mean_over_devices(tree):
    """One all-reduce for all: on a CPU each holds a thread of those that have work to do."""
    vector, split = ravel_pytree(tree)
    return split(jax.lax.pmean(vector, "batch"))


class Replicated:
    """Every device has all parameters, and all take the mean of their gradients."""

    def __init__(self, like, devices):
        """`like` is the tree of trained parameters, or their shapes."""
        self.like = shapes(like)

    def store(self, tree):  # -> {"kernel": vector, "other": vector}
        """All leaves end to end: an optimiser then does a few long operations, not many short."""
        return pack(tree)

    def load(self, stored):  # -> tree
        """The inverse of `store`."""
        return unpack(stored, self.like)

    def specs(self, stored):
        """Where the parts of `store`'s result lie."""
        return EVERYWHERE

    def local(self, stored):  # -> what gradients are taken by
        """Inside a program: the tree, before autodiff begins."""
        # Marked as differing between devices: else autodiff adds the gradients up by itself.
        return self.load(jax.lax.pcast(stored, "batch", to="varying"))

    def tree(self, local, prepare):  # -> what the model takes, its options
        """Inside autodiff: the parameters after `prepare`, such as a cast."""
        return prepare(local), {}

    def collect(self, grads):
        """A part's gradients as the parameters are stored; slices' own gradient would be slow."""
        return pack(grads)

    def mean(self, results):
        """The mean over devices of loss, accuracy and gradients."""
        return mean_over_devices(results)

    def across(self, number):
        """The sum over devices of what each holds a part of: here each holds all."""
        return number


class FullySharded:
    """Every device keeps a share of all parameters, moments and averages (as ZeRO, 1910.02054).

    The blocks' vectors are [L, parameters of a block], divided along their length. A device puts a
    block together when its turn comes, and once more on the way back, so that it has one block
    whole at a time; what is outside the blocks is put together for the whole step. All this is in
    float32. The gradient of an all-gather is a reduce-scatter: each gets its share of the sum.
    """

    def __init__(self, like, devices):
        """`like` is the tree of trained parameters, or their shapes."""
        self.devices, self.stacked = devices, "encoderblock" in like.get("Transformer", {})
        zeros = tree_map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), like)
        blocks, rest = self.divide(zeros)
        self.rest = shapes(rest)
        self.blocks = tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)

    def divide(self, tree):  # -> blocks on a leading axis (maybe none), the rest
        """The blocks apart from what stands alone."""
        if depth(tree.get("Transformer", {})):
            tree = stack_blocks(tree)
        if "encoderblock" not in tree.get("Transformer", {}):
            return {}, tree
        encoder = dict(tree["Transformer"])
        return encoder.pop("encoderblock"), tree | {"Transformer": encoder}

    def store(self, tree):  # -> {"rest": vectors, "blocks": vectors on a leading axis}
        """Vectors with zeros at their ends, so that they divide over the devices."""
        blocks, rest = self.divide(tree)
        parts = {"rest": tree_map(self.filled, pack(rest))}
        if blocks:
            count = len(next(iter(jax.tree.leaves(blocks))))
            each = [pack(tree_map(lambda leaf, i=i: leaf[i], blocks)) for i in range(count)]
            parts["blocks"] = tree_map(lambda *rows: self.filled(np.stack(rows)), *each)
        return parts

    def filled(self, x):  # [..., n] -> [..., next multiple of the devices]
        """Zeros at the end, which stay zero: their gradients and moments are."""
        widths = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % self.devices)]
        return np.pad(x, widths)

    def load(self, stored):  # -> tree
        """The inverse of `store`."""
        tree = unpack(stored["rest"], self.rest)
        if "blocks" not in stored:
            return tree
        count = len(next(iter(stored["blocks"].values())))
        each = [
            unpack({n: v[i] for n, v in stored["blocks"].items()}, self.blocks)
            for i in range(count)
        ]
        blocks = tree_map(lambda *leaves: np.stack(leaves), *each)
        tree = tree | {"Transformer": tree["Transformer"] | {"encoderblock": blocks}}
        return tree if self.stacked else unstack_blocks(tree)

    def specs(self, stored):
        """Each vector is divided along its length."""
        return tree_map(lambda x: PartitionSpec(*[None] * (x.ndim - 1), "batch"), stored)

    def local(self, stored):  # -> what gradients are taken by
        """The device's share itself."""
        return stored

    def tree(self, local, prepare):  # -> what the model takes, its options
        """The rest whole; the blocks still divided, and the function that makes one whole."""
        tree = prepare(unpack(self.gathered(local["rest"]), self.rest))
        if "blocks" not in local:
            return tree, {}

        def whole(block):
            return prepare(unpack(self.gathered(block), self.blocks))

        encoder = tree["Transformer"] | {"encoderblock": local["blocks"]}
        return tree | {"Transformer": encoder}, {"whole": whole}

    def gathered(self, shares):
        """Vectors put together from what each device has."""
        return tree_map(lambda x: jax.lax.all_gather(x, "batch", tiled=True), shares)

    def collect(self, grads):
        """They are of the stored form already."""
        return grads

    def mean(self, results):
        """The gradients are sums over devices already."""
        *numbers, grads = results
        return *mean_over_devices(numbers), tree_map(lambda x: x / self.devices, grads)

    def across(self, number):
        """The sum over devices of what each holds a part of."""
        return jax.lax.psum(number, "batch")


class Whole(Replicated):
    """The tree as it is: evaluation needs no vectors, whose slices would copy all weights."""

    def store(self, tree):
        """The tree."""
        return tree

    def load(self, stored):
        """The inverse."""
        return stored

    def collect(self, grads):
        """They are of the stored form already."""
        return grads


LAYOUTS = {"data": Replicated, "fsdp": FullySharded, "whole": Whole}


def state_specs(layout, state, stored):
    """Where an optimiser's state lies: trees as the parameters, numbers everywhere."""
    specs = layout.specs(stored)
    return {n: specs if isinstance(x, dict) else EVERYWHERE for n, x in state.items()}
