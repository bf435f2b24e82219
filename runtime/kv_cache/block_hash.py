"""Block hashes: a block's identity is the whole token prefix that ends with it.

hash(block) = sha256(hash(parent block), token ids of the block, extra keys). The parent of the first block is a fixed
root. Extra keys come in the order LoRA name, (multi-modal items, in a later wave), cache salt; the salt enters the
first block only, and through the chain every later one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..request import Request


def _find_sha256() -> Callable[[bytes], Any]:
    """Python's own, which its random uses, too: hashlib loads OpenSSL, and is no faster on so few bytes."""
    for module in ("_sha2", "_sha256"):  # of Python 3.12 and later, and of 3.11
        with suppress(ImportError):
            return import_module(module).sha256  # type: ignore[no-any-return]
    return import_module("hashlib").sha256  # type: ignore[no-any-return]


sha256: Final = _find_sha256()
ROOT_HASH: Final[bytes] = sha256(b"trivet.block_hash.v1").digest()


def hash_block_tokens(parent_hash: bytes | None, token_bytes: bytes, extra_keys: tuple[tuple[str, str], ...]) -> bytes:
    """32 bytes. `token_bytes`: the block's ids as int32; `extra_keys`: (kind, value) pairs.

    Every variable-length part is preceded by its length, so different inputs never give the same byte string.
    """
    digest = sha256(ROOT_HASH if parent_hash is None else parent_hash)
    digest.update(len(token_bytes).to_bytes(8, "little"))
    digest.update(token_bytes)
    for kind, value in extra_keys:
        for part in (kind.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    hashed: bytes = digest.digest()
    return hashed


def extra_keys_of_block(request: Request, start_token: int) -> tuple[tuple[str, str], ...]:
    """What besides tokens tells the block that starts at `start_token` apart."""
    keys: tuple[tuple[str, str], ...] = ()
    if request.lora_name:
        keys += (("lora", request.lora_name),)
    if start_token == 0 and request.cache_salt:
        keys += (("cache_salt", request.cache_salt),)
    return keys


def prefix_of_block(request: Request, index: int) -> bytes:
    """Identifies all that comes before the request's block `index`: every full block before it has been hashed."""
    if index > 0:
        return request.block_hashes[index - 1]
    return hash_block_tokens(None, b"", extra_keys_of_block(request, 0))


def make_block_hasher(block_size: int) -> Callable[[Request], list[bytes]]:
    """A function that returns the hashes of a request's full blocks that are not in `request.block_hashes` yet."""

    def block_hasher(request: Request) -> list[bytes]:
        start = len(request.block_hashes) * block_size
        if start + block_size > request.num_tokens:
            return []
        parent = request.block_hashes[-1] if request.block_hashes else None
        new_hashes = []
        for block_start in range(start, request.num_tokens - block_size + 1, block_size):
            tokens = request.token_bytes(block_start, block_start + block_size)
            parent = hash_block_tokens(parent, tokens, extra_keys_of_block(request, block_start))
            new_hashes.append(parent)
        return new_hashes

    return block_hasher
