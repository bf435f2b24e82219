"""What the server needs of an engine: AsyncLLM, or a stand-in in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ....backends.contract.manifest import Manifest
    from ....backends.devices import DeviceChoice
    from ....runtime.config import ModelConfig
    from ....runtime.outputs import RequestOutput
    from ....runtime.sampling_params import SamplingParams
    from ....runtime.tokenizer import Tokenizer


class Engine(Protocol):
    @property
    def model_config(self) -> ModelConfig: ...

    manifest: Manifest

    @property
    def device(self) -> DeviceChoice: ...

    @property
    def default_max_tokens(self) -> int | None: ...

    def generate(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def check_health(self) -> None: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    def get_stats(self) -> dict[str, Any]: ...
