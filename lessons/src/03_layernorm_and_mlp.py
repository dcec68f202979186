# %% [markdown]
# # 3. LayerNorm and MLP, forward and back
#
# **Goal.** Build the two pieces that work on each token alone, derive their gradients, and learn to check any
# gradient by differences. After this you can write LayerNorm's backward pass in three lines, and know why tests
# with ones see nothing.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checks, figures, in_numpy

rng = np.random.default_rng(3)

# %% [markdown]
# ## LayerNorm
#
# Every token is given mean 0 and variance 1 over its D features, then each feature is scaled and shifted by
# learned numbers:
#
# $$\mathrm{LN}(x) = \gamma\, \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta \qquad \mu = \frac1D \sum_d x_d \qquad \sigma^2 = \frac1D \sum_d (x_d - \mu)^2$$
#
# One token at a time, with loops:


# %%
def normalise_slowly(tokens, epsilon=1e-6):  # [N, D] -> [N, D]
    result = np.zeros_like(tokens)
    for n in range(len(tokens)):
        mean = sum(tokens[n]) / len(tokens[n])
        variance = sum((value - mean) ** 2 for value in tokens[n]) / len(tokens[n])
        for d in range(len(tokens[n])):
            result[n, d] = (tokens[n, d] - mean) / np.sqrt(variance + epsilon)
    return result


x = rng.normal(5, 3, (4, 6))
scale, bias = rng.standard_normal((2, 6))
deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
normal = (x - x.mean(-1, keepdims=True)) / deviation
np.testing.assert_allclose(normal, normalise_slowly(x), atol=1e-12)
y, back = in_numpy.layer_norm({"scale": scale, "bias": bias}, x)
np.testing.assert_allclose(y, normal * scale + bias, atol=1e-12)
print("means", normal.mean(-1).round(6), "variances", normal.var(-1).round(6))

# %% [markdown]
# ## Its gradient
#
# Scale and bias are easy: $d\gamma = \sum dy \cdot \hat x$, $d\beta = \sum dy$, summed over all tokens. For the
# input, let $\hat x$ be the normalised token, $g = dy \cdot \gamma$ its upstream gradient, and
# $s = \sqrt{\sigma^2 + \epsilon}$. Moving one entry of x moves the mean and the deviation of the whole row:
# $\partial \mu / \partial x_i = 1 / D$ and $\partial s / \partial x_i = \hat x_i / D$. So
#
# $$\frac{\partial \hat x_j}{\partial x_i} = \frac1s \Big(\delta_{ij} - \frac1D - \frac{\hat x_i \hat x_j}{D}\Big) \qquad (\delta_{ij} = 1 \text{ if } i = j, \text{ else } 0)$$
#
# and summed over j, each output with its $g_j$:
#
# $$dx_i = \frac1s \Big( g_i \;-\; \underbrace{\tfrac1D \textstyle\sum_j g_j}_{\text{through } \mu} \;-\; \hat x_i\, \underbrace{\tfrac1D \textstyle\sum_j g_j \hat x_j}_{\text{through } \sigma} \Big)$$
#
# In words: what would shift the row as a whole, or stretch it, is taken out of the gradient, since the result
# does not depend on it. By central differences, the judge of all derivations:


# %%
def by_differences(f, x, dy, step=1e-5):  # gradient of (f(x) * dy).sum() at x
    slope = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = x.copy()
        moved[place] += step
        up = (f(moved) * dy).sum()
        moved[place] -= 2 * step
        slope[place] = (up - (f(moved) * dy).sum()) / (2 * step)
    return slope


def norm(x):
    return in_numpy.layer_norm({"scale": scale, "bias": bias}, x)[0]


dy = rng.standard_normal(x.shape)
g = dy * scale
shift, stretch = g.mean(-1, keepdims=True), (g * normal).mean(-1, keepdims=True)
dx = (g - shift - normal * stretch) / deviation
np.testing.assert_allclose(dx, by_differences(norm, x, dy), atol=1e-8)
np.testing.assert_allclose(dx, back(dy)[1], atol=1e-12)
print("derived, by differences, and minivit's: the same")

# %% [markdown]
# ## How small a step?
#
# A difference has two errors. The curve is no line: with central differences that error falls with the *square*
# of the step. And the computer keeps 16 digits: subtracting two nearly equal numbers loses more of them, the
# smaller the step. The best step lies between, about 1e-5.

# %%
steps = 10.0 ** np.arange(-11, 0)
errors = [np.abs(by_differences(norm, x, dy, step) - dx).max() for step in steps]
single = x.astype("float32")
errors32 = [np.abs(by_differences(norm, single, dy, step) - dx).max() for step in steps]
assert 1e-7 < steps[np.argmin(errors)] < 1e-3
assert min(errors32) > 1e4 * min(errors)
series = {"float64": errors, "float32": errors32}
figures.lines(steps, series, "step of the difference", "largest error", log_x=True, log_y=True)

