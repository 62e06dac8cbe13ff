// `DirectCalls(choose, autocasts=False)(backend, *arguments)`: the calls of one op. A call goes straight to the raw op
// that `settle` named for its backend and device, or to `choose(backend, *arguments)` if none was named.
//
// An OpOverload tries to convert each argument to every type that some overload allows. This class knows only the few
// types in the schemas of fuseopt/ops, reads them in place and passes them to PyTorch's dispatcher. From there on all
// is as with an OpOverload: dispatch modes, profiling and other devices' keys apply.
//
// A call that needs more than the raw op returns NotImplemented, and the caller takes the general path. Such calls have
// tensors of subclasses, gradients, transforms of torch.func, torch.jit.trace, __torch_function__ modes, CUDA's autocast
// if it affects the op (`autocasts`), arguments of other types, or arguments that the op refuses. The version counters of
// tensors that the op writes to are incremented.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

namespace {

using c10::IValue;

enum class Type { kTensor, kDtype, kInt, kFloat, kBool };

struct Parameter {
  Type type;
  bool optional;
  bool is_written_to;
  std::optional<IValue> default_value;
};

struct RawOp {
  PyObject* backend;  // interned string
  c10::DeviceType device;
  c10::OperatorHandle handle;
  std::vector<Parameter> parameters;
};

struct DirectCalls {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* choose;
  bool autocasts;
  std::deque<RawOp> settled;  // a deque keeps addresses: a call may run while another thread adds
};

// The stack of the thread's last call of this use, whose memory the next call reuses.
enum class Use { kCall, kHeldArguments };
template <Use kUse = Use::kCall>
class Stack {
 public:
  Stack() : values_(std::move(last_)) {}
  ~Stack() {
    values_.clear();
    last_ = std::move(values_);
  }
  Stack(const Stack&) = delete;
  torch::jit::Stack& operator*() { return values_; }

 private:
  static inline thread_local torch::jit::Stack last_;
  torch::jit::Stack values_;
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// The same as at::autocast::is_autocast_enabled, whose header takes seconds to compile.
bool is_cuda_autocast_enabled() { return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA); }

// What `call_raw` has to see to: with kAll, also gradients, and modes and transforms that observe the call.
enum class Checks { kTypes, kAll };

// Whether the raw op alone is enough for this tensor.
bool is_plain(const at::Tensor& tensor, c10::DeviceType device, Checks checks) {
  return tensor.device().type() == device &&
         (checks == Checks::kTypes || !((at::GradMode::is_enabled() && tensor.requires_grad()) ||
                                        tensor._fw_grad(/*level=*/0).defined()));
}

// Appends the argument to the stack. Returns false if its type is not the parameter's, or if it is a tensor that is not
// plain.
bool push(torch::jit::Stack& stack, const Parameter& parameter, PyObject* argument, c10::DeviceType device,
          Checks checks) {
  if (argument == Py_None) {
    if (parameter.optional) stack.emplace_back();
    return parameter.optional;
  }
  switch (parameter.type) {
    case Type::kTensor: {
      if (!THPVariable_CheckExact(argument)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(argument);
      if (!is_plain(tensor, device, checks)) return false;
      stack.emplace_back(tensor);
      return true;
    }
    case Type::kDtype:
      if (!THPDtype_Check(argument)) return false;
      stack.emplace_back(static_cast<int64_t>(reinterpret_cast<THPDtype*>(argument)->scalar_type));
      return true;
    case Type::kInt: {
      if (!PyLong_CheckExact(argument)) return false;
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(argument, &overflow);
      stack.emplace_back(static_cast<int64_t>(value));
      return overflow == 0;
    }
    case Type::kFloat:
      if (!PyFloat_CheckExact(argument)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(argument));
      return true;
    case Type::kBool:
      if (!PyBool_Check(argument)) return false;
      stack.emplace_back(argument == Py_True);
      return true;
  }
  return false;
}

// Needed because this call starts below the ADInplaceOrView key, whose kernel increments it in other calls of the op.
void count_version_up(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

PyObject* results_of(torch::jit::Stack& stack) {
  if (stack.empty()) Py_RETURN_NONE;
  if (stack.size() == 1) return THPVariable_Wrap(std::move(stack[0]).toTensor());
  PyObject* results = PyTuple_New(static_cast<Py_ssize_t>(stack.size()));
  for (size_t i = 0; results != nullptr && i < stack.size(); ++i) {
    PyObject* result = THPVariable_Wrap(std::move(stack[i]).toTensor());
    if (result == nullptr) Py_CLEAR(results);
    else PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), result);
  }
  return results;
}

const RawOp* find(const DirectCalls& calls, PyObject* backend, c10::DeviceType device) {
  for (const RawOp& op : calls.settled) {
    if (op.device == device && (op.backend == backend || PyUnicode_Compare(op.backend, backend) == 0)) return &op;
  }
  return nullptr;
}

// Returns NotImplemented if the call needs more than the raw op.
PyObject* call_raw(const RawOp& op, PyObject* const* arguments, size_t count, Checks checks) {
  if (count > op.parameters.size() ||
      (checks == Checks::kAll &&
       (at::impl::torch_function_mode_enabled() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)))) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  try {
    Stack<> own;
    Stack<Use::kHeldArguments> held;
    torch::jit::Stack& stack = *own;
    for (size_t i = 0; i < op.parameters.size(); ++i) {
      const Parameter& parameter = op.parameters[i];
      if (i < count) {
        if (!push(stack, parameter, arguments[i], op.device, checks)) Py_RETURN_NOTIMPLEMENTED;
      } else if (parameter.default_value.has_value()) {
        stack.push_back(*parameter.default_value);
      } else {
        Py_RETURN_NOTIMPLEMENTED;
      }
    }
    // A second copy of what the op takes from the stack: without it, the op gives up the last reference to a tensor
    // besides its Python object's, for which PyTorch takes the GIL, once for each tensor. It is no part of the stack, all
    // of which observers (a tape's recorder, the profiler) take for results.
    *held = stack;
    {
      WithoutGil released;
      at::AutoDispatchBelowADInplaceOrView nothing_for_autograd;
      op.handle.callBoxed(stack);
    }
    for (size_t i = 0; i < count; ++i) {
      if (op.parameters[i].is_written_to) count_version_up(THPVariable_Unpack(arguments[i]));
    }
    return results_of(stack);
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception&) {
    Py_RETURN_NOTIMPLEMENTED;
  }
}

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flagged_count, PyObject* keywords) {
  const auto& calls = *reinterpret_cast<DirectCalls*>(self);
  const size_t count = static_cast<size_t>(PyVectorcall_NARGS(flagged_count));
  if (keywords != nullptr || count < 2 || !PyUnicode_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "expected a backend, a tensor and the other arguments of the raw op, none by name");
    return nullptr;
  }
  if (!THPVariable_CheckExact(arguments[1]) || (calls.autocasts && is_cuda_autocast_enabled())) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const RawOp* op = find(calls, arguments[0], THPVariable_Unpack(arguments[1]).device().type());
  if (op == nullptr) return PyObject_Vectorcall(calls.choose, arguments, count, nullptr);
  return call_raw(*op, arguments + 1, count - 1, Checks::kAll);
}

