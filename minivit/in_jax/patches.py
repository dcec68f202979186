"""Images to patches and back, and the linear embedding of patches (eq. 1)."""

import jax.numpy as jnp

from ..interpolation import resize_weights
from ..shapes import check_images, grid_of, pair, patch_grid
from .mlp import dense


def patchify(images, patch):  # [B, height, width, C] -> [B, height/P, width/P, P*P*C]
    """Cut images into non-overlapping P x P patches, flattened row by row, channel last."""
    rows, columns = pair(patch)
    batch, height, width, channels = images.shape
    h, w = patch_grid(height, width, patch)
    patches = images.reshape(batch, h, rows, w, columns, channels).swapaxes(2, 3)
    return patches.reshape(batch, h, w, rows * columns * channels)


def unpatchify(patches, patch):  # [B, h, w, P*P*C] -> [B, h*P, w*P, C]
    """The inverse of `patchify`."""
    (rows, columns), (h, w) = pair(patch), grid_of(patches.shape)
    grid = patches.reshape(len(patches), h, w, rows, columns, -1)
    return grid.swapaxes(2, 3).reshape(len(patches), h * rows, w * columns, -1)


def patch_embedding(p, images):  # [B, height, width, C] -> [B, height/P, width/P, D]
    """Project every patch to D numbers: a convolution whose stride is its kernel size."""
    check_images(images, p["kernel"].shape)
    return dense(p, patchify(images, p["kernel"].shape[:2]))


def resize_kernel(kernel, patch):  # [P, Q, C, D] -> [P', Q', C, D]
    """A patch kernel for another patch size (FlexiViT, arXiv 2212.08013, eq. 4).

    The embedding of a patch enlarged by half-pixel bilinear resizing stays what it was. That is
    the pseudo-inverse of the resizing, which is separable, so rows and columns go one by one.
    """
    kernel = jnp.asarray(kernel)
    sizes = zip(kernel.shape[:2], pair(patch), strict=True)
    forth = [jnp.array(resize_weights(old, new, "bilinear")) for old, new in sizes]
    rows, columns = (jnp.linalg.pinv(matrix.T) for matrix in forth)
    new = jnp.einsum("ri,cj,ijkd->rckd", rows, columns, kernel, precision="highest")
    return new.astype(kernel.dtype)
