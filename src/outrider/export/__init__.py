"""Outrider's drafters in other engines, and its `generate` on a transformers model.

plan     which drafter, how many tokens (K)       engines     an engine's configuration and command line
write    the exported folder                      gguf        draft models for llama.cpp
ray      a Ray Serve application file             vllm/       plug-ins and a launcher for vLLM's server
accelerate   the transformers-style `generate`

Except for `accelerate`, nothing here runs a model. No engine needs to be installed to export to it.
"""
