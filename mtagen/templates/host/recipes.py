"""Calls of host functions, launch by launch or by recipes."""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with gradients off. Where they are off, as in backward passes, torch.no_grad would take as long."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments, **options)
        with torch.no_grad():
            return function(*arguments, **options)

    return called


class Call:
    """The memory and the launches of one call, which are made at once.

    Args:
        like: a tensor on the device of the call.

    Attributes:
        device: that device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like, self.device = like, like.device

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a tensor that the call returns, of any content."""
        return self._like.new_empty(shape, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the call, which is zero before its first launch."""
        return self._like.new_zeros(shape, dtype=dtype)

    def workspace(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the call, of any content. It may be that which was asked for by the same name before."""
        return self._like.new_empty(shape, dtype=dtype)

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
        """Launch Triton's kernel with its options, or a loaded CUDA kernel, for which None is a null pointer."""
        if options:
            kernel[grid](*arguments, **options)
        else:
            kernel(grid, *(x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in arguments))

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of tensors and then of other values, which writes to some of the tensors."""
        function(*arguments)

    def reshaped(self, name: str, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A view of a tensor in another shape; if there is none, a copy in the workspace of this name."""
        view = _viewed(x, shape)
        if view is None:
            view = self.workspace(name, shape, x.dtype)
            self.run(_copy_rows, view.view(x.shape), x)
        return view


def _copy_rows(copy: torch.Tensor, x: torch.Tensor) -> None:
    """Copy rows of a tensor, in words of 16 bytes if all rows consist of such words.

    PyTorch copies strided tensors one element at a time, and a complex number is one element of 16 bytes.
    """
    copy, x = copy.squeeze(), x.squeeze()  # the stride of an axis of one entry does not matter
    *strides, last = x.stride()
    distances = [number * x.itemsize for number in (x.storage_offset(), *strides, x.shape[-1])]
    if last == 1 and not any(number % 16 for number in (x.data_ptr(), *distances)):
        copy, x = copy.view(torch.complex128), x.view(torch.complex128)
    copy.copy_(x)


def _viewed(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """A view of a tensor in another shape; None if there is none."""
    try:
        return x.view(shape)
    except RuntimeError:
        return None


class Whole(NamedTuple):
    """One of a call's tensors."""

    base: int

    def of(self, bases: Sequence[Any]) -> Any:
        """The tensor of a call."""
        return bases[self.base]


class Place(NamedTuple):
    """A view of one of a call's tensors.

    Attributes:
        base: number of the tensor.
        shape, strides, offset: of the view, in elements; the offset is from the tensor's first element.
        dtype: of the view, if it is not the tensor's.
    """

    base: int
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    dtype: torch.dtype | None = None

    def of(self, bases: Sequence[Any]) -> torch.Tensor:
        """The view of a call's tensor."""
        base: torch.Tensor = bases[self.base]
        if self.dtype:
            base = base.view(self.dtype)
        if not self.offset:  # PyTorch takes the tensor's own offset, and less time
            return base.as_strided(self.shape, self.strides)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


class Pointer(NamedTuple):
    """An argument of a launch: the number of an address in the recipe's list, and for Triton what lies there."""

    number: int
    place: Whole | Place | None = None


class Described(NamedTuple):
    """An argument of a launch: a descriptor like this one, of what lies at a place."""

    place: Whole | Place
    like: TensorDescriptor

    def of(self, bases: Sequence[Any]) -> TensorDescriptor:
        """The descriptor of a call's tensor."""
        return TensorDescriptor(self.place.of(bases), self.like.shape, self.like.strides, self.like.block_shape)


class CudaLaunch(NamedTuple):
    """A launch of a loaded CUDA kernel."""

    kernel: Any
    grid: Sequence[int]
    arguments: Sequence[Any]

    def bound(self, cells: int, numbers: int) -> Callable[..., None]:
        """The launch with its arguments in cells of 8 bytes.

        Args:
            cells: address of the cells of the recipe's pointers.
            numbers: address of cells for the numbers of this launch, which are written now.
        """
        addresses = []
        for place, (code, x) in enumerate(zip(self.kernel.codes, self.arguments, strict=True)):
            if isinstance(x, Pointer):
                addresses.append(cells + 8 * x.number)
            else:
                addresses.append(numbers + 8 * place)
                ctypes.memmove(addresses[-1], struct.pack(code, x or 0), struct.calcsize(code))
        launch: Callable[..., None] = self.kernel.bound(self.grid, addresses)
        return launch


class TritonLaunch:
    """A launch of Triton's kernel. The first one finds the compiled kernel, whose launcher takes addresses."""

    def __init__(self, kernel: Any, grid: Sequence[int], arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self._kernel, self._arguments, self._options = kernel, arguments, options
        self._grid = (*grid, 1, 1)[:3]
        self._compiled: Any = None
        self._constants: list[Any] = []

    def __call__(self, stream: int, bases: Sequence[Any], addresses: Sequence[int]) -> None:
        """Launch on a stream, given the call's tensors and the addresses in the recipe's list."""
        arguments = [x.of(bases) if isinstance(x, Described) else x for x in self._arguments]
        if self._compiled is not None and not self._kernel.pre_run_hooks:
            values = [addresses[x.number] if isinstance(x, Pointer) else x for x in arguments]
            self._compiled[self._grid](*values, *self._constants, stream=stream)
            return
        tensors = [x.place.of(bases) if isinstance(x, Pointer) and x.place else x for x in arguments]
        compiled = self._kernel[self._grid](*tensors, **self._options)
        if isinstance(compiled, CompiledKernel):
            parameters = list(self._kernel.signature.parameters.values())
            self._constants = [parameter.default for parameter in parameters[len(arguments) :]]
            self._compiled = compiled


class FunctionCall(NamedTuple):
    """A call of a function that takes tensors, then other values."""

    function: Callable[..., Any]
    places: Sequence[Whole | Place]
    values: Sequence[Any]

    def __call__(self, stream: int, bases: Sequence[Any], addresses: Sequence[int]) -> None:
        """Call it with the call's tensors."""
        self.function(*[x.of(bases) for x in self.places], *self.values)


class Recorder(Call):
    """Notes what a call does. Its tensors are on the meta device: they have shapes and no memory.

    Args:
        tensors: tensors like those of the call; None for those that it lacks, but not for the first.

    Attributes:
        tensors: the same on the meta device.
        bases: each of the call's tensors on the meta device with its number, by its storage: first the arguments, then
            the workspace, which has a number only, then the results.
        regions: the name of each region of the workspace, likewise.
        zeroed, others: bytes of each region: of those that are zero at first, and of the others.
        results: shape and dtype of each result.
        steps: launches and calls of functions.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__(tensors[0])
        self._noted: list[torch.Tensor] = []  # they live as long as this, so that a storage has one identity
        self.bases: dict[int, tuple[int, torch.Tensor]] = {}
        self.regions: dict[int, str] = {}
        self.zeroed: dict[str, int] = {}
        self.others: dict[str, int] = {}
        self.results: list[tuple[Sequence[int], torch.dtype]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.tensors: list[Any] = [x if x is None else self._argument(number, x) for number, x in enumerate(tensors)]

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        x = self._memory(shape, dtype)
        self.bases[_storage(x)] = len(self.tensors) + 1 + len(self.results), x
        self.results.append((shape, dtype))
        return x

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._region(self.zeroed, f"zeros {len(self.zeroed)}", shape, dtype)

    def workspace(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._region(self.others, name, shape, dtype)

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
        self.steps.append((kernel, grid, arguments, options))

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.steps.append((function, arguments))

    def _argument(self, number: int, x: torch.Tensor) -> torch.Tensor:
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._noted.append(x)
        self.bases[_storage(x)] = number, x
        return x

    def _memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._noted.append(torch.empty(shape, dtype=dtype, device="meta"))
        return self._noted[-1]

    def _region(self, sizes: dict[str, int], name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        x = self._memory(shape, dtype)
        self.regions[_storage(x)] = name
        sizes[name] = max(sizes.get(name, 0), x.nbytes)
        return x


def _storage(x: torch.Tensor) -> int:
    """The identity of the memory of a tensor on the meta device."""
    return int(x.untyped_storage()._cdata)


class Recipe:
    """The launches of calls of equal sizes, worked out once. It makes such a call with other tensors.

    Args:
        notes: what a call did.
        returned: what the call returned: results, or parts of the workspace.
    """

    def __init__(self, notes: Recorder, returned: Sequence[torch.Tensor]) -> None:
        like = notes.tensors[0]
        # PyTorch takes longer to read a tuple of extents, and a dtype.
        self._results = [(x, {} if dtype == like.dtype else {"dtype": dtype}) for x, dtype in notes.results]
        starts, end = {}, 0
        for name, size in (notes.zeroed | notes.others).items():
            starts[name] = end
            end += _rounded(size)
        self._elements = end // like.itemsize
        zeroed = sum(map(_rounded, notes.zeroed.values())) // like.itemsize
        self._zeroed = (zeroed,) if zeroed else None  # a shape, because a slice takes longer
        self._dtypes: list[torch.dtype] = []  # of other views of the workspace, which are tensors of the call, too
        self._pointers: dict[tuple[int, int], int] = {}  # the number of each, by tensor and bytes from its begin
        workspace = len(notes.tensors)

        def place(x: torch.Tensor, often: bool = True) -> Whole | Place:
            view = x.shape, x.stride(), int(x.storage_offset())
            if _storage(x) in notes.bases:
                base, whole = notes.bases[_storage(x)]
                return Whole(base) if view == (whole.shape, whole.stride(), 0) else Place(base, *view)
            start = starts[notes.regions[_storage(x)]] // x.itemsize
            base = workspace
            if x.dtype != like.dtype and not often:
                return Place(base, *view[:2], start + view[2], x.dtype)
            if x.dtype != like.dtype:
                if x.dtype not in self._dtypes:
                    self._dtypes.append(x.dtype)
                base += 1 + len(notes.results) + self._dtypes.index(x.dtype)
            return Place(base, *view[:2], start + view[2])

        def pointer(x: torch.Tensor) -> int:
            base, _ = notes.bases.get(_storage(x), (workspace, None))
            start = starts[notes.regions[_storage(x)]] if base == workspace else 0
            address = base, start + int(x.storage_offset()) * x.itemsize
            return self._pointers.setdefault(address, len(self._pointers))

        def step(kernel: Any, *noted: Any) -> Any:
            if len(noted) == 1:
                tensors = [x for x in noted[0] if isinstance(x, torch.Tensor)]
                return FunctionCall(kernel, [place(x) for x in tensors], noted[0][len(tensors) :])
            grid, arguments, options = noted
            if not options:
                values = [Pointer(pointer(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
                return CudaLaunch(kernel, grid, values)
            values = []
            for x in arguments:
                if isinstance(x, torch.Tensor):
                    x = Pointer(pointer(x), place(x, often=False))  # for the launch that finds the compiled kernel
                elif isinstance(x, TensorDescriptor):
                    x = Described(place(x.base), x)
                values.append(x)
            return TritonLaunch(kernel, grid, values, options)

        self._steps = [step(*noted) for noted in notes.steps]
        self._returned = [place(x) for x in returned]
        self._pack_into = struct.Struct(f"{len(self._pointers)}P").pack_into
        self._frames: list[tuple[Any, list[Callable[..., Any]]]] = []  # each is free for a call

    def __call__(self, tensors: Sequence[Any], begins: Sequence[int]) -> tuple[Any, ...]:
        """Make a call, whose first tensor is on the current device.

        Args:
            tensors: the call's tensors.
            begins: the address of each.

        Returns:
            what the call returns.
        """
        like = tensors[0]
        results = [like.new_empty(*shape, **options) for shape, options in self._results]
        workspace = like.new_empty(self._elements)
        if self._zeroed:
            workspace.as_strided(self._zeroed, (1,)).zero_()
        bases = [*tensors, workspace, *results]
        begins = [*begins, workspace.data_ptr(), *[x.data_ptr() for x in results]]
        bases += [workspace.view(dtype) for dtype in self._dtypes]
        addresses = [begins[base] + offset for base, offset in self._pointers]
        try:
            frame = self._frames.pop()  # a call of another thread meanwhile takes another frame
        except IndexError:
            frame = self._frame()
        cells, steps = frame
        self._pack_into(cells, 0, *addresses)
        stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
        for step in steps:
            step(stream, bases, addresses)
        self._frames.append(frame)
        return tuple([x.of(bases) for x in self._returned])

    def _frame(self) -> tuple[Any, list[Callable[..., Any]]]:
        """Memory for the arguments of a call's launches, and the steps of a call that has it."""
        numbers = len(self._pointers)  # the first cell for numbers
        steps = [step for step in self._steps if isinstance(step, CudaLaunch)]
        cells = (ctypes.c_uint64 * (numbers + sum(len(step.arguments) for step in steps)))()
        begin, bound = ctypes.addressof(cells), []
        for step in self._steps:
            if isinstance(step, CudaLaunch):
                bound.append(step.bound(begin, begin + 8 * numbers))
                numbers += len(step.arguments)
            else:
                bound.append(step)
        return cells, bound


def _rounded(size: int) -> int:
    """Bytes of a region, so that the next one begins as aligned as memory of PyTorch."""
    return -(-size // 512) * 512


class Recipes:
    """The recipes of a module's host functions.

    The first call of some sizes is made launch by launch, and the second one makes the recipe. So calls whose sizes
    always change make no recipes, unless several layers share the module. Calls on the CPU make none.
    """

    MOST = 256  # recipes that are kept

    def __init__(self) -> None:
        self._suspended = 0
        self._recipes: dict[Any, Recipe] = {}
        self._seen: dict[Any, bool] = {}
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Any], tensors: Sequence[Any], numbers: tuple[Any, ...]) -> Any:
        """Call a function, or do by a recipe what it does.

        Args:
            function: takes a :class:`Call`, the tensors and the numbers. It does the same for all tensors of equal
                dtypes, shapes and strides and for equal numbers. Gradients are off.
            tensors: maybe with None. The first one is on the current device.
            numbers: hashable values.

        Returns:
            what the function returns, a tuple.
        """
        like = tensors[0]
        if self._suspended or not self.serves(like):
            return function(Call(like), *tensors, *numbers)
        begins = [0 if x is None else x.data_ptr() for x in tensors]
        bits = 0
        facts: list[Any] = [function, like.get_device(), numbers]  # one tuple, because hashes of many take longer
        for x, begin in zip(tensors, begins, strict=True):
            if x is None:
                facts.append(None)
            else:  # strides of a dense tensor follow from its shape
                facts += x.dtype, x.shape, x.is_contiguous() or x.stride()
                bits |= begin
        # Triton's kernels are compiled for dtypes, and for aligned addresses and others.
        key = *facts, *([begin & 15 for begin in begins] if bits & 15 else ())
        recipe = self._recipes.get(key)
        if recipe is None:
            if key not in self._seen:
                self._keep(self._seen, key, True)
                return function(Call(like), *tensors, *numbers)
            notes = Recorder(tensors)
            recipe = Recipe(notes, function(notes, *notes.tensors, *numbers))
            self._keep(self._recipes, key, recipe)
        return recipe(tensors, begins)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Make each call launch by launch, until the context ends."""
        with self._lock:
            self._suspended += 1
        try:
            yield
        finally:
            with self._lock:
                self._suspended -= 1

    @staticmethod
    def serves(x: torch.Tensor) -> bool:
        """Whether calls on the device of a tensor are made by recipes."""
        return x.is_cuda

    def _keep(self, kept: dict[Any, Any], key: Any, value: Any) -> None:
        with self._lock:
            kept[key] = value
            while len(kept) > self.MOST:
                del kept[next(iter(kept))]  # the oldest


RECIPES: Recipes = Recipes()