// Throws if a schema has a type that `push` does not know.
std::vector<Parameter> parameters_of(const c10::FunctionSchema& schema) {
  std::vector<Parameter> parameters;
  for (const c10::Argument& argument : schema.arguments()) {
    // The real type, since the plain type of a dtype is int.
    c10::TypePtr type = argument.real_type();
    const auto optional = type->cast<c10::OptionalType>();
    if (optional) type = optional->getElementType();
    const auto known = [&]() -> Type {
      switch (type->kind()) {
        case c10::TypeKind::TensorType: return Type::kTensor;
        case c10::TypeKind::ScalarTypeType: return Type::kDtype;
        case c10::TypeKind::IntType: return Type::kInt;
        case c10::TypeKind::FloatType: return Type::kFloat;
        case c10::TypeKind::BoolType: return Type::kBool;
        default: TORCH_CHECK(false, "settle: no arguments of type ", type->str(), ", as ", argument.name());
      }
    }();
    const bool is_written_to = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    TORCH_CHECK(!is_written_to || (known == Type::kTensor && !optional), "settle: only tensors are written to");
    parameters.push_back({known, optional != nullptr, is_written_to, argument.default_value()});
  }
  for (const c10::Argument& result : schema.returns()) {
    TORCH_CHECK(result.type()->kind() == c10::TypeKind::TensorType, "settle: no results but tensors");
  }
  return parameters;
}

PyObject* settle(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* backend = nullptr;
  const char *device = nullptr, *name = nullptr, *overload = nullptr;
  if (!PyArg_ParseTuple(arguments, "Usss", &backend, &device, &name, &overload)) return nullptr;
  auto& calls = *reinterpret_cast<DirectCalls*>(self);
  const c10::DeviceType device_type = c10::Device(device).type();
  if (find(calls, backend, device_type) != nullptr) Py_RETURN_NONE;  // added by another thread
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  auto parameters = parameters_of(handle.schema());
  Py_INCREF(backend);
  PyUnicode_InternInPlace(&backend);
  calls.settled.push_back({backend, device_type, std::move(handle), std::move(parameters)});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* choose = nullptr;
  int autocasts = 0;
  if (!PyArg_ParseTuple(arguments, "O|p", &choose, &autocasts)) return nullptr;
  auto* calls = reinterpret_cast<DirectCalls*>(type->tp_alloc(type, 0));
  if (calls == nullptr) return nullptr;
  calls->call = call;
  calls->choose = Py_NewRef(choose);
  calls->autocasts = autocasts != 0;
  new (&calls->settled) std::deque<RawOp>();
  return reinterpret_cast<PyObject*>(calls);
}

void deallocate(PyObject* self) {
  auto* calls = reinterpret_cast<DirectCalls*>(self);
  for (const RawOp& op : calls->settled) Py_DECREF(op.backend);
  std::destroy_at(&calls->settled);
  Py_DECREF(calls->choose);
  Py_TYPE(self)->tp_free(self);
}

PyMethodDef methods[] = {
    {"settle", settle, METH_VARARGS,
     "settle(backend, device, name, overload): calls of that backend on that device go to the raw op"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject* direct_calls_type() {
  static PyTypeObject type = [] {
    PyTypeObject created{};
    created.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
    created.tp_name = "fuseopt_python.DirectCalls";
    created.tp_basicsize = sizeof(DirectCalls);
    created.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    created.tp_vectorcall_offset = offsetof(DirectCalls, call);
    created.tp_call = PyVectorcall_Call;
    created.tp_new = create;
    created.tp_dealloc = deallocate;
    created.tp_methods = methods;
    return created;
  }();
  return &type;
}

}  // namespace
