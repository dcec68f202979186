"""Convolution, its standardised kernel, and pooling: the pieces of a ResNet."""

import jax
import jax.numpy as jnp

from ..shapes import check_channels, padded
from .half import bounded, narrow


def conv2d(p, x, *, stride=1, padding="SAME"):  # [B, height, width, C] -> [B, h, w, F]
    """Slide the kernel [rows, columns, C, F] over the image."""
    kernel = p["kernel"]
    check_channels(x.shape, kernel.shape)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    return jax.lax.conv_general_dilated(
        x.astype(dtype),
        kernel.astype(dtype),
        (stride, stride),
        padded(x.shape, kernel.shape[:2], stride, padding),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def standardise_kernel(kernel, form="official"):  # [rows, columns, C, F], the same
    """Mean 0 and deviation 1 for each filter (arXiv 1903.10520); forms as in the NumPy twin."""
    wide = bounded(kernel, (0, 1, 2))
    centred = wide - wide.mean((0, 1, 2))
    variance = (centred * centred).mean((0, 1, 2))
    if form == "bit":
        return narrow(centred / jnp.sqrt(variance + 1e-10), kernel.dtype)
    # The square root has no slope at 0: a constant filter stays 0 and gets a finite gradient.
    deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    return narrow(centred / (deviation + 1e-5), kernel.dtype)


def std_conv(p, x, *, form="official", **options):  # [B, height, width, C] -> [B, h, w, F]
    """A convolution whose kernel is standardised first."""
    return conv2d({"kernel": standardise_kernel(p["kernel"], form)}, x, **options)


def max_pool(x, *, size=3, stride=2, padding="SAME"):  # [B, height, width, C] -> [B, h, w, C]
    """The largest of each window. "SAME" pads with -inf, which never wins; a number with zeros."""
    pads = padded(x.shape, (size, size), stride, padding)
    if padding != "SAME":
        x, pads = jnp.pad(x, ((0, 0), *pads, (0, 0))), ((0, 0), (0, 0))
    return jax.lax.reduce_window(
        x,
        -jnp.inf,
        jax.lax.max,
        (1, size, size, 1),
        (1, stride, stride, 1),
        ((0, 0), *pads, (0, 0)),
    )
