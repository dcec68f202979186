"""How other implementations name and lay out the same weights.

Each dialect is a table of names beside the official ones; the layout of an array follows from what
it is. A flat dictionary {name: array} goes in, and one under the official names comes out, or the
reverse. Only NumPy is needed.
"""

import math
import re

import numpy as np

from .foreign import Foreign, listed, model_of
from .params import flatten, natural_order, stack_blocks, unflatten, unstack_blocks
from .shapes import depth
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
# transformers 5.9 and later (huggingface/transformers#41693).
HUGGINGFACE_NEW = HUGGINGFACE | {
    "block": "layers.{}.",
    f"{ATTENTION}/query": "attention.q_proj",
    f"{ATTENTION}/key": "attention.k_proj",
    f"{ATTENTION}/value": "attention.v_proj",
    f"{ATTENTION}/out": "attention.o_proj",
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
    "bit": {},
}
FOLDED = "v / 127.5 - 1, folded from ImageNet's"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# timm's giant, gigantic, so400m; DINOv2's giant; and the usual 64 features per head.
KNOWN_HEADS = {(1408, 40): 16, (1664, 48): 16, (1152, 27): 16, (1536, 40): 24, (512, 8): 8}
WRITABLE = ("official", "linen", "big_vision", "big_vision-scan")
WRITABLE += ("timm", "huggingface", "huggingface-5.9")
TABLES = {"timm": TIMM, "huggingface": HUGGINGFACE, "dinov2": DINOV2}
TABLES |= {"huggingface-5.9": HUGGINGFACE_NEW}
MOST_BLOCKS = 1000  # of any model; a name with a larger number is damaged


def recognise(names):  # -> a key of EXPECTS
    """Which dialect a set of names is written in."""
    text = "\n".join(map(older, names))
    if re.search(r"^(?!.*layers?\.\d+\.blocks\.)(.*\.)?blocks\.0\.attn\.", text, re.M):
        return "timm"
    if match := re.search(r"encoder\.layer\.\d+\.(norm1|layernorm_before)\.", text):
        return "dinov2" if match[1] == "norm1" else "huggingface"
    stacked = re.search(r"Transformer/encoderblock/", text)
    if stacked or re.search(r"^(params/)?(.*/)?(?<!posembed_input/)pos_embedding$", text, re.M):
        return "big_vision"
    if re.search(r"encoderblock\w*/MlpBlock_0", text):
        return "big_vision" if "params/" in text or "MAPHead_0" in text else "linen"
    if "embedding/kernel" in text:
        return "official"
    if "resnet/root_block/" in text:
        return "bit"
    raise Foreign(f"holds another model: {model_of(names)}")


def older(name):  # a name of any version of transformers -> as until 5.8
    """`layers.0.attention.q_proj` was `encoder.layer.0.attention.attention.query`."""
    layer = (
        r"(^|\.)(?:encoder\.)?layers?\.(\d+)\.(?=attention\.|layernorm_|norm\d|layer_scale|mlp\.)"
    )
    name, found = re.subn(layer, r"\1encoder.layer.\2.", name)
    if found:
        words = {"q": "query", "k": "key", "v": "value"}
        name = re.sub(
            r"attention\.([qkv])_proj\.", lambda m: f"attention.attention.{words[m[1]]}.", name
        )
        name = name.replace("attention.o_proj.", "attention.output.dense.")
    return name


def renamed(flat, function):  # {name: array} -> {name: array}
    """The same arrays under other names, of which no two may be the same."""
    result = {}
    for name, array in flat.items():
        if result.setdefault(new := function(name), array) is not array:
            raise ValueError(f"two arrays stand for {new}, one of them is {name}")
    return result


def numeral(text):  # digits of a name -> number
    """The number of a block, a stage or a unit."""
    if len(text) > 9 or int(text) >= MOST_BLOCKS:
        raise ValueError(f"no model has a block of number {text[:20]}; names count from 0 or 1")
    return int(text)


