"""What keeps JAX from being used is one line; what somebody chose about its devices counts."""

import os
import subprocess
import sys

import numpy as np
import pytest

from minivit import command, engines, params, variants
from minivit.engine_numpy import NumPyEngine

MODEL = "params.initialise(variants.parse('tiny'), 0, image_size=28, channels=1, classes=10)"
MAKE = f"""
from minivit import command, engines, params, variants
def work():
    engine = engines.make("jax", {MODEL}, batch_size=SIZE)
    print(engine.hardware)
command.run("train", work) and exit(2)
"""
JOIN = "from minivit import command, processes; command.run('train', processes.join) and exit(2)"
WAYS = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")


def run(code, **variables):  # -> result
    """A process where JAX is as its user would have it."""
    environment = {name: value for name, value in os.environ.items() if name not in WAYS}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True
    )


def one_line(result):  # -> what was said
    """Status 2, nothing on standard output, one line on standard error."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("minivit.train: error: ")
    return line


@pytest.mark.parametrize("code", [MAKE.replace("SIZE", "None"), JOIN], ids=["make", "join"])
@pytest.mark.parametrize("name", ["cuda", "tpu", "nonsense"])
def test_no_such_device(name, code):
    """An absent device, and a word that is none: what was set, and both ways out."""
    variables = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_PROCESS_ID": "0"}
    said = one_line(run(code, JAX_PLATFORMS=name, JAX_NUM_PROCESSES="1", **variables))
    assert f"JAX cannot be used with JAX_PLATFORMS={name}: " in said
    assert "unset that, or choose --backend numpy" in said


@pytest.mark.parametrize("code", [MAKE.replace("SIZE", "None"), JOIN], ids=["make", "join"])
@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError", "AttributeError"])
def test_a_jax_that_cannot_be_imported(error, code, tmp_path):
    """As jaxlib does on a processor without AVX: its reason, in one line."""
    (tmp_path / "jax.py").write_text(f"raise {error}('built for AVX,\\nwhich is absent')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", os.getcwd())])
    said = one_line(run(code, PYTHONPATH=path))
    assert "JAX cannot be used: built for AVX, which is absent; choose --backend numpy" in said


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, 1),
        ({"JAX_NUM_CPU_DEVICES": "3"}, 3),
        ({"JAX_NUM_CPU_DEVICES": "3", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 3),
    ],
)
def test_a_chosen_number_of_devices(variables, devices):
    """In whichever of JAX's ways, also more or fewer than the cores or the images need."""
    result = run(MAKE.replace("SIZE", "12"), JAX_PLATFORMS="cpu", **variables)
    assert result.stdout == f"{devices} cpu devices\n", result.stderr
    code = f"import jax; jax.config.update('jax_num_cpu_devices', {devices})\n"
    result = run(code + MAKE.replace("SIZE", "12"), JAX_PLATFORMS="cpu")
    assert result.stdout == f"{devices} cpu devices\n", result.stderr


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "abc", "", "1" * 60])
@pytest.mark.parametrize("name", ["JAX_NUM_CPU_DEVICES", "XLA_FLAGS"])
def test_a_nonsensical_number_of_devices(name, value):
    """XLA would list its flags and abort; of JAX's variable it would see another number."""
    flag = "--xla_force_host_platform_device_count="
    variables = {name: flag + value if name == "XLA_FLAGS" else value, "JAX_PLATFORMS": "cpu"}
    said = one_line(run(MAKE.replace("SIZE", "None"), **variables))
    assert name in said
    assert f"is '{value}'" in said


def small(**options):
    """A model of few numbers, and options of `make`."""
    variant = variants.Variant("small", patch=7, width=16, mlp=32, heads=2, blocks=2)
    return params.initialise(variant, 0, image_size=28, channels=1, classes=10), options


