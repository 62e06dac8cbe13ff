// Eager calls of users' ops (fuseopt/extend). Choosing and checking in Python would take several times as long as a
// small kernel's launch.
//
// A kernel is here a tuple (kernel, function, direct, supports, results, gradient, name): the object that Python knows it
// by; its function; what runs in place of the function unless it returns NotImplemented, which is a `DirectCalls` settled
// for the raw op that the function calls, a `Launches`, or None; what is asked whether it takes the arguments, or None; how
// many tensors it gives; its gradient (own_gradient.h), what is called with the arguments in its place if one needs a
// gradient, or None where autograd sees through the function; and its name for errors.
#pragma once

#include "python/direct_calls.h"
#include "python/launches.h"
#include "python/own_gradient.h"

#include <structmember.h>

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

enum KernelField { kKernel, kFunction, kDirect, kSupports, kResults, kGradient, kName, kKernelFields };

struct Arguments {
  PyObject* const* items;
  Py_ssize_t count;
};

// What `look` finds: the first tensor, null if there is none, and whether some tensor requires a gradient.
struct Seen {
  const at::Tensor* first = nullptr;
  bool requires_grad = false;
};

// Whether autocast, a mode, a transform, a trace or a profiler has to see calls. Reads the keys of the thread once.
bool is_observed() {
  using c10::DispatchKey;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  constexpr c10::DispatchKeySet observers({DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::Tracer});
  constexpr c10::DispatchKeySet autocast({DispatchKey::AutocastCUDA, DispatchKey::AutocastCPU});
  return keys.included_.has_any(observers) || !keys.excluded_.has_all(autocast) ||
         at::impl::torch_function_mode_enabled() || c10::impl::dispatch_mode_enabled() ||
         (at::isRecordFunctionEnabled() && at::hasCallbacks());
}

