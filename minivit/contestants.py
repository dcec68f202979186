"""What `minivit.bench` times, each in a process of its own: `python -m minivit.contestants`.

A contestant is built from a task, does its first call, and then runs as many calls as the parent
writes to it, one number per line; it answers with seconds. So the parent can alternate between
them, and none sees another's threads, memory or compiled programs.
"""

import contextlib
import json
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from . import engines, machine, variants
from .command import literal, out_of_memory
from .in_numpy import smooth_labels
from .params import initialise

with contextlib.suppress(ImportError):  # Windows has no such thing
    import resource


@dataclass(frozen=True)
class Task:
    """What to compute: a model at an image size, a training step or a forward pass."""

    config: str
    what: str  # "train" or "forward"
    batch: int
    dtype: str = "float32"

    @property
    def variant(self):
        """The sizes of the model."""
        return CONFIGS[self.config][0]

    @property
    def flops(self):
        """Operations of one call: a training step is three forward passes."""
        _, size, channels, classes, _ = CONFIGS[self.config]
        one = variants.forward_flops(self.variant, size, channels=channels, classes=classes)
        return one * self.batch * (3 if self.what == "train" else 1)

    def arrays(self):  # -> images uint8 [B, height, width, C], labels [B]
        """A batch of noise."""
        _, size, channels, classes, _ = CONFIGS[self.config]
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (self.batch, size, size, channels), np.uint8)
        return images, rng.integers(0, classes, self.batch)

    def training_batch(self):
        """The same as the engines take it."""
        images, labels = self.arrays()
        return {"images": images, "targets": smooth_labels(labels, CONFIGS[self.config][3])}

    def params(self):
        """Fresh parameters."""
        _, size, channels, classes, _ = CONFIGS[self.config]
        sizes = {"image_size": size, "channels": channels, "classes": classes}
        return initialise(self.variant, 0, **sizes)


# Model, image side, channels, classes, batch.
CONFIGS = {
    "tiny": (variants.parse("tiny"), 28, 1, 10, 128),
    "tiny/4": (replace(variants.parse("tiny"), patch=4), 28, 1, 10, 128),
    "Ti/16": (variants.parse("Ti/16"), 224, 3, 1000, 16),
    "B/16": (variants.parse("B/16"), 224, 3, 1000, 8),
}
OPTIMISER = {"weight_decay": 0.05}  # AdamW, for all
RATE = 1e-4


def make(backend, task):
    """Its engine, for training."""
    options = {"batch_size": task.batch, "dtype": task.dtype} | OPTIMISER
    return engines.make(backend, task.params(), **options)


def numpy_twin(task):  # -> function of the number of calls
    """The readable one."""
    return engine_calls(task, make("numpy", task))


def jax_twin(task):
    """The fast one, on a mesh of all devices."""
    engine = make("jax", task)
    calls = engine_calls(task, engine)
    if task.what == "train":
        calls.temporaries = lambda: engine.mesh.size * engine.temporaries(task.training_batch())
    return calls


def engine_calls(task, engine):
    """Steps or forward passes of an engine, each with all that a run needs around it."""
    batch = task.training_batch()
    images = batch["images"]

    def train(count):
        for step in range(count):
            loss, _ = engine.step(step, batch, RATE)
        return float(loss)  # waits

    def forward(count):
        for _ in range(count):
            scores = engine.logits(images, len(images))
        return float(scores[0, 0])

    return train if task.what == "train" else forward


def products(task):
    """Square matrix products by XLA on all devices, one beside the other: the machine's limit."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from .processes import use_all_cores

    use_all_cores()
    devices = jax.local_devices()
    side = SIDE if devices[0].platform == "cpu" else 4 * SIDE
    place = NamedSharding(Mesh(np.array(devices), ("batch",)), PartitionSpec("batch"))
    shape = (len(devices), side, side)
    a = jax.device_put(jax.numpy.ones(shape, task.dtype), place)
    multiply = jax.jit(lambda a: (a @ a) / side)

    def calls(count):
        x = a
        for _ in range(count):
            x = multiply(x)
        return jax.block_until_ready(x)

    calls.flops = 2 * side**3 * len(devices)
    return calls


SIDE = 1536
OURS = {"minivit JAX": jax_twin, "minivit NumPy": numpy_twin, "matrix product": products}


def contestants():  # -> {name: function of a task}
    """Ours, and the peers by name; what a peer needs is imported only when it is built."""
    from . import peers

    return OURS | peers.PEERS


def resident():  # -> bytes
    """The most memory that this process has had; 0 where the system does not say."""
    if "resource" not in globals():
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fault(error):  # exception -> text
    """Why a contestant cannot go on, in one line."""
    if out_of_memory(error):
        return "out of memory; try a smaller --batch"
    return literal(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def main():
    """Build, report, then obey, and say why if that fails."""
    machine.keep_memory()
    spec = json.loads(sys.argv[1])
    name, task = spec.pop("contestant"), Task(**spec)
    say = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    try:
        for answer in answers(name, task):
            print(json.dumps(answer), file=say, flush=True)
    except Exception as error:  # a peer may fail in any way, and then is left out
        print(json.dumps({"error": fault(error)}), file=say, flush=True)


def answers(name, task):  # -> dictionaries, the first of them a report
    """One when the contestant is ready, and one for each number of calls on standard input."""
    begun = time.perf_counter()
    calls = contestants()[name](task)
    calls(1)
    report = {"first": time.perf_counter() - begun, "flops": getattr(calls, "flops", task.flops)}
    if temporaries := getattr(calls, "temporaries", None):
        report["temporaries"] = temporaries()
    yield report
    for line in sys.stdin:
        begun = time.perf_counter()
        calls(int(line))
        yield {"seconds": time.perf_counter() - begun, "resident": resident()}


if __name__ == "__main__":
    main()
