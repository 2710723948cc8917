"""Report missing indexes of safetensors shards, and indexes that contradict the shards."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from shlex import quote

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.message_terms import action, call
from ckpttools.core.text import plural, sample_names
from ckpttools.diagnosis.base import (
    ERROR,
    INFO,
    WARNING,
    Check,
    Finding,
    Fix,
    finding_of,
    fix_command,
    quote_local_path,
    quote_path,
    set_aside_command,
)
from ckpttools.diagnosis.inventory import INDEX, SAFETENSORS, Inventory, SafetensorsFiles, json_or_error
from ckpttools.diagnosis.safe_files import is_file, write_new
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.safetensors.format import NAMES, header_of
from ckpttools.formats.safetensors.header import SafetensorsHeader
from ckpttools.formats.safetensors.sharded import is_sharded
from ckpttools.formats.sidecar_files import CONFIG, WEIGHTS_FIELD
from ckpttools.formats.weight_index import WeightsLocation, normalize_name, sort_by_reading_order
from ckpttools.stores.base import is_inside
from ckpttools.stores.location import Location

_WHOLE = f"model{SAFETENSORS}"
_NAME = f"model{INDEX}"
_MAX_NAMED = 5


def _examine(inventory: Inventory) -> Iterator[Finding]:
    for weights in inventory.weights:
        if weights.is_whole:
            yield from _folder(inventory, weights)


def _folder(inventory: Inventory, weights: SafetensorsFiles) -> Iterator[Finding]:
    try:
        named_weights = NAMES.chosen(weights.folder)
    except CheckpointError as error:
        yield finding_of(error, weights.folder / CONFIG, reason="transformers reads no other file")
        return
    if named_weights is not None:
        yield from _named_weights_findings(inventory, weights, named_weights)
        return
    unread = [name for name in weights.indexes if name == _NAME and _WHOLE in weights.files]
    for name in weights.indexes:
        result = _index(inventory, weights, name)
        yield from _unread(weights.folder / name, result) if name in unread else result
    lost = NAMES.missing(weights.files)
    if lost and not weights.indexes:
        yield _missing_shard_findings(weights.folder, lost, "the names of the others imply them")
    if not weights.indexes and len(weights.files) > 1 and not lost:
        yield (
            _extra_weights_finding(weights)
            if _WHOLE in weights.files
            else _missing_index_finding(inventory, weights)
        )


def _named_weights_findings(
    inventory: Inventory, weights: SafetensorsFiles, named_weights: WeightsLocation
) -> Iterator[Finding]:
    """Report the weights that `transformers_weights` names, and faults of an index that it names."""
    if named_weights.index is not None:
        yield from _index(inventory, weights, named_weights.index)
    name = named_weights.index or named_weights.files[0]
    others = [file for file in (*weights.files, *weights.indexes) if file != name]
    if named_weights.index is not None and named_weights.named is not None:
        others = [other for other in others if other not in {*named_weights.named.values()}]
    reason = f"transformers and ckpttools read {name}" + (f", not {_format_names(others)}" if others else "")
    do = f"no action is needed; ckpttools leaves {WEIGHTS_FIELD} out of the {CONFIG} that it writes"
    yield Finding(INFO, str(weights.folder / CONFIG), f"{WEIGHTS_FIELD} is {name}", reason, do)


def _unread(location: Location, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Report an index that is not read because one file has all weights."""
    errors = [item.what for item in findings if item.level == ERROR]
    reason = f"transformers and ckpttools read {_WHOLE}, not the index"
    if not errors:
        problem = f"{_WHOLE} next to {location.name}"
        yield Finding(INFO, str(location.parent), problem, reason, "move the unneeded one away")
        return
    command = set_aside_command(location)
    do = f"move the index away: {command}"
    reason += "; tools that read the index first fail"
    yield Finding(WARNING, str(location), f"not needed, and {'; '.join(errors)}", reason, do, command=command)


def _missing_shard_findings(location: Location, names: Sequence[str], expected: str) -> Finding:
    problem = f"{plural(len(names), 'weight file')} missing: {_format_names(names)}"
    fetched = " ".join(map(quote, names)) if len(names) <= _MAX_NAMED else f"--include '*{SAFETENSORS}'"
    do = f"fetch them: hf download REPO {fetched} --local-dir {quote_local_path(location.folder())}"
    return Finding(ERROR, str(location), problem, f"{expected}; their tensors cannot be read", do)


