// Launches of compiled kernels by the driver: users' `__global__` kernels without host code (fuseopt/extend/native.py)
// and Triton's kernels of expressions (fuseopt/extend/triton_expression.py). In Python torch's launch of the former
// takes 50 us, Triton's of the latter 14 us.
//
// `Launches(prepare, driver, supports, is_watched, as_floats)` holds a prepared launch for each kind of call. The kind
// is dtype, device, sizes, strides and 16-byte alignment of each tensor, and which arguments are numbers or None;
// without `as_floats` also the numbers.
//   prepare(*arguments): the `fuseopt.extend.launches.PreparedLaunch` of a new kind, or None if Python has to launch
//   driver: (address of cuLaunchKernel, stream(device index), failed(status, device index, is_last)); `failed` raises,
//     or returns if the launch should be retried
//   supports: the predicate that says yes to all calls of a prepared kind, or None
//   is_watched: is_watched(): whether launches have to go through Python; or None
//   as_floats: kernels get all numbers as float, else as int and double
// `launches(*arguments)`: the results of a launch; NotImplemented, with nothing launched, if Python has to launch.
#pragma once

#include "python/direct_calls.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kMostPrepared = 1024;  // a limit, since calls of ever new kinds would fill memory
constexpr uint64_t kAlignment = 16;  // of pointers, in bytes: Triton compiles a kernel for those that have it

using LaunchFunction = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                               void** extra);
using Sizes = std::array<unsigned, 3>;

enum DriverField { kLaunch, kStream, kFailed, kDriverFields };

struct ResultShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// What a parameter of the kernel is: the argument or, after the arguments, the result at `place`; a constant if -1.
struct KernelParameter {
  Py_ssize_t place;
  uint64_t constant;
};

struct PreparedLaunch {
  void* function;
  Sizes grid, block;
  unsigned shared;  // bytes
  std::vector<ResultShape> results;
  std::vector<KernelParameter> parameters;
  std::vector<Py_ssize_t> contiguous;  // the tensors of which the kernel gets contiguous copies
  PyObject* references;                // the tuple that it was read from
  PyObject *grid_of, *three;           // the grid of a call is three(grid_of(*arguments)), if not null; borrowed

  ~PreparedLaunch() { Py_DECREF(references); }
};
using PreparedPointer = std::shared_ptr<PreparedLaunch>;

// Lookup by string_view needs no string.
struct KindHash {
  using is_transparent = void;
  size_t operator()(std::string_view kind) const { return std::hash<std::string_view>()(kind); }
};

struct Launches {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *prepare, *driver, *supports, *is_watched;
  bool as_floats;
  std::unordered_map<std::string, PreparedPointer, KindHash, std::equal_to<>> prepared;  // null: Python launches
};

// What a launch refers to may run Python when it is freed, so all are taken out first.
void drop_prepared(Launches& launches) { decltype(launches.prepared)().swap(launches.prepared); }

bool read_sizes(PyObject* tuple, Sizes& sizes) {
  return tuple != nullptr && PyArg_ParseTuple(tuple, "III", &sizes[0], &sizes[1], &sizes[2]);
}

bool read_result(PyObject* given, ResultShape& result) {
  PyObject *sizes = nullptr, *dtype = nullptr;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &sizes, &THPDtypeType, &dtype)) return false;
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(sizes); ++d) {
    result.sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, d)));
  }
  result.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  return !PyErr_Occurred();
}

bool read_parameter(PyObject* given, Py_ssize_t places, KernelParameter& parameter) {
  if (PyBytes_Check(given) && PyBytes_GET_SIZE(given) <= static_cast<Py_ssize_t>(sizeof(parameter.constant))) {
    parameter = {-1, 0};
    std::memcpy(&parameter.constant, PyBytes_AS_STRING(given), static_cast<size_t>(PyBytes_GET_SIZE(given)));
    return true;
  }
  parameter = {PyLong_AsSsize_t(given), 0};
  if (parameter.place >= 0 && parameter.place < places) return true;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a parameter of a kernel is no argument and no result");
  return false;
}

// Reads each item of a list. Returns false with an exception.
template <typename T, typename Read>
bool read_list(PyObject* list, std::vector<T>& items, Read read) {
  items.resize(static_cast<size_t>(PyList_GET_SIZE(list)));
  for (size_t i = 0; i < items.size(); ++i) {
    if (!read(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)), items[i])) return false;
  }
  return true;
}

