"""The parts of a head's block that have another form on a GPU."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from heads.layers import attention_of_groups


def test_query_heads_as_queries_of_their_key_head() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    visible = torch.rand(2, 3, 20) < 0.5
    visible[..., 0] = True
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)
    torch.testing.assert_close(attention_of_groups(q, k, v, visible), expected)
