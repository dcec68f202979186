# %% [markdown]
# # 9. What it learned
#
# **Goal.** Repeat the paper's pictures of the inside (Figures 6 and 7) on a small model of our own, and read them
# with care. After this you can draw filters, position similarity, attention distance and rollout of any ViT, and
# say what each of them can and cannot show.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import (
    attention_maps,
    checkpoint,
    checks,
    datasets,
    figures,
    in_numpy,
    params,
    variants,
)

# %% [markdown]
# The model is `tiny` with patches of 4x4 pixels, so 7x7 of them, trained for five minutes by
# `python -m minivit.train --model tiny/4`: 86.6 % of the test pictures. One forward pass leaves all that we need
# in `out`, and one backward pass the gradients of the attention weights.

# %%
p = checkpoint.load(Path.cwd().parent / "data" / "tiny4.npz")
fashion = datasets.load("fashion-mnist")
images, grid, patch = fashion.test_images[:128], (7, 7), 4

out = {}
scores, back = in_numpy.vit(p, datasets.normalise(images), out=out)
guesses = scores.argmax(-1)
back(np.eye(10, dtype="float32")[guesses])  # a one for the class that it chose
weights = attention_maps.of_blocks(out)
gradient = attention_maps.of_blocks(out, "attention_gradient")
print("attention", weights.shape, "= images, blocks, heads, tokens, tokens")

# %% [markdown]
# ## Filters (Figure 7, left)
#
# The columns of the embedding's kernel are patterns of 4x4 pixels. The paper draws the *principal components* of
# all of them: the directions in which they differ most.

# %%
kernel = p["embedding"]["kernel"]
main = attention_maps.main_filters(kernel, 14)
filters = kernel.reshape(16, 64).T
share = np.linalg.svd(filters - filters.mean(0), compute_uv=False) ** 2
print("variance in the first four components:", (share[:4].sum() / share.sum()).round(2))
begun = params.initialise(
    variants.parse("tiny/4"), [0, datasets.WEIGHTS], image_size=28, channels=1, classes=10
)
same = np.corrcoef(begun["embedding"]["kernel"].ravel(), kernel.ravel())[0, 1]
print("correlation with the kernel before training:", same.round(2))
assert same > 0.9
figures.filters(main, columns=7)

# %% [markdown]
# In the paper these are smooth waves, like the basis of a picture compression: trained on hundreds of millions of
# pictures. Ours saw 60,000, and the filters are nearly those that training began with: noise. (Noise of this
# shape, too, has 0.43 of its variance in four components.) The model learned *with* them.
#
# ## Positions (Figure 7, centre)
#
# The cosine between the embedding of each place and those of all places; the map in row 3, column 5 belongs to
# that patch. Nobody told the model that the places form a grid.

# %%
table = p["Transformer"]["posembed_input"]["pos_embedding"]
likeness = attention_maps.position_similarity(table, grid)
figures.positions([likeness], ["how alike the 49 places are"])

# %% [markdown]
# Every place is most like itself, which must be. But also: like the one above and below, and like its *mirror
# image* on the other side. The training pictures are clothes, symmetric from left to right; probably that is why.
# So columns show clearly, and rows faintly; in numbers:

# %%
y, x = np.indices(grid).reshape(2, -1)
down, right = np.abs(y[:, None] - y), np.abs(x[:, None] - x)
alike = likeness.reshape(49, 49)
groups = {
    "above or below": (down == 1) & (right == 0),
    "left or right": (down == 0) & (right == 1),
    "mirrored": (down == 0) & (x[:, None] + x == 6) & (right > 1),
    "two or more away": np.maximum(down, right) >= 2,
}
means = {name: alike[which].mean() for name, which in groups.items()}
assert means["above or below"] > 0.2
assert means["mirrored"] > 0.2 > means["left or right"] > 0.1
assert abs(means["two or more away"]) < 0.1
figures.bars({"mean cosine": means})

# %% [markdown]
# ## Attention distance (Figure 7, right)
#
# How far away is what a head looks at? The distance in pixels between the query's patch and each key's, weighted
# by attention; a mean over queries and images. The class token has no place: it is left out, and the other
# weights are scaled to sum to one again. With $g_i$ the row and column of patch i, for one head:
#
# $$d = \frac1N \sum_{i, j} A_{ij}\; P\, \lVert g_i - g_j \rVert$$
#
# ## Exercise 1: the distance
#
# For one head: `weights` is `[N, N]`, rows are queries and sum to one, the class token is already out; `grid` is
# (rows, columns); the result is in pixels.


# %%
def my_distance(weights, grid, patch):  # [N, N] -> pixels
    return None  # your answer


_ = checks.attention_distance(my_distance)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_distance(weights, grid, patch):
#     places = np.indices(grid).reshape(2, -1).T * patch
#     apart = np.sqrt(((places[:, None] - places) ** 2).sum(-1))
#     return (weights * apart).sum(-1).mean()
# ```
# </details>