// A `fuseopt.extend.launches.PreparedLaunch` for calls with `count` arguments. Null with an exception.
PreparedPointer read_prepared(PyObject* given, Py_ssize_t count) {
  PreparedPointer prepared(new PreparedLaunch{});
  prepared->references = Py_NewRef(given);
  PyObject *function = nullptr, *grid = nullptr, *block = nullptr, *results = nullptr, *parameters = nullptr;
  PyObject *contiguous = nullptr, *keeps = nullptr;
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "a prepared launch is a tuple");
    return nullptr;
  }
  if (!PyArg_ParseTuple(given, "OOOIO!O!O!O", &function, &grid, &block, &prepared->shared, &PyList_Type, &results,
                        &PyList_Type, &parameters, &PyList_Type, &contiguous, &keeps)) {
    return nullptr;
  }
  prepared->function = PyLong_AsVoidPtr(function);
  if (PyErr_Occurred() || !read_sizes(block, prepared->block)) return nullptr;
  if (PyTuple_Check(grid) && PyTuple_GET_SIZE(grid) == 2) {
    prepared->grid_of = PyTuple_GET_ITEM(grid, 0);
    prepared->three = PyTuple_GET_ITEM(grid, 1);
  } else if (!read_sizes(grid, prepared->grid)) {
    return nullptr;
  }
  const Py_ssize_t places = count + PyList_GET_SIZE(results);
  const auto parameter = [=](PyObject* item, KernelParameter& read) { return read_parameter(item, places, read); };
  const auto tensor = [=](PyObject* item, Py_ssize_t& place) {
    place = PyLong_AsSsize_t(item);
    return !PyErr_Occurred() && place >= 0 && place < count;
  };
  const bool is_read = read_list(results, prepared->results, read_result) &&
                       read_list(parameters, prepared->parameters, parameter) &&
                       read_list(contiguous, prepared->contiguous, tensor) && !prepared->results.empty();
  if (!is_read && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a launch without results, or a wrong place");
  return is_read ? prepared : nullptr;
}

// One call of `Launches`. The arguments have to outlive it.
class LaunchCall {
 public:
  LaunchCall(Launches& launches, PyObject* const* arguments, Py_ssize_t count)
      : launches_(launches), arguments_(arguments), count_(count) {
    for (Py_ssize_t i = 0; i < count && is_readable_; ++i) is_readable_ = read(arguments[i]);
    is_readable_ &= first_ != nullptr;
    if (!is_readable_) return;
    const auto found = launches.prepared.find(kind());
    is_known_ = found != launches.prepared.end();
    if (is_known_) prepared_ = found->second;
  }
  LaunchCall(const LaunchCall&) = delete;

  bool is_prepared() const { return prepared_ != nullptr; }
  const Launches& launches() const { return launches_; }

  // New results, NotImplemented with nothing launched, or null with an exception.
  PyObject* run() {
    if (!is_readable_ || (launches_.is_watched != Py_None && is_watched())) return not_implemented();
    if (!is_known_ && !prepare()) return nullptr;
    return prepared_ == nullptr ? not_implemented() : launch();
  }

