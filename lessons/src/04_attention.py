# %% [markdown]
# # 4. Attention
#
# **Goal.** Build multi-head self-attention from a loop over five tokens to the form that runs, and know what each
# piece is for. After this you can write softmax and attention yourself, and have them checked.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checks, figures, params, variants
from minivit.in_numpy import attention, scaled_dot_product, softmax

rng = np.random.default_rng(3)

# %% [markdown]
# ## One query, five tokens
#
# Each token asks a question (its *query*), offers an answer (its *value*) and says what it can answer (its
# *key*). A query takes the mean of all values, weighted by how well each key fits. Equations 5 to 7 of the
# paper's appendix A, for one head:
#
# $$[q, k, v] = z U_{qkv} \qquad A = \mathrm{softmax}(q k^\top / \sqrt{K}) \qquad \mathrm{SA}(z) = A v$$
#
# Here z are N tokens of D numbers, and $U_{qkv}$ three learned matrices $D \times K$ side by side (the code adds
# biases, which the paper leaves out). Softmax turns a row of scores into weights that are positive and sum to
# one:
#
# $$\mathrm{softmax}(s)_j = \frac{e^{s_j}}{\sum_i e^{s_i}}$$
#
# Adding the same number to all scores changes nothing, since it cancels; so the largest is subtracted first, and
# no exponential overflows. With loops, for five tokens and K = 4, with queries, keys and values drawn at random:

# %%
N, K = 5, 4
q, k, v = rng.standard_normal((3, N, K))


def attend_slowly(q, k, v):  # 3 x [N, K] -> [N, K], weights [N, N]
    mixed, weights = np.zeros_like(v), np.zeros((len(q), len(k)))
    for i in range(len(q)):
        scores = np.array([q[i] @ k[j] for j in range(len(k))]) / np.sqrt(K)
        exponentials = np.exp(scores - scores.max())
        weights[i] = exponentials / exponentials.sum()
        for j in range(len(v)):
            mixed[i] += weights[i, j] * v[j]
    return mixed, weights


slow, slow_weights = attend_slowly(q, k, v)
print(np.round(slow_weights, 2))
print("rows sum to", slow_weights.sum(1))

# %% [markdown]
# ## As matrices
#
# All queries times all keys is one product, and so is the weighted mean. Rows are queries, columns are keys.

# %%
scores = q @ k.T / np.sqrt(K)
weights, _ = softmax(scores)  # the result, and the way back that lesson 5 is about
mixed = weights @ v
np.testing.assert_allclose(mixed, slow, atol=1e-12)
np.testing.assert_allclose(weights, slow_weights, atol=1e-12)
figures.matrices([scores, weights], ["scores", "weights: rows sum to one"], "key", "query")

# %% [markdown]
# ## Why divide by √K
#
# The product of two random vectors of K numbers, of mean 0 and variance 1, has standard deviation √K. Without the
# division wider heads have larger scores, softmax turns almost into a maximum, and its gradient becomes almost
# zero. The entropy of a row, $-\sum_j a_j \log a_j$, tells: log N when all weights are equal (dotted: log 50), 0
# when one key takes all.

# %%
widths, entropy = [1, 4, 16, 64, 256], {"divided by √K": [], "not divided": []}
for width in widths:
    a, b = rng.standard_normal((2, 200, 50, width))
    for name, scale in (("divided by √K", width**-0.5), ("not divided", 1.0)):
        w, _ = softmax(a @ b.swapaxes(1, 2) * scale)
        entropy[name].append(-(w * np.log(w + 1e-30)).sum(-1).mean())  # 0 log 0 counts as 0
assert entropy["not divided"][-1] < 0.5 < 3 < entropy["divided by √K"][-1]
figures.lines(
    widths, entropy, "head width K", "entropy of the weights (nats)", log_x=True, level=np.log(50)
)

# %% [markdown]
# ## Several heads
#
# One softmax can only ask one question. So there are H heads; each projects all D features to queries, keys and
# values of its own, of K = D / H numbers, and a last product mixes what the heads found (equation 8). In arrays a
# head is one more batch axis: the projections of all heads `[B, N, H * K]` are read as `[B, N, H, K]` and turned
# to `[B, H, N, K]`.
#
# Equation 8 lays the heads' results side by side and multiplies by one matrix. That is the same as multiplying
# each head by its own rows of the matrix and adding, as the loop below does. `scaled_dot_product` is the two
# products with softmax between.

