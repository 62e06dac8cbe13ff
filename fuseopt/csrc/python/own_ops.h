// Eager calls of users' ops (fuseopt/extend). Choosing and checking in Python would take several times as long as a
// small kernel's launch.
//
// A kernel is here a tuple (kernel, function, raw, supports, results, gradient, name): the object that Python knows it
// by; its function; a `DirectCalls` settled for the raw op that the function calls, or None; what is asked whether it
// takes the arguments, or None; how many tensors it gives; its gradient (own_gradient.h), what is called with the arguments
// in its place if one needs a gradient, or None where autograd sees through the function; and its name for errors.
#pragma once

#include "python/direct_calls.h"
#include "python/own_gradient.h"

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

enum KernelField { kKernel, kFunction, kRaw, kSupports, kResults, kGradient, kName, kKernelFields };

struct Arguments {
  PyObject* const* items;
  Py_ssize_t count;
};

// What `look` finds: the first tensor, null if there is none, and whether some tensor requires a gradient.
struct Seen {
  const at::Tensor* first = nullptr;
  bool requires_grad = false;
};

bool is_observed() {
  using c10::DispatchKey;
  using c10::impl::tls_is_dispatch_key_included;
  return tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         tls_is_dispatch_key_included(DispatchKey::Tracer) || at::impl::torch_function_mode_enabled() ||
         c10::impl::dispatch_mode_enabled() || (at::isRecordFunctionEnabled() && at::hasCallbacks());
}

bool is_autocast_enabled() {
  return is_cuda_autocast_enabled() || !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
}

// Returns false if torch has to see the call: for a subclass, another device, or a tangent of forward-mode AD.
bool look(Arguments arguments, Seen& seen) {
  for (Py_ssize_t i = 0; i < arguments.count; ++i) {
    PyObject* const item = arguments.items[i];
    if (THPVariable_CheckExact(item)) {
      const at::Tensor& tensor = THPVariable_Unpack(item);
      if (!(tensor.is_cpu() || tensor.is_cuda()) || tensor._fw_grad(/*level=*/0).defined()) return false;
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
      const at::Tensor& tensor = THPVariable_Unpack(item);
      if (tensor.has_storage() && tensor.storage().is_alias_of(result.storage())) return true;
    } else if (PyList_Check(item) || PyTuple_Check(item)) {
      if (shares_storage(result, {PySequence_Fast_ITEMS(item), PySequence_Fast_GET_SIZE(item)})) return true;
    }
  }
  return false;
}

