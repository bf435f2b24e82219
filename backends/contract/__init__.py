"""The contract between exporters, runtime and back ends: op schemas, weight formats, package manifest.

Imports the standard library and msgspec only.
"""
