# %% [markdown]
# # 5. Attention, backwards
#
# **Goal.** Derive the gradient of attention, line by line, and then in one go. After this you can write `back`
# for softmax in one line, and know which parts of the forward pass must be kept for it.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checks, figures, params, variants
from minivit.checks.judge import by_differences  # which lesson 3 builds
from minivit.in_numpy import attention, scaled_dot_product, softmax

rng = np.random.default_rng(5)

# %% [markdown]
# ## The contract
#
# Every function of `minivit.in_numpy` (its twin in JAX comes in lesson 8) returns its result and a function
# `back`. Given the gradient of a loss with respect to the *result* (the *upstream* gradient), `back` returns the
# gradient with respect to the *input*. To try a piece alone any loss will do; we take `(result * dy).sum()` with
# a random `dy`, so that the upstream gradient is `dy`. Numerically, a gradient is what happens to the loss when
# one entry moves a little up and a little down: `by_differences` does that with every entry (lesson 3).


# %%
def compare(name, mine, theirs):
    gap = np.abs(mine - theirs).max() / np.abs(theirs).max()
    print(f"{name:8} {'agrees' if gap < 1e-6 else 'DIFFERS'}")
    assert gap < 1e-6


# %% [markdown]
# ## A product
#
# For $Y = A B$, that is $Y_{ij} = \sum_k A_{ik} B_{kj}$, the entry $A_{ik}$ goes into all of row i of Y, each
# time with a factor $B_{kj}$. So
#
# $$dA_{ik} = \sum_j dY_{ij}\, B_{kj}, \quad\text{that is}\quad dA = dY\, B^\top, \qquad\text{and likewise}\quad dB = A^\top dY.$$

# %%
a, b = rng.standard_normal((3, 4)), rng.standard_normal((4, 2))
dy = rng.standard_normal((3, 2))
compare("dA", dy @ b.T, by_differences(lambda a: a @ b, a, dy))
compare("dB", a.T @ dy, by_differences(lambda b: a @ b, b, dy))

# %% [markdown]
# ## Softmax
#
# Let $a_i = e^{s_i} / Z$ with $Z = \sum_l e^{s_l}$. Score j is in the numerator of $a_j$ alone, and in
# everybody's Z:
#
# $$\frac{\partial a_i}{\partial s_j} = \frac{\delta_{ij} e^{s_i}}{Z} - \frac{e^{s_i} e^{s_j}}{Z^2} = a_i (\delta_{ij} - a_j) \qquad (\delta_{ij} = 1 \text{ if } i = j, \text{ else } 0)$$
#
# That is a matrix for each row of weights, the *Jacobian*. First build it, as the formula says; then never again.

# %%
s, da = rng.standard_normal((2, 6))
a, _ = softmax(s)
jacobian = np.diag(a) - np.outer(a, a)
compare("ds", jacobian.T @ da, by_differences(lambda s: softmax(s)[0], s, da))
print("rows of the Jacobian sum to zero:", np.allclose(jacobian.sum(1), 0))
figures.matrices([jacobian], ["how each weight answers each score"], "score j", "weight i")

# %% [markdown]
# Rows sum to zero: if all scores rise alike, nothing changes. Columns do too (the matrix is symmetric), because
# the weights always sum to one. So for an upstream gradient of ones the true gradient is zero: a test with ones
# cannot see a wrong sign or a lost factor, since these are zero as well.
#
# ## Exercise 1: softmax, backwards
#
# The chain rule says $ds_j = \sum_i da_i\, \partial a_i / \partial s_j = \sum_i da_i\, a_i (\delta_{ij} - a_j)$.
# Multiply it out: the matrix disappears. `weights` are the result of the forward pass, `dweights` their gradient,
# of any number of axes; return the gradient of the scores, in one line.


# %%
def my_softmax_back(weights, dweights):  # 2 x [..., N] -> [..., N]
    return None  # your answer


_ = checks.softmax_back(my_softmax_back)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_softmax_back(weights, dweights):
#     return weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
# ```
# </details>
#
# In words: each weight, times how far its own gradient lies above the weighted mean of all. The same numbers as
# with a matrix for each of many rows, at a fraction of the work:

# %%
many, back = softmax(rng.standard_normal((2, 3, 50, 50)))
dmany = rng.standard_normal(many.shape)
jacobians = many[..., :, None] * (np.eye(50) - many[..., None, :])  # [2, 3, 50, 50, 50]
compare("ds", back(dmany), np.einsum("...ij,...i->...j", jacobians, dmany))

