# %% [markdown]
# # 10. Higher resolution
#
# **Goal.** Take a trained model to larger pictures: resize its position table, measure what that is worth, and
# fine-tune. After this you can write the interpolation, and know four ways in which it goes wrong without an
# error.

# %%
# %matplotlib inline
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import (
    attention_maps,
    batches,
    checkpoint,
    checks,
    datasets,
    figures,
    finetune,
    in_numpy,
    optim,
)
from minivit.engine_numpy import NumPyEngine
from minivit.interpolation import resize_weights

p, description = checkpoint.inspect(Path.cwd().parent / "data" / "tiny.npz")
fashion = datasets.load("fashion-mnist")
table = p["Transformer"]["posembed_input"]["pos_embedding"]

# %% [markdown]
# ## What has the wrong shape?
#
# Pictures twice as large, patches of the same 7x7 pixels: four times as many tokens (section 3.2 of the paper).
# The blocks do not care how many there are. One array does: the position table, a row for each of the 4x4 places
# and one for the class token.

# %%
large = batches.fit(fashion.test_images[:1000], (56, 56), 1)
try:
    in_numpy.vit(p, datasets.normalise(large[:1]))
except ValueError as error:
    print("refused:", error)
figures.gallery([fashion.test_images[0], large[0]], ["28x28: 16 patches", "56x56: 64 patches"])

# %% [markdown]
# ## One axis
#
# Pretend that the old table samples something smooth at m = 4 places; we want it at n = 8. The official code lays
# the end points on the end points, and draws straight lines between:
#
# $$\mathrm{new}_i = (1 - t)\, \mathrm{old}_{\lfloor s \rfloor} + t\, \mathrm{old}_{\lfloor s \rfloor + 1} \qquad s = i\, \frac{m - 1}{n - 1}, \quad t = s - \lfloor s \rfloor$$
#
# With a loop, for one feature of the first row of places:

# %%
row = table[0, 1:5, 0]
loop = []
for i in range(8):
    s = i * 3 / 7
    left = min(int(s), 2)
    loop.append((1 - (s - left)) * row[left] + (s - left) * row[left + 1])
np.testing.assert_allclose(loop, np.array(resize_weights(4, 8)) @ row, atol=1e-6)
print(row.round(2), "->", np.round(loop, 2))

# %% [markdown]
# The package has it as a matrix of weights, `[n, m]`, two of them in each row: then resizing is a product.
#
# ## Exercise 1: resize a row
#
# From `[m, D]` to `[n, D]`, both at least 2.


# %%
def my_resize_row(values, n):  # [m, D] -> [n, D]
    return None  # your answer


_ = checks.resize_row(my_resize_row)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_resize_row(values, n):
#     places = np.arange(n) * (len(values) - 1) / (n - 1)
#     weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(len(values))))
#     return weights @ values
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# Most libraries' `resize` does this, and it is no mistake for pictures. Why is it not what the official weights
# were fine-tuned with?


# %%
def broken_resize_row(values, n):
    places = (np.arange(n) + 0.5) * len(values) / n - 0.5
    places = places.clip(0, len(values) - 1)
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(len(values))))
    return weights @ values


_ = checks.resize_row(broken_resize_row)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# It takes the places for the centres of pixels ("half-pixel" or `align_corners=False`): corners move inwards, and
# the outermost are clamped. Both rules are sound; the official code uses the other one. From 14 to 24 places they
# read the old table at points up to 0.2 of a place apart.
# </details>
#
# ## Two axes
#
# Rows first, then columns, or the reverse: the same, since each is a product from its own side. With the weights
# as matrices $R$ and $C$, each feature's grid becomes $R\, G\, C^\top$. The class token has no place: its row is
# copied.


# %%
def by_hand(table, new):  # [1, 1+m*m, D] -> [1, 1+n*n, D]
    side = int((table.shape[1] - 1) ** 0.5)
    places = np.arange(new) * (side - 1) / (new - 1)
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(side)))
    grid = table[0, 1:].reshape(side, side, -1)
    grid = np.stack([weights @ grid[..., d] @ weights.T for d in range(grid.shape[-1])], axis=-1)
    return np.concatenate([table[:, :1], grid.reshape(1, new * new, -1)], axis=1)


resized, _ = in_numpy.resize(table, (8, 8))
np.testing.assert_allclose(by_hand(table, 8), resized, atol=1e-6)
again, _ = in_numpy.resize(resized, (4, 4), method="corners")
corners = [0, 3, 12, 15]
np.testing.assert_allclose(again[0, 1:][corners], table[0, 1:][corners], atol=1e-6)
print("by hand and minivit's agree; corners survive the way back")

# %% [markdown]
# Each small map: how alike the position at this place is to all others. The new table is the old one, drawn
# finer.

