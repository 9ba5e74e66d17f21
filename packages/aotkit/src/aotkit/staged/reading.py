"""Read a stage from its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aotkit_inductor_lower.runtime import BindError
from aotkit_runtime_wrappers import WrapperError

from ..artifact.package_file import read_package
from ..driver.package import check_environment
from ..errors import PackageError
from ..options import Options
from .compiled import Compiled
from .files import check_format, options_from

if TYPE_CHECKING:
    from .captured import Captured
    from .lowered import Lowered
    from .partitioned import Partitioned

__all__ = ["load"]


def load(
    path: str | os.PathLike[str], *, signing_key: bytes | str | None = None
) -> Captured | Partitioned | Lowered | Compiled:
    """The stage that ``save`` wrote to ``path``, in this or another process: the next ones are made of it as ever.

    A file of the last stage holds native code, which runs in this process: load only files that you trust. With
    ``signing_key``, a file that was not signed with it is refused unread. A stage of a module has no weights:
    :meth:`.Compiled.bind` gives them to the last one.

    Raises :class:`PackageError` if the file is no stage, was made with another version of torch or for another
    processor, or lacks the signature.
    """
    manifest, sections, _ = read_package(path, signing_key)
    check_format(manifest, path)
    check_environment(manifest["environment"])
    options, stage = options_from(manifest["options"]), manifest["stage"]
    try:
        if stage == "compiled":
            return Compiled.read(manifest, sections, options)
        return _read_earlier(stage, manifest, sections, options)
    except (BindError, WrapperError, ValueError, KeyError) as error:
        raise PackageError(f"the stage {os.fspath(path)} can't be loaded: {error}") from error


def _read_earlier(
    stage: str, manifest: Mapping[str, Any], sections: Mapping[str, bytes], options: Options
) -> Captured | Partitioned | Lowered:
    """A stage that there is more to compile of, which needs what compiles."""
    from aotkit_inductor_lower import LoweringError
    from aotkit_partition import PartitionError

    from .captured import Captured
    from .lowered import Lowered
    from .partitioned import Partitioned

    try:
        if stage == "captured":
            return Captured.read(manifest, sections, options)
        partitioned = Partitioned.read(manifest, sections, options)
        return partitioned if stage == "partitioned" else Lowered.read(partitioned, manifest, sections)
    except (LoweringError, PartitionError) as error:
        raise ValueError(str(error)) from error
