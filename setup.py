"""What pyproject.toml cannot say: a wheel that holds native libraries is for this platform, and for any Python."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

PREBUILT = Path(__file__).parent / "fuseopt" / "_lib"


class PlatformWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not any(PREBUILT.glob("*.so"))

    def get_tag(self) -> tuple[str, str, str]:
        *_, this_platform = super().get_tag()
        return "py3", "none", this_platform


setup(cmdclass={"bdist_wheel": PlatformWheel})