 private:
  static PyObject* not_implemented() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented); }
  std::string_view kind() const { return {kind_.data(), kind_.size()}; }

  template <typename T>
  void add_to_kind(const T& value) {
    const auto* const bytes = reinterpret_cast<const char*>(&value);
    kind_.append(bytes, bytes + sizeof(value));
  }

  // Returns false for an argument that no kernel here takes.
  bool read(PyObject* argument) {
    if (THPVariable_Check(argument)) return read_tensor(THPVariable_Unpack(argument));
    add_to_kind('n');
    uint64_t value = 0;
    if (argument == Py_None) {
      kind_.back() = '0';
    } else if (launches_.as_floats) {
      const double number = PyFloat_AsDouble(argument);
      if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
      const auto rounded = static_cast<float>(number);
      std::memcpy(&value, &rounded, sizeof(rounded));
    } else if (PyLong_Check(argument)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(argument, &overflow);
      if (overflow != 0 || number != static_cast<int>(number)) return false;
      value = static_cast<uint64_t>(number);
      add_to_kind(value);
    } else if (PyFloat_Check(argument)) {
      const double number = PyFloat_AS_DOUBLE(argument);
      std::memcpy(&value, &number, sizeof(value));
      kind_.back() = 'd';
      add_to_kind(value);
    } else {
      return false;
    }
    tensors_.push_back(nullptr);
    values_.push_back(value);
    return true;
  }

  bool read_tensor(const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided || tensor.is_nested()) return false;
    if (first_ == nullptr) first_ = &tensor;
    const auto address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    const at::Device device = tensor.device();
    add_to_kind('t');
    add_to_kind(static_cast<char>(address % kAlignment == 0));
    add_to_kind(device.type());
    add_to_kind(device.index());
    add_to_kind(tensor.scalar_type());
    add_to_kind(static_cast<int32_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) add_to_kind(size);
    for (const int64_t stride : tensor.strides()) add_to_kind(stride);
    tensors_.push_back(&tensor);
    values_.push_back(address);
    return true;
  }

  bool is_watched() const {
    THPObjectPtr answer(PyObject_CallNoArgs(launches_.is_watched));
    return !answer || PyObject_IsTrue(answer.get()) != 0;
  }

  // Prepares the launch of a new kind, or notes that Python launches it. Returns false with an exception.
  bool prepare() {
    THPObjectPtr given(
        PyObject_Vectorcall(launches_.prepare, arguments_, static_cast<size_t>(count_), /*keywords=*/nullptr));
    if (!given) return false;
    if (given.get() != Py_None && !(prepared_ = read_prepared(given.get(), count_))) return false;
    if (launches_.prepared.size() >= kMostPrepared) drop_prepared(launches_);
    launches_.prepared.insert_or_assign(std::string(kind()), prepared_);
    return true;
  }

  bool read_grid(Sizes& grid) const {
    THPObjectPtr given(
        PyObject_Vectorcall(prepared_->grid_of, arguments_, static_cast<size_t>(count_), /*keywords=*/nullptr));
    if (!given) return false;
    if (PyLong_CheckExact(given.get())) {
      const long number = PyLong_AsLong(given.get());
      if (number > 0 && number <= INT32_MAX) {
        grid = {static_cast<unsigned>(number), 1, 1};
        return true;
      }
      PyErr_Clear();
    }
    THPObjectPtr three(PyObject_CallOneArg(prepared_->three, given.get()));
    return read_sizes(three.get(), grid);
  }

  PyObject* launch() {
    const at::Device device = first_->device();
    c10::SmallVector<at::Tensor, 4> results, copies;
    for (const Py_ssize_t place : prepared_->contiguous) {
      if (tensors_[place] == nullptr || tensors_[place]->is_contiguous()) continue;
      copies.push_back(tensors_[place]->contiguous());
      values_[place] = reinterpret_cast<uint64_t>(copies.back().const_data_ptr());
    }
    for (const ResultShape& shape : prepared_->results) {
      results.push_back(at::empty(shape.sizes, at::TensorOptions().device(device).dtype(shape.dtype)));
      values_.push_back(reinterpret_cast<uint64_t>(results.back().mutable_data_ptr()));
      if (values_.back() % kAlignment != 0) return not_implemented();
    }
    if (std::any_of(results.begin(), results.end(), [](const at::Tensor& result) { return result.numel() != 0; })) {
      const c10::DeviceGuard guard(device);
      Sizes grid = prepared_->grid;
      if ((prepared_->grid_of != nullptr && !read_grid(grid)) || !launch(grid, device.index())) return nullptr;
    }
    if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
    THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
    for (size_t i = 0; tuple && i < results.size(); ++i) {
      PyObject* const result = THPVariable_Wrap(std::move(results[i]));
      if (result == nullptr) return nullptr;
      PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), result);
    }
    return tuple.release();
  }

  bool launch(const Sizes& grid, c10::DeviceIndex device) {
    c10::SmallVector<void*, 16> pointers;
    for (KernelParameter& each : prepared_->parameters) {
      pointers.push_back(each.place < 0 ? &each.constant : &values_[each.place]);
    }
    const auto driver = [&](DriverField field) { return PyTuple_GET_ITEM(launches_.driver, field); };
    const auto run = reinterpret_cast<LaunchFunction>(PyLong_AsVoidPtr(driver(kLaunch)));
    const Sizes& block = prepared_->block;
    THPObjectPtr index(PyLong_FromLong(device));
    for (const bool is_last : {false, true}) {
      THPObjectPtr stream(index ? PyObject_CallOneArg(driver(kStream), index.get()) : nullptr);
      void* const queue = stream ? PyLong_AsVoidPtr(stream.get()) : nullptr;
      if (PyErr_Occurred()) return false;
      int status = 0;
      {
        WithoutGil released;
        status = run(prepared_->function, grid[0], grid[1], grid[2], block[0], block[1], block[2], prepared_->shared,
                     queue, pointers.data(), nullptr);
      }
      if (status == 0) return true;
      THPObjectPtr again(
          PyObject_CallFunction(driver(kFailed), "iOO", status, index.get(), is_last ? Py_True : Py_False));
      if (!again) return false;
    }
    PyErr_SetString(PyExc_RuntimeError, "a kernel cannot be launched");
    return false;
  }

  Launches& launches_;
  PyObject* const* arguments_;
  Py_ssize_t count_;
  bool is_readable_ = true, is_known_ = false;
  const at::Tensor* first_ = nullptr;
  c10::SmallVector<const at::Tensor*, 8> tensors_;  // null for numbers
  c10::SmallVector<uint64_t, 12> values_;           // of the arguments, then of the results, as the kernel gets them
  c10::SmallVector<char, 256> kind_;
  PreparedPointer prepared_;
};

