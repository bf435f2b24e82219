"""Errors of the exporters. Every message is one complete line: what came, what was expected, what to do.

ExportError
  CheckpointError        a checkpoint file is missing, damaged or inconsistent
  UnsupportedError       a sound checkpoint that this version cannot run (architecture, format, option)
  ConfigError            a config value that is missing, of the wrong type or out of range
  VerificationError      the exported graph does not compute what the checkpoint says
  PackageError           a package cannot be written or read
"""

from __future__ import annotations


class ExportError(Exception):
    """Base of everything that `export()` raises on purpose."""


class CheckpointError(ExportError):
    pass


class UnsupportedError(ExportError):
    pass


class ConfigError(ExportError):
    pass


class VerificationError(ExportError):
    pass


class PackageError(ExportError):
    pass
