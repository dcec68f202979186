# %% [markdown]
# # 1. An image is a sequence
#
# **Goal.** Cut an image into patches and lay them in a row, as a sentence is a row of words; put it together
# again. After this you can write `patchify` in one line, and say what a shuffled row has lost.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checks, datasets, figures
from minivit.in_numpy import patchify, unpatchify

# %% [markdown]
# ## The images
#
# Two data sets come without a download: Fashion-MNIST, grey, 28x28, and `shapes`, in colour, 32x32, which is
# drawn by the program. An image is an array `[height, width, C]` of bytes, and many of them are
# `[B, height, width, C]`.

# %%
fashion = datasets.load("fashion-mnist").test_images
colour = datasets.load("shapes").test_images
print("Fashion-MNIST", fashion.shape, fashion.dtype, "shapes", colour.shape, colour.dtype)
boot, drawing = fashion[0], colour[3]

# %% [markdown]
# A Transformer takes a *sequence*: N vectors of the same length. One pixel for each element (each *token*) would
# make 784 tokens of a tiny picture, and 50,176 of a photograph of 224x224, while attention compares every token
# with every other. So the paper ("An Image is Worth 16x16 Words", Dosovitskiy et al. 2020, arXiv 2010.11929)
# takes squares of P x P pixels.
#
# ## The paper's equation (section 3.1)
#
# An image $x \in \mathbb{R}^{H \times W \times C}$ becomes $x_p \in \mathbb{R}^{N \times (P^2 C)}$ with
# $N = HW / P^2$ patches. (Code says `height` and `width`; H will be the heads.) The order is that of reading:
# patches from left to right, then down; inside a patch rows, then columns, then channels. With loops:


# %%
def patchify_slowly(image, p):  # [height, width, C] -> [N, P*P*C]
    patches = []
    for top in range(0, image.shape[0], p):
        for left in range(0, image.shape[1], p):
            patches.append(image[top : top + p, left : left + p].reshape(-1))
    return np.array(patches)


sequence = patchify_slowly(boot, 7)
print(sequence.shape, "= 16 patches of 7 * 7 * 1 numbers")

# %%
figures.patches(boot, 7)

# %%
figures.patches(drawing, 8)

# %% [markdown]
# ## Exercise 1: without a loop
#
# The loops only move numbers. The same in three steps: *split* both sides into (which patch, place in it), *swap*
# so that the two "which patch" axes come first, *join*. Write it with `reshape` and `swapaxes` alone, for any
# batch, height, width, patch size and number of channels. The check knows the answer in loops, tries many cases,
# and tells you the smallest that goes wrong.


# %%
def my_patchify(images, p):  # [B, height, width, C] -> [B, N, P*P*C]
    return None  # your answer


_ = checks.patchify(my_patchify)  # it returns whether all was right; `_` keeps that out of sight

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_patchify(images, p):
#     b, h, w, c = images.shape
#     split = images.reshape(b, h // p, p, w // p, p, c)  # [B, rows, P, columns, P, C]
#     return split.swapaxes(2, 3).reshape(b, -1, p * p * c)
# ```
# </details>
#
# The package's own `patchify` does that and keeps the grid, `[B, rows, columns, P*P*C]`. It gives the numbers of
# the loops:

# %%
for images, p in ((fashion[:4], 7), (fashion[:4], 4), (colour[:4], 8)):
    slowly = np.array([patchify_slowly(image, p) for image in images])
    grid = patchify(images, p)
    assert (grid.reshape(slowly.shape) == slowly).all()
    print("grid", grid.shape, "as rows", slowly.shape)

# %% [markdown]
# ## And back
#
# Nothing was lost: `unpatchify` restores the image to the bit. But the row of patches alone does not say where
# each was. Shuffled, it is the same *set* of patches; attention (lesson 4) treats all tokens alike, and would
# only shuffle its output with them. That is why lesson 2 adds positions.

# %%
grid = patchify(colour[3:4], 8)
restored = unpatchify(grid, 8)
assert (restored == colour[3:4]).all()

order = np.random.default_rng(0).permutation(16)
shuffled = grid.reshape(1, 16, -1)[:, order].reshape(grid.shape)
jumbled = unpatchify(shuffled, 8)
inverse = np.argsort(order)  # the permutation that undoes it
again = shuffled.reshape(1, 16, -1)[:, inverse].reshape(grid.shape)
assert (unpatchify(again, 8) == colour[3:4]).all()
figures.gallery(
    [colour[3], jumbled[0], unpatchify(again, 8)[0]], ["an image", "shuffled", "restored"]
)

# %% [markdown]
# ## How long is the sequence?
#
# Halving P makes four times as many tokens, and 16 times as many pairs for attention to compare.

# %%
print("image  channels  patch  tokens  numbers in each     pairs")
sizes = ((28, 1, 7), (28, 1, 4), (224, 3, 32), (224, 3, 16), (384, 3, 16), (224, 3, 14))
for side, channels, p in sizes:
    n = (side // p) ** 2
    print(f"{side:5} {channels:9} {p:6} {n:7} {p * p * channels:16} {n * n:9}")

# %% [markdown]
# ## Exercise 2: find the fault
#
# A mistake that is easy to make: the right shape, it even trains, and it is wrong. What does it do to an image?
# Look at the picture and at what the check says, and repair it until the check says right. (So in all lessons.)


# %%
def broken_patchify(images, p):
    b, h, w, c = images.shape
    return images.reshape(b, (h // p) * (w // p), p * p * c)


_ = checks.patchify(broken_patchify)
pieces = broken_patchify(colour[3:4], 8).reshape(1, 4, 4, -1)
figures.gallery([colour[3], unpatchify(pieces, 8)[0]], ["the image", "its 'patches', as a grid"])

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# Without the swap a "patch" is a run of P*P pixels in reading order: for this image, 32 pixels wide, and P = 8
# two whole rows. Its left and right edge are together; pixels two rows apart, which belong together, are in
# different "patches".
# </details>
#
# ## Summary
#
# - An image becomes N = HW / P² vectors of P² C numbers: split, swap, join.
# - Nothing is lost but the place of each patch; a Transformer must be told it.
# - P sets the cost: tokens grow with 1 / P², pairs with 1 / P⁴.
#
# **In the paper.** Images of 224x224 in patches of 16 are 196 tokens of 768 numbers; P = 32 makes 49, and the
# huge model takes P = 14, that is 256. For fine-tuning at 384 the same patches make 576 tokens (lesson 10).
