"""C++ and CUDA sources of the user's own as kernels of an op: built, cached and loaded like the package's libraries.

A source is C++ against torch's stable ABI, with a function that has the op's name and arguments; or, for CUDA, a bare
`__global__` kernel that is launched with a grid and a block given from Python.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuseopt.build import library_cache, loader, toolchain
from fuseopt.build.compiler_messages import build_error
from fuseopt.errors import NativeBuildError, OpError, shown
from fuseopt.extend import nvrtc
from fuseopt.extend.backends import Kernel
from fuseopt.extend.launches import PreparedLaunch, launches_by
from fuseopt.extend.own_library import Missing, library_of
from fuseopt.extend.signature import arguments_of, check_takes, tensors_of, with_tensors

if TYPE_CHECKING:
    from fuseopt.extend.own_op import Op

Kind = Literal["cpu", "cuda"]
Grid = Callable[..., Any]
_SUFFIX = {"cpu": ".cpp", "cuda": ".cu"}
_CPP_TYPES = {"int": "int64_t", "SymInt": "int64_t", "float": "double", "str": "std::string"}
_CPP_CHECKS = {
    "int": "std::is_integral_v<std::tuple_element_t<{}, Given>>",
    "SymInt": "std::is_integral_v<std::tuple_element_t<{}, Given>>",
    "float": "std::is_same_v<std::tuple_element_t<{}, Given>, double>",
    "bool": "std::is_same_v<std::tuple_element_t<{}, Given>, bool>",
}
_SIGNATURE = """#include <tuple>
#include <type_traits>
namespace fuseopt_signature {{
template <class> struct Arguments;
template <class R, class... A> struct Arguments<R(A...)> {{ using type = std::tuple<std::decay_t<A>...>; }};
template <class R, class... A> struct Arguments<R(A...) noexcept> : Arguments<R(A...)> {{}};
using Given = Arguments<decltype({function})>::type;
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """A source text, and what compilers are to call it."""

    text: str
    label: str
    folder: Path | None

    @classmethod
    def of(cls, op: str, kind: Kind, given: str | os.PathLike[str]) -> Source:
        """A source given as text or as the path of a file.

        Raises:
            OpError: a path of which there is no file, or a text that is not UTF-8.
        """
        if not isinstance(given, (str, os.PathLike)) or not str(given).strip():
            raise OpError(f"{op}: its {kind} source must be text or the path of a file, not {shown(given)}")
        try:
            if isinstance(given, str) and re.search(r"[\n;{]", given):
                given.encode()
                return cls(given, f"{op} ({kind} source)", None)
            path = Path(given)
            if not path.is_file():
                folder = ", which is a folder" if path.is_dir() else ""
                text = "give its path, or the source's text"
                raise OpError(f"{op}: no file {str(path)!r} for the {kind} source{folder}; {text}")
            return cls(path.read_text(encoding="utf-8"), str(path.resolve()), path.resolve().parent)
        except UnicodeError as error:
            raise OpError(f"{op}: its {kind} source is not UTF-8: {error}") from error

    def line_marker(self) -> str:
        """The directive after which compilers count the source's lines from 1, and call it by its name."""
        quoted = self.label.replace("\\", "\\\\").replace('"', '\\"')
        return f'#line 1 "{quoted}"'

