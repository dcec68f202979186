# %% [markdown]
# # 2. Tokens: embedding, class token, positions
#
# **Goal.** Turn patches into tokens, as a product and as the convolution that other code calls it; add the class
# token and the positions, and see what each is for. After this you can write the model's first layer and show
# that order matters.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checkpoint, checks, datasets, figures, in_numpy

p = checkpoint.load(Path.cwd().parent / "data" / "tiny.npz")
fashion = datasets.load("fashion-mnist")
images = datasets.normalise(fashion.test_images[:8])
kernel, bias = p["embedding"]["kernel"], p["embedding"]["bias"]
print("kernel", kernel.shape, "bias", bias.shape)

# %% [markdown]
# ## One product
#
# The paper's equation 1, for N patches $x_p^i$:
#
# $$z_0 = [x_\mathrm{class};\; x_p^1 E;\; \dots;\; x_p^N E] + E_\mathrm{pos}$$
#
# It begins with $x_p^i E$: each patch, a row of $P^2 C$ numbers, times a matrix E of $P^2 C \times D$ (the code
# adds a bias, as Conv layers do). Every token is thus D answers to the question "how much of this pattern is in
# the patch?". The patterns are the columns of E, which have the shape of a patch and can be looked at. Of a
# trained tiny model, 16 of 64:

# %%
figures.filters(np.moveaxis(kernel, -1, 0)[:16])

# %% [markdown]
# Nearly all of it is still the noise that they began with. (The paper's, from many more pictures, are smooth
# waves: lesson 9.)
#
# ## The same as a convolution
#
# Most code says `Conv2d(kernel_size=P, stride=P)` here. Slide a window of P x P over the picture in steps of P,
# multiply, and sum. Windows do not overlap, so it is the same product. First with loops:


# %%
def embed_slowly(kernel, bias, images):  # [P, P, C, D], [D], [B, height, width, C] -> [B, N, D]
    p = kernel.shape[0]
    _, height, width, _ = images.shape
    tokens = []
    for top in range(0, height, p):
        for left in range(0, width, p):
            window = images[:, top : top + p, left : left + p]
            token = [(window * kernel[..., d]).sum((1, 2, 3)) for d in range(len(bias))]
            tokens.append(np.stack(token, axis=-1) + bias)
    return np.stack(tokens, axis=1)


slowly = embed_slowly(kernel, bias, images)
rows = in_numpy.patchify(images, 7).reshape(8, 16, 49)
product = rows @ kernel.reshape(49, 64) + bias
convolved, _ = in_numpy.conv2d({"kernel": kernel}, images, stride=7, padding=0)
np.testing.assert_allclose(product, slowly, atol=1e-5)
np.testing.assert_allclose(convolved.reshape(8, 16, 64) + bias, slowly, atol=1e-5)
print("loops, product and convolution agree:", product.shape)

# %% [markdown]
# What makes it *one product* is the order of axes: pixels of a patch must be laid out as the kernel's are, row by
# row, channels last. A kernel from PyTorch has the channels first, `[D, C, P, P]`, and must be turned before it
# is flattened.
#
# ## Exercise 1: embed
#
# One product for all patches of all images. `kernel` is `[P, P, C, D]`; take `patchify` from `in_numpy`.


# %%
def my_embed(kernel, bias, images):  # [P, P, C, D], [D], [B, height, width, C] -> [B, N, D]
    return None  # your answer


_ = checks.embed(my_embed)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_embed(kernel, bias, images):
#     patches = in_numpy.patchify(images, kernel.shape[0])
#     return patches.reshape(len(images), -1, patches.shape[-1]) @ kernel.reshape(-1, len(bias)) + bias
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# The channels of this one are scrambled, and a grey picture would never tell. Why does the check need two
# channels?


# %%
def broken_embed(kernel, bias, images):
    p, _, channels, width = kernel.shape
    patches = in_numpy.patchify(images, p)
    patches = patches.reshape(len(images), -1, p * p * channels)
    return patches @ kernel.transpose(2, 0, 1, 3).reshape(-1, width) + bias