// Whether a result is as an op promises it: a contiguous tensor with memory of its own.
bool is_as_promised(PyObject* result, Arguments arguments) {
  if (!THPVariable_CheckExact(result)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(result);
  return tensor.layout() == at::kStrided && tensor.has_storage() && tensor.is_contiguous() &&
         !shares_storage(tensor, arguments);
}

bool are_as_promised(PyObject* output, Py_ssize_t results, Arguments arguments) {
  if (results == 1) return is_as_promised(output, arguments);
  if (!PyTuple_CheckExact(output) || PyTuple_GET_SIZE(output) != results) return false;
  for (Py_ssize_t i = 0; i < results; ++i) {
    if (!is_as_promised(PyTuple_GET_ITEM(output, i), arguments)) return false;
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

// 1 if the kernel takes the arguments, 0 if not, -1 with an exception.
int takes(PyObject* kernel, Arguments arguments) {
  PyObject* const supports = PyTuple_GET_ITEM(kernel, kSupports);
  if (supports == Py_None) return 1;
  PyObject* answer = PyObject_Vectorcall(supports, arguments.items, static_cast<size_t>(arguments.count), nullptr);
  int result = -1;
  if (answer != nullptr) result = answer == Py_None || (!PyUnicode_Check(answer) && PyObject_IsTrue(answer));
  if (answer != nullptr && PyErr_Occurred()) result = -1;
  Py_XDECREF(answer);
  if (result < 0) note(kernel, "`supports` of the ");
  return result;
}

PyObject* compute(PyObject* kernel, Arguments arguments) {
  const auto count = static_cast<size_t>(arguments.count);
  PyObject* const raw = PyTuple_GET_ITEM(kernel, kRaw);
  if (raw != Py_None) {
    PyObject* output = call_raw(reinterpret_cast<DirectCalls*>(raw)->settled.front(), arguments.items, count);
    if (output != Py_NotImplemented) return output;
    Py_DECREF(output);
  }
  return PyObject_Vectorcall(PyTuple_GET_ITEM(kernel, kFunction), arguments.items, count, nullptr);
}

// Results that are not as promised are made so by `op.finished(kernel, output, arguments)`.
PyObject* run(PyObject* op, PyObject* kernel, PyObject* tuple) {
  static PyObject* const finished = PyUnicode_InternFromString("finished");
  const Arguments arguments{PySequence_Fast_ITEMS(tuple), PyTuple_GET_SIZE(tuple)};
  PyObject* output = compute(kernel, arguments);
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
PyObject* run_differentiably(PyObject* op, PyObject* kernel, PyObject* arguments) {
  THPObjectPtr output;
  {
    const at::AutoGradMode none(false);
    output = run(op, kernel, arguments);
  }
  if (!output) return nullptr;
  const auto [node, pointer] = make_node(PyTuple_GET_ITEM(kernel, kGradient), arguments);
  node->set_results(pointer, output.get());
  return output.release();
}

bool is_kernel(PyObject* object) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != kKernelFields) return false;
  PyObject* const raw = PyTuple_GET_ITEM(object, kRaw);
  return raw == Py_None || (Py_TYPE(raw) == direct_calls_type() && reinterpret_cast<DirectCalls*>(raw)->settled.size());
}

// `run_own(op, kernel, arguments)`: the kernel's results, as the op promises them.
PyObject* run_own(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !is_kernel(given[1]) || !PyTuple_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "run_own takes an op, a kernel and a tuple of arguments");
    return nullptr;
  }
  return run(given[0], given[1], given[2]);
  END_HANDLE_TH_ERRORS
}

// `call_own(op, kernels, backend, arguments)`: calls the first kernel that takes the arguments. `kernels` is a dict for
// CPUs and one for GPUs, of tuples of kernels by backend. Returns NotImplemented, with nothing done but `supports` asked,
// for calls that torch has to see, under autocast, without tensors, and where no kernel is listed or takes the arguments.
PyObject* call_own(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 4 || !PyTuple_Check(given[1]) || PyTuple_GET_SIZE(given[1]) != 2 || !PyTuple_Check(given[3])) {
    PyErr_SetString(PyExc_TypeError, "call_own takes an op, two dicts of kernels, a backend and a tuple of arguments");
    return nullptr;
  }
  const Arguments arguments{PySequence_Fast_ITEMS(given[3]), PyTuple_GET_SIZE(given[3])};
  Seen seen;
  if (is_autocast_enabled() || is_observed() || !look(arguments, seen) || seen.first == nullptr) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* listed = PyDict_GetItemWithError(PyTuple_GET_ITEM(given[1], seen.first->is_cuda() ? 1 : 0), given[2]);
  if (listed == nullptr) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NOTIMPLEMENTED;
  }
  const bool needs_grad = seen.requires_grad && at::GradMode::is_enabled();
  const THPObjectPtr kernels(Py_NewRef(listed));  // another thread may replace them meanwhile
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kernels.get()); ++i) {
    PyObject* const kernel = PyTuple_GET_ITEM(kernels.get(), i);
    if (!is_kernel(kernel)) {
      PyErr_SetString(PyExc_TypeError, "call_own: not a kernel");
      return nullptr;
    }
    const int does = takes(kernel, arguments);
    if (does < 0) return nullptr;
    if (does == 0) continue;
    PyObject* const gradient = PyTuple_GET_ITEM(kernel, kGradient);
    if (!needs_grad || gradient == Py_None) return run(given[0], kernel, given[3]);
    if (is_gradient(gradient)) return run_differentiably(given[0], kernel, given[3]);
    return PyObject_Vectorcall(gradient, arguments.items, static_cast<size_t>(arguments.count), nullptr);
  }
  Py_RETURN_NOTIMPLEMENTED;
  END_HANDLE_TH_ERRORS
}

}  // namespace