    def digest(self) -> str:
        """A hash of the text, and of the headers beside it that it includes."""
        found = hashlib.sha256(self.text.encode())
        if self.folder is not None:
            for file in sorted(toolchain.with_headers(Path(self.label))):
                found.update(file.read_bytes())
        return found.hexdigest()[:16]


def add(
    op: Op,
    *,
    cuda: str | os.PathLike[str] | None,
    cpu: str | os.PathLike[str] | None,
    kernel: str | None,
    grid: Grid | None,
    block: int | Sequence[int],
) -> None:
    """See `Op.native`."""
    if cuda is None and cpu is None:
        raise OpError(f"{op.name}: give native a source, as cuda=... or cpu=..., text or the path of a file")
    if (kernel is None) != (grid is None) or (kernel is not None and cuda is None):
        raise OpError(
            f"{op.name}: a bare kernel needs cuda=SOURCE, kernel='its name' and grid=function of the arguments"
        )
    if kernel is not None:
        _check_launch(op, kernel, grid, block)
    sources: list[tuple[Kind, str | os.PathLike[str]]] = []
    sources += [("cpu", cpu)] if cpu is not None else []
    sources += [("cuda", cuda)] if cuda is not None else []
    for kind, given in sources:
        source = Source.of(op.name, kind, given)
        try:
            if kind == "cuda":
                _check_device()
            if kind == "cuda" and kernel is not None:
                assert grid is not None
                loader.load_all(["python"])
                bare = _BareKernel(op, kernel, cubin(source, kernel, _capability()), source.digest(), grid, block)
                made = Kernel(kind, bare, launches=bare.launches)
            else:
                overload = _from_library(op, kind, source)
                made = Kernel(kind, overload._op, raw=overload)
        except (Missing, toolchain.ToolchainError, library_cache.CacheError) as reason:
            op.add_kernel(Kernel(kind, op.function, missing=f"its {kind} source is not built: {reason}"))
        else:
            op.add_kernel(made)


def _check_launch(op: Op, kernel: str, grid: Any, block: Any) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", kernel, re.ASCII):
        raise OpError(f"{op.name}: {shown(kernel)} is no name of a kernel")
    check_takes(op.name, "grid", grid, *op.signature.names)
    _three(op, "block", block)


def _check_device() -> None:
    if torch.version.cuda is None:
        raise Missing(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Missing("torch sees no CUDA device")


def _capability() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def _from_library(op: Op, kind: Kind, source: Source) -> OpOverload:
    recipe = toolchain.cpu_recipe() if kind == "cpu" else toolchain.cuda_recipe([_capability()])
    name = f"{op.name.partition('::')[2]}__native_{kind}_{source.digest()}"
    torch.ops.load_library(build(op.name, name, kind, source, recipe, op.signature.schema))
    loader.load_all(["python"])  # by which the kernel is called sooner
    return op.define_native(name)


def declaration(function: str, schema: str) -> str:
    """The C++ function that a schema asks for, as "Tensor scale(Tensor x, double factor)"."""
    given = []
    for argument in arguments_of(schema):
        kind, _, name = argument.partition(" ")
        is_optional, is_list = kind.endswith("?"), kind.rstrip("?").endswith("[]")
        plain = kind.rstrip("?[]")
        plain = _CPP_TYPES.get(plain, plain)
        plain = f"std::vector<{plain}>" if is_list else plain
        given.append(f"{f'std::optional<{plain}>' if is_optional else plain} {name}")
    results = schema.rpartition("-> ")[2].strip("()").split(", ")
    result = results[0] if len(results) == 1 else f"std::tuple<{', '.join(results)}>"
    return f"{result} {function}({', '.join(given)})"


def _signature_checks(op: str, function: str, schema: str) -> str:
    """C++ that refuses a function with another number of arguments than the schema, or with other types of numbers.

    torch would refuse the first in each call, and reinterpret the bits of the second.
    """
    wanted = f"{op} is called as: {declaration(function, schema)}"
    kinds = [argument.partition(" ")[0] for argument in arguments_of(schema)]
    checks = [f"std::tuple_size_v<Given> == {len(kinds)}"]
    checks += [_CPP_CHECKS[kind].format(place) for place, kind in enumerate(kinds) if kind in _CPP_CHECKS]
    return (
        _SIGNATURE.format(function=function)
        + "".join(f'static_assert({check}, "{wanted}");\n' for check in checks)
        + "}\n"
    )


def build(op: str, registered: str, kind: Kind, source: Source, recipe: toolchain.Recipe, schema: str) -> Path:
    """The library of a source, built unless it is in the cache.

    Args:
        op: the op's name.
        registered: the name that its function has in `torch.ops`, in the op's namespace.
        recipe: for fuseopt's own library of that kind, whose flags are taken.
        schema: the op's, which the function must fit.

    Raises:
        OpError: the source has no function of the op's name.
        NativeBuildError: the compiler refuses the source; the message has its first error, with file and line.
        library_cache.CacheError: the cache folder must not be used.
    """
    namespace, _, function = op.partition("::")
    if function not in source.text and not re.search(r'#\s*include\s+"(?!new_tensor\.h)', source.text):
        raise OpError(f"{source.label} has no function {function!r}; define {declaration(function, schema)}")
    text = (
        f'{source.line_marker()}\n{source.text}\n#line 1 "registration of {op}"\n'
        f"#include <torch/csrc/stable/library.h>\n{_signature_checks(op, function, schema)}"
        f"STABLE_TORCH_LIBRARY_IMPL({namespace}, {kind.upper()}, library) {{\n"
        f'  library.impl("{registered}", TORCH_BOX(&{function}));\n}}\n'
    )
    here = () if source.folder is None else (f"-I{source.folder}",)
    return library_of(
        op,
        text,
        kind,
        file=f"{function}{_SUFFIX[kind]}",
        recipe=recipe,
        command=(*compile_command(recipe, kind), *here),
        digest=source.digest(),
    )


def compile_command(recipe: toolchain.Recipe, kind: Kind) -> tuple[str, ...]:
    """The recipe's command for one file; for CUDA with the headers and the C++ that the stable ABI needs."""
    if kind == "cpu":
        return recipe.compile_commands[".cpp"]
    nvcc = tuple(flag.replace("-std=c++17", "-std=c++20") for flag in recipe.compile_commands[".cu"])
    headers = recipe.compile_commands[".cpp"]
    defines = tuple(flag for flag in headers if flag.startswith("-D"))
    folders = [headers[place + 1] for place, flag in enumerate(headers) if flag == "-isystem"]
    return (*nvcc, *defines, *(part for folder in folders for part in ("-isystem", folder)))


def cubin(source: Source, kernel: str, architecture: str) -> bytes:
    """A bare kernel's machine code for a compute capability, as "90": by NVRTC, or where that cannot, by nvcc.

    NVRTC lacks what nvcc includes by itself, such as `int64_t`. So what it refuses is left to nvcc, if there is one.

    Raises:
        OpError: the source has no kernel of that name.
        NativeBuildError: the compiler refuses the source.
        toolchain.ToolchainError: there is neither NVRTC nor nvcc.
    """
    declared = re.search(
        rf"__global__\s+(?:__launch_bounds__\([^)]*\)\s+)?void\s+(?:[^;{{(]*\s)?{kernel}\s*\(", source.text
    )
    if declared is None:
        raise OpError(f"{source.label} has no `__global__ void {kernel}(...)`")
    text = source.text
    if 'extern "C"' not in text[: declared.start()].rpartition("\n")[2]:
        text = f'{text[: declared.start()]}extern "C" {text[declared.start() :]}'
    text = f"{source.line_marker()}\n{text}"
    here = [] if source.folder is None else [f"-I{source.folder}"]
    try:
        options = [f"--gpu-architecture=sm_{architecture}", *here, *nvrtc.include_flags()]
        return nvrtc.cubin(text, source.label, options)
    except (Missing, NativeBuildError) as refusal:
        try:
            nvcc = toolchain.find_nvcc()
        except toolchain.ToolchainError as absent:
            if isinstance(refusal, NativeBuildError):
                raise refusal from None
            raise toolchain.ToolchainError(f"{refusal}, and {absent}") from None
    with tempfile.TemporaryDirectory(prefix="fuseopt-") as folder_name:
        file, output = Path(folder_name) / f"{kernel}.cu", Path(folder_name) / f"{kernel}.cubin"
        file.write_text(text, encoding="utf-8")
        command = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-O3", str(file), "-o", str(output), *here]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode != 0:
            raise build_error(f"{source.label} does not compile", command, done.stdout)
        return output.read_bytes()


class _BareKernel:
    """Calls of a bare kernel: contiguous tensors, the numbers as int and double, the results, and their size as int.

    Args:
        code: its machine code, a cubin.
        digest: of its source.
    """

    def __init__(self, op: Op, name: str, code: bytes, digest: str, grid: Grid, block: int | Sequence[int]) -> None:
        self.digest = digest
        self._op, self._grid, self._block = op, grid, _three(op, "block", block)

        @functools.cache
        def on_device(index: int) -> Any:
            with torch.cuda.device(index):
                return torch.cuda._utils._cuda_load_module(code, [name])[name]

        self._on_device = on_device
        on_device(torch.cuda.current_device())  # raises now for code that the driver refuses

    def launches(self, library: Any) -> Any:
        """Its launches by csrc/python."""
        return launches_by(library, self._prepare)

    def _prepare(self, *arguments: Any) -> PreparedLaunch | None:
        device, *others = {tensor.device for tensor in tensors_of(arguments)}
        if others:
            return None
        results = self._results(arguments)
        passed = [place for place, argument in enumerate(arguments) if argument is not None]
        made = range(len(arguments), len(arguments) + len(results))
        size = struct.pack("i", self._size(results))
        return PreparedLaunch(
            self._on_device(device.index).func.value,
            (self._grid, functools.partial(_three, self._op, "grid")),
            self._block,
            0,
            results,
            [*passed, *made, size],
            [place for place in passed if isinstance(arguments[place], Tensor)],
        )

    def __call__(self, *arguments: Any) -> Any:
        """A launch by torch.

        Raises:
            TypeError: an argument is no tensor and no number.
            OverflowError: a number, or the size of the first result, that does not fit into an int.
            ValueError: the tensors are on different devices.
        """
        for argument in arguments:
            _check_passed(argument)
        device, *others = {tensor.device for tensor in tensors_of(arguments)}
        if others:
            raise ValueError("the tensors of a bare kernel are on different devices")
        found = self._results(arguments)
        size = self._size(found)
        given = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in arguments]
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in found]
        if any(result.numel() for result in results):
            with torch.cuda.device(device):
                passed = [argument for argument in given if argument is not None]
                grid = _three(self._op, "grid", self._grid(*arguments))
                self._on_device(device.index)(grid, self._block, [*passed, *results, size])
        return results[0] if self._op.signature.results == 1 else tuple(results)

