"""What is held of a GPU until it is closed."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class DeviceResource(ABC):
    """A context manager whose end is `close`, which may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give it back."""
