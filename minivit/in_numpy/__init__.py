"""The Vision Transformer in NumPy, to be read: every piece forward, and backward by hand.

Each piece is `y, back = piece(p, x)`, and `dp, dx = back(dy)` sends a gradient back; a piece
without parameters takes no `p` and sends back the gradient of its input alone. Exceptions:
`scaled_dot_product` returns its weights between the two; `patchify` and `unpatchify`, each the
other's gradient, return an array, as do `guess`, `resize_kernel`, `sincos2d` and `smooth_labels`;
`ridge` returns weights and bias; an objective's `back` sends back the parameters' and images'
gradient.
"""

from .attention import attention, cross_attention, scaled_dot_product, softmax
from .convolution import conv2d, max_pool, standardise_kernel, std_conv
from .dropout import dropout
from .head import attention_pool, head, pool, pre_logits
from .losses import guess, sigmoid_cross_entropy, smooth_labels, softmax_cross_entropy
from .masked import color_loss, corrupt, masked_vit, over_corrupted, pixel_loss
from .mlp import dense, gelu, mlp
from .model import model
from .norms import group_norm, layer_norm
from .objectives import OBJECTIVES, classification, masked_colors, masked_pixels
from .patches import patch_embedding, patchify, resize_kernel, unpatchify
from .positions import add_class_token, add_positions, resize, sincos2d
from .resnet import bit, bottleneck, preactivation_unit, relu, stem
from .ridge import ridge
from .vit import embed, encoder, encoder_block, vit
