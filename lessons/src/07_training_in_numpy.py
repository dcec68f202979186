# %% [markdown]
# # 7. Training in NumPy
#
# **Goal.** Train a Vision Transformer with gradients derived by hand, an optimiser of a few lines, and two checks
# that find most mistakes in the first second. After this you can read any training loop, and know what to look at
# when it does not learn.

# %%
# %matplotlib inline
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # so that it runs from a clone, without installing

import numpy as np

from minivit import checks, datasets, figures, in_numpy, optim, params, variants
from minivit.engine_numpy import NumPyEngine, loss_and_gradient
from minivit.params import flatten, tree_map

fashion = datasets.load("fashion-mnist")
p = params.initialise(variants.parse("tiny"), 0, image_size=28, channels=1, classes=10)

# %% [markdown]
# ## The loss
#
# The head gives a score $s_k$ for each class, softmax makes probabilities of them, and the loss is minus the
# logarithm of the right one:
#
# $$\ell = -\log \frac{e^{s_y}}{\sum_k e^{s_k}} \qquad \frac{\partial \ell}{\partial s_k} = p_k - [k = y]$$
#
# The gradient is the simplest of the whole model: what was said, minus what is right.

# %%
scores = np.random.default_rng(0).standard_normal((4, 10))
targets = in_numpy.smooth_labels([3, 0, 9, 3], 10, dtype="float64")
losses, back = in_numpy.softmax_cross_entropy(scores, targets)
probabilities, _ = in_numpy.softmax(scores)
np.testing.assert_allclose(back(np.ones(4)), probabilities - targets, atol=1e-12)
print("losses", losses.round(2))

# %% [markdown]
# ## First check: log K
#
# The head starts at zero, so all classes are equally likely, and the loss must be $\log K$: 2.303 for ten
# classes. Anything else before the first step is a mistake in the loss or in the head. (It is blind to the rest:
# with a head of zeros any pictures and any labels give log K, and only the head has a gradient yet. Hence the
# second check.)


# %%
def batch_of(indices):
    return {
        "images": fashion.train_images[indices],
        "targets": in_numpy.smooth_labels(fashion.train_labels[indices], 10),
    }


loss, grads, accuracy = loss_and_gradient(p, batch_of(np.arange(64)))
assert abs(loss - np.log(10)) < 1e-5
print(f"loss {loss:.4f}, log 10 is {np.log(10):.4f}; {len(flatten(grads))} arrays of gradients")

# %% [markdown]
# ## Adam, by hand
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1) g \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \qquad p \leftarrow p - \eta\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}$$
#
# A mean of past gradients, divided by their usual size: every weight moves by at most about the learning rate,
# however large or small its gradient is. Both means start at zero and are too small in the first steps; the
# divisions by $1 - \beta^t$ mend that.
#
# ## Exercise 1: one step of Adam
#
# β₁ = 0.9, β₂ = 0.999, ε = 1e-8; `step` counts from 1. Return the new weights and both means.


# %%
def my_adam(p, g, mean, square, step, rate):  # 4 x [n] -> 3 x [n]
    return None  # your answer


_ = checks.adam(my_adam)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_adam(p, g, mean, square, step, rate):
#     mean = 0.9 * mean + 0.1 * g
#     square = 0.999 * square + 0.001 * g * g
#     m, v = mean / (1 - 0.9**step), square / (1 - 0.999**step)
#     return p - rate * m / (np.sqrt(v) + 1e-8), mean, square
# ```
# </details>
#
# ## Exercise 2: find the fault
#
# Often seen, and it trains. What are its first steps like?


# %%
def broken_adam(p, g, mean, square, step, rate):
    mean = 0.9 * mean + 0.1 * g
    square = 0.999 * square + 0.001 * g * g
    return p - rate * mean / (np.sqrt(square) + 1e-8), mean, square


_ = checks.adam(broken_adam)