PyObject* call_launches(PyObject* self, PyObject* const* arguments, size_t flagged_count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  if (keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "a launch takes no arguments by name");
    return nullptr;
  }
  return LaunchCall(*reinterpret_cast<Launches*>(self), arguments, PyVectorcall_NARGS(flagged_count)).run();
  END_HANDLE_TH_ERRORS
}

PyObject* create_launches(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *prepare = nullptr, *driver = nullptr, *supports = nullptr, *is_watched = nullptr;
  int as_floats = 0;
  if (!PyArg_ParseTuple(arguments, "OO!OOp", &prepare, &PyTuple_Type, &driver, &supports, &is_watched, &as_floats)) {
    return nullptr;
  }
  if (PyTuple_GET_SIZE(driver) != kDriverFields) {
    PyErr_SetString(PyExc_TypeError, "a driver is (address, stream, failed)");
    return nullptr;
  }
  auto* launches = reinterpret_cast<Launches*>(type->tp_alloc(type, 0));
  if (launches == nullptr) return nullptr;
  launches->call = call_launches;
  launches->prepare = Py_NewRef(prepare);
  launches->driver = Py_NewRef(driver);
  launches->supports = Py_NewRef(supports);
  launches->is_watched = Py_NewRef(is_watched);
  launches->as_floats = as_floats != 0;
  new (&launches->prepared) decltype(launches->prepared)();
  return reinterpret_cast<PyObject*>(launches);
}

int traverse_launches(PyObject* self, visitproc visit, void* arg) {
  const auto& launches = *reinterpret_cast<Launches*>(self);
  Py_VISIT(launches.prepare);
  Py_VISIT(launches.driver);
  Py_VISIT(launches.supports);
  Py_VISIT(launches.is_watched);
  for (const auto& [kind, prepared] : launches.prepared) {
    if (prepared) Py_VISIT(prepared->references);
  }
  return 0;
}

int clear_launches(PyObject* self) {
  auto& launches = *reinterpret_cast<Launches*>(self);
  drop_prepared(launches);
  // None, since a finalizer may still call it.
  Py_SETREF(launches.prepare, Py_NewRef(Py_None));
  Py_SETREF(launches.supports, Py_NewRef(Py_None));
  Py_SETREF(launches.is_watched, Py_NewRef(Py_None));
  return 0;
}

void deallocate_launches(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto& launches = *reinterpret_cast<Launches*>(self);
  std::destroy_at(&launches.prepared);
  Py_DECREF(launches.prepare);
  Py_DECREF(launches.driver);
  Py_DECREF(launches.supports);
  Py_DECREF(launches.is_watched);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject* launches_type() {
  static PyTypeObject type = [] {
    PyTypeObject created{};
    created.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
    created.tp_name = "fuseopt_python.Launches";
    created.tp_basicsize = sizeof(Launches);
    created.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    created.tp_vectorcall_offset = offsetof(Launches, call);
    created.tp_call = PyVectorcall_Call;
    created.tp_new = create_launches;
    created.tp_traverse = traverse_launches;
    created.tp_clear = clear_launches;
    created.tp_dealloc = deallocate_launches;
    return created;
  }();
  return &type;
}

}  // namespace
