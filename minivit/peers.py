"""Other implementations for `minivit.bench`, where they are installed; nothing else uses them.

`pip install timm vit-pytorch flax` brings them. Each gets the same sizes, the same batch, AdamW,
all cores, and the data ready on its device.
"""

from functools import partial
from importlib.util import find_spec

import numpy as np

from .contestants import CONFIGS, OPTIMISER, RATE


def sizes(task):  # -> variant, side, channels, classes
    """What every peer asks for under its own names."""
    return CONFIGS[task.config][:4]


def torch_calls(task, model):
    """Steps or forward passes of a PyTorch module."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    images, labels = task.arrays()
    x = torch.tensor(images.transpose(0, 3, 1, 2) / 127.5 - 1, dtype=torch.float32, device=device)
    y = torch.tensor(labels, device=device)
    half = torch.autocast(device, torch.bfloat16, enabled=task.dtype == "bfloat16")
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, **OPTIMISER)

    def train(count):
        model.train()
        for _ in range(count):
            optimiser.zero_grad(set_to_none=True)
            with half:
                loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
        return loss.item()  # waits

    def forward(count):
        model.eval()
        with torch.inference_mode(), half:
            for _ in range(count):
                scores = model(x)
        return scores[0, 0].item()

    return train if task.what == "train" else forward


def timm(task, *, compiled=False):
    """timm's VisionTransformer, in PyTorch's eager mode or compiled."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    variant, side, channels, classes = sizes(task)
    model = VisionTransformer(
        img_size=side,
        patch_size=variant.patch,
        in_chans=channels,
        num_classes=classes,
        embed_dim=variant.width,
        depth=variant.blocks,
        num_heads=variant.heads,
        mlp_ratio=variant.mlp / variant.width,
    )
    return torch_calls(task, torch.compile(model) if compiled else model)


def vit_pytorch(task):
    """lucidrains' ViT."""
    from vit_pytorch import ViT

    variant, side, channels, classes = sizes(task)
    model = ViT(
        image_size=side,
        patch_size=variant.patch,
        channels=channels,
        num_classes=classes,
        dim=variant.width,
        depth=variant.blocks,
        heads=variant.heads,
        dim_head=variant.width // variant.heads,
        mlp_dim=variant.mlp,
    )
    return torch_calls(task, model)


def flax_model(variant, classes, dtype):
    """A ViT of flax's own layers, blocks unrolled as in the official code."""
    import jax.numpy as jnp
    from flax import linen as nn

    layer = {"dtype": dtype}

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(epsilon=1e-6, **layer)(x)
            x = x + nn.MultiHeadDotProductAttention(variant.heads, **layer)(y, y)
            y = nn.LayerNorm(epsilon=1e-6, **layer)(x)
            y = nn.gelu(nn.Dense(variant.mlp, **layer)(y))
            return x + nn.Dense(variant.width, **layer)(y)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, images):
            window = (variant.patch, variant.patch)
            x = nn.Conv(variant.width, window, window, padding="VALID", **layer)(images)
            x = x.reshape(len(x), -1, variant.width)
            token = self.param("cls", nn.initializers.zeros, (1, 1, variant.width))
            x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)).astype(x.dtype), x], 1)
            shape = (1, x.shape[1], variant.width)
            x = x + self.param("positions", nn.initializers.normal(0.02), shape).astype(x.dtype)
            for _ in range(variant.blocks):
                x = Block()(x)
            return nn.Dense(classes)(nn.LayerNorm(epsilon=1e-6, **layer)(x)[:, 0])

    return Model()


def flax(task):
    """It, jitted on one device as the official code does on a CPU."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    from . import optim

    variant, _, _, classes = sizes(task)
    model = flax_model(variant, classes, task.dtype)
    batch = task.training_batch()
    images = jnp.asarray(batch["images"] / 127.5 - 1, "float32")
    targets = jnp.asarray(batch["targets"])
    params = model.init(jax.random.key(0), images)
    # Packed leaves, as in minivit: the same optimiser for both, at its best.
    flat, split = ravel_pytree(params)

    def loss(flat):
        logits = model.apply(split(flat), images).astype("float32")
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(flat, state):
        value, grads = jax.value_and_grad(loss)(flat["w"])
        flat, state = optim.update(flat, {"w": grads}, state, RATE, **OPTIMISER)
        return flat, state, value

    apply = jax.jit(lambda flat: model.apply(split(flat), images))
    kept = [{"w": flat}, optim.start({"w": flat})]

    def train(count):
        for _ in range(count):
            *kept[:], value = step(*kept)
        return float(value)

    def forward(count):
        for _ in range(count):
            scores = apply(flat)
        return float(np.asarray(scores)[0, 0])

    return train if task.what == "train" else forward


NEEDS = {"timm": ("torch", "timm"), "vit-pytorch": ("torch", "vit_pytorch"), "flax": ("flax",)}


def absent(name):  # of a contestant -> names of packages
    """What would have to be installed for it."""
    needed = NEEDS.get(name.removesuffix(" compiled"), ())
    return [module.replace("_", "-") for module in needed if find_spec(module) is None]


PEERS = {
    "timm": timm,
    "timm compiled": partial(timm, compiled=True),
    "vit-pytorch": vit_pytorch,
    "flax": flax,
}