// Whether a tensor's memory does not hold its values: they are to be negated or conjugated, or all are 0.
bool is_lazy(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet lazy({DispatchKey::Negative, DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return tensor.key_set().has_any(lazy);
}

// Returns false if torch has to see the call: for a subclass, another device, a lazy tensor, or a tangent of forward-mode
// AD.
bool look(Arguments arguments, Seen& seen) {
  for (Py_ssize_t i = 0; i < arguments.count; ++i) {
    PyObject* const item = arguments.items[i];
    if (THPVariable_CheckExact(item)) {
      const at::Tensor& tensor = THPVariable_Unpack(item);
      if (!(tensor.is_cpu() || tensor.is_cuda()) || is_lazy(tensor)) return false;
      if (tensor._fw_grad(/*level=*/0).defined()) return false;
      if (seen.first == nullptr) seen.first = &tensor;
      seen.requires_grad |= tensor.requires_grad();
    } else if (PyList_Check(item) || PyTuple_Check(item)) {
      if (!look({PySequence_Fast_ITEMS(item), PySequence_Fast_GET_SIZE(item)}, seen)) return false;
    } else if (THPVariable_Check(item)) {
      return false;
    }
  }
  return true;
}

bool shares_storage(const at::Tensor& result, Arguments arguments) {
  for (Py_ssize_t i = 0; i < arguments.count; ++i) {
    PyObject* const item = arguments.items[i];
    if (THPVariable_CheckExact(item)) {
      const c10::Storage& storage = THPVariable_Unpack(item).unsafeGetTensorImpl()->unsafe_storage();
      if (storage && storage.is_alias_of(result.storage())) return true;
    } else if (PyList_Check(item) || PyTuple_Check(item)) {
      if (shares_storage(result, {PySequence_Fast_ITEMS(item), PySequence_Fast_GET_SIZE(item)})) return true;
    }
  }
  return false;
}

// Whether a result is as an op promises it: a contiguous tensor that shares no memory with an argument.
bool is_as_promised(PyObject* result, Arguments arguments) {
  if (!THPVariable_CheckExact(result)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(result);
  return tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->unsafe_storage() && tensor.is_contiguous() &&
         !shares_storage(tensor, arguments);
}

bool are_as_promised(PyObject* output, Py_ssize_t results, Arguments arguments) {
  if (results == 1) return is_as_promised(output, arguments);
  if (!PyTuple_CheckExact(output) || PyTuple_GET_SIZE(output) != results) return false;
  for (Py_ssize_t i = 0; i < results; ++i) {
    PyObject* const result = PyTuple_GET_ITEM(output, i);
    if (!is_as_promised(result, arguments)) return false;
    if (shares_storage(THPVariable_Unpack(result), {&PyTuple_GET_ITEM(output, 0), i})) return false;
  }
  return true;
}

// Notes on the current exception which kernel it is from.
void note(PyObject* kernel, const char* what) {
#if PY_VERSION_HEX >= 0x030B0000
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* added = nullptr;
  PyObject* text = PyUnicode_FromFormat("fuseopt: raised by the %s%U", what, PyTuple_GET_ITEM(kernel, kName));
  if (text != nullptr) added = PyObject_CallMethod(value, "add_note", "O", text);
  if (added == nullptr) PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(added);
  PyErr_Restore(type, value, trace);
#endif
}

using MaybeLaunch = std::optional<LaunchCall>;

// Looks up the launch of a kernel that is a `Launches`.
void look_up(PyObject* kernel, Arguments arguments, MaybeLaunch& launch_call) {
  PyObject* const direct = PyTuple_GET_ITEM(kernel, kDirect);
  if (Py_TYPE(direct) != launches_type()) return launch_call.reset();
  launch_call.emplace(*reinterpret_cast<Launches*>(direct), arguments.items, arguments.count);
}

// 1 if the kernel takes the arguments, 0 if not, -1 with an exception.
int takes(PyObject* kernel, Arguments arguments, const MaybeLaunch& launch_call) {
  PyObject* const supports = PyTuple_GET_ITEM(kernel, kSupports);
  if (supports == Py_None) return 1;
  if (launch_call && launch_call->is_prepared() && launch_call->launches().supports == supports) return 1;
  PyObject* answer = PyObject_Vectorcall(supports, arguments.items, static_cast<size_t>(arguments.count), nullptr);
  int result = -1;
  if (answer != nullptr) result = answer == Py_None || (!PyUnicode_Check(answer) && PyObject_IsTrue(answer));
  if (answer != nullptr && PyErr_Occurred()) result = -1;
  Py_XDECREF(answer);
  if (result < 0) note(kernel, "`supports` of the ");
  return result;
}

PyObject* compute(PyObject* kernel, Arguments arguments, Checks checks, MaybeLaunch& launch_call) {
  const auto count = static_cast<size_t>(arguments.count);
  PyObject* const direct = PyTuple_GET_ITEM(kernel, kDirect);
  if (direct != Py_None) {
    PyObject* output =
        launch_call ? launch_call->run()
                : call_raw(reinterpret_cast<DirectCalls*>(direct)->settled.front(), arguments.items, count, checks);
    if (output != Py_NotImplemented) return output;
    Py_DECREF(output);
  }
  return PyObject_Vectorcall(PyTuple_GET_ITEM(kernel, kFunction), arguments.items, count, nullptr);
}

// Results that are not as promised are made so by `op.finished(kernel, output, arguments)`.
PyObject* run(PyObject* op, PyObject* kernel, PyObject* tuple, Checks checks, MaybeLaunch& launch_call) {
  static PyObject* const finished = PyUnicode_InternFromString("finished");
  const Arguments arguments{PySequence_Fast_ITEMS(tuple), PyTuple_GET_SIZE(tuple)};
  PyObject* output = compute(kernel, arguments, checks, launch_call);
  if (output == nullptr) {
    note(kernel, "");
    return nullptr;
  }
  const Py_ssize_t results = PyLong_AsSsize_t(PyTuple_GET_ITEM(kernel, kResults));
  if (are_as_promised(output, results, arguments)) return output;
  PyObject* made =
      PyObject_CallMethodObjArgs(op, finished, PyTuple_GET_ITEM(kernel, kKernel), output, tuple, nullptr);
  Py_DECREF(output);
  return made;
}

// The results with a node of autograd.
PyObject* run_differentiably(PyObject* op, PyObject* kernel, PyObject* arguments, MaybeLaunch& launch_call) {
  THPObjectPtr output;
  {
    const at::AutoGradMode none(false);
    output = run(op, kernel, arguments, Checks::kTypes, launch_call);
  }
  if (!output) return nullptr;
  const auto [node, pointer] = make_node(PyTuple_GET_ITEM(kernel, kGradient), arguments);
  node->set_results(pointer, output.get());
  return output.release();
}

bool is_kernel(PyObject* object) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != kKernelFields) return false;
  PyObject* const direct = PyTuple_GET_ITEM(object, kDirect);
  return direct == Py_None || Py_TYPE(direct) == launches_type() ||
         (Py_TYPE(direct) == direct_calls_type() && reinterpret_cast<DirectCalls*>(direct)->settled.size());
}

// `run_own(op, kernel, arguments)`: the kernel's results, as the op promises them.
PyObject* run_own(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !is_kernel(given[1]) || !PyTuple_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "run_own takes an op, a kernel and a tuple of arguments");
    return nullptr;
  }
  MaybeLaunch launch_call;
  look_up(given[1], {PySequence_Fast_ITEMS(given[2]), PyTuple_GET_SIZE(given[2])}, launch_call);
  return run(given[0], given[1], given[2], Checks::kAll, launch_call);
  END_HANDLE_TH_ERRORS
}

