# %% [markdown]
# # 11. Learning without labels
#
# **Goal.** Corrupt half of a picture's patches and let the model say what was there: the paper's masked patch
# prediction (section 4.6). After this you can build its corruption and its targets, and judge by numbers what it
# is good for.

# %%
# %matplotlib inline
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import (
    checkpoint,
    checks,
    datasets,
    figures,
    in_numpy,
    masking,
    optim,
    params,
    synthetic,
    variants,
)
from minivit.engine_numpy import NumPyEngine

DATA = Path.cwd().parent / "data"
fashion = datasets.load("fashion-mnist")

# %% [markdown]
# ## Which patches, and what becomes of them
#
# As in BERT: half of the patches are *corrupted*. Of these, 80 % become one learned vector, the mask; 10 % become
# the embedding of another patch of the same picture; 10 % stay as they are. All of them must be predicted, also
# those that stayed: the model cannot know which patches it may trust.
#
# Note that *embeddings* are replaced, not pixels, and that positions are added afterwards: the model knows
# *where* something is missing. For one picture of 16 patches, a patch after the other:

# %%
rng = np.random.default_rng(5)
chosen = rng.permutation(16)[:8]  # half of them, exactly
for patch in sorted(chosen):
    dice = rng.random()
    other = (patch + rng.integers(1, 16)) % 16  # never itself
    fate = "the mask" if dice < 0.8 else f"patch {other}" if dice < 0.9 else "itself"
    print(f"patch {patch} becomes {fate}")

# %% [markdown]
# `masking.draw_corruption` does that for a batch, from a seed, so that both twins see the same. Over 5,000
# pictures:

# %%
drawn = masking.draw_corruption(np.random.default_rng(0), batch=5000, patches=16)
own = drawn.source == np.arange(16)
fates = {
    "mask": drawn.masked & drawn.corrupted,
    "another patch": drawn.corrupted & ~drawn.masked & ~own,
    "kept, but asked for": drawn.corrupted & ~drawn.masked & own,
    "not asked for": ~drawn.corrupted,
}
assert (drawn.corrupted.sum(1) == 8).all()  # half of each picture, exactly
shares = {name: 100 * which.mean() for name, which in fates.items()}
np.testing.assert_allclose(list(shares.values()), [40, 5, 5, 50], atol=1)
figures.bars({"% of all patches": shares})

# %% [markdown]
# ## What to predict: 512 colours
#
# Pixels are too many and too noisy, so the paper asks for the patch's *mean colour*, in 3 bits a channel:
# $8 \cdot 8 \cdot 8 = 512$ classes, and a cross-entropy as for any classes. Level 0 holds the means below 32,
# level 7 those from 224. The label is $64\, r + 8\, g + b$.
#
# ## Exercise 1: the label
#
# `patch` holds bytes, `[P, P, 3]`. Beware of their range: bytes overflow when they are added as bytes.


# %%
def my_label(patch):  # uint8 [P, P, 3] -> 0 ... 511
    return None  # your answer


_ = checks.mean_color(my_label)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_label(patch):
#     pixels = patch.reshape(-1, 3).astype(int)
#     red, green, blue = pixels.sum(0) // (32 * len(pixels))
#     return 64 * red + 8 * green + blue
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# It looks like a scale from 0 to 8. Which patches break it, and what would training do then? Repair it.


# %%
def broken_label(patch):
    red, green, blue = (patch.mean((0, 1)) / 255 * 8).astype(int)
    return 64 * red + 8 * green + blue


_ = checks.mean_color(broken_label)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# A channel of 255: 255 / 255 * 8 is 8, and there are only the levels 0 to 7. White gets label 584, where the last
# is 511; worse, pure blue gets 8, which is valid and wrong. Few frameworks complain about a label that does not
# exist: with JAX, indexing takes the last class instead, and `one_hot` gives a row of zeros.
# </details>
#
# On the drawn data set `shapes`, the target as a picture: every patch painted in the middle of its colour's box.

# %%
colour = synthetic.shapes(train=2000, test=8)
labels = masking.color_labels(colour[3], 8)
boxes = masking.label_colors(labels, 3)
painted = masking.joined(masking.paint_cells(boxes, 8), 32, 32)
print("labels of one picture:", labels[0, :, 0])
pairs = [picture for both in zip(colour[3][:3], painted[:3], strict=True) for picture in both]
figures.gallery(pairs, 3 * ["picture", "its 16 targets"])

# %% [markdown]
# ## The loss sees the corrupted patches only
#
# Otherwise the model would spend its strength on copying what it sees. With C the corrupted patches, kept ones
# included, and $c_i$ the label of patch i:
#
# $$\ell = -\frac{1}{|C|} \sum_{i \in C} \log p_i(c_i)$$
#
# So the gradient of all other predictions must be exactly zero, and the loss of nothing corrupted must be 0, not
# 0 / 0. (Random scores, as here, are worse than none: half a nat above log 512.)

