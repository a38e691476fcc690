"""Ray Serve: an application file for vLLM replicas with an exported drafter."""