def _format_names(names: Iterable[str]) -> str:
    return sample_names(sorted(names), _MAX_NAMED)


def _extra_weights_finding(weights: SafetensorsFiles) -> Finding:
    """Report files next to a model's only weights file: an adapter, or the same weights under other names."""
    others = [name for name in weights.files if name != _WHOLE]
    problem = f"{_format_names(others)} next to {_WHOLE}"
    reason = f"transformers and ckpttools read only {_WHOLE}"
    do = (
        "no action is needed; open another file by its name, "
        f"such as {quote_path(weights.folder / others[0])}"
    )
    return Finding(INFO, str(weights.folder), problem, reason, do)


def _missing_index_finding(inventory: Inventory, weights: SafetensorsFiles) -> Finding:
    problem = f"{plural(len(weights.files), 'file')} and no {_NAME}"
    reason = "transformers does not find the weights; ckpttools reads all of them"
    headers = {name: header_of(weights.folder / name) for name in weights.files}
    if is_sharded(header for header in headers.values() if isinstance(header, SafetensorsHeader)):
        problem = "files of single processes of a PyTorch distributed checkpoint"
        do = f"{action('convert', format='safetensors')} combines them"
        return Finding(INFO, str(weights.folder), problem, "transformers does not load it", do)
    fault = _contradiction(headers)
    if fault:
        do = "separate unrelated files, then write an index: " + fix_command(inventory, "index")
        return Finding(WARNING, str(weights.folder), f"{problem}; {fault}", reason, do)
    do = f"{fix_command(inventory, 'index')} writes it"
    return Finding(WARNING, str(weights.folder), problem, reason, do, "index")


def _contradiction(headers: Mapping[str, SafetensorsHeader | CheckpointError]) -> str | None:
    """Return the reason why these files cannot have an index, or None."""
    damaged = [name for name, header in headers.items() if isinstance(header, CheckpointError)]
    if damaged:
        return f"damaged: {_format_names(damaged)}"
    stems = {_stem(name) for name in headers}
    if len(stems) > 1:
        return f"they are not shards of one model: {_format_names(stems)}"
    duplicates = [name for name, files in _locations(headers).items() if len(files) > 1]
    return f"the same tensors in several files: {_format_names(duplicates)}" if duplicates else None


def _stem(name: str) -> str:
    """Return the common stem of a model's shards: `model` for `model-00001-of-00002.safetensors`."""
    match = NAMES.numbered.fullmatch(name)
    return match["stem"] if match else name.removesuffix(SAFETENSORS)


def _locations(headers: Mapping[str, SafetensorsHeader | CheckpointError]) -> dict[str, list[str]]:
    """Return the files of each tensor."""
    locations: dict[str, list[str]] = defaultdict(list)
    for file, header in headers.items():
        for entry in header.entries if isinstance(header, SafetensorsHeader) else ():
            locations[entry.name].append(file)
    return locations


def _index(inventory: Inventory, weights: SafetensorsFiles, name: str) -> Iterator[Finding]:
    location = weights.folder / name
    document = json_or_error(location)
    if isinstance(document, CheckpointError):
        yield finding_of(document, location, reason="it is unknown which file has which tensor")
        return
    named = document.get("weight_map")
    if not isinstance(named, dict) or not named or not all(type(file) is str for file in named.values()):
        problem = "no usable weight_map"
        yield Finding(
            ERROR, str(location), problem, "it is unknown which file has which tensor", "fetch it again"
        )
        return
    other = sorted({file for file in named.values() if not file.endswith(SAFETENSORS)})
    if other:
        problem = f"names files that do not end in {SAFETENSORS}: {_format_names(other)}"
        reason = "transformers takes them for files of torch.save and refuses them"
        command = call("convert", weights.folder, "DST", format="safetensors")
        do = f"`{command}` writes files under usual names"
        yield Finding(ERROR, str(location), problem, reason, do, command=command)
    paths = {tensor: normalize_name(file) for tensor, file in named.items()}
    yield from _check_against_files(
        inventory, weights, location, paths, sort_by_reading_order(named.values())
    )