# %%
rng = np.random.default_rng(1)
predictions, asked = rng.standard_normal((2, 16, 512)), rng.random((2, 16)) < 0.5
answers = rng.integers(0, 512, (2, 16, 1))
loss, back = in_numpy.color_loss(predictions, answers, asked)
each = []
for b, i in np.argwhere(asked):
    probabilities, _ = in_numpy.softmax(predictions[b, i])
    each.append(-np.log(probabilities[answers[b, i, 0]]))
np.testing.assert_allclose(loss, np.mean(each))
gradient = back(1.0)
assert (gradient[~asked] == 0).all()
assert (np.abs(gradient[asked]).max(-1) > 0).all()
nothing, _ = in_numpy.color_loss(predictions, np.zeros((2, 16, 1), int), np.zeros((2, 16), bool))
print(f"loss {loss:.2f} (log 512 is {np.log(512):.2f}), of nothing {nothing:.0f}")

# %% [markdown]
# ## Train it
#
# The same encoder; in place of the head one layer that predicts 512 colours for every patch, and the mask. 100
# steps on pictures in colour, without one label. The loss begins at $\log 512 = 6.24$.

# %%
start = params.initialise(variants.parse("tiny/8"), 0, image_size=32, channels=3, classes=1)
start = masking.add_prediction(start, "mean-color", 0)
engine, losses = NumPyEngine(start, objective="mean-color", clip=1.0), []
for step in range(100):
    rng = np.random.default_rng([7, step])
    pictures = colour[1][rng.integers(0, 2000, 64)]
    corruption = masking.draw_corruption(rng, 64, 16)
    batch = masking.masked_batch(pictures, corruption, "mean-color", (8, 8))
    rate = optim.schedule(step, base=3e-3, total=100, warmup=10)
    losses.append(engine.step(step, batch, rate)[0])
assert abs(losses[0] - np.log(512)) < 1e-3
share = np.bincount(masking.color_labels(colour[1], 8).ravel(), minlength=512) / (2000 * 16)
entropy = -(share * np.log(share + 1e-30)).sum()  # the best loss without looking at the picture
assert np.mean(losses[-10:]) < entropy - 0.2
series = {"colour of corrupted patches": losses}
figures.lines(range(100), series, "step", "loss (nats)", marker="", level=entropy)

# %% [markdown]
# After 20 steps it knows how common each colour is (dotted: the best that is possible without looking, 4.0 nats);
# the rest comes from the other patches of the picture. To look at something finer, here is a model that was
# trained for 3,000 steps on clothes (`python -m minivit.train --tiny --objective downsampled --steps 3000`), with
# the paper's second target: every patch shrunk to 4x4 cells of one colour each (of 8, since the pictures are
# grey).

# %%
p, description = checkpoint.inspect(DATA / "masked.npz")
pictures = fashion.test_images[[0, 2, 3, 6, 11, 18]]
corruption = masking.draw_corruption(np.random.default_rng(2), 6, 16)
batch = masking.masked_batch(pictures, corruption, "downsampled", (7, 7))
given = datasets.normalise(pictures)
said, _ = in_numpy.masked_vit(p, given, corruption.masked, corruption.source)
figures.mosaic(masking.mosaic(batch, said, "downsampled", (7, 7)))

# %% [markdown]
# Half of a garment is often enough: the heel, the second leg. Where it is not, the most probable colour is
# painted: sleeves lose their light edge, and the bag loses a corner.
#
# ## Is it good for anything?
#
# The encoder is then fine-tuned with few labels, 600 steps, and compared with the same steps from scratch. All
# runs are recorded in `data/masked.csv`; means of three seeds, with the commands in README:

# %%
rows = list(csv.DictReader((DATA / "masked.csv").open()))
panels = {}
for count in ("10", "100"):
    found = {}
    for row in rows:
        if row["labels_per_class"] == count:
            found.setdefault(row["pretraining"], []).append(float(row["accuracy"]))
    panels[f"{count} labels a class, % right"] = {n: np.mean(each) for n, each in found.items()}
    assert np.mean(found["mean-color"]) > np.mean(found["none, the whole compute"]) + 2
figures.bars(panels)

# %% [markdown]
# Pictures without labels are worth 10 to 12 points with ten labels a class, 5 to 6 with a hundred; the same
# compute without them gains little (against flips and shifts, the best row without pre-training, it is 6 to 8
# points and 3 to 4). All three targets help about alike (seeds differ by one to two points), so the simplest one
# will do.
#
# ## Summary
#
# - Corrupt half of the embeddings: 80 % mask, 10 % another patch, 10 % kept; predict all of these and nothing
#   else.
# - The target is the mean colour in 512 boxes; integers, and mind the white patch.
# - It helps most where labels are few: measure against the same compute without it.
#
# **In the paper.** ViT-B/16, a million steps on JFT-300M without its labels, then fine-tuned on ImageNet: 79.9 %,
# two points above training from scratch, four below supervised pre-training. No code was published. 15 %
# corruption instead of half was slightly worse, and so was predicting all pixels.
