"""Triton kernels: attention, matmul, sampling, elementwise operations.

Promise: a row's bits do not depend on the other rows of the call. They know rows, slots and planes, not layers.
"""