# %% [markdown]
# <details><summary>What is wrong</summary>
#
# The corrections are missing. In the first step the mean is a tenth of the gradient and the root of the square a
# 32nd of its size: the step is three times too large. After a dozen steps it is six times, after a thousand still
# a quarter too large: just where training is most fragile.
# </details>
#
# ## Second check: learn one batch by heart
#
# A model of 139 thousand weights can remember 16 pictures. If it cannot, some gradient is wrong, or the optimiser
# is. Here with `optim.update`, which is Adam with decoupled weight decay on trees of arrays:

# %%
few, learner = batch_of(np.arange(16)), tree_map(np.copy, p)
state, remembered = optim.start(learner), []
for _ in range(60):
    loss, grads, accuracy = loss_and_gradient(learner, few)
    remembered.append(loss)
    learner, state = optim.update(learner, grads, state, 2e-3)
assert accuracy == 1
assert remembered[-1] < 0.1
print(f"loss {remembered[0]:.2f} -> {remembered[-1]:.3f}, {accuracy:.0%} of the 16 right")
figures.lines(range(60), {"16 pictures, by heart": remembered}, "step", "loss (nats)", marker="")

# %% [markdown]
# ## The learning rate
#
# A Transformer's first steps are its most dangerous: Adam knows nothing about the gradients' size yet. So the
# rate climbs from zero (*warm-up*), and then falls along a cosine, so that the last steps settle.
#
# $$\eta_t = \eta\; \min\!\Big(1, \frac{t}{w}\Big) \cdot \tfrac12 \Big(1 + \cos \pi\, \frac{\max(0, t - w)}{T - w}\Big)$$
#
# ## Exercise 3: the schedule
#
# Steps count from 0; after `total` the rate stays zero.


# %%
def my_cosine(step, base, warmup, total):  # -> learning rate
    return None  # your answer


_ = checks.cosine(my_cosine)

# %% [markdown]
# <details><summary>A solution</summary>
#
# ```python
# def my_cosine(step, base, warmup, total):
#     progress = np.clip((step - warmup) / (total - warmup), 0, 1)
#     return base * 0.5 * (1 + np.cos(np.pi * progress)) * min(1, step / warmup)
# ```
# </details>
#
# ## Training
#
# Everything together: shuffled batches, the schedule, the gradient (all arrays as one vector) clipped to length
# 1, weight decay. `NumPyEngine` does what the cell above did, a thread for each core with its share of the batch.
# 150 steps of 128 pictures take a few seconds:

# %%
steps, rows = 150, []
engine = NumPyEngine(p, weight_decay=0.05, clip=1.0)
for step in range(steps):
    rate = optim.schedule(step, base=3e-3, total=steps, warmup=15)
    batch = batch_of(datasets.batch_indices(60_000, 128, 0, step))
    loss, accuracy = engine.step(step, batch, rate)
    rows.append({"step": step, "loss": loss, "accuracy": accuracy, "learning_rate": rate})
logits = engine.logits(fashion.test_images[:2000])
right = (logits.argmax(-1) == fashion.test_labels[:2000]).mean()
rows[-1] |= {"test_accuracy": right}
assert right > 0.7
print(f"{right:.3f} of 2,000 test pictures")
figures.curves(rows)

# %% [markdown]
# The loss is noisy, since each batch is another. `python -m minivit.train --tiny --backend numpy` goes on to 87 %
# in a minute and a half.
#
# ## Look at the mistakes
#
# A number says how often, a picture says what. Wrong answers are red:

# %%
guesses = logits[:20].argmax(-1)
figures.examples(fashion.test_images[:20], fashion.test_labels[:20], guesses, fashion.classes)

# %% [markdown]
# ## Summary
#
# - Before training: the loss is log K. After seconds: one batch is learned by heart.
# - Adam moves each weight by at most about the learning rate; warm-up and cosine say how far, when.
# - The gradient of softmax and cross-entropy together is p minus y; from there `back` of each piece does the
#   rest.
#
# **In the paper.** Pre-training: Adam, batches of 4096, 10,000 steps of warm-up; weight decay 0.1 on JFT, 0.03 on
# ImageNet-21k, 0.3 on ImageNet; decay linear, on ImageNet cosine (Table 3). Fine-tuning: SGD with momentum 0.9,
# batches of 512, cosine, no weight decay, gradients clipped at 1 (Table 4). `minivit.recipes` has both tables as
# data.
