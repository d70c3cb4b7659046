"""All output tokens of a Vision Transformer, whose last block otherwise computes only those that are pooled."""


def every_token(net, pixels):
    """Return the normalized output tokens of the last block, including those that are not pooled."""
    x = net.add_positions(net.add_prefix_tokens(net.patch_embed(pixels)))  # (B, T, D)
    for block in net.blocks:
        for positions in block.positions:
            x = positions(x)
        x = block.forward(x)
    return net.norm(x)
