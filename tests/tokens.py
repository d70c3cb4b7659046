"""What a Vision Transformer computes where its last block may not stop at the tokens that are read."""


def every_token(net, pixels):
    """The tokens that the blocks end with, also those that no pool reads."""
    x = net.add_positions(net.add_prefix_tokens(net.patch_embed(pixels)))  # (B, T, D)
    for block in net.blocks:
        for positions in block.positions:
            x = positions(x)
        x = block.forward(x)
    return net.norm(x)