    def _results(self, arguments: Sequence[Any]) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each result, which the op's fake knows."""
        meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors_of(arguments)]
        return [(r.shape, r.dtype) for r in self._op.fake_results(with_tensors(arguments, meta))]

    def _size(self, results: Sequence[tuple[torch.Size, torch.dtype]]) -> int:
        size = results[0][0].numel()
        if size >= 2**31:
            raise OverflowError(
                f"{self._op.name}: a bare kernel gets the size of its first result as int, into which {size} does not "
                "fit; call it with smaller tensors, or refuse such calls in `supports`"
            )
        return size


def _check_passed(argument: Any) -> None:
    if isinstance(argument, int) and not -(2**31) <= argument < 2**31:
        raise OverflowError(f"a bare kernel gets numbers as int, into which {argument} does not fit")
    if argument is not None and not isinstance(argument, (Tensor, int, float)):
        raise TypeError(f"a bare kernel takes tensors, ints and floats, not {type(argument).__name__}")


def _three(op: Op, what: str, size: Any) -> tuple[int, int, int]:
    """A grid or a block in three dimensions.

    Raises:
        OpError: it is no positive int, nor up to three of them.
    """
    sizes = (size,) if isinstance(size, int) else size
    if not (isinstance(sizes, (tuple, list)) and 1 <= len(sizes) <= 3 and all(type(n) is int and n > 0 for n in sizes)):
        raise OpError(f"{op.name}: its {what} must be a positive int, or up to three of them, not {shown(size)}")
    first, second, third = (*sizes, 1, 1)[:3]
    return first, second, third
