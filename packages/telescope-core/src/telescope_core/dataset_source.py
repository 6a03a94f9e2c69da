"""Examples from tables: a dataset on the Hugging Face Hub, a local folder, or a local file."""

from telescope_core.examples.dataset_source import (
    DATASETS_VARIABLE,
    DatasetSource,
    DatasetSpec,
    as_prompt,
    example_of_row,
    load_table,
)

__all__ = [
    "DATASETS_VARIABLE",
    "DatasetSource",
    "DatasetSpec",
    "as_prompt",
    "example_of_row",
    "load_table",
]
