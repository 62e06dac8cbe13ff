// Launches of users' `__global__` kernels without host code (fuseopt/extend/native.py), by the driver. torch's own launch,
// in Python, takes 50 us.
#pragma once

#include "python/direct_calls.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <cstring>

namespace {

// A bare kernel is a tuple of
//   kLaunch     the address of cuLaunchKernel
//   kBlock      three ints
//   kGrid       grid(*arguments): an int, or what `kThree` makes three ints of
//   kThree
//   kShapes     shapes(arguments): a list of (sizes, dtype) of the results
//   kKnown      a dict of such lists, by dtypes and sizes of tensors and by numbers
//   kHandle     handle(device index): the kernel's handle
//   kStream     stream(device index): the current stream
//   kFailed     failed(status, device index, is_last): raises, or returns if the launch should be retried
enum BareField { kLaunch, kBlock, kGrid, kThree, kShapes, kKnown, kHandle, kStream, kFailed, kBareFields };

constexpr Py_ssize_t kMostKnown = 256;  // a limit, since calls with ever new sizes and numbers would fill memory

using LaunchFunction = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                               void** extra);
using Sizes = std::array<unsigned, 3>;

// Arguments of a launch: pointers of contiguous tensors, and numbers as int and double.
struct Launched {
  std::vector<at::Tensor> tensors;
  std::vector<uint64_t> values;
  std::string kind;  // the key in `kKnown`

  template <typename T>
  void add_to_kind(const T& value) { kind.append(reinterpret_cast<const char*>(&value), sizeof(value)); }

  // Returns false with an exception for arguments that a kernel does not support.
  bool add(PyObject* argument) {
    if (THPVariable_Check(argument)) {
      tensors.push_back(THPVariable_Unpack(argument).contiguous());
      const at::Tensor& tensor = tensors.back();
      if (tensor.device() != tensors.front().device()) {
        PyErr_SetString(PyExc_ValueError, "the tensors of a bare kernel are on different devices");
        return false;
      }
      add_to_kind(static_cast<int64_t>(tensor.scalar_type()));
      add_to_kind(tensor.dim());
      for (const int64_t size : tensor.sizes()) add_to_kind(size);
      values.push_back(reinterpret_cast<uint64_t>(tensor.data_ptr()));
      return true;
    }
    add_to_kind(Py_TYPE(argument));
    if (argument == Py_None) return true;
    uint64_t value = 0;
    if (PyLong_Check(argument)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(argument, &overflow);
      if (overflow != 0 || number != static_cast<int>(number)) {
        PyErr_Format(PyExc_OverflowError, "a bare kernel gets numbers as int, into which %R does not fit", argument);
        return false;
      }
      value = static_cast<uint64_t>(number);
    } else if (PyFloat_Check(argument)) {
      const double number = PyFloat_AS_DOUBLE(argument);
      std::memcpy(&value, &number, sizeof(value));
    } else {
      PyErr_Format(PyExc_TypeError, "a bare kernel takes tensors, ints and floats, not %s", Py_TYPE(argument)->tp_name);
      return false;
    }
    add_to_kind(value);
    values.push_back(value);
    return true;
  }
};

PyObject* bare_field(PyObject* kernel, BareField field) { return PyTuple_GET_ITEM(kernel, field); }

// A list of (sizes, dtype) of the results.
PyObject* shapes_of(PyObject* kernel, const std::string& kind, PyObject* const* arguments, Py_ssize_t count) {
  THPObjectPtr key(PyBytes_FromStringAndSize(kind.data(), static_cast<Py_ssize_t>(kind.size())));
  PyObject* known = key ? PyDict_GetItemWithError(bare_field(kernel, kKnown), key.get()) : nullptr;
  if (known != nullptr || PyErr_Occurred()) return Py_XNewRef(known);
  THPObjectPtr tuple(PyTuple_New(count));
  for (Py_ssize_t i = 0; tuple && i < count; ++i) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(arguments[i]));
  THPObjectPtr shapes(tuple ? PyObject_CallOneArg(bare_field(kernel, kShapes), tuple.get()) : nullptr);
  if (PyDict_GET_SIZE(bare_field(kernel, kKnown)) == kMostKnown) PyDict_Clear(bare_field(kernel, kKnown));
  if (shapes && PyDict_SetItem(bare_field(kernel, kKnown), key.get(), shapes.get()) < 0) return nullptr;
  return shapes.release();
}

