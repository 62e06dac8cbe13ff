"""fuseopt: one line makes a Hugging Face model fast, and one line undoes it to the bit."""

from fuseopt._version import __version__

__all__ = ["__version__"]
