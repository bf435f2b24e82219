"""Queue of waiting requests, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Request


class FCFSRequestQueue:
    """In order of arrival; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def prepend_request(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek_request(self) -> Request:
        """Raises IndexError when empty."""
        return self._requests[0]

    def pop_request(self) -> Request:
        """Raises IndexError when empty."""
        return self._requests.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Those that are not in the queue are passed over."""
        gone = set(requests)
        self._requests = deque(r for r in self._requests if r not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
