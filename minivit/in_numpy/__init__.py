"""The Vision Transformer in NumPy, to be read: every piece forward, and backward by hand.

Each piece is `y, back = piece(p, x)`, and `dp, dx = back(dy)` sends a gradient back; a piece
without parameters takes no `p` and sends back the gradient of its input alone.
"""

from .attention import attention, scaled_dot_product, softmax
from .dropout import dropout
from .head import head, pool, pre_logits
from .losses import sigmoid_cross_entropy, smooth_labels, softmax_cross_entropy
from .mlp import dense, gelu, mlp
from .norms import layer_norm
from .patches import patch_embedding, patchify, unpatchify
from .positions import add_class_token, add_positions
from .vit import encoder, encoder_block, vit
