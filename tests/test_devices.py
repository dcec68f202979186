"""Eight devices and two processes compute what one does; divided parameters come together again."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minivit import datasets, in_numpy, optim, params, processes, states, train, variants
from minivit.augmentation import Augmentation
from minivit.batches import Batches
from minivit.engine_jax import SCAN_FROM, JaxEngine
from minivit.layouts import FullySharded, Replicated
from minivit.params import flatten
from minivit.shapes import depth

SMALL = variants.Variant("small", patch=7, width=16, mlp=64, heads=2, blocks=2)
DEEP = replace(SMALL, blocks=SCAN_FROM)
STEPS, BATCH = 50, 32


def model(variant):
    return params.initialise(variant, 0, image_size=28, channels=1, classes=10)


def curve(variant, **options):
    """The loss of each of 50 steps of Fashion-MNIST."""
    d = datasets.load("fashion-mnist")
    sizes = {"batch_size": BATCH, "image_size": (28, 28), "patch": (7, 7), "channels": 1}
    batches = Batches(d.train_images, d.train_labels, 10, **sizes)
    engine = JaxEngine(model(variant), batch_size=BATCH, weight_decay=0.1, clip=1.0, **options)
    rates = [optim.schedule(s, base=3e-3, total=STEPS, warmup=5) for s in range(STEPS)]
    return engine, [float(engine.step(s, batches(s), rates[s])[0]) for s in range(STEPS)]


def bytes_on_a_device(*trees):
    shards = [leaf.addressable_shards[0].data for tree in trees for leaf in jax.tree.leaves(tree)]
    return sum(shard.nbytes for shard in shards)


def on_eight_devices():  # prints JSON
    """What the test below asks a process with eight devices."""
    everything = {"devices": jax.device_count()}
    for name, variant in (("loop", SMALL), ("scan", DEEP)):
        _, everything[f"{name}-one"] = curve(variant, devices=jax.devices()[:1])
        for shard in ("data", "fsdp"):
            engine, everything[f"{name}-{shard}"] = curve(variant, shard=shard, accumulate=2)
            stored = bytes_on_a_device(engine.params, engine.state["mean"], engine.state["square"])
            everything[f"{name}-{shard}-bytes"] = stored
    # TRN-07: 19 images, batches of 8, 4 devices.
    images = datasets.load("fashion-mnist").test_images[:19]
    engine = JaxEngine(engine.snapshot(), batch_size=8, devices=jax.devices()[:4])
    expected, _ = in_numpy.vit(engine.snapshot(), datasets.normalise(images))
    logits = engine.logits(images, batch_size=8)
    everything["gap"] = float(abs(logits - expected).max())
    everything["scores"] = logits.shape
    print(json.dumps(everything))


def start(command, **variables):
    """A process with other devices than this one's."""
    environment = os.environ | variables
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(each):
    """What each process said, and its exit status; none is left behind."""
    try:
        said = [process.communicate(timeout=300)[0] for process in each]
    finally:
        for process in each:
            process.kill()
            process.stdout.close()
    return said, [process.returncode for process in each]


def test_eight_devices_are_as_good_as_one():
    process = start([sys.executable, __file__], JAX_NUM_CPU_DEVICES="8", JAX_PLATFORMS="cpu")
    (said,), statuses = finish([process])
    assert statuses == [0], said
    got = json.loads(said.splitlines()[-1])
    assert got["devices"] == 8
    for name, variant in (("loop", SMALL), ("scan", DEEP)):
        one = got[f"{name}-one"]
        assert one[-1] < 0.9 * one[0]
        for shard in ("data", "fsdp"):
            # Sums in another order: 1e-7 a step, which 50 steps of Adam enlarge.
            np.testing.assert_allclose(got[f"{name}-{shard}"], one, rtol=1e-5)
        whole = 3 * 4 * params.count(model(variant))  # weights and two moments in float32
        assert got[f"{name}-data-bytes"] == whole
        filled = 8 * 4 * 3 * 4 * (variant.blocks + 1)  # zeros at the ends of a few vectors
        assert whole / 8 <= got[f"{name}-fsdp-bytes"] <= whole / 8 + filled
    assert got["scores"] == [19, 10]
    assert got["gap"] < 1e-5


