"""Passes on a CPU: eager torch operations, the int8 decoder and its C kernels."""