# %% [markdown]
# In float32 the best step leaves an error of 1e-5, where float64 leaves less than 1e-10; and at float64's best
# step, 1e-5, float32 is wrong by 0.02 where gradients reach 0.45. So gradients are checked in float64.
#
# ## Ones see nothing
#
# A tempting test takes the *sum* of the outputs as the loss, that is, an upstream gradient of ones. Without a
# learned scale a normalised row sums to zero whatever x is, so the true gradient is zero. Now forget the way
# through σ: for ones that term is $\hat x_i$ times the mean of $\hat x$, zero as well, and the test passes. So
# would a function that returns zeros.


# %%
def forgotten(d):  # without the way through the deviation
    return (d - d.mean(-1, keepdims=True)) / deviation


plain = {"scale": np.ones(6), "bias": np.zeros(6)}
_, plain_back = in_numpy.layer_norm(plain, x)
for name, d in (("ones", np.ones_like(x)), ("random numbers", dy)):
    error = np.abs(forgotten(d) - plain_back(d)[1]).max()
    print(f"{name}: wrong by {error:.1e}")
    assert (error < 1e-12) == (name == "ones")

# %% [markdown]
# ## Exercise 1: LayerNorm, backwards
#
# `dnormal` is the gradient of the normalised tokens (g above). Return that of the tokens.


# %%
def my_layer_norm_back(dnormal, normal, deviation):  # 2 x [..., D], [..., 1] -> [..., D]
    return None  # your answer


_ = checks.layer_norm_back(my_layer_norm_back)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_layer_norm_back(dnormal, normal, deviation):
#     shift = dnormal.mean(-1, keepdims=True)
#     stretch = (dnormal * normal).mean(-1, keepdims=True)
#     return (dnormal - shift - normal * stretch) / deviation
# ```
# </details>
#
# ## The MLP
#
# $$\mathrm{MLP}(x) = \mathrm{GELU}(x W_1 + b_1)\, W_2 + b_2$$
#
# The token is widened from D to M features (M = 4 D in the paper's models), bent, and narrowed again. GELU is x
# times the probability that a normal random number lies below x: zero far left, x far right, smooth between. The
# official code takes the approximation with tanh:
#
# $$\mathrm{GELU}(x) = x\, \Phi(x) \approx \tfrac12 x \big(1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\, x^3))\big)$$
#
# Its slope is $\Phi(x) + x\, \Phi'(x)$: by the product rule there are *two* terms.

# %%
line = np.linspace(-4, 4, 81)
value, back = in_numpy.gelu(line)
slope = back(np.ones_like(line))  # ones are fine here: each x has an output of its own
np.testing.assert_allclose(
    slope, by_differences(lambda x: in_numpy.gelu(x)[0], line, 1.0), atol=1e-8
)
exact, _ = in_numpy.gelu(line, "erf")
print(f"tanh and exact form differ by at most {np.abs(value - exact).max():.1e}")
assert slope.min() < 0
assert slope.max() > 1
figures.lines(line, {"GELU": value, "its slope": slope}, "x", "", marker="")

# %% [markdown]
# The slope is below zero left of -0.75 and above one right of about 0.75: GELU is not monotonic. `mlp` is then
# two products with GELU between, and its way back is theirs in reverse (lesson 5 derives the product's):

# %%
p = {
    "Dense_0": {"kernel": rng.standard_normal((6, 24)), "bias": rng.standard_normal(24)},
    "Dense_1": {"kernel": rng.standard_normal((24, 6)), "bias": rng.standard_normal(6)},
}
y, back = in_numpy.mlp(p, x)
dp, dx = back(dy)
difference = by_differences(lambda x: in_numpy.mlp(p, x)[0], x, dy)
np.testing.assert_allclose(dx, difference, rtol=1e-6, atol=1e-6)
print({name: {n: a.shape for n, a in part.items()} for name, part in dp.items()})

# %% [markdown]
# ## Exercise 2: find the fault
#
# Found in a ViT in NumPy on the web: the forward pass is right, and this is its slope. The model trains, a little
# worse. What was forgotten? Repair it.


# %%
def broken_gelu_slope(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2)


_ = checks.gelu_slope(broken_gelu_slope)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# The second term is x times the derivative of the tanh, and by the chain rule that still needs the slope of what
# is inside it: `np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)`. At x = 0 nobody notices.
# </details>
#
# ## Summary
#
# - LayerNorm's gradient is the upstream one with shift and stretch of the row taken out, over the deviation.
# - GELU's slope has two terms; it goes below zero and above one.
# - Judge gradients by central differences: float64, step 1e-5, random upstream numbers.
#
# **In the paper.** LayerNorm stands *before* attention and MLP (pre-norm), and once at the end. ε is 1e-6 in the
# official code; other implementations take 1e-5 or 1e-12, which a loaded checkpoint notices. In ViT-B the MLPs
# hold 56.7 of 86.6 million parameters.