# %%
H, D = 3, 24
small = variants.Variant("small", patch=4, width=D, mlp=48, heads=H, blocks=1)
p = params.initialise(small, 0, image_size=16, channels=1)
p = p["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]  # the official names
for name in ("query", "key", "value", "out"):
    print(name, p[name]["kernel"].shape)

x = rng.standard_normal((2, N, D))
y, _ = attention(p, x)


def by_hand(p, x):  # [B, N, D] -> [B, N, D]
    heads = []
    for h in range(H):
        q, k, v = (x @ p[n]["kernel"][:, h] + p[n]["bias"][h] for n in ("query", "key", "value"))
        weights, _ = softmax(q @ k.swapaxes(1, 2) / np.sqrt(D // H))
        heads.append(weights @ v @ p["out"]["kernel"][h])
    return sum(heads) + p["out"]["bias"]


def split_heads(part):  # query, key or value -> [B, H, N, K]
    projected = x @ part["kernel"].reshape(D, D) + part["bias"].reshape(D)  # [B, N, H*K]
    return projected.reshape(2, N, H, D // H).swapaxes(1, 2)


q, k, v = (split_heads(p[name]) for name in ("query", "key", "value"))
mixed, weights, _ = scaled_dot_product(q, k, v)
joined = mixed.swapaxes(1, 2).reshape(2, N, D)  # the heads side by side again
all_at_once = joined @ p["out"]["kernel"].reshape(D, D) + p["out"]["bias"]


np.testing.assert_allclose(by_hand(p, x), y, atol=1e-6)  # the parameters are float32
np.testing.assert_allclose(all_at_once, y, atol=1e-6)
print("a loop over heads and all heads at once agree")

# %% [markdown]
# ## A set, not a row
#
# Exchange two tokens, and the outputs are exchanged and otherwise the same: attention does not know about order.
# It is *equivariant* under permutations; positions must come with the tokens (lesson 2).

# %%
order = rng.permutation(N)
turned, _ = attention(p, x[:, order])
np.testing.assert_allclose(turned, y[:, order], atol=1e-6)
print("attention of the shuffled tokens is the shuffled attention")

# %% [markdown]
# ## Exercise 1: softmax
#
# Along the last axis, for any shape. It must also work for large scores, where `np.exp(1000)` overflows to
# infinity.


# %%
def my_softmax(s):  # [..., N] -> [..., N]
    return None  # your answer


_ = checks.softmax(my_softmax)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_softmax(s):
#     e = np.exp(s - s.max(-1, keepdims=True))
#     return e / e.sum(-1, keepdims=True)
# ```
# </details>
#
# ## Exercise 2: attention of all heads at once
#
# `q`, `k` and `v` are `[B, H, N, K]`. Two products with your `my_softmax` between them; no loop.


# %%
def my_attention(q, k, v):  # 3 x [B, H, N, K] -> [B, H, N, K]
    return None  # your answer


_ = checks.attention(my_attention)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_attention(q, k, v):
#     return my_softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
# ```
# </details>
#
# ## Exercise 3: find the fault
#
# Found in a ViT in NumPy on the web: it survives every test with one row of scores. What does the check say, and
# why?


# %%
def broken_softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum(-1, keepdims=True)


_ = checks.softmax(broken_softmax)
# %% [markdown]
# <details><summary>What is wrong</summary>
#
# The maximum is taken over the whole array, not over each row. A row whose scores all lie far below another row's
# maximum underflows to zeros, and 0 / 0 gives `nan`. `scaled_dot_product` of this package subtracts per row.
# </details>

# %% [markdown]
# ## Summary
#
# - Attention is a weighted mean of values; the weights are the softmax of queries times keys over √K.
# - Heads are one more batch axis, and a last product mixes them.
# - It sees a set: permuting tokens permutes outputs, nothing else.
#
# **In the paper.** ViT-B has 12 heads of K = 64, ViT-H 16 of 80; with 197 tokens each layer of B computes 12 x
# 197 x 197 weights for one image. The division by √K is from "Attention Is All You Need" (2017).
