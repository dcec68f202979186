"""How other implementations name and lay out the same weights.

Each dialect is a table of names beside the official ones; the layout of an array follows from what
it is. A flat dictionary {name: array} goes in, and one under the official names comes out, or the
reverse. Only NumPy is needed.
"""

import re

import numpy as np

from .params import flatten, natural_order, stack_blocks, unflatten, unstack_blocks
from .variants import SIZES

ATTENTION = "MultiHeadDotProductAttention_1"
PARTS = ("query", "key", "value")

# flax numbers the layers of a class, the official files all layers of a block.
LINEN = {
    "LayerNorm_2": "LayerNorm_1",
    ATTENTION: "MultiHeadDotProductAttention_0",
    "MlpBlock_3": "MlpBlock_0",
}
# Official layer of a block, and outside the blocks, beside that of a PyTorch state dict.
TIMM = {
    "block": "blocks.{}.",
    "LayerNorm_0": "norm1",
    "LayerNorm_2": "norm2",
    f"{ATTENTION}/query": "attn.query",
    f"{ATTENTION}/key": "attn.key",
    f"{ATTENTION}/value": "attn.value",
    f"{ATTENTION}/out": "attn.proj",
    "MlpBlock_3/Dense_0": "mlp.fc1",
    "MlpBlock_3/Dense_1": "mlp.fc2",
    "embedding": "patch_embed.proj",
    "cls": "cls_token",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "Transformer/encoder_norm": "norm",
    "pre_logits": "pre_logits.fc",
    "head": "head",
}
HUGGINGFACE = TIMM | {
    "block": "encoder.layer.{}.",
    "LayerNorm_0": "layernorm_before",
    "LayerNorm_2": "layernorm_after",
    f"{ATTENTION}/query": "attention.attention.query",
    f"{ATTENTION}/key": "attention.attention.key",
    f"{ATTENTION}/value": "attention.attention.value",
    f"{ATTENTION}/out": "attention.output.dense",
    "MlpBlock_3/Dense_0": "intermediate.dense",
    "MlpBlock_3/Dense_1": "output.dense",
    "embedding": "embeddings.patch_embeddings.projection",
    "cls": "embeddings.cls_token",
    "Transformer/posembed_input/pos_embedding": "embeddings.position_embeddings",
    "Transformer/encoder_norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
}
DINOV2 = HUGGINGFACE | {
    "LayerNorm_0": "norm1",
    "LayerNorm_2": "norm2",
    "MlpBlock_3/Dense_0": "mlp.fc1",
    "MlpBlock_3/Dense_1": "mlp.fc2",
}
# What the models were trained with, where shapes cannot tell.
EXPECTS = {
    "official": {"gelu_form": "tanh", "epsilon": 1e-6},
    "linen": {"gelu_form": "tanh", "epsilon": 1e-6},
    "big_vision": {"gelu_form": "tanh", "epsilon": 1e-6},
    "timm": {"gelu_form": "erf", "epsilon": 1e-6},
    "huggingface": {"gelu_form": "erf", "epsilon": 1e-12},
    "dinov2": {"gelu_form": "erf", "epsilon": 1e-6},
}
TABLES = {"timm": TIMM, "huggingface": HUGGINGFACE, "dinov2": DINOV2}


def recognise(names):  # -> a key of EXPECTS
    """Which dialect a set of names is written in."""
    text = "\n".join(names)
    if "blocks.0.attn." in text:
        return "timm"
    if "encoder.layer.0." in text:
        return "dinov2" if "encoder.layer.0.norm1" in text else "huggingface"
    stacked = re.search(r"Transformer/encoderblock/", text)
    if stacked or re.search(r"^(params/)?(.*/)?(?<!posembed_input/)pos_embedding$", text, re.M):
        return "big_vision"
    if "MlpBlock_0" in text and not re.search(r"MAPHead_0/.*MlpBlock_3", text):
        return "big_vision" if "params/" in text or "MAPHead_0" in text else "linen"
    if "embedding/kernel" in text:
        return "official"
    raise ValueError("the names are of no Vision Transformer that minivit knows")