# %%
old = attention_maps.position_similarity(table, (4, 4))
new = attention_maps.position_similarity(resized, (8, 8))
figures.positions([old, new], ["4x4 places, learned", "8x8 places, resized"])

# %% [markdown]
# ## Trap: along the sequence
#
# A table of 16 rows can be stretched to 64 in one line, without a grid. Then the end of each row of patches is
# mixed with the beginning of the next one. Nothing complains. One feature of the table, the one with the largest
# entry, the right way and the wrong one:

# %%
along = np.array([np.interp(np.linspace(0, 15, 64), np.arange(16), c) for c in table[0, 1:].T]).T
feature = np.abs(table[0, 1:]).max(0).argmax()
shown = [table[0, 1:, feature].reshape(4, 4), resized[0, 1:, feature].reshape(8, 8)]
shown.append(along[:, feature].reshape(8, 8))
figures.matrices(shown, ["learned", "resized as a grid", "stretched as a row"], "column", "row")

# %% [markdown]
# (Two more: the class token's row must not be resized with the others; and SciPy's `zoom`, which the official
# code calls, writes zeros into the last row and column for some sizes, such as 8 to 26, where a rounded position
# falls an ulp outside.)
#
# ## What is it worth?
#
# Before any training: freeze the model, fit a linear head on 500 enlarged pictures, and count right answers on
# 1,000 others.

# %%
some = replace(
    fashion, test_images=fashion.test_images[:1000], test_labels=fashion.test_labels[:1000]
)


def probed(params, size, method="corners", grid=(4, 4)):
    told = description | {"grid": grid}
    return finetune.probe(params, told, size, some, method, examples=500)


stretched = np.concatenate([table[:, :1], along[None].astype("float32")], axis=1)
model = finetune.at_size(p, (56, 56))
model["Transformer"]["posembed_input"] = {"pos_embedding": stretched}
worth = {
    "28x28, as trained": probed(p, (28, 28)),
    "56x56, resized as a grid": probed(p, (56, 56)),
    "56x56, stretched as a row": probed(model, (56, 56), grid=(8, 8)),
    "56x56, random positions": probed(p, (56, 56), "random"),
}
assert worth["56x56, resized as a grid"] > worth["56x56, random positions"] + 0.04
assert worth["56x56, resized as a grid"] > worth["56x56, stretched as a row"] + 0.04
figures.bars({"% of 1,000 test pictures": {name: 100 * share for name, share in worth.items()}})

# %% [markdown]
# The pictures have no more detail than before, and a patch of 7 pixels now sees half as much in each direction:
# so the larger size costs accuracy here, with whatever positions. Positions that were resized as a grid are worth
# eight points more than random ones; stretched as a row, nothing.
#
# ## Fine-tuning
#
# `finetune.adapt` puts a new head of zeros on the model and resizes its positions. Then training goes on, as in
# lesson 7, with small steps. Both ways for 25 steps:

# %%
numbers, curves, tuned = datasets.batch_indices, {}, {}
for method in ("corners", "random"):
    start = finetune.adapt(p, image_size=(56, 56), classes=10, method=method)
    engine, losses = NumPyEngine(start, clip=1.0), []
    for step in range(25):
        chosen = numbers(60_000, 64, 1, step)
        images = batches.fit(fashion.train_images[chosen], (56, 56), 1)
        targets = in_numpy.smooth_labels(fashion.train_labels[chosen], 10)
        rate = optim.schedule(step, base=1e-3, total=25, warmup=5)
        losses.append(engine.step(step, {"images": images, "targets": targets}, rate)[0])
    name = f"{'resized' if method == 'corners' else 'random'} positions"
    curves[name] = np.convolve(losses, np.ones(5) / 5, "valid")
    right = (engine.logits(large).argmax(-1) == some.test_labels).mean()
    tuned[method] = right
    print(f"{name}: {right:.1%} of 1,000 test pictures after 25 steps")
assert tuned["corners"] > tuned["random"] + 0.04
figures.lines(range(5, 26), curves, "step", "loss, mean of five", marker="")

# %% [markdown]
# The lead stays for a while. (Both are below the probe's numbers: its head was fitted exactly, this one began at
# zero 25 steps ago.)
#
# ## Summary
#
# - Only the position table knows the image's size; resize it as a grid, the class token's row aside.
# - Corners on corners is the official rule; half-pixel rules give other numbers, a row instead of a grid gives
#   nonsense.
# - Nothing fails when it is done wrong: accuracy is lower (here by eight points), and that is all one sees.
#
# **In the paper.** Pre-training at 224, fine-tuning at 384: from 14x14 to 24x24 patches (518 for H/14). It is,
# says section 3.2, the only place where the 2-D structure of images is put into the model by hand, besides the
# patches themselves.
