"""The fixture `home`: a tiny target and prompts to train on."""

from support.training import home  # noqa: F401