def to_official(flat, dialect, heads=None):  # {name: array} -> {name: array}
    """Arrays under the official names and in the official layout."""
    if dialect in TABLES:
        return from_torch(flat, TABLES[dialect], heads)
    flat = strip_prefixes(flat)
    flat = flatten(unstack_blocks(unflatten(flat))) if dialect == "big_vision" else flat
    if dialect != "official":
        flat = {renumber(name, {v: k for k, v in LINEN.items()}): a for name, a in flat.items()}
    table = "Transformer/posembed_input/pos_embedding"
    for old in ("pos_embedding", "Transformer/pos_embedding"):
        if old in flat:
            positions = flat.pop(old)
            if "cls" in flat:  # the class token joins later there: it has no position to add
                zero = np.zeros_like(positions[:, : flat["cls"].shape[1]])
                positions = np.concatenate([zero, positions], axis=1)
            flat[table] = positions
    return flat


def from_official(flat, dialect):  # {name: array} -> {name: array}
    """The reverse of `to_official`; "big_vision-scan" stacks the blocks."""
    if dialect in TABLES:
        return to_torch(flat, TABLES[dialect], dialect)
    if dialect not in ("official", "linen", "big_vision", "big_vision-scan"):
        known = ", ".join([*EXPECTS, "big_vision-scan"])
        raise ValueError(f"unknown dialect {dialect!r}; choose one of {known}")
    flat = dict(flat)
    if dialect.startswith("big_vision"):
        table = flat.pop("Transformer/posembed_input/pos_embedding", None)
        if table is not None and "cls" in flat:
            prefix = flat["cls"].shape[1]
            flat["cls"], table = flat["cls"] + table[:, :prefix], table[:, prefix:]
        if table is not None:
            flat["pos_embedding"] = table
    if dialect != "official":
        flat = {renumber(name, LINEN): array for name, array in flat.items()}
    if dialect == "big_vision-scan":
        flat = flatten(stack_blocks(unflatten(flat)))
    if dialect.startswith("big_vision"):
        flat = {f"params/{name}": array for name, array in flat.items()}
    return flat


def strip_prefixes(flat):
    """Without the folders that training states put around the weights."""
    for prefix in ("opt/target/", "params/img/", "params/", "img/"):
        if any(name.startswith(prefix) and name.endswith("embedding/kernel") for name in flat):
            return {n[len(prefix) :]: a for n, a in flat.items() if n.startswith(prefix)}
    return flat


def renumber(name, numbers):
    """Other counters for the layers inside the encoder's blocks."""
    parts = name.split("/")
    if "encoderblock" not in name:
        return name
    return "/".join(numbers.get(part, part) for part in parts)


def official_layout(name, array, heads):  # PyTorch array -> official array
    """Dense kernels are transposed, patches permuted, heads split."""
    if name == "embedding/kernel":
        return array.transpose(2, 3, 1, 0)  # [D, C, P, P] -> [P, P, C, D]
    part = name.split("/")[-2] if "/" in name else ""
    if name.endswith("kernel"):
        kernel = array.T
        if part in PARTS:
            return kernel.reshape(len(kernel), heads, -1)
        return kernel.reshape(heads, -1, kernel.shape[1]) if part == "out" else kernel
    return array.reshape(heads, -1) if part in PARTS else array


def torch_layout(name, array):  # official array -> PyTorch array
    """The reverse of `official_layout`."""
    if name == "embedding/kernel":
        return array.transpose(3, 2, 0, 1)
    part = name.split("/")[-2] if "/" in name else ""
    if name.endswith("kernel"):
        rows = array.shape[0] if part in PARTS else np.prod(array.shape[:-1])
        return array.reshape(rows, -1).T
    return array.reshape(-1) if part in PARTS else array


def torch_name(name, table):  # official name -> state dict's name
    """By the table; kernel and scale are both called weight."""
    match = re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name)
    start, rest = (table["block"].format(match[1]), match[2]) if match else ("", name)
    if rest in table:
        return start + table[rest]
    layer, leaf = rest.rsplit("/", 1)
    return f"{start}{table[layer]}.{'bias' if leaf == 'bias' else 'weight'}"


def to_torch(flat, table, dialect):
    """A state dict; timm keeps query, key and value in one array."""
    if flat.get("cls", np.zeros((1, 1))).shape[1] > 1:
        raise ValueError("register tokens cannot be written to another dialect yet")
    if any(name.startswith("MAPHead") for name in flat):
        raise ValueError(f"the attention-pooled head of big_vision has no {dialect} equivalent")
    result = {}
    for name, array in flat.items():
        result[torch_name(name, table)] = np.ascontiguousarray(torch_layout(name, array))
    if table is TIMM:
        for name in [n for n in result if ".attn.query." in n]:
            parts = [result.pop(name.replace("query", part)) for part in PARTS]
            result[name.replace("query", "qkv")] = np.concatenate(parts)
    return result


