"""The Vision Transformer: blocks, encoder, and the whole model."""

import jax

from ..shapes import depth
from .attention import attention
from .dropout import dropout, split
from .head import attention_pool, head, pool, pre_logits
from .mlp import mlp
from .norms import layer_norm
from .patches import patch_embedding
from .positions import add_class_token, add_positions
from .resnet import stem


def encoder_block(
    p, x, *, gelu_form="tanh", epsilon=1e-6, rate=0.0, rng=None, out=None, chunk=None
):  # [B, N, D] -> [B, N, D]
    """Attention, then MLP, each on a normalised copy and added to its input (eqs. 2 and 3)."""
    rng_attention, rng_mlp = split(rng, 2)
    ln1 = layer_norm(p["LayerNorm_0"], x, epsilon)
    mha = attention(p["MultiHeadDotProductAttention_1"], ln1, out=out, chunk=chunk)
    middle = x + dropout(mha, rate, rng_attention)
    ln2 = layer_norm(p["LayerNorm_2"], middle, epsilon)
    y = mlp(p["MlpBlock_3"], ln2, gelu_form=gelu_form, rate=rate, rng=rng_mlp)
    if out is not None:
        out |= {"ln1": ln1, "mha": mha, "ln2": ln2, "mlp": y}
    return middle + y


def scan_blocks(p, x, *, rng=None, whole=None, **options):  # [B, N, D] -> [B, N, D]
    """The blocks as one loop over their parameters, stacked on a leading axis.

    XLA then compiles one block instead of L, and does not fuse the whole residual chain into
    transposed copies. Rematerialised, the backward pass computes each block again instead of
    storing its insides. Which is faster depends on the sizes; `engine_jax` chooses.
    `whole` makes a block's parameters of what `p` has of them, where that is a device's share.
    """

    def body(x, step):
        block, key = step
        return encoder_block(whole(block) if whole else block, x, rng=key, **options), None

    keys = None if rng is None else jax.random.split(rng, len(jax.tree.leaves(p)[0]))
    return jax.lax.scan(jax.checkpoint(body), x, (p, keys))[0]


def encoder(p, x, *, epsilon=1e-6, rate=0.0, rng=None, out=None, whole=None, **options):
    # [B, N, D] -> [B, N, D]
    """Add positions, apply the blocks in the order of their numbers, normalise.

    Stacked blocks (`params.stack_blocks`) are scanned, and `out` does not see inside them.
    """
    rng_positions, rng_blocks = split(rng, 2)
    options |= {"epsilon": epsilon, "rate": rate}
    if "posembed_input" in p:
        x = add_positions(p["posembed_input"], x)
    x = dropout(x, rate, rng_positions)
    if out is not None:
        out["tokens"] = x
    if "encoderblock" in p:
        x = scan_blocks(p["encoderblock"], x, rng=rng_blocks, whole=whole, **options)
    for i, key in enumerate(split(rng_blocks, depth(p))):
        inside = None if out is None else {}
        # Or XLA fuses the residual stream through all blocks and computes its sums again and again.
        x = jax.lax.optimization_barrier(x)
        x = encoder_block(p[f"encoderblock_{i}"], x, rng=key, out=inside, **options)
        if out is not None:
            out[f"block{i}"] = x
            out |= {f"block{i}_{name}": value for name, value in inside.items()}
    return layer_norm(p["encoder_norm"], x, epsilon)


def embed(p, images, out=None):  # [B, height, width, C] -> [B, h, w, D]
    """The grid of patch embeddings: of the image, or in a hybrid of its stem's feature map."""
    x = stem(p, images, out) if "conv_root" in p else images
    grid = patch_embedding(p["embedding"], x)
    if out is not None:
        out["patch_embedding"] = grid
    return grid


def vit(p, images, *, mean=False, out=None, **options):  # [B, height, width, C] -> [B, classes]
    """The whole model (eqs. 1 to 4): images in [-1, 1] to class scores.

    Options and the names that a dictionary `out` receives are those of the NumPy twin, but for
    what its `back` adds; `rng` is a JAX key. Under `jax.jit`, make `out` inside the function and
    return it. Gradients are for reverse mode (`jax.grad`, `jax.vjp`); attention's is written by
    hand and has no forward mode.
    """
    grid = embed(p, images, out)
    x = grid.reshape(len(grid), -1, grid.shape[-1])
    if "cls" in p:
        x = add_class_token(p["cls"], x)
    forms = {name: options[name] for name in ("gelu_form", "epsilon") if name in options}
    encoded = encoder(p["Transformer"], x, out=out, **options)
    if "MAPHead_0" in p:
        y = attention_pool(p["MAPHead_0"], encoded, **forms)
    else:
        y = pool(encoded, class_token="cls" in p and not mean)
    if "pre_logits" in p:
        y = pre_logits(p["pre_logits"], y)
    features = y
    if "head" in p:
        y = head(p["head"], y)
    if out is not None:
        out |= {"encoded": encoded, "pre_logits": features, "logits": y}
    return y
