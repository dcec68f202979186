# %% [markdown]
# # 6. The model, its parameters and their names
#
# **Goal.** Stack blocks to a model, walk through its parameters, and open a checkpoint with NumPy alone. After
# this you can count the parameters of any ViT, say where they are, and read the official names.

# %%
# %matplotlib inline
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import architecture, checkpoint, checks, datasets, figures, in_numpy, params, variants
from minivit.params import flatten

# %% [markdown]
# ## A block adds twice
#
# $$z' = \mathrm{MSA}(\mathrm{LN}(z)) + z \qquad z = \mathrm{MLP}(\mathrm{LN}(z')) + z'$$
#
# The token itself runs through all blocks and is never replaced, only added to: the *residual stream*. A block
# reads a normalised copy and adds what it found. The gradient runs back along the same stream, so even the first
# block of 32 learns.
#
# ## Exercise 1: the block
#
# `p` holds `LayerNorm_0`, `MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`: the official names,
# numbered by their place in the block. Use `layer_norm`, `attention` and `mlp` of `in_numpy`; each returns its
# result and a function that you do not need here.


# %%
def my_block(p, x):  # [B, N, D] -> [B, N, D]
    return None  # your answer


_ = checks.encoder_block(my_block)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_block(p, x):
#     normal, _ = in_numpy.layer_norm(p["LayerNorm_0"], x)
#     looked, _ = in_numpy.attention(p["MultiHeadDotProductAttention_1"], normal)
#     x = x + looked
#     normal, _ = in_numpy.layer_norm(p["LayerNorm_2"], x)
#     thought, _ = in_numpy.mlp(p["MlpBlock_3"], normal)
#     return x + thought
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# The Transformer of 2017 looked like this. What does it do to the residual stream? Repair it.


# %%
def broken_block(p, x):
    looked, _ = in_numpy.attention(p["MultiHeadDotProductAttention_1"], x)
    x, _ = in_numpy.layer_norm(p["LayerNorm_0"], x + looked)
    thought, _ = in_numpy.mlp(p["MlpBlock_3"], x)
    return in_numpy.layer_norm(p["LayerNorm_2"], x + thought)[0]


_ = checks.encoder_block(broken_block)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# The norms stand *after* the sums ("post-norm"): the stream itself is normalised in every block, and the gradient
# must pass through every norm. Such models need a careful warm-up. ViT is "pre-norm", with one more norm at the
# very end.
# </details>
#
# ## The parameters are a tree
#
# No classes, no configuration: a nested dictionary. Paths joined by "/" are the names in the official files. The
# shapes carry the architecture: patch side, channels and D from the embedding's kernel, heads from the query's.

# %%
tiny = checkpoint.load(Path.cwd().parent / "data" / "tiny.npz")
for name, array in flatten(tiny).items():
    if "encoderblock" not in name or "encoderblock_0" in name:
        print(f"{name:75}{list(array.shape)}")

# %% [markdown]
# ## A checkpoint is a zip of arrays
#
# An `.npz` file holds each array under its name. So NumPy alone can open it, and saving is one line.
# (`checkpoint.load` also knows the names of timm, Hugging Face and big_vision, and never unpickles. One more
# entry, `minivit/settings`, keeps image size and class names.)

# %%
with np.load(Path.cwd().parent / "data" / "tiny.npz", allow_pickle=False) as file:
    opened = {name: file[name] for name in file.files if name != "minivit/settings"}
assert opened.keys() == flatten(tiny).keys()
for name, array in flatten(tiny).items():
    np.testing.assert_array_equal(opened[name], array)
with tempfile.TemporaryDirectory() as folder:
    np.savez(Path(folder) / "mine.npz", **flatten(tiny))
    again = checkpoint.load(Path(folder) / "mine.npz")
image = datasets.normalise(datasets.load("fashion-mnist").test_images[:1])
assert (in_numpy.vit(again, image)[0] == in_numpy.vit(tiny, image)[0]).all()
print(len(opened), "arrays; saved, loaded, and the same scores")

