"""What runs only on an NVIDIA GPU: kernels, and what is chosen beside them."""
