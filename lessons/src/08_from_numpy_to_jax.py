# %% [markdown]
# # 8. From NumPy to JAX
#
# **Goal.** Read the same model in both libraries, see `grad`, `jit`, `vmap` and `scan` replace code of ours, and
# know what makes it fast, or slow. After this you can read either twin, check a gradient, and avoid the trap that
# everybody falls into once.

# %%
# %matplotlib inline
import csv
import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import jax
import jax.numpy as jnp
import numpy as np

from minivit import checks, figures, in_jax, in_numpy, params, variants
from minivit.params import flatten, stack_blocks

# %% [markdown]
# ## The twins
#
# Every piece of this package exists twice under one name. In NumPy it returns its result and a function `back`;
# in JAX only the result. Here is the MLP; most lines are the same.

# %%
print(inspect.getsource(in_numpy.mlp))
print(inspect.getsource(in_jax.mlp))

# %% [markdown]
# ## grad: the backward pass for nothing
#
# `jax.vjp(f, p, x)` gives what a NumPy piece gives: the result, and a function from the gradient of the result to
# the gradients of parameters and input. So every gradient that we derived by hand has a judge. For the whole
# model:

# %%
small = variants.Variant("small", patch=4, width=16, mlp=32, heads=2, blocks=2)
p = params.initialise(small, 0, image_size=8, channels=1, classes=3)
p["head"]["kernel"] = np.random.default_rng(1).normal(0, 0.1, (16, 3)).astype("float32")
rng = np.random.default_rng(2)
images, dy = rng.standard_normal((5, 8, 8, 1), "float32"), rng.standard_normal((5, 3), "float32")

y, back = in_numpy.vit(p, images)
y_jax, back_jax = jax.vjp(in_jax.vit, p, images)
by_hand, by_jax = flatten(back(dy)[0]), flatten(back_jax(dy)[0])
gaps = {name: float(np.abs(by_hand[name] - by_jax[name]).max()) for name in by_hand}
np.testing.assert_allclose(y, y_jax, atol=1e-5)
assert max(gaps.values()) < 1e-4
print(f"the results and {len(gaps)} arrays of gradients agree to float32's rounding")

# %% [markdown]
# (Upstream gradients are random here, never ones: softmax and LayerNorm send back exactly zero for ones, and a
# wrong gradient would pass.)
#
# ## jit: trace once, run often
#
# `jax.jit` runs a function once with *tracers* in place of arrays, writes down what it did, compiles that, and
# from then on runs only the compiled program. The first call is slow, the next ones are not:

# %%
forward = jax.jit(in_jax.vit)


def seconds(function, *arguments):
    begun = time.perf_counter()
    jax.block_until_ready(function(*arguments))  # JAX returns before the work is done
    return time.perf_counter() - begun


first = seconds(forward, p, images)
later = min(seconds(forward, p, images) for _ in range(10))
print("more than ten times as long:", first > 10 * later)

# %% [markdown]
# ## The trap: a new program every step
#
# Another shape, another type, or another value of an argument declared *static* makes JAX trace and compile
# again. A learning rate that is passed as a static argument compiles one program a step. Count the traces:

# %%
traces = []


def update(x, rate):
    traces.append(rate)  # runs while tracing only
    return x - rate * x


for how, step in (
    ("static", jax.jit(update, static_argnames="rate")),
    ("traced", jax.jit(update)),
):
    traces.clear()
    for i in range(5):
        step(jnp.ones(3), rate=0.1 / (i + 1))
    print(f"rate {how}: {len(traces)} traces for 5 steps")

# %% [markdown]
# ## Exercise: run five steps with one trace
#
# `step(x, rate)` is jitted. Begin with one and apply the rates 0.1 / 1, 0.1 / 2, … 0.1 / 5. A loop that begins
# with `x = 1` gives the right number, and traces twice. What is the *type* of the first `x`, and of the second?


# %%
def run_five(step):
    return None  # your answer: the last x


_ = checks.traced_once(run_five)
# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def run_five(step):
#     x = 1.0
#     for i in range(5):
#         x = step(x, 0.1 / (i + 1))
#     return x
# ```
# The integer 1 makes a program for integers, whose result is a float; the second call needs another program.
# Begin with the type that the loop goes on with.
# </details>
#
# ## vmap: write it for one, run it for many
#
# `vmap` adds a batch axis. Our pieces carry the batch themselves, since that is how NumPy is fast; so `vmap` is
# for what is naturally about one example, such as the gradient of *each* image's loss.