def guess_heads(width, blocks):
    """State dicts do not tell: the variant's number, or a head for every 64 features."""
    for size in SIZES.values():
        if (size.width, size.blocks) == (width, blocks):
            return size.heads
    if width % 64:
        raise ValueError(f"{blocks} blocks of width {width}: say how many heads they have")
    return width // 64


def from_torch(flat, table, heads):
    """The official arrays of a state dict; all that is left over is refused by name."""
    flat = {
        re.sub(r"^(module|vit|deit|dinov2|dinov2_with_registers)\.", "", n): a
        for n, a in flat.items()
    }
    flat.pop("embeddings.mask_token", None)  # of the pre-training; no part of the model
    flat = {
        name: array
        for name, array in flat.items()
        if not name.startswith("distillation_classifier")
    }
    flat = fold_layer_scale(join_prefix_tokens(split_qkv(flat)))
    start = table["block"].format("")[:-1]
    blocks = {int(m[1]) for n in flat if (m := re.match(re.escape(start) + r"(\d+)\.", n))}
    width = flat[table["embedding"] + ".weight"].shape[0]
    heads = heads or guess_heads(width, len(blocks))
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads do not divide width {width}")
    result = {}
    for name in official_names(max(blocks, default=-1) + 1):
        if (theirs := torch_name(name, table)) in flat:
            result[name] = official_layout(name, flat.pop(theirs), heads)
    if flat:
        raise ValueError(
            f"these arrays have no place in an official ViT: {', '.join(sorted(flat))}"
        )
    return result


def official_names(blocks):
    """Every name that a ViT with so many blocks can have."""
    layers = ["LayerNorm_0", "LayerNorm_2", "MlpBlock_3/Dense_0", "MlpBlock_3/Dense_1"]
    layers += [f"{ATTENTION}/{part}" for part in (*PARTS, "out")]
    layers = [f"Transformer/encoderblock_{i}/{layer}" for i in range(blocks) for layer in layers]
    layers += ["embedding", "Transformer/encoder_norm", "pre_logits", "head"]
    names = ["cls", "Transformer/posembed_input/pos_embedding"]
    for layer in layers:
        names += [f"{layer}/bias", f"{layer}/{'scale' if 'orm' in layer[-12:] else 'kernel'}"]
    return names


def split_qkv(flat):
    """timm's joined projections as three."""
    result = {}
    for name, array in flat.items():
        if ".qkv." in name:
            for part, piece in zip(PARTS, np.split(array, 3), strict=True):
                result[name.replace("qkv", part)] = piece
        else:
            result[name] = array
    return result


def join_prefix_tokens(flat):
    """Registers, or DeiT's distillation token, follow the class token and are prefix tokens too."""
    flat = dict(flat)
    cls = next((n for n in ("cls_token", "embeddings.cls_token") if n in flat), None)
    extra = (
        "reg_token",
        "dist_token",
        "embeddings.register_tokens",
        "embeddings.distillation_token",
    )
    positions = "pos_embed" if cls == "cls_token" else "embeddings.position_embeddings"
    for name in extra:
        if name not in flat:
            continue
        tokens = flat.pop(name)
        if "reg" in name and positions in flat:
            # Registers join after the positions: theirs is zero. timm leaves out the class
            # token's too where it has registers; Hugging Face does not.
            has_cls = cls != "cls_token"
            table, zero = flat[positions], np.zeros_like(tokens)
            lead = table[:, :1] if has_cls else np.zeros_like(table[:, :1])
            flat[positions] = np.concatenate([lead, zero, table[:, int(has_cls) :]], axis=1)
        flat[cls] = np.concatenate([flat[cls], tokens], axis=1)
    return flat


def fold_layer_scale(flat):
    """y * gamma is a dense layer whose kernel's columns and bias are multiplied by gamma."""
    flat = dict(flat)
    for name in [n for n in flat if re.search(r"\.(ls|layer_scale)\d?\.?\w*(gamma|lambda1)$", n)]:
        gamma, start = flat.pop(name), re.match(r"(blocks|encoder\.layer)\.\d+\.", name)[0]
        first = re.search(r"(ls1|layer_scale1)", name)
        candidates = ("attn.proj", "attention.output.dense") if first else ("mlp.fc2",)
        layer = next(start + c for c in candidates if f"{start}{c}.weight" in flat)
        flat[f"{layer}.weight"] = flat[f"{layer}.weight"] * gamma[:, None]
        flat[f"{layer}.bias"] = flat[f"{layer}.bias"] * gamma
    return dict(sorted(flat.items(), key=lambda item: natural_order(item[0])))
