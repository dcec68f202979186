# %% [markdown]
# # 12. Convolutions meet attention
#
# **Goal.** Build a convolution, see what it knows that a ViT must learn, and compare three families: ViT, ResNet
# and the hybrid of both. After this you can say what an inductive bias is, in numbers, and when it helps.

# %%
# %matplotlib inline
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import architecture, checks, datasets, figures, images, in_numpy, params, variants
from minivit.params import flatten

rng = np.random.default_rng(12)

# %% [markdown]
# An *inductive bias* is what a model assumes before it has seen any data. A convolution assumes two things of
# pictures: that near pixels belong together (*locality*), and that a pattern means the same everywhere.
#
# ## A convolution
#
# A small kernel slides over the picture, and the same few weights are used at every place:
#
# $$y_{ijf} = \sum_{a, b, c} x_{(si + a)(sj + b)c}\; k_{abcf}$$
#
# With stride s the windows are s pixels apart. At the border something must be added: with "SAME" padding, enough
# zeros that the result has $\lceil n / s \rceil$ places. An edge detector on a photograph, with loops over the
# windows:

# %%
photo = images.read(Path.cwd().parent / "data" / "photos" / "coffee.jpg", channels=1)
edges = np.zeros((3, 3, 1, 2))
edges[:, :, 0, 0] = [[1, 0, -1], [2, 0, -2], [1, 0, -1]]  # from left to right
edges[:, :, 0, 1] = edges[:, :, 0, 0].T  # from top to bottom


def convolve_slowly(x, kernel):  # [height, width, C], [3, 3, C, F] -> [height-2, width-2, F]
    result = np.zeros((x.shape[0] - 2, x.shape[1] - 2, kernel.shape[-1]))
    for i in range(result.shape[0]):
        for j in range(result.shape[1]):
            window = x[i : i + 3, j : j + 3]
            result[i, j] = (window[..., None] * kernel).sum((0, 1, 2))
    return result


x = datasets.normalise(photo[None])[:, ::2, ::2]
slowly = convolve_slowly(x[0], edges)
y, back = in_numpy.conv2d({"kernel": edges}, x)
np.testing.assert_allclose(y[0, 1:-1, 1:-1], slowly, atol=1e-5)
strength = np.abs(y[0]) / np.abs(y[0]).max() * 255
figures.gallery(
    [photo, *np.moveaxis(strength, -1, 0)[..., None]],
    ["picture", "changes left to right", "changes top to bottom"],
)

# %% [markdown]
# ## As one product
#
# All windows, one a row, are a matrix, `[places, 3 * 3 * C]`; the kernel is `[3 * 3 * C, F]`. That is how
# `conv2d` does it, and why its backward pass is that of a product, with the windows' gradients added back to
# where they came from.

# %%
windows = np.lib.stride_tricks.sliding_window_view(x[0], (3, 3), axis=(0, 1))  # [h, w, C, 3, 3]
flat = windows.transpose(0, 1, 3, 4, 2).reshape(-1, 9)
np.testing.assert_allclose((flat @ edges.reshape(9, 2)).reshape(slowly.shape), slowly, atol=1e-5)
dy = rng.standard_normal(y.shape)
dp, dx = back(dy)
moved = edges.copy()
moved[0, 2, 0, 1] += 1e-4
slope = ((in_numpy.conv2d({"kernel": moved}, x)[0] - y) * dy).sum() / 1e-4
np.testing.assert_allclose(dp["kernel"][0, 2, 0, 1], slope, rtol=1e-3)
print("one product, and its gradient by differences")

# %% [markdown]
# ## Exercise 1: convolution
#
# One picture, a 3x3 kernel, stride 1 or 2, "SAME" padding: the result has ⌈n / stride⌉ rows, and an odd pixel of
# padding goes *after* the picture.


# %%
def my_conv(x, kernel, stride):  # [height, width, C], [3, 3, C, F] -> [h, w, F]
    return None  # your answer


_ = checks.conv2d(my_conv)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_conv(x, kernel, stride):
#     pads = []
#     for n in x.shape[:2]:
#         total = max((-(-n // stride) - 1) * stride + 3 - n, 0)
#         pads.append((total // 2, total - total // 2))
#     x = np.pad(x, (*pads, (0, 0)))
#     windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(0, 1))[::stride, ::stride]
#     return np.einsum("hwcab,abcf->hwf", windows, kernel)
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# PyTorch's `padding=1` for a 3x3 kernel. With stride 1 it is right. With stride 2 and an even side, where does
# each window lie?


# %%
def broken_conv(x, kernel, stride):
    x = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(0, 1))[::stride, ::stride]
    return np.einsum("hwcab,abcf->hwf", windows, kernel)


_ = checks.conv2d(broken_conv)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# An even side with stride 2 needs one row of zeros in all, and "SAME" puts it after the picture; here it goes
# before, so every window lies one pixel further up and left. Nothing fails, but an official hybrid loaded into
# such a network has its features shifted. (BiT itself pads as PyTorch does; README's table "Which ViT is this?"
# says who does what.)
# </details>
#
# ## What a convolution knows
#
# Shift the picture by the stride, and the result is shifted by one place: *translation equivariance*, by
# construction, away from the borders. A ViT's patch embedding *is* a convolution, but of stride 7 here: for any
# shift but whole patches it must learn from examples that a shoe further left is a shoe; and adding positions
# ends even that. How much does the result change when the picture moves, after the shift is undone?