# %%
targets = jnp.eye(3)[jnp.array([0, 1, 2, 0, 1])]


def loss_of_one(p, image, target):
    return in_jax.softmax_cross_entropy(in_jax.vit(p, image[None]), target[None])[0]


each = jax.vmap(jax.grad(loss_of_one), in_axes=(None, 0, 0))(p, images, targets)
together = jax.grad(lambda p: in_jax.softmax_cross_entropy(in_jax.vit(p, images), targets).mean())(
    p
)
mean = jax.tree.map(lambda leaf: leaf.mean(0), each)
for name, leaf in flatten(together).items():
    np.testing.assert_allclose(flatten(mean)[name], leaf, atol=1e-5)
norms = sum((leaf.reshape(5, -1) ** 2).sum(-1) for leaf in jax.tree.leaves(each)) ** 0.5
print("norm of each image's gradient:", np.round(norms, 2))

# %% [markdown]
# ## scan: one block compiled, not twelve
#
# A Python loop over blocks is unrolled into the program. Stack the blocks' parameters on a leading axis instead,
# and `jax.lax.scan` compiles one block. For L = 12 on a CPU that takes 2 seconds instead of 8. (Written out,
# there is a barrier between the blocks: without it XLA fuses the whole residual stream, and computes its sums
# again and again.) With `jax.checkpoint` the backward pass computes each block again instead of keeping its
# insides: a quarter of the memory.

# %%
stacked = stack_blocks(p)["Transformer"]
print(sorted(stacked), stacked["encoderblock"]["LayerNorm_0"]["scale"].shape)


def length(p):  # lines of the program
    return jax.jit(in_jax.vit).lower(p, images).as_text().count("\n")


for blocks in (2, 4, 8):
    deep = params.initialise(replace(small, blocks=blocks), 0, image_size=8, channels=1, classes=3)
    np.testing.assert_allclose(in_jax.vit(deep, images), in_jax.vit(stack_blocks(deep), images))
    print(f"{blocks} blocks: {length(deep)} lines unrolled, {length(stack_blocks(deep))} scanned")

# %% [markdown]
# ## What makes it fast on a CPU
#
# `python -m minivit.bench` runs both twins and other implementations in turns. This is what it measured on two
# cores (`data/bench.csv`); 1 is timm, in PyTorch. The tiny model is ahead; Ti/16 and B/16 are not: Ti/16's
# products already run as fast as the machine can, and a quarter of them is done twice, by the `checkpoint` from
# above.

# %%
rows = list(csv.DictReader((Path.cwd().parent / "data" / "bench.csv").open()))
numbers = ("ratio", "least", "most")
rows = [row | {name: float(row[name]) for name in numbers} for row in rows]
figures.ratios([row for row in rows if row["what"] == "train"])

# %% [markdown]
# What the profiles taught, in order of gain:
#
# - **One device a core.** XLA shares an operation among threads badly; one program a core on its share of the
#   batch, with the gradients averaged, is the same code that runs on eight GPUs. NumPy likewise: a thread a core
#   with half of the batch each, and BLAS held to one thread, is twice as fast as the reverse.
# - **Axes.** Attention on `[B, H, N, K]` takes a seventh of the time of the same einsum on `[B, N, H, K]`; one
#   product for queries, keys and values, then one transposition, a third of three einsums.
# - **Gradients by hand where autodiff keeps too much.** Attention and LayerNorm have a `jax.custom_vjp` with the
#   formulas of the NumPy twin: a fifth of the tiny model's training time.
# - **Few large arrays.** Optimisers run over two long vectors, not over hundreds of small leaves.
# - **Memory that stays.** Freed arrays go back to the system and return page by page. Telling the C library to
#   keep them makes the NumPy twin a fifth faster.
# - Not everything helps: keeping activations instead of computing them again gained nothing here, since writing
#   them costs as much as the products that they save.
#
# ## Summary
#
# - A JAX piece is a NumPy piece without `back`; `jax.vjp` writes that.
# - `jit` traces once for each shape, type and static value; count traces when a loop is slow.
# - Speed is layout, sharing the batch, and memory, before it is cleverness.
#
# **In the paper.** Pre-training ViT-L/16 on JFT-300M took 680 TPUv3-core-days, the ResNet of about that accuracy
# (BiT-L, R152x4) 9,900 (Table 2).