def numbers(names, pattern):  # -> set of numbers
    """The numbers that names have where the pattern has its group."""
    return {numeral(m[1]) for name in names if (m := re.match(pattern, name))}


def to_official(
    flat, dialect, heads=None, extra="error", hint=None
):  # {name: array} -> {name: array}
    """Arrays under the official names and in the official layout.

    For a state dict, `heads` is the number that the file or the user states, and `hint` one that
    is believed only where the width does not settle it. Names that an official ViT lacks stay as
    they are, those of a state dict only if `extra` is "warn".
    """
    if dialect in TABLES:
        return from_torch(flat, dialect, heads, extra, hint)
    flat = strip_prefixes(flat)
    if dialect == "bit":  # some files number TensorFlow's layers: standardized_conv2d_12
        layer = r"(standardized_conv2d|group_norm)_\d+/"
        return renamed(flat, lambda name: re.sub(layer, r"\1/", name))
    if dialect == "big_vision":
        lengths = [a.shape[:1] for n, a in flat.items() if "/encoderblock/" in n]
        if any(not length or length[0] > MOST_BLOCKS for length in lengths):
            raise ValueError(f"its stacked blocks are {lengths[0]}; that is no number of blocks")
        flat = flatten(unstack_blocks(unflatten(flat)))
    if dialect != "official":
        ours = {theirs: ours for ours, theirs in LINEN.items()}
        flat = renamed(flat, lambda name: renumber(name, ours))
    table = "Transformer/posembed_input/pos_embedding"
    for old in ("pos_embedding", "Transformer/pos_embedding"):
        if old in flat and table in flat:
            raise ValueError(f"{old} and {table} stand for the same")
        if old in flat:
            positions = flat.pop(old)
            if "cls" in flat:  # the class token joins later there: it has no position to add
                zero = np.zeros_like(positions[:, : flat["cls"].shape[1]])
                positions = np.concatenate([zero, positions], axis=1)
            flat[table] = positions
    return flat


def from_official(flat, dialect):  # {name: array} -> {name: array}
    """The reverse of `to_official`; "big_vision-scan" stacks the blocks."""
    if dialect not in WRITABLE:
        raise ValueError(f"cannot write {dialect!r}; choose one of {', '.join(WRITABLE)}")
    if dialect != "official" and any(name.startswith("resnet/") for name in flat):
        raise ValueError(f"a ResNet has names of its own, not those of {dialect}; choose official")
    if dialect in TABLES:
        return to_torch(flat, TABLES[dialect], dialect)
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


FIRST = ("embedding/kernel", "resnet/root_block/standardized_conv2d/kernel")


def strip_prefixes(flat):
    """Without the folders that training states put around the weights."""
    for prefix in ("opt/target/", "params/img/", "params/", "img/"):
        if any(name.startswith(prefix) and name.endswith(FIRST) for name in flat):
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
    if len(array.shape) != (4 if name == "embedding/kernel" else 2) and name.endswith("kernel"):
        raise ValueError(f"what is {name} here has shape {list(array.shape)}")
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
    known = set(official_names(depth(unflatten(flat)["Transformer"])))
    if strange := sorted(set(flat) - known):
        raise ValueError(f"{dialect} has no equivalent of {listed(strange)}")
    result = {}
    for name, array in flat.items():
        result[torch_name(name, table)] = np.ascontiguousarray(torch_layout(name, array))
    if table is TIMM:
        for name in [n for n in result if ".attn.query." in n]:
            parts = [result.pop(name.replace("query", part)) for part in PARTS]
            result[name.replace("query", "qkv")] = np.concatenate(parts)
    elif "head/kernel" in flat:  # the body is a part of the classifier there
        result = {n if n.startswith("classifier") else f"vit.{n}": a for n, a in result.items()}
    return result


