#!/usr/bin/env python3
"""Fail when the committed trivet.cdx.json is not what generate.py writes now."""

from __future__ import annotations

import sys

from generate import OUTPUT, generate

if OUTPUT.read_text() != generate():
    sys.exit(f"{OUTPUT.name} is stale: run sbom/generate.py and commit the result")
print(f"{OUTPUT.name} is up to date")
