"""Compiles the CUDA sources of the examples, on a machine without a GPU."""

from pathlib import Path

from fuseopt.build import library_cache, toolchain
from fuseopt.extend import native, registered


def assert_compiles_for_sm_90(op: str, file: Path) -> None:
    """Builds an op's source against its schema. The example that defines the op must have been imported."""
    source = native.Source.of(op, "cuda", file)
    name, schema = f"{op.partition('::')[2]}__native", registered()[op].signature.schema
    library = native.build(op, name, "cuda", source, toolchain.cuda_recipe(["90"]), schema)
    assert library_cache.damage(library) is None