@given(
    st.integers(1, 9),
    st.sampled_from(["tiny", "tiny-hybrid", "tiny-resnet"]),
    st.booleans(),
    st.booleans(),
)
def test_stored_and_loaded(devices, name, freeze, stack):
    """Whatever the layout, the number of devices and the family: the same arrays come back."""
    tree = params.initialise(variants.parse(name), 0, image_size=28, channels=1, classes=10)
    _, tree = params.split_frozen(tree, freeze)
    if depth(tree.get("Transformer", {})) and stack:
        tree = params.stack_blocks(tree)
    for layout in (Replicated(tree, devices), FullySharded(tree, devices)):
        stored = layout.store(tree)
        back = flatten(layout.load(stored))
        assert back.keys() == flatten(tree).keys()
        for leaf, array in flatten(tree).items():
            np.testing.assert_array_equal(back[leaf], array)
    assert all(x.shape[-1] % devices == 0 for x in jax.tree.leaves(stored))


@pytest.mark.parametrize("variant", [SMALL, DEEP], ids=["loop", "scan"])
def test_a_state_moves_between_layouts(variant):
    """What one layout saved, another goes on from, to the bit."""
    batch = {"images": datasets.load("fashion-mnist").test_images[:8], "targets": np.eye(10)[:8]}
    batch["targets"] = batch["targets"].astype("float32")
    options = {"batch_size": 8, "keep": 0.9}
    first = JaxEngine(model(variant), **options)
    first.step(0, batch, 1e-2)
    saved = first.state_tree()
    second = JaxEngine(model(variant), shard="fsdp", **options)
    second.load_state(saved)
    for name, leaf in flatten(second.state_tree()).items():
        np.testing.assert_array_equal(leaf, flatten(saved)[name], err_msg=name)
    losses = [float(engine.step(1, batch, 1e-2)[0]) for engine in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("objective", ["classes", "mean-color"])
@pytest.mark.parametrize("mixing", [0.0, 0.2])
def test_shares_of_a_batch(objective, mixing):
    """The processes' shares, one after the other, are the whole batch to the bit."""
    d = datasets.load("fashion-mnist")
    how = Augmentation(0.5, 2, True, mixing)
    sizes = {"batch_size": 18, "image_size": (28, 28), "patch": (7, 7), "channels": 1}
    whole = Batches(d.train_images, d.train_labels, 10, **sizes, augmentation=how)
    whole = replace(whole, objective=objective)
    for count in (1, 2, 3):
        parts = [replace(whole, processes=processes.Processes(i, count)) for i in range(count)]
        for step in (0, 3333):  # the second crosses an epoch's end
            expected, shares = whole(step), [part(step) for part in parts]
            assert len(expected["images"]) == 18
            for name, array in expected.items():
                together = np.concatenate([share[name] for share in shares])
                np.testing.assert_array_equal(together, array)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_together(*options, count=2):
    """The same command in so many processes."""
    command = [sys.executable, "-m", "minivit.train", "--distributed", *map(str, options)]
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_PLATFORMS": "cpu"}
    variables |= {"JAX_NUM_PROCESSES": str(count), "JAX_NUM_CPU_DEVICES": "1"}
    each = [start(command, **variables, JAX_PROCESS_ID=str(i)) for i in range(count)]
    return each


def rows(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def test_two_processes_are_as_good_as_one(tmp_path):
    """50 steps, divided parameters: the curve of one process; one writes; none starts alone."""
    options = ["--tiny", "--steps", 50, "--log-every", 1, "--batch-size", 32]
    options += ["--evaluate-every", 25, "--validation", 0.01]
    two, one = tmp_path / "two", tmp_path / "one"
    said, statuses = finish(train_together(*options, "--shard", "fsdp", "--output", two))
    assert statuses == [0, 0], said
    assert "whole command" in said[0]
    assert "2 cpu devices of 2 processes, fsdp" in said[0]
    assert re.fullmatch(r"(\[Gloo\].*\n)*", said[1])
    alone = [sys.executable, "-m", "minivit.train", *map(str, options), "--output", str(one)]
    subprocess.run(alone, check=True, capture_output=True)
    assert len(rows(two)) == len(rows(one)) == 53
    for got, expected in zip(rows(two), rows(one), strict=True):
        for name, value in expected.items():
            assert bool(value) == bool(got[name])
            # As with eight devices; an accuracy is a count, of which rounding may change one.
            of = {"accuracy": 32, "validation_accuracy": 600, "test_accuracy": 10_000}.get(name)
            tolerance = {"abs": 1.01 / of} if of else {"rel": 1e-5}
            assert float(got[name] or 0) == pytest.approx(float(value or 0), **tolerance), name
    said, statuses = finish(train_together(*options, "--output", two))
    assert statuses == [2, 2]
    assert f"{two} holds a checkpoint.npz already" in said[0]
    assert "another process could not start" in said[1]


def test_two_processes_stop_and_go_on_together(tmp_path):
    """One is asked to stop, both do; its newest state is damaged; they go on with another layout.

    Masked, with dropout, an average, and a test set that does not divide over the devices.
    """
    options = ["--tiny", "--objective", "pixels", "--steps", 400, "--log-every", 5]
    options += ["--batch-size", 16, "--dropout", 0.1, "--average", 0.9, "--checkpoint-every", 10]
    options += [
        "--dataset",
        f"folder:{squares(tmp_path)}",
        "--image-size",
        14,
        "--mosaic-every",
        30,
    ]
    two, one = tmp_path / "two", tmp_path / "one"
    each = train_together(*options, "--shard", "fsdp", "--output", two)
    deadline = time.monotonic() + 200
    while not (two / "state-10.npz").exists() and each[1].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    each[1].send_signal(signal.SIGTERM)
    said, statuses = finish(each)
    assert statuses == [130, 130], said
    assert "go on with --resume" in said[0]
    newest = states.numbered(two)[0][1]
    newest.write_bytes(newest.read_bytes()[:-100])
    said, statuses = finish(train_together("--resume", two, "--shard", "data"))
    assert statuses == [0, 0], said
    assert re.search(rf"warning: {re.escape(str(newest))}.* passed over", said[0]), said[0]
    alone = [sys.executable, "-m", "minivit.train", *map(str, options), "--output", str(one)]
    variables = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    subprocess.run(alone, check=True, capture_output=True, env=os.environ | variables)
    assert len(rows(two)) == len(rows(one)) == 81
    for got, expected in zip(rows(two), rows(one), strict=True):
        for name, value in expected.items():
            # Two layouts, three sums in another order.
            assert float(got[name] or 0) == pytest.approx(float(value or 0), rel=1e-5), name


def squares(folder):
    """Pictures of two classes: 40 to train on, 3 to test with."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 3)):
        for i in range(count):
            path = folder / "pictures" / part / f"class-{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 128, (14, 14)) + 127 * (i % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return folder / "pictures"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "coordinator_address should be defined"),
        ({"JAX_NUM_PROCESSES": "2"}, "coordinator_address should be defined"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two"}, "'two'"),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "localhost:1",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "2",
            },
            "process_id=2",
        ),
    ],
)
def test_join_says_what_is_missing(variables, message):
    """In a process of its own, where JAX has not been used and no cluster is around."""
    command = [sys.executable, "-m", "minivit.train", "--tiny", "--distributed"]
    cluster = ("JAX_", "SLURM_", "OMPI_", "KUBERNETES_")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(cluster)} | variables
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    expected = f"minivit.train: error: --distributed cannot start: .*{message}.* set JAX_COORD.*\n"
    assert re.fullmatch(expected, result.stderr), result.stderr


def test_only_jax_has_devices(tmp_path, capsys):
    """Refused at once, and also where a run of the NumPy twin is resumed."""
    options = ["--tiny", "--steps", "2", "--backend", "numpy", "--output", str(tmp_path / "a")]
    for more in (["--shard", "fsdp"], ["--distributed"], ["--chunk", "8"]):
        assert train.main([*options, *more]) == 2
        assert f"{' '.join(more)} needs --backend jax" in capsys.readouterr().err
    assert train.main(options) == 0
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "a"), "--shard", "fsdp"]) == 2
    assert "--shard fsdp needs --backend jax" in capsys.readouterr().err


def test_processes_that_fail_take_the_others_along(monkeypatch):
    """What one cannot do, all are told of; who was told tells nobody again."""
    asked = []
    others = processes.Processes(0, 2)
    monkeypatch.setattr(processes.Processes, "any", lambda self, flag: asked.append(flag) or True)
    with pytest.raises(ValueError, match="mine"), others.together():
        raise ValueError("mine")
    assert asked == [True]
    with pytest.raises(ValueError, match="another process"), others.together():
        others.check()
    assert asked == [True, False]


if __name__ == "__main__":
    on_eight_devices()