// Returns false with an exception.
bool add_result(PyObject* shape, const at::Device& device, Launched& launched) {
  PyObject *sizes = nullptr, *dtype = nullptr;
  if (!PyArg_ParseTuple(shape, "OO!", &sizes, &THPDtypeType, &dtype)) return false;
  std::vector<int64_t> numbers;
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(sizes); ++d) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, d)));
  }
  if (PyErr_Occurred()) return false;
  const auto options = at::TensorOptions().device(device).dtype(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
  launched.tensors.push_back(at::empty(numbers, options));
  launched.values.push_back(reinterpret_cast<uint64_t>(launched.tensors.back().data_ptr()));
  return true;
}

bool read_sizes(PyObject* tuple, Sizes& sizes) {
  return tuple != nullptr && PyArg_ParseTuple(tuple, "III", &sizes[0], &sizes[1], &sizes[2]);
}

bool grid_of(PyObject* kernel, PyObject* const* arguments, Py_ssize_t count, Sizes& grid) {
  THPObjectPtr given(PyObject_Vectorcall(bare_field(kernel, kGrid), arguments, static_cast<size_t>(count), nullptr));
  if (!given) return false;
  if (PyLong_CheckExact(given.get())) {
    const long number = PyLong_AsLong(given.get());
    if (number > 0 && number <= INT32_MAX) {
      grid = {static_cast<unsigned>(number), 1, 1};
      return true;
    }
    PyErr_Clear();
  }
  THPObjectPtr three(PyObject_CallOneArg(bare_field(kernel, kThree), given.get()));
  return read_sizes(three.get(), grid);
}

bool launch(PyObject* kernel, const Sizes& grid, const Sizes& block, c10::DeviceIndex device, Launched& launched) {
  const auto run = reinterpret_cast<LaunchFunction>(PyLong_AsVoidPtr(bare_field(kernel, kLaunch)));
  THPObjectPtr index(PyLong_FromLong(device));
  std::vector<void*> pointers;
  for (uint64_t& value : launched.values) pointers.push_back(&value);
  for (const bool is_last : {false, true}) {
    THPObjectPtr function(PyObject_CallOneArg(bare_field(kernel, kHandle), index.get()));
    THPObjectPtr stream(function ? PyObject_CallOneArg(bare_field(kernel, kStream), index.get()) : nullptr);
    if (!stream) return false;
    void *const handle = PyLong_AsVoidPtr(function.get()), *const queue = PyLong_AsVoidPtr(stream.get());
    if (PyErr_Occurred()) return false;
    int status = 0;
    {
      WithoutGil released;
      status = run(handle, grid[0], grid[1], grid[2], block[0], block[1], block[2], 0, queue, pointers.data(), nullptr);
    }
    if (status == 0) return true;
    THPObjectPtr again(PyObject_CallFunction(bare_field(kernel, kFailed), "iOO", status, index.get(),
                                             is_last ? Py_True : Py_False));
    if (!again) return false;
  }
  PyErr_SetString(PyExc_RuntimeError, "a bare kernel cannot be launched");
  return false;
}

// `run_bare(kernel, *arguments)`: the results of a launch.
PyObject* run_bare(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* const kernel = count == 0 ? Py_None : given[0];
  if (!PyTuple_Check(kernel) || PyTuple_GET_SIZE(kernel) != kBareFields) {
    PyErr_SetString(PyExc_TypeError, "run_bare takes a kernel and its arguments");
    return nullptr;
  }
  PyObject* const* arguments = given + 1;
  Launched launched;
  for (Py_ssize_t i = 0; i < count - 1; ++i) {
    if (!launched.add(arguments[i])) return nullptr;
  }
  TORCH_CHECK(!launched.tensors.empty(), "a bare kernel takes a tensor at least");
  const at::Device device = launched.tensors.front().device();
  const size_t first = launched.tensors.size();
  THPObjectPtr shapes(shapes_of(kernel, launched.kind, arguments, count - 1));
  if (!shapes) return nullptr;
  const Py_ssize_t results = PyList_GET_SIZE(shapes.get());
  for (Py_ssize_t i = 0; i < results; ++i) {
    if (!add_result(PyList_GET_ITEM(shapes.get(), i), device, launched)) return nullptr;
  }
  const int64_t size = launched.tensors[first].numel();
  launched.values.push_back(static_cast<uint64_t>(size));
  if (size != 0) {
    Sizes grid{}, block{};
    const c10::DeviceGuard guard(device);
    if (!read_sizes(bare_field(kernel, kBlock), block) || !grid_of(kernel, arguments, count - 1, grid) ||
        !launch(kernel, grid, block, device.index(), launched)) {
      return nullptr;
    }
  }
  if (results == 1) return THPVariable_Wrap(std::move(launched.tensors[first]));
  THPObjectPtr tuple(PyTuple_New(results));
  for (Py_ssize_t i = 0; tuple && i < results; ++i) {
    PyObject* const result = THPVariable_Wrap(std::move(launched.tensors[first + i]));
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i, result);
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