// What `Op.calls.direct` is: a tuple (calls, names, defaults, numbers, on_cpu, on_gpu) of the `EagerCalls`, the names of
// the op's arguments, a dict of defaults, (place, types) of the arguments that are no tensors, and for each type of
// device a dict of tuples of kernels by backend.
enum DirectField { kCalls, kNames, kDefaults, kNumbers, kOnCpu, kOnGpu, kDirectFields };

// The arguments in the op's order, and the backend that the call names. Null if something is missing or unknown.
THPObjectPtr bind(PyObject* direct, PyObject* given, PyObject* keywords, PyObject*& backend) {
  static PyObject* const automatic = PyUnicode_InternFromString("auto");
  static PyObject* const backend_name = PyUnicode_InternFromString("backend");
  PyObject* const names = PyTuple_GET_ITEM(direct, kNames);
  const Py_ssize_t count = PyTuple_GET_SIZE(names), first = PyTuple_GET_SIZE(given);
  Py_ssize_t named = keywords == nullptr ? 0 : PyDict_GET_SIZE(keywords);
  PyObject* const asked = named == 0 ? nullptr : PyDict_GetItemWithError(keywords, backend_name);
  backend = asked == nullptr ? automatic : asked;
  named -= asked != nullptr;
  if (first == count && named == 0) return THPObjectPtr(Py_NewRef(given));
  THPObjectPtr bound(first > count ? nullptr : PyTuple_New(count));
  for (Py_ssize_t i = 0; bound && i < count; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    PyObject* item = i < first ? PyTuple_GET_ITEM(given, i) : nullptr;
    if (item == nullptr && named != 0 && (item = PyDict_GetItemWithError(keywords, name)) != nullptr) --named;
    if (item == nullptr) item = PyDict_GetItemWithError(PyTuple_GET_ITEM(direct, kDefaults), name);
    if (item == nullptr) return {};
    PyTuple_SET_ITEM(bound.get(), i, Py_NewRef(item));
  }
  return named == 0 ? std::move(bound) : THPObjectPtr();
}

bool have_types(PyObject* numbers, Arguments arguments) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
    PyObject* const number = PyTuple_GET_ITEM(numbers, i);
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(arguments.items[PyLong_AsSsize_t(PyTuple_GET_ITEM(number, 0))]));
    if (PySequence_Contains(PyTuple_GET_ITEM(number, 1), type) != 1) return false;
  }
  return true;
}

