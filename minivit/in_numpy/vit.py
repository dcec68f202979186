"""The Vision Transformer: blocks, encoder, and the whole model."""

from ..shapes import depth
from .attention import attention
from .dropout import dropout
from .head import attention_pool, head, pool, pre_logits
from .mlp import mlp
from .norms import layer_norm
from .patches import patch_embedding
from .positions import add_class_token, add_positions
from .resnet import stem


def encoder_block(p, x, *, gelu_form="tanh", epsilon=1e-6, rate=0.0, rng=None, out=None):
    # [B, N, D] -> [B, N, D]
    """Attention, then MLP, each on a normalised copy and added to its input (eqs. 2 and 3).

    The official names count the layers of a block: norm 0, attention 1, norm 2, MLP 3.
    """
    ln1, back_norm1 = layer_norm(p["LayerNorm_0"], x, epsilon)
    mha, back_attention = attention(p["MultiHeadDotProductAttention_1"], ln1, out=out)
    kept, back_drop = dropout(mha, rate, rng)
    middle = x + kept
    ln2, back_norm2 = layer_norm(p["LayerNorm_2"], middle, epsilon)
    y, back_mlp = mlp(p["MlpBlock_3"], ln2, gelu_form=gelu_form, rate=rate, rng=rng)
    if out is not None:
        out |= {"ln1": ln1, "mha": mha, "ln2": ln2, "mlp": y}

    def back(dy):
        dmlp, dln2 = back_mlp(dy)
        dnorm2, dmiddle = back_norm2(dln2)
        dmiddle = dmiddle + dy
        dattention, dln1 = back_attention(back_drop(dmiddle))
        dnorm1, dx = back_norm1(dln1)
        dp = {"LayerNorm_0": dnorm1, "MultiHeadDotProductAttention_1": dattention}
        return dp | {"LayerNorm_2": dnorm2, "MlpBlock_3": dmlp}, dx + dmiddle

    return middle + y, back


def encoder(p, x, *, epsilon=1e-6, rate=0.0, rng=None, out=None, backward=True, **options):
    # [B, N, D] -> [B, N, D]
    """Add positions, apply the blocks in the order of their numbers, normalise.

    Without `backward` there is no backward pass, and each block's intermediates are freed.
    """
    backs, seen = [], []
    if "posembed_input" in p:
        x, back_positions = add_positions(p["posembed_input"], x)
    x, back_drop = dropout(x, rate, rng)
    if out is not None:
        out["tokens"] = x
    for i in range(depth(p)):
        inside = None if out is None else {}
        x, back_block = encoder_block(
            p[f"encoderblock_{i}"], x, epsilon=epsilon, rate=rate, rng=rng, out=inside, **options
        )
        if backward:
            backs.append(back_block)
            seen.append(inside)
        del back_block
        if out is not None:
            out[f"block{i}"] = x
            out |= {f"block{i}_{name}": value for name, value in inside.items()}
    y, back_norm = layer_norm(p["encoder_norm"], x, epsilon)

    def back(dy):
        dp = {}
        dp["encoder_norm"], dx = back_norm(dy)
        for i in reversed(range(len(backs))):
            dp[f"encoderblock_{i}"], dx = backs[i](dx)
            if out is not None:
                out[f"block{i}_attention_gradient"] = seen[i]["attention_gradient"]
        dx = back_drop(dx)
        if "posembed_input" in p:
            dp["posembed_input"], dx = back_positions(dx)
        return dp, dx

    return y, back if backward else None


def embed(p, images, out=None):  # [B, height, width, C] -> [B, h, w, D]
    """The grid of patch embeddings: of the image, or in a hybrid of its stem's feature map."""
    x, hybrid = images, "conv_root" in p
    if hybrid:
        x, back_stem = stem(p, images, out)
    grid, back_embedding = patch_embedding(p["embedding"], x)
    if out is not None:
        out["patch_embedding"] = grid

    def back(dgrid):
        dembedding, dx = back_embedding(dgrid)
        dstem, dx = back_stem(dx) if hybrid else ({}, dx)
        return dstem | {"embedding": dembedding}, dx

    return grid, back


def vit(p, images, *, mean=False, out=None, **options):  # [B, height, width, C] -> [B, classes]
    """The whole model (eqs. 1 to 4): images in [-1, 1] to class scores.

    The parameters carry the architecture. Without `cls`, or with `mean`, the tokens are averaged,
    or pooled by `MAPHead_0`; without `posembed_input` order is invisible; without `head` the
    result is the features [B, D].
    Options: gelu_form "tanh" or "erf"; epsilon of LayerNorm; rate and rng of dropout; `backward`.
    `out` receives by name patch_embedding, tokens, block{i} and its _ln1, _attention, _mha, _ln2,
    _mlp, then encoded, pre_logits, logits; and from `back` block{i}_attention_gradient.
    """
    forms = {name: options[name] for name in ("gelu_form", "epsilon") if name in options}
    grid, back_embed = embed(p, images, out)
    x = grid.reshape(len(grid), -1, grid.shape[-1])
    if "cls" in p:
        x, back_cls = add_class_token(p["cls"], x)
    encoded, back_encoder = encoder(p["Transformer"], x, out=out, **options)
    if "MAPHead_0" in p:
        y, back_pool = attention_pool(p["MAPHead_0"], encoded, **forms)
    else:
        y, back_pool = pool(encoded, class_token="cls" in p and not mean)
    if "pre_logits" in p:
        y, back_pre_logits = pre_logits(p["pre_logits"], y)
    features = y
    if "head" in p:
        y, back_head = head(p["head"], y)
    if out is not None:
        out |= {"encoded": encoded, "pre_logits": features, "logits": y}

    def back(dy):
        dp = {}
        if "head" in p:
            dp["head"], dy = back_head(dy)
        if "pre_logits" in p:
            dp["pre_logits"], dy = back_pre_logits(dy)
        if "MAPHead_0" in p:
            dp["MAPHead_0"], dy = back_pool(dy)
        else:
            dy = back_pool(dy)
        dp["Transformer"], dx = back_encoder(dy)
        if "cls" in p:
            dp["cls"], dx = back_cls(dx)
        dembed, dimages = back_embed(dx.reshape(grid.shape))
        return dp | dembed, dimages

    return y, back
