"""Models that the built-in decoder does not know, run by Hugging Face transformers: slower, and as exact."""
