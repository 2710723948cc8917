"""What reading took, over all stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ckpttools.stores.costs import Traffic
from ckpttools.stores.registry import in_use


@contextmanager
def counted() -> Iterator[Callable[[], Mapping[str, Traffic]]]:
    """Gives what tells how much stores were asked since the `with` began, by any thread of the process.

    By address, such as "gs://", in the order of the alphabet; local files and memory are not among them.
    """
    before = {id(store): store.traffic or Traffic() for store in in_use()}

    def since() -> Mapping[str, Traffic]:
        result = {
            f"{store.scheme}://": store.traffic - before.get(id(store), Traffic())
            for store in in_use()
            if store.traffic is not None
        }
        return {address: result[address] for address in sorted(result) if result[address].requests}

    yield since