def _check_against_files(
    inventory: Inventory,
    weights: SafetensorsFiles,
    location: Location,
    named: Mapping[str, str],
    shards: Sequence[str],
) -> Iterator[Finding]:
    outside = [file for file in shards if not is_inside(file)]
    if outside:
        problem = f"names files outside of its directory: {_format_names(outside)}"
        do = "do not trust this index; fetch the checkpoint from its source again"
        yield Finding(ERROR, str(location), problem, "readers that follow it read other files", do)
    lost = [file for file in shards if is_inside(file) and not is_file(weights.folder / file)]
    if lost:
        yield _stale(inventory, weights, location, named, lost) or _missing_shard_findings(
            location, lost, "the index names them"
        )
    headers = {file: header_of(weights.folder / file) for file in shards if file not in {*lost, *outside}}
    files = _locations(headers)
    is_readable = {file for file, item in headers.items() if isinstance(item, SafetensorsHeader)}
    absent = {tensor for tensor, file in named.items() if file in is_readable and tensor not in files}
    if not outside:
        yield from _duplicate_tensor_findings(weights, location, named, files, absent)
    loose = sorted(set(weights.files) - set(shards) - {_WHOLE})
    loose_tensors = _locations({file: header_of(weights.folder / file) for file in loose}) if absent else {}
    holders = sorted({file for tensor in absent for file in loose_tensors.get(tensor, ())})
    if absent:
        problem = (
            f"names {plural(len(absent), 'tensor')} that its files do not contain: {_format_names(absent)}"
        )
        hint = f"fetch the index again, or set it aside: {set_aside_command(location)}"
        reason = "they cannot be loaded: they belong to another model, or a shard was changed"
        if holders:
            moved = plural(sum(tensor in loose_tensors for tensor in absent), "tensor")
            reason = (
                f"nothing loads them: {moved} of these in files "
                f"that it does not name, {_format_names(holders)}"
            )
            hint = "fetch the index and its files again"
        yield Finding(ERROR, str(location), problem, reason, hint)
    yield from _misplaced_tensor_findings(weights, location, named, files)
    loose = [file for file in loose if file not in holders]
    if loose and len(weights.indexes) == 1 and not lost:
        yield _loose(inventory, weights, location, files, loose)


