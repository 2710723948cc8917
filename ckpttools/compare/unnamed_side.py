"""Map one side of a comparison, whose names differ from those of the other, by the rows of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, by_name
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import option
from ckpttools.core.text import array_count
from ckpttools.digest.pairing import NamedArrays
from ckpttools.mapping.build import Mapped
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import Size
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions, rope_flags
from ckpttools.model_families.family import Family, Spelling
from ckpttools.model_families.registry import families

Arrays = Mapping[str, LazyArray]


@dataclass(frozen=True)
class UnnamedSide:
    """A side that does not have MaxText names yet.

    Attributes:
        tree: A Hugging Face checkpoint.
        files: The model's files, with its configuration if there is one.
        beside: Arrays of a MaxText checkpoint of the model, by name; empty if there is none.
    """

    tree: Tree
    files: ModelFiles
    beside: Arrays

    @property
    def arrays(self) -> dict[str, LazyArray]:
        return by_name(self.tree.arrays)

    def likely_families(self) -> list[Family]:
        """Return the families whose rows produce most of the other side's names, for any configured sizes."""
        counts = {family.name: self._common_names(family) for family in families().values()}
        limit = max(counts.values(), default=0)
        return [families()[name] for name, count in counts.items() if count == limit > 0]

    def _common_names(self, family: Family) -> int:
        try:
            built = replace(self, files=ModelFiles())._made(family, ModelOptions()).arrays.keys()
        except CheckpointError:
            # Rows whose sizes contradict the arrays produce no names.
            return 0
        names = {with_slashes(key) for key in built}
        return len(names & self.beside.keys()) if self.beside else len(names)

    def mapped(self, family: Family, model: ModelOptions) -> NamedArrays[LazyArray]:
        """Return the arrays under MaxText's names by a family's rows.

        Arrays without a row keep their own names.

        Raises:
            ConfigError: The configuration contradicts itself.
        """
        mapped = self._made(family, model)
        built = {with_slashes(key): array for key, array in mapped.arrays.items()}
        naming = [f"names are mapped to MaxText's by the rows of family {family.name}"]
        if self.files.config is None:
            naming.append(
                "without a config.json, names identify the family and RoPE is assumed to be in halves; "
                f"{option('like')}, {option('family')} and {option('rope_layout')} override this"
            )
        # Arrays without a MaxText counterpart or without a row.
        unplaced = (*mapped.unused, *mapped.dropped)
        if unplaced:
            naming.append(f"compared under their own names, as MaxText lacks them: {array_count(unplaced)}")
        left = {name: self.arrays[name] for name in unplaced if name not in built}
        return NamedArrays(
            {**built, **left},
            naming=tuple(naming),
            sizes=mapped.sizes,
            head=tying.LEFT_HEAD,
            unused=family.unused,
        )

    def _made(self, family: Family, model: ModelOptions) -> Mapped:
        arrays, config = self.arrays, self.files.config
        spelling = family.spelling_of(arrays)
        head = tying.right_head(family, spelling)
        # An existing output head is compared regardless of the configuration.
        tied = tying.tied_flags("keep", head.head if head else None, arrays)
        flags = {**rope_flags(family, model), **tied}
        there = family.towers_in(name.replace("/", ".") for name in self.beside)
        without = [tower for tower in family.towers if self.beside and tower not in there]
        table = family.table(config, self.files.location, spelling=spelling, overrides=flags, without=without)
        if config is None:
            table = replace(table, sizes={**layers_of(family, spelling, arrays), **table.sizes})
        beside = {name.replace("/", "."): array for name, array in self.beside.items()}
        built = table.to_left_partly(arrays, beside)

        def exactly() -> Arrays:
            return table.to_left_partly(arrays, beside, exact=True).arrays

        return replace(built, arrays=as_wide_as(beside, built.arrays, exactly))


def layers_of(family: Family, spelling: Spelling, arrays: Arrays) -> dict[str, Size]:
    """Return the number of layers, from the highest number in names."""
    starts = {str(spelling.key(parse_key(group.right)).parts[0]) for group in family.text_layers}
    rests = (name.removeprefix(start) for start in starts for name in arrays if name.startswith(start))
    numbers = [int(rest.partition(".")[0]) for rest in rests if rest.partition(".")[0].isdecimal()]
    return {"layers": Size(max(numbers) + 1, "names of layers")} if numbers else {}


def with_slashes(key: str) -> str:
    return key.replace(".", "/")


def with_joints_of(arrays: Arrays, names: Arrays) -> dict[str, LazyArray]:
    """Rename arrays whose names differ from those in `names` only in the separator of keys."""
    known = {name.replace("/", "."): name for name in names}
    built = {name if name in names else known.get(name.replace("/", "."), name): name for name in arrays}
    if len(built) != len(arrays):
        return dict(arrays)
    return {new: arrays[old] for new, old in built.items()}


def as_wide_as(
    there: Mapping[str, LazyArray],
    built: Mapping[str, LazyArray],
    exactly: Callable[[], Mapping[str, LazyArray]],
) -> Mapping[str, LazyArray]:
    """Return the arrays of a conversion, without rounding those that are stored with 32 bits instead of 16.

    All arrays are unrounded if the conversion would cast them, because casting rounds first.

    Args:
        there: The stored arrays.
        built: Arrays of a conversion that may round, under the same names.
        exactly: Returns the arrays of a conversion without rounding.
    """
    short = [name for name, array in built.items() if _has_bits(array, 16)]
    wide = {name for name in short if name in there and _has_bits(there[name], 32)}
    if not wide or all(name in wide for name in short if name in there):
        return built
    exact = exactly()
    return {name: exact[name] if name in wide else array for name, array in built.items()}


def _has_bits(array: LazyArray, bits: int) -> bool:
    return array.dtype.is_float and array.dtype.bits == bits