@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("batch_size", -2), ("accumulate", 0), ("seed", -1)]
)
def test_numbers_that_are_none(backend, name, value):
    """The same words of both twins."""
    tree, options = small(**{"batch_size": 4, name: value})
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least"):
        engines.make(backend, tree, **options)


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("precision", "highest")])
def test_what_numpy_cannot_do(name, value):
    """Refused; what it does anyhow is accepted."""
    tree, options = small(dtype="float32", shard="data", precision="default")
    assert isinstance(engines.make("numpy", tree, **options), NumPyEngine)
    with pytest.raises(ValueError, match=f"--{name} {value} needs --backend jax"):
        engines.make("numpy", tree, **options | {name: value})


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_a_sequence_too_long_for_the_memory(backend, monkeypatch):
    """Refused before a step, by what attention alone takes: 4 B H N^2 bytes."""
    tree, options = small(batch_size=60, accumulate=2)
    needed = 4 * 30 * 2 * 17**2
    monkeypatch.setattr("minivit.machine.memory", lambda: needed)
    engines.make(backend, tree, **options)
    monkeypatch.setattr("minivit.machine.memory", lambda: needed - 1)
    with pytest.raises(MemoryError, match="attention among 17 tokens of 30 images would take"):
        engines.make(backend, tree, **options)
    engines.make(backend, tree)  # of one image


@pytest.mark.parametrize("chunk", [None, 64])
def test_a_long_sequence_goes_by_chunks(chunk, monkeypatch):
    """Which JAX does by itself above 1024 tokens: what fits so is not refused."""
    variant = variants.Variant("small", patch=2, width=16, mlp=32, heads=2, blocks=2)
    tree = params.initialise(variant, 0, image_size=72, channels=1, classes=10)
    needed = 4 * 2 * 1297 * (chunk or 256)
    monkeypatch.setattr("minivit.machine.memory", lambda: needed)
    engines.make("jax", tree, model={"chunk": chunk})
    for backend, model in (("numpy", {}), ("jax", {"chunk": 0})):
        with pytest.raises(MemoryError, match="attention among 1,297 tokens of 1 image would"):
            engines.make(backend, tree, model=model)


def test_few_images_keep_few_cores_busy(monkeypatch):
    """A share of at least 128 tokens for each thread: 8 images of 17 tokens, one of 197."""
    monkeypatch.setattr("minivit.engine_numpy.cores", lambda: 64)
    tree, _ = small()
    shares = [engines.make("numpy", tree, batch_size=n).hardware for n in (1, 15, 16, 64, 10_000)]
    assert shares == [f"{n} CPU threads" for n in (1, 1, 2, 8, 64)]
    assert [engines.busy(197, n) for n in (1, 8)] == [1, 12]


def test_few_images_keep_few_devices_busy():
    """The same of JAX's devices, where nobody chose their number."""
    code = "from minivit import processes; processes.cores = lambda: 6\n"
    for size, devices in (("16", 2), ("None", 6)):
        result = run(code + MAKE.replace("SIZE", size), JAX_PLATFORMS="cpu")
        assert result.stdout == f"{devices} cpu devices\n", result.stderr


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_no_images_have_no_scores(backend):
    """Said in words, not by NumPy that there is nothing to join."""
    tree, _ = small()
    engine = engines.make(backend, tree)
    with pytest.raises(ValueError, match="there are no images to score"):
        engine.logits(np.zeros((0, 28, 28, 1), np.uint8))


SHORT = f"""
import resource
import numpy as np
from minivit import command, engines, machine, params, variants
engine = engines.make("BACKEND", {MODEL}, batch_size=2048)
images = np.zeros((2048, 28, 28, 1), np.uint8)
batch = {{"images": images, "targets": np.zeros((2048, 10), np.float32)}}
def work():
    float(engine.step(0, batch, 1e-3)[0])
work()  # compiled and with the optimiser's state
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA, used + EXTRA))
machine.leave(command.run("train", work, remedy="do something else"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("backend", "extra"), [("numpy", 2**26), ("jax", -(2**28))])
def test_out_of_memory_in_a_step(backend, extra):
    """NumPy's exception and XLA's are one line each, also where other devices wait for that one.

    A step takes over 500 MB, which NumPy has given back by now; JAX does so a moment later.
    """
    code = SHORT.replace("BACKEND", backend).replace("EXTRA", str(extra))
    result = run(code, JAX_PLATFORMS="cpu")
    assert one_line(result).endswith("out of memory; do something else")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 959496336 bytes."), True),
        (RuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("INTERNAL: YNNPACK operation failed: error"), True),  # it got no memory
        (RuntimeError("INVALID_ARGUMENT: shapes do not match"), False),
    ],
)
def test_words_for_too_little_memory(error, short):
    """What XLA and the libraries below it say, taken from runs under `ulimit -v`."""
    assert command.out_of_memory(error) == short