def _misplaced_tensor_findings(
    weights: SafetensorsFiles,
    location: Location,
    named: Mapping[str, str],
    files: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """Report tensors that the index lists in the wrong file, or not at all."""
    moved = [tensor for tensor, file in named.items() if tensor in files and file not in files[tensor]]
    unlisted = [tensor for tensor in files if tensor not in named]
    kinds = (
        (f"does not name {plural(len(unlisted), 'tensor')} of its files", unlisted),
        (f"names the wrong file of {plural(len(moved), 'tensor')}", moved),
    )
    for kind, tensors in kinds:
        if tensors:
            reason = (
                "transformers and ckpttools read all tensors of the files that an index names; readers that "
                "look up a tensor in the index do not find these"
            )
            command = call("convert", weights.folder, "DST", format="safetensors")
            do = f"`{command}` writes them with an index of all tensors"
            yield Finding(
                WARNING, str(location), f"{kind}: {_format_names(tensors)}", reason, do, command=command
            )


def _loose(
    inventory: Inventory,
    weights: SafetensorsFiles,
    location: Location,
    files: Mapping[str, Sequence[str]],
    loose: Sequence[str],
) -> Finding:
    """Report files that the index does not name: from another save, or a forgotten part of the model."""
    problem = f"does not name {plural(len(loose), 'file')} next to it: {_format_names(loose)}"
    series = {_stem(name) for name in {file for item in files.values() for file in item}}
    of_model = [name for name in loose if NAMES.numbered.fullmatch(name) and _stem(name) in series]
    tensors = _locations({name: header_of(weights.folder / name) for name in of_model})
    if not tensors.keys() - files.keys():
        do = "move them away if they belong to another save"
        return Finding(WARNING, str(location), problem, "nothing loads them; they take up space", do)
    reason = f"transformers skips them, and no other file has {_format_names(tensors.keys() - files.keys())}"
    do = "fetch the shards and the index again: they belong to different saves"
    headers = {name: header_of(weights.folder / name) for name in weights.files}
    if not _contradiction(headers) and not NAMES.missing(weights.files):
        do = (
            f"if all these files belong to one save, run {set_aside_command(location)} && "
            f"{fix_command(inventory, 'index')}"
        )
    return Finding(ERROR, str(location), problem, reason, do)


def _stale(
    inventory: Inventory,
    weights: SafetensorsFiles,
    location: Location,
    named: Mapping[str, str],
    lost: Sequence[str],
) -> Finding | None:
    """Report missing files whose tensors are in other files; None if the tensors are missing, too.

    Either the index or the other files may be from an earlier save, and names do not show which. So the
    finding has a step for each case, but no command.
    """
    loose = sorted(set(weights.files) - set(named.values()) - {_WHOLE})
    headers = {name: header_of(weights.folder / name) for name in loose}
    expected = {tensor for tensor, file in named.items() if file in {*lost}}
    if not loose or not expected <= _locations(headers).keys() or NAMES.missing(loose):
        return None
    problem = f"names {plural(len(lost), 'file')} that do not exist: {_format_names(lost)}"
    reason = (
        f"other files have their tensors ({_format_names(loose)}): "
        "the index is from an earlier save, or these files "
        "are and the download is incomplete"
    )
    fetched = f"if the index is right, run hf download REPO --local-dir {quote_local_path(weights.folder)}"
    do = f"fetch the index again; {fetched}"
    if {*named.values()} <= {*lost} and not _contradiction(headers):
        do = (
            f"if these files are right, run {set_aside_command(location)} "
            f"&& {fix_command(inventory, 'index')}; {fetched}"
        )
    return Finding(ERROR, str(location), problem, reason, do)


def _duplicate_tensor_findings(
    weights: SafetensorsFiles,
    location: Location,
    named: Mapping[str, str],
    files: Mapping[str, Sequence[str]],
    absent: Collection[str],
) -> Iterator[Finding]:
    """Report tensors in several files. transformers reads the last one, regardless of the index."""
    repeated = {
        name: locations[-1] for name, locations in files.items() if len(locations) > 1 and name in named
    }
    overlaid = [name for name, last in repeated.items() if named[name] == last]
    unclear = [name for name in repeated if name not in {*overlaid, *absent}]
    if unclear:
        name = unclear[0]
        what = (
            "does not name the last file with "
            f"{plural(len(unclear), 'repeated tensor')}: {_format_names(unclear)}"
        )
        reason = f"transformers loads {name} from {repeated[name]}, and the index names {named[name]}"
        do = "fetch the shards and the index again: they belong to different saves"
        yield Finding(ERROR, str(location), what, reason, do)
    elif overlaid:
        what = f"{plural(len(overlaid), 'tensor')} in several files: {_format_names(overlaid)}"
        reason = (
            "transformers and ckpttools read the files that the index names; the other copies waste space"
        )
        command = call("convert", weights.folder, "DST", format="safetensors")
        do = f"`{command}` writes each once"
        yield Finding(WARNING, str(location), what, reason, do, command=command)


def rebuild(folder: Location, read: ReadOptions) -> str:
    """Write an index of all safetensors files of a directory that has none.

    Raises:
        FormatError: An index exists, a shard is missing or damaged, a tensor is in two files, or the files
            are not shards of one model.
        StorageError: The index cannot be written.
    """
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(SAFETENSORS) and p.name[0] != ".")
    headers = {name: header_of(folder / name) for name in names}
    fault = _contradiction(headers)
    lost = NAMES.missing(names)
    if fault or lost:
        raise FormatError(
            "no index can be made", location=folder, got=fault or f"missing: {_format_names(lost)}"
        )
    result = [header for header in headers.values() if isinstance(header, SafetensorsHeader)]
    total = sum(entry.end - entry.begin for header in result for entry in header.entries)
    weight_map = {tensor: files[0] for tensor, files in sorted(_locations(headers).items())}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    path = folder / _NAME
    write_new(path, text.encode())
    return f"{path} was written: {plural(len(weight_map), 'tensor')} in {plural(len(names), 'file')}"


CHECK = Check(
    "safetensors-index",
    "missing shards; a missing, stale or incomplete index, or one with absent tensors; tensors in "
    "several shards",
    _examine,
    Fix("index", f"write {_NAME} over the shards of a directory that has none", rebuild),
)
