"""Triton kernels whose rows do not depend on their neighbours: products, attention, sampling, small operations."""
