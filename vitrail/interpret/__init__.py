"""Weights and images -> arrays that explain: what the network looks at, how far, and what spoke for its answer."""