# %%
shoe = datasets.normalise(datasets.load("fashion-mnist").test_images[:1])
shoe = np.pad(shoe, ((0, 0), (14, 14), (14, 14), (0, 0)), constant_values=-1)  # 56x56
kernel3, kernel7 = rng.standard_normal((3, 3, 1, 8)), rng.standard_normal((7, 7, 1, 8))


def changed(f, picture, pixels, places):  # relative change of f(picture), the shift undone
    before, after = f(picture), f(np.roll(picture, pixels, axis=2))
    return np.linalg.norm(np.roll(after, -places, axis=2) - before) / np.linalg.norm(before)


def convolve(x):
    return in_numpy.conv2d({"kernel": kernel3}, x + 1)[0]


def stride_2(x):
    return in_numpy.conv2d({"kernel": kernel3}, x + 1, stride=2)[0]


def embed(x):
    return in_numpy.conv2d({"kernel": kernel7}, x + 1, stride=7, padding=0)[0]


print("relative change            1 pixel   the stride")
for name, layer, stride in (
    ("convolution", convolve, 1),
    ("with stride 2", stride_2, 2),
    ("patches of 7", embed, 7),
):
    by_one, by_stride = changed(layer, shoe, 1, int(stride == 1)), changed(layer, shoe, stride, 1)
    print(f"{name:24} {by_one:9.2f} {by_stride:12.2f}")
    assert by_stride < 1e-6
    assert (by_one > 0.1) == (stride > 1)

# %% [markdown]
# A ResNet is convolutions in blocks that add, as in lesson 6, with fewer places and more channels from stage to
# stage. It is not exactly equivariant either, but nearly so for small shifts, and local in every layer.
#
# ## The hybrid
#
# The paper's third family (section 3.1): a small ResNet makes a feature map, and *its* places become the tokens,
# patches of 1x1. Everything after that is the same encoder.

# %%
hybrid = params.initialise(variants.parse("tiny-hybrid"), 0, image_size=28, channels=1, classes=10)
out = {}
scores, _ = in_numpy.vit(hybrid, shoe[:, 14:42, 14:42], out=out)
print(
    "picture 28x28x1 -> embedded map",
    out["patch_embedding"].shape[1:],
    "-> tokens",
    out["tokens"].shape[1:],
)
cost, size = {}, {}
for name in ("tiny", "tiny-hybrid", "tiny-resnet"):
    v = variants.parse(name)
    work = variants.flops_by_part(v, 28, channels=1, classes=10)
    cost[name] = sum(work.values()) / 1e6
    model = params.initialise(v, 0, image_size=28, channels=1, classes=10)
    size[name] = sum(architecture.parameters_by_part(flatten(model)).values()) / 1e3
figures.bars({"million operations an image": cost, "thousand parameters": size})

# %% [markdown]
# ## The comparison
#
# All three on Fashion-MNIST with the same operations in all (500 steps of the ViT, 438 of the hybrid, 508 of the
# ResNet, which has 1.7 times the parameters), with 1,000, 10,000 and 60,000 pictures; three seeds each, recorded
# in `data/families.csv` (a minute a run).

# %%
results = {}
for row in csv.DictReader((Path.cwd().parent / "data" / "families.csv").open()):
    by_size = results.setdefault(row["family"], {})
    by_size.setdefault(int(row["images"]), []).append(float(row["accuracy"]) / 100)
for images_seen in (1000, 10_000, 60_000):
    assert np.mean(results["ResNet"][images_seen]) > np.mean(results["ViT"][images_seen])
figures.data_sizes(results, [1000, 10_000, 60_000])

# %% [markdown]
# The ResNet wins at every size, by 2.4 to 2.8 points over the ViT: what it assumes need not be learned, and
# perhaps 500 steps are too few to learn it. The hybrid gains 1.4 points where pictures are few (one deviation is
# 0.8), and loses 0.7 where they are many. So the small experiment shows the first half of the paper's story. The
# second half, that the ViT overtakes, needs tens of millions of pictures: no laptop shows it.
#
# ## Summary
#
# - A convolution is a product with all windows; sharing the kernel makes it equivariant under shifts.
# - A ViT has little of that built in: patches, the same weights for each, and the grid when positions are
#   resized. It pays with data.
# - With few pictures the prior wins, here as in the paper; mind padding when you compare or convert.
#
# **In the paper.** With ImageNet alone (1.3 M pictures) ViT-L is worse than ViT-B, and both are below BiT; with
# ImageNet-21k (14 M) ViT-L and ViT-B are level; with JFT (303 M) ViT-L is ahead (Figure 3). For the same accuracy
# a ViT needs two to four times less compute than a ResNet; hybrids help at small budgets only (Figure 5).
