"""Passes on an NVIDIA GPU: captured graphs, device state, and the triton kernels that they launch."""