# %% [markdown]
# ## Line by line
#
# Attention of one head is three lines. Backwards, they are read from the last to the first, and each line needs
# what went into it. Watch what must be kept: q, k, v and the weights; not the scores.

# %%
N, K = 5, 4
q, k, v = rng.standard_normal((3, N, K))
dy = rng.standard_normal((N, K))

scores = q @ k.T / np.sqrt(K)
weights, _ = softmax(scores)
y = weights @ v

dweights, dv = dy @ v.T, weights.T @ dy
dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
dq, dk = dscores @ k / np.sqrt(K), dscores.T @ q / np.sqrt(K)


def head(q, k, v):
    return softmax(q @ k.T / np.sqrt(K))[0] @ v


compare("dq", dq, by_differences(lambda q: head(q, k, v), q, dy))
compare("dk", dk, by_differences(lambda k: head(q, k, v), k, dy))
compare("dv", dv, by_differences(lambda v: head(q, k, v), v, dy))
figures.matrices([weights, dscores], ["weights", "gradient of the scores"], "key", "query")

# %% [markdown]
# The same lines serve all heads of all images once each `.T` becomes `.swapaxes(-1, -2)`, since `@` treats the
# leading axes as a batch. That is `scaled_dot_product` of this package, which also scales q first:

# %%
q, k, v, dy = rng.standard_normal((4, 2, 3, N, K))
_, _, back = scaled_dot_product(q, k, v)
for name, gradient, x, f in zip(
    ("dq", "dk", "dv"),
    back(dy),
    (q, k, v),
    (
        lambda q: scaled_dot_product(q, k, v)[0],
        lambda k: scaled_dot_product(q, k, v)[0],
        lambda v: scaled_dot_product(q, k, v)[0],
    ),
    strict=True,
):
    compare(name, gradient, by_differences(f, x, dy))

# %% [markdown]
# ## With the projections
#
# Around it lie two products with learned matrices: queries, keys and values from the tokens, and the mix of
# heads. Their gradients are the rule for products once more, with batch and tokens summed over, as in
# `dkernel = np.einsum("bnd,bhnk->dhk", x, dq)`. The token itself went into three products, so its gradient is a
# sum of three. (In float64, as all checks of gradients; `p | {...}` is p with one part replaced.)

# %%
p = params.initialise(variants.Variant("small", 4, 12, 24, 3, 1), 0, image_size=16, channels=1)
p = p["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
p = {n: {m: array.astype("float64") for m, array in part.items()} for n, part in p.items()}
x, dy = rng.standard_normal((2, 2, N, 12))
_, back = attention(p, x)
dp, dx = back(dy)
compare("tokens", dx, by_differences(lambda x: attention(p, x)[0], x, dy))


def with_query(kernel):
    return attention(p | {"query": p["query"] | {"kernel": kernel}}, x)[0]


compare("kernel", dp["query"]["kernel"], by_differences(with_query, p["query"]["kernel"], dy))
largest = {f"{n}/{m}": float(np.abs(g).max()) for n, part in dp.items() for m, g in part.items()}
assert largest["key/bias"] < 1e-12 < largest["query/bias"]
print("the gradient of the keys' bias is zero: why?")

# %% [markdown]
# <details><summary>Why</summary>
#
# A bias of the keys adds the same number, query times bias, to all scores of a row, and softmax does not see what
# is added to all scores alike. The keys' bias does nothing at all.
# </details>
#
# ## Exercise 2: find the fault
#
# Found in a ViT in NumPy on the web. What was left out? Repair it until the check says right.


# %%
def broken_softmax_back(weights, dweights):
    return weights * (1 - weights) * dweights


_ = checks.softmax_back(broken_softmax_back)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# It is the diagonal of the Jacobian: how each weight answers its own score. The terms beside it, $-a_i a_j$, are
# missing: raising a score lowers all other weights.
# </details>
#
# ## Summary
#
# - Products: dA = dY Bᵀ, dB = Aᵀ dY. Softmax: a (da - Σ a da), without a matrix.
# - Backwards, attention needs q, k, v and the weights: N² numbers a head, for long sequences (N > 3 K) more than
#   q, k and v.
# - Random upstream gradients and central differences find nearly every mistake; ones miss many in a softmax.
#
# **In the paper.** No backward pass is given: autodiff computes it. For the 577 tokens of a 384-pixel image a
# layer of ViT-B keeps 12 x 577 x 577 weights an image, 16 MB in float32. It grows with the fourth power of the
# side, which is why `in_jax` can also take some queries at a time and compute their weights again on the way
# back.
