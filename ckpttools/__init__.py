"""Convert, inspect, compare and repair LLM checkpoints.

    import ckpttools

    tree = ckpttools.open("checkpoints/llama")                               # reads only headers
    receipt = ckpttools.hf_to_maxtext("hf/llama", "maxtext/llama", dtype="bfloat16")
    prepared = ckpttools.maxtext_to_hf.plan("maxtext/llama", "hf/again")     # plans, writes nothing
    ckpttools.verify("maxtext/llama", "hf/llama").equal                      # True

Names are imported on first use, so `import ckpttools` itself is cheap.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("ckpttools does not run on Windows; use it in WSL")

# Not typing.TYPE_CHECKING: importing typing takes as long as everything else before `ckpt` handles signals.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ckpttools.api.adapters import adapter_to_maxtext as adapter_to_maxtext
    from ckpttools.api.adapters import adapter_to_peft as adapter_to_peft
    from ckpttools.api.adapters import extract_adapter as extract_adapter
    from ckpttools.api.adapters import merge_adapter as merge_adapter
    from ckpttools.api.assemble import assemble as assemble
    from ckpttools.api.assemble import list_saves as list_saves
    from ckpttools.api.average import average as average
    from ckpttools.api.cat import cat as cat
    from ckpttools.api.chunks import chunks as chunks
    from ckpttools.api.conversion_fn import conversion_fn as conversion_fn
    from ckpttools.api.conversion_fn import family_conversion_fn as family_conversion_fn
    from ckpttools.api.conversion_fn import use_in_maxtext as use_in_maxtext
    from ckpttools.api.convert import convert as convert
    from ckpttools.api.copy import copy as copy
    from ckpttools.api.diff import diff as diff
    from ckpttools.api.doctor import doctor as doctor
    from ckpttools.api.families import check_family as check_family
    from ckpttools.api.families import families as families
    from ckpttools.api.hash import hash as hash
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext as hf_to_maxtext
    from ckpttools.api.hf_to_maxtext import plan_to_maxtext as plan_to_maxtext
    from ckpttools.api.inspect import inspect as inspect
    from ckpttools.api.load import load as load
    from ckpttools.api.ls import ls as ls
    from ckpttools.api.maxtext_config import maxtext_config as maxtext_config
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf as maxtext_to_hf
    from ckpttools.api.maxtext_to_hf import plan_to_huggingface as plan_to_huggingface
    from ckpttools.api.plan_status import plan_status as plan_status
    from ckpttools.api.plan_training import plan_training as plan_training
    from ckpttools.api.plans import write_plan as write_plan
    from ckpttools.api.prepared import Prepared as Prepared
    from ckpttools.api.prepared import Resources as Resources
    from ckpttools.api.prepared import WriteOptions as WriteOptions
    from ckpttools.api.prune import prune as prune
    from ckpttools.api.publish_plan import publish_plan as publish_plan
    from ckpttools.api.quantize import quantize as quantize
    from ckpttools.api.report import report as report
    from ckpttools.api.reshard import reshard as reshard
    from ckpttools.api.resolve import resolve as resolve
    from ckpttools.api.run_part import run_part as run_part
    from ckpttools.api.save import plan_save as plan_save
    from ckpttools.api.save import save as save
    from ckpttools.api.save import save_async as save_async
    from ckpttools.api.shrink import shrink as shrink
    from ckpttools.api.sources import open as open
    from ckpttools.api.stats import stats as stats
    from ckpttools.api.summary import summary as summary
    from ckpttools.api.synth import stitch as stitch
    from ckpttools.api.synth import synth as synth
    from ckpttools.api.transforms import cast as cast
    from ckpttools.api.transforms import remap as remap
    from ckpttools.api.transforms import select as select
    from ckpttools.api.transforms import stack as stack
    from ckpttools.api.transforms import strip_optimizer as strip_optimizer
    from ckpttools.api.transforms import transform as transform
    from ckpttools.api.transforms import unstack as unstack
    from ckpttools.api.verify import verify as verify
    from ckpttools.api.verify import verify_files as verify_files
    from ckpttools.array.lazy import LazyArray as LazyArray
    from ckpttools.array.tree import Empty as Empty
    from ckpttools.array.tree import Metadata as Metadata
    from ckpttools.array.tree import Text as Text
    from ckpttools.array.tree import Tree as Tree
    from ckpttools.copying.prepared import PreparedCopy as PreparedCopy
    from ckpttools.core.dtypes import DTYPES as DTYPES
    from ckpttools.core.dtypes import DType as DType
    from ckpttools.core.errors import CheckpointError as CheckpointError
    from ckpttools.core.errors import CheckpointWarning as CheckpointWarning
    from ckpttools.core.errors import ChosenItemWarning as ChosenItemWarning
    from ckpttools.core.errors import ConfigError as ConfigError
    from ckpttools.core.errors import CoverageError as CoverageError
    from ckpttools.core.errors import DamagedScalesError as DamagedScalesError
    from ckpttools.core.errors import DestinationExistsError as DestinationExistsError
    from ckpttools.core.errors import FormatError as FormatError
    from ckpttools.core.errors import LaterStepWarning as LaterStepWarning
    from ckpttools.core.errors import LostValuesWarning as LostValuesWarning
    from ckpttools.core.errors import MappingError as MappingError
    from ckpttools.core.errors import MemoryBudgetError as MemoryBudgetError
    from ckpttools.core.errors import MissingPackageError as MissingPackageError
    from ckpttools.core.errors import MissingPathError as MissingPathError
    from ckpttools.core.errors import NoSpaceError as NoSpaceError
    from ckpttools.core.errors import NoSuchPathError as NoSuchPathError
    from ckpttools.core.errors import OtherProcessError as OtherProcessError
    from ckpttools.core.errors import PaddedVocabularyWarning as PaddedVocabularyWarning
    from ckpttools.core.errors import SeveralCheckpointsError as SeveralCheckpointsError
    from ckpttools.core.errors import ShapeError as ShapeError
    from ckpttools.core.errors import SourceChangedError as SourceChangedError
    from ckpttools.core.errors import StepWarning as StepWarning
    from ckpttools.core.errors import StorageError as StorageError
    from ckpttools.core.errors import UncutArraysWarning as UncutArraysWarning
    from ckpttools.core.errors import UnknownNameError as UnknownNameError
    from ckpttools.core.errors import UnlistedStepWarning as UnlistedStepWarning
    from ckpttools.core.errors import UsageError as UsageError
    from ckpttools.core.region import Region as Region
    from ckpttools.core.version import __version__ as __version__
    from ckpttools.maxtext.conversion_options import ToHuggingFace as ToHuggingFace
    from ckpttools.maxtext.conversion_options import ToMaxText as ToMaxText
    from ckpttools.maxtext.model_options import ModelOptions as ModelOptions
    from ckpttools.maxtext.stacking import ForceUnroll as ForceUnroll
    from ckpttools.maxtext.stacking import StackLayers as StackLayers
    from ckpttools.maxtext.stacking import UnstackLayers as UnstackLayers
    from ckpttools.maxtext.strip import StripOptimizer as StripOptimizer
    from ckpttools.maxtext.to_version import ForVersion as ForVersion
    from ckpttools.run.events import Receipt as Receipt
    from ckpttools.sharding.save_background import Saving as Saving
    from ckpttools.transforms.cast import CastMap as CastMap
    from ckpttools.transforms.cast import CastTo as CastTo
    from ckpttools.transforms.functions import as_checkpoint_conversion_fn as as_checkpoint_conversion_fn
    from ckpttools.transforms.functions import mapped_by as mapped_by
    from ckpttools.transforms.select import Select as Select

# Module -> the public names that it defines.
_MODULES = {
    "api.adapters": "adapter_to_maxtext adapter_to_peft extract_adapter merge_adapter",
    "api.average": "average",
    "api.assemble": "assemble list_saves",
    "api.transforms": "cast remap select stack strip_optimizer transform unstack",
    "api.cat": "cat",
    "api.chunks": "chunks",
    "api.conversion_fn": "conversion_fn family_conversion_fn use_in_maxtext",
    "api.convert": "convert",
    "api.copy": "copy",
    "api.doctor": "doctor",
    "api.diff": "diff",
    "api.hash": "hash",
    "api.families": "check_family families",
    "api.hf_to_maxtext": "hf_to_maxtext plan_to_maxtext",
    "api.load": "load",
    "api.maxtext_config": "maxtext_config",
    "api.maxtext_to_hf": "maxtext_to_hf plan_to_huggingface",
    "api.report": "report",
    "api.run_part": "run_part",
    "api.plan_training": "plan_training",
    "api.plans": "write_plan",
    "api.prepared": "Prepared Resources WriteOptions",
    "api.prune": "prune",
    "api.publish_plan": "publish_plan",
    "api.quantize": "quantize",
    "api.reshard": "reshard",
    "api.resolve": "resolve",
    "api.ls": "ls",
    "api.save": "plan_save save save_async",
    "api.shrink": "shrink",
    "api.plan_status": "plan_status",
    "api.sources": "open",
    "api.stats": "stats",
    "api.summary": "summary",
    "api.synth": "stitch synth",
    "api.inspect": "inspect",
    "api.verify": "verify verify_files",
    "array.lazy": "LazyArray",
    "array.tree": "Empty Metadata Text Tree",
    "copying.prepared": "PreparedCopy",
    "core.dtypes": "DType DTYPES",
    "core.errors": (
        "CheckpointError CheckpointWarning ChosenItemWarning ConfigError CoverageError "
        "DamagedScalesError DestinationExistsError FormatError LaterStepWarning LostValuesWarning "
        "MappingError MemoryBudgetError MissingPackageError MissingPathError NoSpaceError NoSuchPathError "
        "OtherProcessError PaddedVocabularyWarning SeveralCheckpointsError ShapeError "
        "SourceChangedError StepWarning StorageError UncutArraysWarning UnknownNameError "
        "UnlistedStepWarning UsageError"
    ),
    "core.region": "Region",
    "core.version": "__version__",
    "maxtext.conversion_options": "ToHuggingFace ToMaxText",
    "maxtext.model_options": "ModelOptions",
    "maxtext.stacking": "ForceUnroll StackLayers UnstackLayers",
    "maxtext.strip": "StripOptimizer",
    "maxtext.to_version": "ForVersion",
    "run.events": "Receipt",
    "sharding.save_background": "Saving",
    "transforms.cast": "CastMap CastTo",
    "transforms.functions": "as_checkpoint_conversion_fn mapped_by",
    "transforms.select": "Select",
}
_MODULE_OF = {name: f"ckpttools.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ckpttools' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        raise import_module("ckpttools.core.extras").missing_package(error) from error
    if _MODULE_OF[name].startswith("ckpttools.api.") and not isinstance(value, type):
        terms = import_module("ckpttools.core.message_terms")
        value = globals()[name] = terms.for_python(value)
    return value


def __dir__() -> list[str]:
    return __all__