# %% [markdown]
# ## Table 1
#
# The paper's three sizes, and two smaller ones of later work. A parameter is one number of the tree.

# %%
print("model  L   D     M     H   parameters  operations an image")
for name in ("Ti/16", "S/16", "B/16", "L/16", "H/14"):
    v = variants.parse(name)
    count, work = variants.parameter_count(v) / 1e6, variants.forward_flops(v) / 1e9
    print(f"{name:6} {v.blocks:2} {v.width:5} {v.mlp:5} {v.heads:3} {count:9.1f} M {work:12.1f} G")

# %% [markdown]
# ## Where are they?
#
# A block has four matrices D x D in attention and two of D x M in its MLP: with M = 4 D that is $12 D^2$, two
# thirds of it MLP. Everything outside the blocks is small, except for small models, whose embedding and head do
# not shrink as fast. Operations follow the blocks' parameters (each is used once for every token; a
# multiplication and an addition count as two); attention adds the products of tokens with tokens, which have no
# parameters.

# %%
base = params.initialise(variants.parse("B/16"), 0, image_size=224)
parts = architecture.parameters_by_part(flatten(base))
assert sum(parts.values()) == 86_567_656
work = variants.flops_by_part(variants.parse("B/16"))
figures.bars(
    {
        "ViT-B/16: million parameters": {name: count / 1e6 for name, count in parts.items()},
        "billion operations an image": {name: count / 1e9 for name, count in work.items()},
    }
)

# %% [markdown]
# ## Exercise 3: count them
#
# From the sizes alone: `v.patch`, `v.width`, `v.mlp`, `v.blocks`; images are 224x224 with 3 channels, 1000
# classes, one class token. Don't forget biases. The answers are official: 86,567,656 for B/16, 304,326,632 for
# L/16, 632,045,800 for H/14.


# %%
def my_count(v):  # -> number
    return None  # your answer


_ = checks.parameter_count(my_count)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_count(v):
#     d, m = v.width, v.mlp
#     tokens = (224 // v.patch) ** 2 + 1
#     embedding = v.patch**2 * 3 * d + d
#     block = 4 * (d * d + d) + (d * m + m) + (m * d + d) + 2 * 2 * d
#     return embedding + d + tokens * d + v.blocks * block + 2 * d + d * 1000 + 1000
# ```
# </details>
#
# ## The stream grows
#
# Each block adds; what it adds could shorten a token, but here it hardly ever does. The length of a token, from
# its embedding through four blocks of the trained model, a mean over 500 pictures. The last LayerNorm makes every
# length √D = 8 again, before its own scale and bias.

# %%
out = {}
some = datasets.normalise(datasets.load("fashion-mnist").test_images[:500])
in_numpy.vit(tiny, some, out=out)
places = ["tokens", "block0", "block1", "block2", "block3"]


def length(x, which):  # [B, N, D] -> mean length of the class token, or of the patches
    return np.linalg.norm(x, axis=-1)[:, which].mean()


stream = {
    "class token": [length(out[name], slice(0, 1)) for name in places],
    "patches": [length(out[name], slice(1, None)) for name in places],
}
assert stream["class token"][-1] > 2 * stream["class token"][0]
figures.lines(range(5), stream, "after so many blocks", "length of a token")

# %% [markdown]
# ## Summary
#
# - A ViT is embedding, L equal blocks that add to a stream, a norm, and a head; its parameters are a dictionary
#   of named arrays.
# - A block has about 12 D² parameters, two thirds of them in the MLP; depth and width make the size, resolution
#   almost nothing.
# - Names and shapes are all that a checkpoint needs; with the official names, official files open.
#
# **In the paper.** Table 1: ViT-Base 12 blocks, D = 768, 86 M parameters; Large 24, 1024, 307 M; Huge 32, 1280,
# 632 M. (L/16 has 304 M, L/32 306.5 M, with a head of 1,000 classes.) Patch size is not a size of the model: B/16
# and B/32 differ by 1.7 M.
