"""Models that the built-in decoder does not support, run by Hugging Face transformers: slower, equally exact."""
