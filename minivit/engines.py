"""Which twin computes: an engine for the parameters, from what a command line says."""

import numpy as np

from .command import counted
from .machine import check_memory
from .processes import jax_devices
from .shapes import depth

TOKENS = 128  # per thread or CPU device at least; with fewer, the serial part takes longer
ONLY_JAX = {"dtype": "float32", "shard": "data", "precision": "default"}


def make(backend, params, *, batch_size=None, **options):
    """The NumPyEngine or JaxEngine of these parameters; commands choose between them only here.

    Without a `batch_size` it is for evaluation. Other options are those of the engines and
    `precision`, of JAX's products. OSError: JAX cannot be used; MemoryError: a batch cannot fit;
    ValueError: an option is nonsense, or beyond the NumPy twin.
    """
    check(batch_size=batch_size, **options)
    given = {name: options.pop(name, usual) for name, usual in ONLY_JAX.items()}
    images = max(1, (batch_size or 1) // options.get("accumulate", 1))  # in memory at once
    tokens, chunk = token_count(params), (options.get("model") or {}).get("chunk")
    if backend == "numpy":
        for name, value in given.items():
            if value != ONLY_JAX[name]:
                raise ValueError(f"--{name} {value} needs --backend jax; NumPy cannot do it")
        check_attention(params, tokens, images)
        from .engine_numpy import NumPyEngine

        return NumPyEngine(params, batch_size=batch_size, **options)
    platform = jax_devices()[0].platform
    import jax

    from .engine_jax import JaxEngine
    from .in_jax.attention import by_default

    if platform == "cpu":
        check_attention(params, tokens, images, by_default(tokens) if chunk is None else chunk)
    if given.pop("precision") == "highest":
        jax.config.update("jax_default_matmul_precision", "highest")
    return JaxEngine(params, batch_size=batch_size, **given, **options)


def check(**options):
    """Numbers that neither twin can do anything with."""
    for name, least in {"batch_size": 1, "accumulate": 1, "seed": 0}.items():
        if (value := options.get(name)) is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def busy(tokens, images):  # tokens per image or 0, images -> threads or CPU devices
    """How many cores so many images keep busy, each with at least `TOKENS`."""
    return max(1, images * (tokens or TOKENS) // TOKENS)


def joined(parts, done=None):  # iterable of [b, classes] -> [B, classes]
    """All scores; `done` is told of how many images each part is, as it comes."""
    found = []
    for scores in parts:
        found.append(scores)
        if done:
            done(len(scores))
    if not found:
        raise ValueError("there are no images to score")
    return np.concatenate(found)


def token_count(params):  # -> N, or 0 where no position table says it
    """Length of the sequence."""
    table = params.get("Transformer", {}).get("posembed_input", {}).get("pos_embedding")
    return 0 if table is None else table.shape[1]


def check_attention(params, tokens, images=1, chunk=None):
    """Refuse a sequence too long for the memory, before anything of that size is made.

    Only one block's attention weights are counted, [B, H, N, N] or those of one chunk.
    """
    if depth(params.get("Transformer", {})) and "encoderblock_0" in params["Transformer"]:
        attention = params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
        heads = attention["query"]["kernel"].shape[1]
        check_memory(
            4 * images * heads * tokens * min(chunk or tokens, tokens),
            f"attention among {tokens:,} tokens of {counted(images, 'image')}",
            "choose a smaller --image-size"
            + (" or --batch-size, or a larger --accumulate" if images > 1 else ""),
        )