def known_heads(width, blocks, hint=None):
    """State dicts do not tell; only widths whose heads are settled are believed."""
    for size in SIZES.values():
        if (size.width, size.blocks) == (width, blocks):
            return size.heads
    if (width, blocks) in KNOWN_HEADS:
        return KNOWN_HEADS[width, blocks]
    if hint and not width % hint:
        return hint
    if not blocks:
        raise ValueError("it has no blocks")
    raise ValueError(f"{blocks} blocks of width {width}: say how many heads they have (--heads)")


def from_torch(flat, dialect, heads, extra, hint):
    """The official arrays of a state dict; what is left over is refused by name, or kept."""
    table, imagenet = TABLES[dialect], saw_imagenet(flat, dialect)
    flat = renamed(strip_module(flat), older)
    if dialect == "huggingface":
        mlp = {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}
        flat = renamed(flat, lambda n: re.sub(r"mlp\.fc[12]", lambda m: mlp[m[0]], n))
    flat.pop("embeddings.mask_token", None)  # of the pre-training; no part of the model
    flat = fold_layer_scale(join_prefix_tokens(split_qkv(flat)))
    blocks = numbers(flat, re.escape(table["block"].format("")[:-1]) + r"(\d+)\.")
    patches = table["embedding"] + ".weight"
    if patches not in flat:
        raise ValueError(f"missing {patches}")
    names = {n: torch_name(n, table) for n in official_names(max(blocks, default=-1) + 1)}
    surplus = sorted({*flat} - {*names.values()}, key=natural_order)
    if surplus and (extra == "error" or {*surplus} & {*names}):
        raise ValueError(f"extra arrays, with no place in an official ViT: {listed(surplus)}")
    width = flat[patches].shape[0]
    heads = heads or known_heads(width, len(blocks), hint)
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads do not divide width {width}")
    result = {n: official_layout(n, flat[t], heads) for n, t in names.items() if t in flat}
    if imagenet:
        kernel, bias = result["embedding/kernel"], result["embedding/bias"]
        result["embedding/kernel"], result["embedding/bias"] = fold_pixels(kernel, bias)
    return result | {name: flat[name] for name in surplus}


def saw_imagenet(flat, dialect):  # -> bool
    """Whether a state dict's model was trained on pixels scaled by ImageNet's mean and deviation.

    Known of DINOv2, of what is called `deit.` anywhere, and of a distillation token under whatever
    wrapper: DeiT alone has one. Nothing in a file tells DINO, MAE, DeiT 3 or a DeiT without that
    token from a ViT: they are taken for one, which saw v / 127.5 - 1, unless the user says so.
    """
    if dialect not in TABLES:
        return False
    colour = any(n.endswith(ANCHORS) and a.shape[1:2] == (3,) for n, a in flat.items())
    token = r"(^|\.)(deit\.|dist_token$|embeddings\.distillation_token$)"
    return colour and (dialect == "dinov2" or any(re.search(token, name) for name in flat))


def pixels(flat, dialect):  # -> text
    """What the model sees as it is read."""
    if saw_imagenet(flat, dialect):
        return FOLDED
    return "v / 127.5 - 1" + (", assumed: the names cannot tell" if dialect in TABLES else "")


def fold_pixels(kernel, bias, mean=IMAGENET_MEAN, std=IMAGENET_STD):
    """An embedding of pixels (v / 255 - mean) / std as one of pixels v / 127.5 - 1."""
    if kernel.ndim != 4 or bias.shape != kernel.shape[3:]:
        raise ValueError(f"the patches are {list(kernel.shape)} and {list(bias.shape)}")
    mean, std = (np.array(x, np.float64)[:, None] for x in (mean, std))  # [C, 1]
    wide = kernel.astype(np.float64)
    shift = (wide * (0.5 - mean) / std).sum((0, 1, 2))
    return (wide / (2 * std)).astype(kernel.dtype), (bias + shift).astype(bias.dtype)


