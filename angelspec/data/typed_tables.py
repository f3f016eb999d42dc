"""Tables with typed columns as rows: Parquet files and datasets on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.network import transport_errors
from angelspec.core.recipe import PromptSource
from angelspec.data.reasons import Reason, RowRefused
from angelspec.data.source_row import RAW_CHARACTERS, SourceRow

_BATCH = 256


def parquet_rows(path: Path) -> Iterator[SourceRow]:
    """Read a Parquet file batch by batch.

    Raises:
        DataError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH):
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        value = batch.slice(index, 1).to_pylist()[0]
                    except UnicodeDecodeError as error:
                        refused = RowRefused(
                            Reason.INVALID_UTF8,
                            f"byte 0x{error.object[error.start]:02X} at offset {error.start} of a text is not UTF-8",
                        )
                        yield SourceRow(number, None, refused, "")
                    else:
                        yield _typed_row(number, value)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is unreadable as Parquet: {_first_line(error)}", mend="copy or export it again"
        ) from error


def hub_revision(name: str, *, revision: str | None) -> str:
    """The commit that a branch, a tag or the newest state (None) of a hub dataset names now.

    A full commit hash is returned as it is, without asking the hub.

    Raises:
        MissingRequirement: the hub does not answer.
        DataError: there is no such dataset or revision.
    """
    if revision and len(revision) == 40 and all(character in "0123456789abcdef" for character in revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    mend = "check the name, or log in with `hf auth login` if the dataset is private or gated"
    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except (HfHubHTTPError, HFValidationError) as error:
        raise DataError(f"hf:{name}: {_first_line(error)}", mend=mend) from error
    except (OfflineModeIsEnabled, *transport_errors()) as error:
        raise MissingRequirement(
            f"hf:{name}: the hub cannot be reached ({_first_line(error)})",
            mend="connect, set HF_ENDPOINT to a mirror, or use file:PATH",
        ) from error
    if not commit:
        raise DataError(f"hf:{name} has no commit", mend=mend)
    return commit


def hub_rows(name: str, source: PromptSource, *, commit: str) -> Iterator[SourceRow]:
    """Stream one split of a hub dataset at one commit.

    Raises:
        DataError: the split or subset does not exist, or a row cannot be decoded (rows behind it are lost too,
            so the run stops).
    """
    import datasets

    number = 0
    try:
        rows = datasets.load_dataset(name, source.subset, split=source.split, revision=commit, streaming=True)
        for value in rows:
            number += 1
            yield _typed_row(number, value)
    except (ValueError, *transport_errors(), datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source.source} (split {source.split}) failed after row {number}: {_first_line(error)}",
            mend="check split and subset, or download its files and use file:PATH",
        ) from error


def _typed_row(number: int, value: Mapping[str, Any]) -> SourceRow:
    return SourceRow(number, _present(value), None, repr(value)[:RAW_CHARACTERS])


def _present(value: Any) -> Any:
    """Drop None from objects, at every depth: columns of structs spell every absent key that way."""
    if isinstance(value, Mapping):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_present(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
