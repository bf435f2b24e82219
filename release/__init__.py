"""Builds, verifies, signs and indexes release archives: `python -m release --help`. Imports nothing of the product."""
