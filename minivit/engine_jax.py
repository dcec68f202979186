"""Training and evaluation with the JAX twin: one program, on a mesh of all devices."""

import re
import warnings
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from . import optim
from .batches import portion
from .datasets import normalise
from .engines import busy, joined, token_count
from .in_jax import OBJECTIVES, model
from .layouts import EVERYWHERE, LAYOUTS, SHARED, mean_over_devices, shapes, state_specs
from .params import (
    count,
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
from .processes import UNASKED, Processes, use_all_cores
from .shapes import depth

# Where XLA sees all blocks at once the gradient's cost grows faster than the depth. So 12 blocks
# are faster scanned, and of 4 those with many tokens (tiny/4: by 12 %); few and small ones are
# faster written out (tiny: by 28 %). So are large ones with few images (B/16 with 8: by 15 %): the
# scan copies each block's weights and computes each block twice. Written out, a step keeps what is
# inside the blocks, which must not be more than weights, gradient and moments take anyway.
SCAN_FROM, FEW_TOKENS, STATE = 6, 32, 4
PIXELS, MOST = 64 * 224 * 224, 4096  # what an accelerator scores at once: pixels, and images


def batch_mesh(batch_size, parts=1, devices=None):
    """A mesh over as many devices as divide each part of the batch; of several processes all.

    Without a batch all: what is only evaluated is filled up.
    """
    # A process's devices side by side: its share of a batch is one piece.
    devices = devices or sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if batch_size is None:
        return Mesh(np.array(devices), ("batch",))
    count = max(n for n in range(1, len(devices) + 1) if batch_size // parts % n == 0)
    if count < len(devices):
        text = f"a batch of {batch_size}" + (f" in {parts} parts" if parts > 1 else "")
        text += f" divides over {count} of {len(devices)} devices; a multiple of"
        if jax.process_count() > 1:
            raise ValueError(
                f"{text} {parts * len(devices)} is needed, since every process takes part"
            )
        warnings.warn(f"{text} {parts * len(devices)} would use them all", stacklevel=3)
    return Mesh(np.array(devices[:count]), ("batch",))


def useful_devices(tokens, images):  # -> list, or None: all
    """The CPU devices that the images of a part keep busy, unless somebody chose their number."""
    ours = UNASKED["devices"] and jax.default_backend() == "cpu" and jax.process_count() == 1
    return jax.devices()[: busy(tokens, images)] if ours and images else None


def aligned(x):  # -> a copy
    """One that begins where XLA wants it, so that all CPU devices share it; else each copies."""
    x = np.asarray(x)
    memory = np.empty(x.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def kept(block, tokens):  # parameters of a block, N -> numbers per image
    """About what the backward pass needs of a block's inside: activations, attention weights."""
    heads, width = block["MultiHeadDotProductAttention_1"]["out"]["kernel"].shape[::2]
    return tokens * (8 * width + 3 * block["MlpBlock_3"]["Dense_0"]["bias"].size + heads * tokens)


def stacked(params):
    """Many blocks, or such with many tokens, on a leading axis; few and small ones by themselves.

    So they are in states, whatever the arrangement of the run: it may go on with other devices.
    """
    params = unstack_blocks(params)
    blocks = depth(params.get("Transformer", {}))
    many = blocks >= SCAN_FROM or (blocks > 1 and token_count(params) > FEW_TOKENS)
    return stack_blocks(params) if many else params


def fits(params, images):  # images that a device has at a time -> bool
    """Whether all that is inside the blocks may be kept for the backward pass."""
    blocks, tokens = depth(params.get("Transformer", {})), token_count(params)
    if not blocks or not tokens:
        return False
    inside = kept(params["Transformer"]["encoderblock_0"], tokens)
    return blocks * images * inside <= STATE * count(params)


NORM = re.compile(r"(Norm_\d+|encoder_norm|gn\w*|group_norm)/\w+$")


def cast(params, dtype):
    """The weights in the type of the computation; norms stay as they are."""
    flat = flatten(params)
    return unflatten({n: x if NORM.search(n) else x.astype(dtype) for n, x in flat.items()})


def objective_loss(params, batch, *, objective, dtype="float32", **options):
    # -> loss, accuracy or None
    """The objective on a batch, in the type of the parameters' computation."""
    metrics = {}
    batch = batch | {"images": normalise(batch["images"]).astype(dtype)}
    loss = OBJECTIVES[objective](params, **batch, metrics=metrics, **options)
    return loss, tree_map(jax.numpy.float32, metrics).get("accuracy")


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

    Each device computes the gradient of its share of the batch. Where the parameters lie is the
    layout's business: all on every device, or divided (`layouts`).
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
        dtype="float32",
        shard="data",
        devices=None,
        **rule,
    ):
        """Without a `batch_size` it is for evaluation. `objective` is one of OBJECTIVES;
        `accumulate` divides each batch into so many parts, one after the other; `freeze` trains the
        head alone; `keep` averages the weights; `model` are options of `vit` and of the objective;
        `dtype` is that of the computation, while weights, moments, norms, softmax and loss stay
        float32; `shard` is "data" or "fsdp", `devices` those of the mesh, by default all that the
        batch keeps busy; `rule`: see optim.update.
        """
        self.model, self.accumulate = model or {}, accumulate
        self.dtype, self.options = dtype, self.model | {"objective": objective, "dtype": dtype}
        use_all_cores()
        self.rate, self.keep, self.rule = rate, keep, rule
        self.seed = np.uint32(seed % 2**32)
        self.traces = 0
        self.images = (batch_size or 0) // accumulate  # of a part
        devices = devices or useful_devices(token_count(params), self.images)
        self.mesh = batch_mesh(batch_size, accumulate, devices)
        self.processes = Processes(jax.process_index(), jax.process_count())
        self.hardware = f"{self.mesh.size} {self.mesh.devices[0].platform} devices"
        self.multiple = self.mesh.size  # of which a batch to `measure` should be
        # On CPUs a step's all-reduce holds a thread while it waits for the other devices; with a
        # second step in flight none may be left to run them, and XLA gives up ("may be stuck").
        self.wait = self.mesh.size > 1 and self.mesh.devices[0].platform == "cpu"
        params, images = tree_map(np.asarray, params), self.images // self.mesh.size
        # Divided parameters are put together a block at a time, which only the scan does.
        written = batch_size and shard == "data" and fits(params, images)
        self.arranged = unstack_blocks if written else stacked
        layout = LAYOUTS["whole" if not batch_size and shard == "data" else shard]
        self.place(*split_frozen(self.arranged(params), freeze), layout)
        self.build()

    def place(self, frozen, trained, layout):
        """The arrays, each where the layout has it."""
        self.like = shapes(trained)
        self.saved_like, self.saved_frozen = (shapes(stacked(tree)) for tree in (trained, frozen))
        self.layout = layout(self.like, self.mesh.size)
        stored, rule = self.layout.store(trained), self.rule.get("rule", "adamw")
        self.start = partial(optim.start, rule=rule, average=bool(self.keep))
        self.state_like = jax.eval_shape(self.start, shapes(stored))
        self.specs = self.layout.specs(stored)
        self.state_specs = state_specs(self.layout, self.state_like, stored)
        self.params, self.frozen = self.put(stored, self.specs), self.put(frozen, EVERYWHERE)

    @cached_property
    def state(self):
        """The optimiser's, from the first step on; evaluation needs none. All must ask."""
        zeros = tree_map(lambda x: np.zeros(x.shape, x.dtype), self.params)
        weights = self.host(self.params) if self.keep else zeros  # the average begins with them
        return self.put(self.start(weights), self.state_specs)

    def build(self):
        """The programs: each is written for one device and runs on all."""
        on_mesh = partial(jax.shard_map, mesh=self.mesh)
        moving = (self.specs, self.state_specs)
        step = on_mesh(
            self.device_step,
            in_specs=(*moving, EVERYWHERE, SHARED, *4 * [EVERYWHERE]),
            out_specs=(*moving, EVERYWHERE, EVERYWHERE),
        )
        inputs = (self.specs, EVERYWHERE, SHARED)
        scores = on_mesh(self.device_logits, in_specs=inputs, out_specs=SHARED)
        measure = on_mesh(self.device_measure, in_specs=inputs, out_specs=EVERYWHERE)
        everywhere = NamedSharding(self.mesh, EVERYWHERE)
        self.jitted_step = jax.jit(step, donate_argnums=(0, 1))
        alone = self.processes.count == 1
        self.jitted_logits = jax.jit(scores, out_shardings=None if alone else everywhere)
        self.jitted_measure = jax.jit(measure)
        self.gather = jax.jit(lambda x: x, out_shardings=everywhere)
        self.gather_row = jax.jit(lambda x, i: x[i], out_shardings=everywhere)

    def device_step(self, params, state, frozen, batch, seed, step, learning_rate, keep):
        """What every device does in a step, on its share of the batch."""
        self.traces += 1
        key = jax.random.fold_in(jax.random.key(seed), step)
        key = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        gradient = jax.value_and_grad(self.device_loss, has_aux=True)
        local = self.layout.local(params)

        def part(batch, number):
            rng = jax.random.fold_in(key, number) if self.rate else None
            options = self.options | {"rate": self.rate, "rng": rng}
            (loss, accuracy), grads = gradient(local, frozen, batch, **options)
            return loss, accuracy, self.layout.collect(grads)

        results = accumulated(part, batch, self.accumulate)
        loss, accuracy, grads = self.layout.mean(results)
        rule = self.rule | {"keep": keep, "across": self.layout.across}
        params, state = optim.update(params, grads, state, learning_rate, **rule)
        return params, state, loss, accuracy

    def device_loss(self, local, frozen, batch, **options):  # -> loss, accuracy
        """What is differentiated, by what the layout says that a device has of the parameters."""
        params, more = self.device_params(local, frozen)
        return objective_loss(params, batch, **options, **more)

    def device_params(self, local, frozen):  # -> what the model takes, options
        """All parameters on a device, in the type of the computation."""
        prepare = partial(cast, dtype=self.dtype)
        tree, options = self.layout.tree(local, prepare)
        return merge(prepare(frozen), tree), options

    def device_logits(self, params, frozen, images):
        """Class scores of a device's share of the images."""
        options = {name: value for name, value in self.model.items() if name != "loss"}
        params, more = self.device_params(self.layout.local(params), frozen)
        scores = model(params, normalise(images).astype(self.dtype), **options, **more)
        return scores.astype("float32")

    def device_measure(self, params, frozen, batch):
        """The objective on a device's share of a batch."""
        result = self.device_loss(self.layout.local(params), frozen, batch, **self.options)
        return mean_over_devices(result)

    def put(self, tree, specs):
        """NumPy arrays onto the mesh, copied: what is donated may not appear twice.

        CPU devices share what is whole on each, until a step gives each its own.
        """
        tree = tree_map(aligned, tree)
        places = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        if self.processes.count == 1:
            return jax.device_put(tree, places)

        def shares(place, part):  # device_put would ask all processes whether theirs is the same
            return tree_map(
                lambda x: jax.make_array_from_callback(x.shape, place, lambda where: x[where]), part
            )

        return jax.tree.map(shares, places, tree)

    def on_devices(self, batch):
        """A batch divided over the mesh, of which this process has its share."""
        place = NamedSharding(self.mesh, SHARED)
        if self.processes.count == 1:
            return jax.device_put(batch, place)
        return tree_map(partial(jax.make_array_from_process_local_data, place), batch)

    def host(self, tree):  # -> NumPy arrays
        """Arrays of the mesh, whole; all processes must ask."""
        self.finish()
        return tree_map(self.whole, tree)

    def whole(self, x):  # -> NumPy array
        """One array; of what lies in several processes, one block's at a time."""
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        if x.ndim > 1:
            return np.stack([np.asarray(self.gather_row(x, i)) for i in range(len(x))])
        return np.asarray(self.gather(x))

    def step(self, step, batch, learning_rate):  # -> mean loss, accuracy
        """Train on one batch of arrays, images and what else the objective takes.

        Where several processes take part, each brings its share.
        """
        size = len(batch["images"]) * self.processes.count
        parts = self.mesh.size * self.accumulate
        if size % parts:
            raise ValueError(
                f"{size} images do not divide over {self.mesh.size} devices"
                + (f" times {self.accumulate} parts" if self.accumulate > 1 else "")
            )
        batch = self.on_devices(batch)
        self.finish()  # the batch was made while the last step ran
        arguments = self.arguments(step, batch, learning_rate)
        self.params, self.state, loss, accuracy = self.jitted_step(*arguments)
        return loss, accuracy

    def arguments(self, step, batch, learning_rate):
        """Those of the program of a step."""
        numbers = learning_rate, optim.warm_keep(step, self.keep)
        trees = self.params, self.state, self.frozen, batch
        return *trees, self.seed, np.int32(step), *map(np.float32, numbers)

    def temporaries(self, batch):  # -> bytes
        """What XLA sets aside on each device for the intermediates of a step; it compiles anew."""
        arguments = self.arguments(0, self.on_devices(batch), 0.0)
        return self.jitted_step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    def measure(self, batch):  # -> mean loss, accuracy
        """The objective on a batch as it is, without dropout and without training on it.

        Every process brings the whole batch and computes its share.
        """
        self.finish()
        size = len(batch["images"])
        if rest := size % self.mesh.size:
            # Padding would count in a mean: the few that are left over go to one device.
            few = {name: array[-rest:] for name, array in batch.items()}
            params = cast(merge(self.host(self.frozen), self.trained()), self.dtype)
            result = jax.tree.map(float, objective_loss(params, few, **self.options))
            if size == rest:
                return result
            many = self.measure({name: array[:-rest] for name, array in batch.items()})
            return jax.tree.map(lambda a, b: (rest * a + (size - rest) * b) / size, result, many)
        shares = self.on_devices(tree_map(self.share, batch))
        result = self.jitted_measure(self.averaged(), self.frozen, shares)
        return jax.tree.map(float, result)

    def share(self, rows):
        """This process's part of what all of them have."""
        return rows[self.processes.share(len(rows))]

    def finish(self):
        """Wait for the last step, where two in flight could block each other."""
        if self.wait:
            jax.block_until_ready(self.params)

    def logits(self, images, batch_size=None, done=None):  # uint8 [B, ...] -> [B, classes]
        """Class scores of any number of images.

        Without a `batch_size` as many at a time as suits their size, the devices and the memory
        that training takes; `done` is told how many. The last batch is filled up with zeros, whose
        scores are dropped: one shape, compiled once.
        """
        self.finish()
        batch_size = batch_size or self.portion(images.shape[1:3])
        batch_size = -(-batch_size // self.mesh.size) * self.mesh.size

        def scores(batch):
            padded = np.zeros((batch_size, *images.shape[1:]), images.dtype)
            padded[: len(batch)] = batch
            shares = self.on_devices(self.share(padded))
            found = self.jitted_logits(self.averaged(), self.frozen, shares)
            return np.asarray(found)[: len(batch)]

        starts = range(0, len(images), batch_size)
        return joined((scores(images[i : i + batch_size]) for i in starts), done)

    def portion(self, image_size):  # -> images
        """How many to score at once: on CPUs few, whose activations stay in the caches."""
        count = self.mesh.size
        if self.mesh.devices[0].platform == "cpu":
            return max(self.images, portion(image_size, count))
        return max(self.images, portion(image_size, count, PIXELS * count, MOST * count))

    def averaged(self):
        """The trained parameters as they are stored, averaged if they are averaged."""
        return self.state["average"] if self.keep else self.params

    def trained(self):  # -> tree of NumPy arrays
        """The trained parameters, averaged if they are averaged."""
        return self.layout.load(self.host(self.averaged()))

    def snapshot(self):  # -> official tree of NumPy arrays
        """The parameters as they are saved and evaluated, blocks under their own names."""
        return unstack_blocks(merge(self.host(self.frozen), self.trained()))

    def state_tree(self):  # -> tree of NumPy arrays
        """All that the next step depends on, whatever the layout."""

        def packed(stored):
            return pack(stacked(self.layout.load(stored))) if isinstance(stored, dict) else stored

        state = {name: packed(x) for name, x in self.host(self.state).items()}
        weights, frozen = packed(self.host(self.params)), stacked(self.host(self.frozen))
        return {"weights": weights, "optimizer": state, "frozen": frozen}

    def state_shapes(self):  # -> tree of shapes
        """Those of `state_tree`, without asking any device."""
        packed = jax.eval_shape(pack, self.saved_like)
        state = {n: packed if isinstance(x, dict) else x for n, x in self.state_like.items()}
        return {"weights": packed, "optimizer": state, "frozen": self.saved_frozen}

    def load_state(self, tree):
        """Go on from what `state_tree` gave, to the bit."""

        def stored(packed):
            if not isinstance(packed, dict):  # a number
                return packed
            return self.layout.store(self.arranged(unpack(packed, self.saved_like)))

        state = {name: stored(x) for name, x in tree["optimizer"].items()}
        self.params = self.put(stored(tree["weights"]), self.specs)
        self.state = self.put(state, self.state_specs)
        self.frozen = self.put(self.arranged(tree.get("frozen", {})), EVERYWHERE)

    def restore(self, params):
        """Go back to what `snapshot` gave; the optimiser's moments stay."""
        self.finish()
        stored = self.layout.store(select(self.arranged(params), self.like))
        self.params = self.put(stored, self.specs)
        self.state |= {"average": self.put(stored, self.specs)} if self.keep else {}