ANCHORS = ("patch_embed.proj.weight", "embeddings.patch_embeddings.projection.weight")


def strip_module(flat):
    """Without what wrappers put before the names: `vit.`, `module.`, `model.backbone.`

    A classifier outside the body (`module.classifier` beside `module.vit.`) shares its wrappers.
    """
    prefix = next((n.removesuffix(a) for n in flat for a in ANCHORS if n.endswith(a)), "")
    starts = [prefix[: m.end()] for m in re.finditer(r"[^.]*\.", prefix)]

    def bare(name):
        return name.removeprefix(
            max((s for s in starts if name.startswith(s)), key=len, default="")
        )

    return renamed(flat, bare)


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
    result = {name: array for name, array in flat.items() if ".qkv." not in name}
    for name in flat.keys() - result.keys():
        if len(flat[name].shape) == 0 or len(flat[name]) % 3:
            raise ValueError(f"{name} {list(flat[name].shape)} is not query, key and value")
        for part, piece in zip(PARTS, np.split(flat[name], 3), strict=True):
            if (new := name.replace("qkv", part)) in result:
                raise ValueError(f"{name} and {new} stand for the same")
            result[new] = piece
    return result


def join_prefix_tokens(flat):
    """Registers, or DeiT's distillation token, follow the class token and are prefix tokens too.

    Tokens that join after the positions have rows of zeros in the table.
    """
    flat = dict(flat)
    timm = "patch_embed.proj.weight" in flat
    cls = "cls_token" if timm else "embeddings.cls_token"
    table = "pos_embed" if timm else "embeddings.position_embeddings"
    registers = "reg_token" if timm else "embeddings.register_tokens"
    distilled = "dist_token" if timm else "embeddings.distillation_token"
    for name in (distilled, registers):
        if name in flat and cls not in flat:
            raise ValueError(f"{name} without a class token has no place in an official ViT")
        if name in flat:
            flat[cls] = np.concatenate([flat[cls], flat.pop(name)], axis=1)
    if cls in flat and table in flat and np.ndim(flat[table]) == 3:
        rows, prefix = flat[table].shape[1], flat[cls].shape[1]
        # The rows are those of the grid and of the first prefix tokens: none, one or all. timm
        # has none where positions are added before tokens join (DeiT 3, registers).
        lead = next((n for n in (1, 0, prefix) if math.isqrt(max(rows - n, 0)) ** 2 == rows - n), 1)
        zeros = np.zeros_like(flat[table][:, :1]).repeat(prefix - lead, axis=1)
        parts = flat[table][:, :lead], zeros, flat[table][:, lead:]
        flat[table] = np.concatenate(parts, axis=1)
    return flat


def fold_layer_scale(flat):
    """y * gamma is a dense layer whose kernel's columns and bias are multiplied by gamma."""
    flat = dict(flat)
    pattern = r"((?:blocks|encoder\.layer)\.\d+\.)(?:ls|layer_scale)([12])\.(?:gamma|lambda1)"
    for name in list(flat):
        if not (match := re.fullmatch(pattern, name)):
            continue
        start, which = match.groups()
        layers = ("attn.proj", "attention.output.dense") if which == "1" else ("mlp.fc2",)
        layer = next((start + n for n in layers if f"{start}{n}.weight" in flat), None)
        if layer is None:
            raise ValueError(f"{name} scales a layer that an official ViT lacks")
        gamma, shape = flat.pop(name), flat[f"{layer}.weight"].shape
        if not gamma.shape == flat[f"{layer}.bias"].shape == shape[:1]:
            raise ValueError(f"{name} has shape {list(gamma.shape)}, its layer {list(shape)}")
        flat[f"{layer}.weight"] = flat[f"{layer}.weight"] * gamma[:, None]
        flat[f"{layer}.bias"] = flat[f"{layer}.bias"] * gamma
    return flat
