# %% [markdown]
# # 0. The whole ViT on one page
#
# **Goal.** Run a trained Vision Transformer on a picture and open every step on the way. After this you know the
# parts by name and shape; each later lesson builds one of them.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import attention_maps, checkpoint, checks, datasets, figures, in_numpy

# %% [markdown]
# ## The model and the picture
#
# The weights are those of `python -m minivit.train --tiny`: a minute of training on 60,000 pictures of clothes.
# They are a nested dictionary of arrays, nothing else; a name such as `head/kernel` is a path in it.

# %%
p = checkpoint.load(Path.cwd().parent / "data" / "tiny.npz")
fashion = datasets.load("fashion-mnist")
image = fashion.test_images[6:7]  # [1, 28, 28, 1], bytes
x = datasets.normalise(image)  # the same in [-1, 1]
print(list(p), x.shape, x.min(), x.max())

# %% [markdown]
# ## 1. Cut the picture into patches
#
# $$x \in \mathbb{R}^{H \times W \times C} \;\to\; x_p \in \mathbb{R}^{N \times P^2 C}$$
#
# N = HW / P² = 16 squares of P x P = 7x7 pixels in C = 1 channel, each one a row of 49 numbers (lesson 1).

# %%
patches = in_numpy.patchify(x, 7).reshape(1, 16, 49)
figures.patches(image[0], 7)

# %% [markdown]
# ## 2. Make tokens of them
#
# $$z_0 = [x_\mathrm{class};\; x_p^1 E;\; \dots;\; x_p^N E] + E_\mathrm{pos}$$
#
# One matrix E turns each patch into D = 64 numbers, a *token*. One more token, learned, goes before them: it will
# collect the answer. What is added to every token says where it was (lesson 2).

# %%
kernel, bias = p["embedding"]["kernel"].reshape(49, 64), p["embedding"]["bias"]
embedded = patches @ kernel + bias
tokens = np.concatenate([p["cls"], embedded], axis=1)
tokens = tokens + p["Transformer"]["posembed_input"]["pos_embedding"]
print("patches", patches.shape, "embedded", embedded.shape, "tokens", tokens.shape)
figures.matrices(
    [tokens[0]], ["17 tokens of 64 numbers, the class token on top"], "feature", "token"
)

# %% [markdown]
# ## 3. Four encoder blocks
#
# $$z' = \mathrm{MSA}(\mathrm{LN}(z)) + z \qquad z = \mathrm{MLP}(\mathrm{LN}(z')) + z'$$
#
# In each block the tokens look at each other (multi-head self-attention, lessons 4 and 5), and then each one
# thinks by itself (the MLP, lesson 3). Both work on a normalised copy, and both only *add* to the token. Shapes
# never change.

# %%
z = tokens
for i in range(4):
    block = p["Transformer"][f"encoderblock_{i}"]
    normal, _ = in_numpy.layer_norm(block["LayerNorm_0"], z)
    looked, _ = in_numpy.attention(block["MultiHeadDotProductAttention_1"], normal)
    z = z + looked
    normal, _ = in_numpy.layer_norm(block["LayerNorm_2"], z)
    thought, _ = in_numpy.mlp(block["MlpBlock_3"], normal)
    z = z + thought
print("after four blocks", z.shape)

# %% [markdown]
# ## 4. Read the answer off the class token
#
# $$y = \mathrm{LN}(z_L^0)$$
#
# $z_L^0$ is the class token (number 0) after all L blocks. A last product gives a score for each of ten classes,
# and softmax makes shares of them.

# %%
y, _ = in_numpy.layer_norm(p["Transformer"]["encoder_norm"], z[:, 0])
scores = y @ p["head"]["kernel"] + p["head"]["bias"]
probabilities, _ = in_numpy.softmax(scores)
guess = fashion.classes[probabilities.argmax()]
print(f"{guess}; it is a {fashion.classes[fashion.test_labels[6]]}")
figures.bars({"probability, %": dict(zip(fashion.classes, 100 * probabilities[0], strict=True))})

# %% [markdown]
# ## The same in one call
#
# `in_numpy.vit` is these steps, for any size. It also returns the way back, `back`, which gives the gradient of
# every parameter: training needs nothing else (lesson 7). A dictionary `out` receives what lies between.

# %%
out = {}
same, back = in_numpy.vit(p, x, out=out)
np.testing.assert_allclose(same, scores, atol=1e-4)  # float32, in another order
some = fashion.test_images[:1000]
answers = in_numpy.vit(p, datasets.normalise(some))[0].argmax(-1)
accuracy = (answers == fashion.test_labels[:1000]).mean()
assert accuracy > 0.85
print(f"right for {accuracy:.0%} of 1,000 pictures that it never saw")

# %% [markdown]
# ## Where does it look?
#
# From which places does the class token read in the last block? (Its tokens are mixtures of all patches by then,
# so this is no explanation yet: lesson 9.)

# %%
shown, maps = fashion.test_images[[6, 0, 2, 11]], {}
in_numpy.vit(p, datasets.normalise(shown), out=maps)
weights = maps["block3_attention"].mean(1)  # a mean over the heads
seen = attention_maps.on_the_grid(weights, (4, 4), 1)
names = [fashion.classes[label] for label in fashion.test_labels[[6, 0, 2, 11]]]
figures.attention(shown, seen, names, columns=2)

# %% [markdown]
# ## Exercise: three shapes
#
# Two pictures of 28x28 with one channel, patches of 7, tokens of 64 numbers with a class token, ten classes. Give
# the shapes of the patches as rows of numbers, of the tokens in the encoder, and of the scores: three tuples,
# without running anything.

# %%
patches_shape = None  # your answer, such as (2, 28, 28, 1)
tokens_shape = None
scores_shape = None

_ = checks.shapes((patches_shape, tokens_shape, scores_shape))

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# patches_shape = (2, 16, 49)  # 4 x 4 patches of 7 * 7 * 1 numbers
# tokens_shape = (2, 17, 64)  # one more: the class token
# scores_shape = (2, 10)
# ```
# </details>
#
# ## Summary
#
# - A picture becomes a row of patches, each patch a token, and every token keeps its length to the end.
# - Attention exchanges between tokens, the MLP works on each alone, and both add to a stream that runs through.
# - The class token's last value gives the scores; all of it is mostly matrix products, on a dictionary of arrays.
#
# **In the paper.** The same steps (Figure 1), only larger: ViT-B/16 has 196 patches of 16x16x3 pixels, D = 768
# and twelve blocks, 86.6 million parameters; pre-trained on 303 million pictures the largest model, ViT-H/14,
# reaches 88.55 % on ImageNet (Table 2). This one has 139 thousand and sees clothes.