_ = checks.embed(broken_embed)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# The kernel was flattened channel by channel, as a kernel from PyTorch would be, the patches pixel by pixel. Both
# have P²C numbers, so the product runs; each number meets another pixel's weight. With one channel or one pixel
# both orders are the same.
# </details>
#
# ## A set has no order
#
# Take the positions away from the trained model, and shuffle the patches: the scores stay the same, to rounding.
# With positions they change. (Lesson 4 shows where this comes from.)

# %%
order = np.random.default_rng(0).permutation(16)
patches = in_numpy.patchify(images, 7)
shuffled = in_numpy.unpatchify(patches.reshape(8, 16, 49)[:, order].reshape(patches.shape), 7)

encoder = p["Transformer"]
without = p | {"Transformer": {n: part for n, part in encoder.items() if n != "posembed_input"}}
for name, model in (("without positions", without), ("with positions", p)):
    change = in_numpy.vit(model, shuffled)[0] - in_numpy.vit(model, images)[0]
    print(f"{name:18} scores change by up to {np.abs(change).max().round(3)}")
    assert (np.abs(change).max() < 1e-3) == (name == "without positions")

pictures = np.rint((np.stack([images[0], shuffled[0]]) + 1) * 127.5)
figures.gallery(list(pictures), ["a picture", "the same set of patches"])

# %% [markdown]
# ## Positions are a table
#
# The paper adds a learned table $E_\mathrm{pos}$ of $(N + 1) \times D$ numbers, one row for each place, the class
# token's first. It starts as noise of deviation 0.02 and is trained like everything else. Nobody tells the model
# that place 5 lies below place 1.

# %%
table = encoder["posembed_input"]["pos_embedding"]
fresh = np.random.default_rng(0).normal(0, 0.02, table.shape)
print(f"deviation before training {fresh.std():.2f}, after {table.std():.2f}")
figures.matrices(
    [fresh[0], table[0]], ["before", "after training"], "feature", "place, class token on top"
)

# %% [markdown]
# An alternative that is not trained: sines and cosines of row and column at several speeds, as in later work
# (big_vision). The closeness of places can be seen at once. (The paper's appendix D.4 tries a *learned* table for
# two axes, and gains nothing.)

# %%
fixed = in_numpy.sincos2d(8, 8, 64)
near = fixed[0, 27] @ fixed[0].T  # place 27 is row 3, column 3
assert near.argmax() == 27
figures.matrices(
    [fixed[0], near.reshape(8, 8)],
    ["an 8x8 grid's table", "place (3, 3) times all others"],
    "feature, column",
    "place, row",
)

# %% [markdown]
# ## The class token
#
# `cls` is one row of D numbers, the same before every image. It has no picture of its own; in each block it
# collects from the others, and the head reads it alone. Its gradient is a sum over the batch, since all images
# share it:

# %%
tokens, back = in_numpy.add_class_token(p["cls"], product)
dtokens = np.random.default_rng(1).standard_normal(tokens.shape)
dcls, dproduct = back(dtokens)
np.testing.assert_allclose(dcls[0, 0], dtokens[:, 0].sum(0), atol=1e-12)
np.testing.assert_array_equal(dproduct, dtokens[:, 1:])
print("tokens", tokens.shape, "gradient of the class token", dcls.shape)

# %% [markdown]
# ## Summary
#
# - A token is a patch times a matrix: the same as a convolution with stride P, if the axes are in the same order.
# - Without positions a ViT sees a set of patches; a learned table, added once, makes it see a picture.
# - The class token belongs to no patch, and collects what the head reads.
#
# **In the paper.** ViT-B/16 projects 768 numbers (16 * 16 * 3) to 768. Without positions it loses three points on
# ImageNet 5-shot: 61.4 against 64.2 % with a 1-D table (Table 8), a large gap, says D.4. Which *kind* of position
# hardly matters (2-D: 64.0 %), since 14x14 places are few.