# %%
distance = attention_maps.attention_distance(weights, grid, patch)
uniform = attention_maps.patch_distances(grid, patch).mean()
figures.distances(distance, uniform)

# %% [markdown]
# The paper's large models have, in their first blocks, heads that look far *and* heads that stay near; later all
# look far. Here there are no near ones: all heads of all blocks are about as far as if they looked at everything
# alike (dotted). That is a mean and hides that they are choosy, as the next picture shows. With 49 patches and
# 60,000 pictures probably nothing presses the model to become a convolution.
#
# ## Heads
#
# Where the class token looks, by block and head, on one boot. Each map is scaled to its own largest weight:

# %%
boot = attention_maps.on_the_grid(weights[0].reshape(16, 50, 50), grid, 1).reshape(4, 4, 7, 7)
entropy = -(weights * np.log(weights + 1e-30)).sum(-1).mean()
print(
    f"a row's entropy is {entropy:.1f} nats; looking at everything alike would be {np.log(50):.1f}"
)
assert entropy < 0.8 * np.log(50)
figures.heads(boot)

# %% [markdown]
# ## Rollout (Figure 6)
#
# One block's attention says which *tokens* were mixed, and these are mixtures already. Rollout (Abnar and
# Zuidema, arXiv 2005.00928) follows them back to the patches. It *assumes* that in each block a token is half
# what it was (the residual connection) and half what its heads looked at; the product of all blocks would say how
# much of each patch is in the class token, if attention were all that mixes.
#
# $$\tilde A_\ell = \mathrm{rows\ to\ sum\ one}\big(\tfrac1H \textstyle\sum_h A_{\ell h} + I\big) \qquad R = \tilde A_L \cdots \tilde A_2\, \tilde A_1$$
#
# ## Exercise 2: rollout
#
# Of one image, `[L, H, N, N]`. Take the heads' *maximum* instead of their mean: then the rows must really be
# normalised.


# %%
def my_rollout(attention):  # [L, H, N, N] -> [N, N]
    return None  # your answer


_ = checks.rollout(my_rollout)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_rollout(attention):
#     result = np.eye(attention.shape[-1])
#     for layer in attention:
#         flow = layer.max(0) + np.eye(len(result))
#         result = flow / flow.sum(-1, keepdims=True) @ result
#     return result
# ```
# </details>
#
# ## Exercise 3: find the fault
#
# From the implementation that most people copy (vit-explain). With the mean of the heads nobody sees it: why?


# %%
def broken_rollout(attention):
    result = np.eye(attention.shape[-1])
    for layer in attention:
        flow = layer.max(0) + np.eye(len(result))
        result = flow / flow.sum(-1) @ result
    return result


_ = checks.rollout(broken_rollout)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# Without `keepdims` the sums of the rows are a flat vector, which NumPy lays along the *columns*: entry (i, j) is
# divided by the sum of row j. For a mean of heads every row of A + I sums to 2, and the fault is invisible; with
# the maximum the rows no longer sum to one.
# </details>
#
# Side by side: rollout with the mean, maximum and minimum of the heads, and weighted by the *gradient* of the
# chosen class's score, so that only attention which speaks for that class counts (Chefer et al., arXiv
# 2103.15679): $\bar A = \frac1H \sum_h \max(0, \nabla A_h \odot A_h)$ in place of the mean.

# %%
some = [0, 2, 6, 11]
flows = {fuse: attention_maps.rollout(weights[some], fuse) for fuse in ("mean", "max", "min")}
flows["gradient"] = attention_maps.gradient_rollout(weights[some], gradient[some])
for flow in flows.values():
    np.testing.assert_allclose(flow.sum(-1), 1)
maps = {name: attention_maps.on_the_grid(flow, grid, 1) for name, flow in flows.items()}
figures.overlays(images[some], maps, [fashion.classes[guesses[i]] for i in some])

# %% [markdown]
# "mean" and "max" agree roughly (the garment more than the empty ground), and differ in detail; "min" keeps what
# all heads share and is mostly noise here. None of them is *the* explanation: rollout knows nothing of values,
# MLPs and norms.
#
# ## Summary
#
# - Filters and positions are weights and can be looked at directly; ours show symmetry and columns, not the
#   paper's smooth waves.
# - Attention distance is a mean; look at single heads before you believe it.
# - Rollout multiplies the blocks' attention with the residual half; rows sum to one, or something is wrong.
#
# **In the paper.** Figure 7 is of ViT-L (filters, positions of L/32; distances of L/16); Figure 6 of L/16 on
# ImageNet pictures. `python -m minivit.figures --checkpoint FILE --images data/photos` draws all of these for any
# checkpoint; on large pre-trained files the textbook patterns appear.
