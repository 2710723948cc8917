"""Which objects the cloud itself can copy to another key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.base import File
from ckpttools.stores.objects.file import ObjectFile

if TYPE_CHECKING:
    from ckpttools.stores.objects.store import ObjectStore


@dataclass(frozen=True)
class CopyTrials:
    """See `ckpttools.stores.abilities.LinkTrials`: nothing has to be tried.

    Attributes:
        store: where to.
        bucket: its name.
    """

    store: ObjectStore
    bucket: str

    def refusal(self, source: File) -> str | None:
        """Why an object cannot be copied, in the store's words; None if it can."""
        if not isinstance(source, ObjectFile) or source.store is not self.store:
            return f"it is not in {self.store.words.cloud}"
        if source.key.partition("/")[0] != self.bucket:
            return f"it is in another {self.store.words.bucket}"
        if source.size > self.store.largest_copy:
            return f"objects of more than {self.store.largest_copy >> 30} GiB are not copied in one request"
        return None