// Calls the first kernel that takes the arguments. Returns NotImplemented, with nothing done but `supports` asked, for
// calls that torch has to see, under autocast, without tensors, with arguments that Python has to convert or refuse, and
// where no kernel is listed or takes the arguments.
PyObject* call_own(PyObject* direct, PyObject* given, PyObject* keywords) {
  PyObject* backend = nullptr;
  THPObjectPtr tuple = bind(direct, given, keywords, backend);
  if (!tuple) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NOTIMPLEMENTED;
  }
  const Arguments arguments{PySequence_Fast_ITEMS(tuple.get()), PyTuple_GET_SIZE(tuple.get())};
  Seen seen;
  if (is_observed() || !have_types(PyTuple_GET_ITEM(direct, kNumbers), arguments) ||
      !look(arguments, seen) || seen.first == nullptr) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* listed = PyDict_GetItemWithError(PyTuple_GET_ITEM(direct, seen.first->is_cuda() ? kOnGpu : kOnCpu), backend);
  if (listed == nullptr) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* const calls = PyTuple_GET_ITEM(direct, kCalls);
  const bool needs_grad = seen.requires_grad && at::GradMode::is_enabled();
  const THPObjectPtr kernels(Py_NewRef(listed));  // another thread may replace them meanwhile
  MaybeLaunch launch_call;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kernels.get()); ++i) {
    PyObject* const kernel = PyTuple_GET_ITEM(kernels.get(), i);
    look_up(kernel, arguments, launch_call);
    const int does = takes(kernel, arguments, launch_call);
    if (does < 0) return nullptr;
    if (does == 0) continue;
    PyObject* const gradient = PyTuple_GET_ITEM(kernel, kGradient);
    if (!needs_grad || gradient == Py_None) return run(calls, kernel, tuple.get(), Checks::kTypes, launch_call);
    if (is_gradient(gradient)) return run_differentiably(calls, kernel, tuple.get(), launch_call);
    return PyObject_Vectorcall(gradient, arguments.items, static_cast<size_t>(arguments.count), nullptr);
  }
  Py_RETURN_NOTIMPLEMENTED;
}

// Offsets of `Op.calls` and `EagerCalls.direct`, which are slots of these classes, since every call reads them.
struct OwnClasses {
  ternaryfunc call_in_python = nullptr;
  PyTypeObject* calls_type = nullptr;
  Py_ssize_t calls = 0, direct = 0;
};
OwnClasses own_classes;

PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// The call of an `Op`: `call_own`, or `__call__` in Python if that returns NotImplemented.
PyObject* call_op(PyObject* op, PyObject* given, PyObject* keywords) {
  HANDLE_TH_ERRORS
  PyObject* const calls = slot(op, own_classes.calls);
  if (calls != nullptr && Py_TYPE(calls) == own_classes.calls_type) {
    THPObjectPtr direct(Py_XNewRef(slot(calls, own_classes.direct)));
    if (direct && PyTuple_Check(direct.get()) && PyTuple_GET_SIZE(direct.get()) == kDirectFields) {
      PyObject* const output = call_own(direct.get(), given, keywords);
      if (output != Py_NotImplemented) return output;
      Py_DECREF(output);
    }
  }
  return own_classes.call_in_python(op, given, keywords);
  END_HANDLE_TH_ERRORS
}

// Byte offset of the named slot in a class's instances. Returns -1 and sets an exception if the class has no such slot.
Py_ssize_t offset_of(PyObject* type, const char* name) {
  THPObjectPtr member(PyObject_GetAttrString(type, name));
  if (member && Py_TYPE(member.get()) != &PyMemberDescr_Type) PyErr_Format(PyExc_TypeError, "%s is no slot", name);
  return PyErr_Occurred() ? -1 : reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
}

// `call_ops(Op, EagerCalls)`: calls of instances of `Op` go to `call_op`. Its `__call__` in Python stays what torch.compile
// traces, and what a subclass calls.
PyObject* call_ops(PyObject*, PyObject* arguments) {
  PyTypeObject *type = nullptr, *calls_type = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyType_Type, &type, &PyType_Type, &calls_type)) return nullptr;
  if (type->tp_call == call_op) Py_RETURN_NONE;
  const Py_ssize_t calls = offset_of(reinterpret_cast<PyObject*>(type), "calls");
  const Py_ssize_t direct = calls < 0 ? -1 : offset_of(reinterpret_cast<PyObject*>(calls_type), "direct");
  if (direct < 0) return nullptr;
  own_classes = {type->tp_call, calls_type, calls, direct};
  type->tp_call = call_op;
  PyType_Modified(type);
  Py_RETURN_NONE;
}

}  // namespace
