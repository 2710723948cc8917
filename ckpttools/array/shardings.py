"""How an array lay on devices when it was saved: a plain fact that a format tells and nothing depends on."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the parts of one array were.

    Attributes:
        kind: JAX's name of it, such as "NamedSharding".
        mesh: name and length of each axis of the device mesh; empty where there was none.
        spec: for each axis of the array the mesh axes that it is cut along; later axes are whole.
        device: the one device of a `SingleDeviceSharding`.
        devices: numbers of the devices of the mesh, in C order; None for those there are, in JAX's order.
        write_shape: shape of the pieces in which it was written, where that was noted.
    """

    kind: str
    mesh: tuple[tuple[str, int], ...] = ()
    spec: tuple[tuple[str, ...], ...] = ()
    device: str | None = None
    devices: tuple[int, ...] | None = None
    write_shape: Shape | None = None
