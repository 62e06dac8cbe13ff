// `direct_call(name, overload, device)`: a raw op as a Python callable that spends a third of what an OpOverload spends
// on a call. An OpOverload asks of each argument what it could stand for, in every overload; this takes the few types
// that the schemas of fuseopt/ops have, reads them in place and hands them to PyTorch's dispatcher, which does with them
// what it does for an OpOverload: dispatch modes, tracing, profiling and other devices' keys all apply.
//
// It takes a call only where nothing but the op itself is asked for, and returns NotImplemented for any other, which
// whoever calls passes on to the road for all: tensors of subclasses or of another device, gradients, transforms of
// torch.func, __torch_function__ modes, arguments of other types, and whatever the op refuses. The versions of tensors
// that the op writes to are counted up.
//
// The stable ABI has no access to Python's tensors: this library is compiled for one release of torch and of Python.
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
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

struct DirectCall {
  PyObject_HEAD
  vectorcallfunc call;
  c10::OperatorHandle op;
  c10::DeviceType device;
  std::vector<Parameter> parameters;
};

// The stack of the thread's last call, whose memory the next one takes over.
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
  static thread_local torch::jit::Stack last_;
  torch::jit::Stack values_;
};

thread_local torch::jit::Stack Stack::last_;

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Whether the op alone answers for this tensor.
bool is_plain(const at::Tensor& tensor, c10::DeviceType device, bool with_gradients) {
  return tensor.device().type() == device && !(with_gradients && tensor.requires_grad()) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

// Appends the argument to the stack; false where it is not of the parameter's type, or a tensor that is not plain.
bool push(torch::jit::Stack& stack, const Parameter& parameter, PyObject* argument, c10::DeviceType device,
          bool with_gradients) {
  if (argument == Py_None) {
    if (parameter.optional) stack.emplace_back();
    return parameter.optional;
  }
  switch (parameter.type) {
    case Type::kTensor: {
      if (!THPVariable_CheckExact(argument)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(argument);
      if (!is_plain(tensor, device, with_gradients)) return false;
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

// A raw op does not, and autograd must see that what it saved has changed.
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

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flagged_count, PyObject* keywords) {
  const auto& direct = *reinterpret_cast<DirectCall*>(self);
  const size_t count = static_cast<size_t>(PyVectorcall_NARGS(flagged_count));
  if (keywords != nullptr || count > direct.parameters.size() || at::impl::torch_function_mode_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  try {
    const bool with_gradients = at::GradMode::is_enabled();
    Stack own;
    torch::jit::Stack& stack = *own;
    for (size_t i = 0; i < direct.parameters.size(); ++i) {
      const Parameter& parameter = direct.parameters[i];
      if (i < count) {
        if (!push(stack, parameter, arguments[i], direct.device, with_gradients)) Py_RETURN_NOTIMPLEMENTED;
      } else if (parameter.default_value.has_value()) {
        stack.push_back(*parameter.default_value);
      } else {
        Py_RETURN_NOTIMPLEMENTED;
      }
    }
    {
      WithoutGil released;
      at::AutoDispatchBelowADInplaceOrView nothing_for_autograd;
      direct.op.callBoxed(stack);
    }
    for (size_t i = 0; i < count; ++i) {
      if (direct.parameters[i].is_written_to) count_version_up(THPVariable_Unpack(arguments[i]));
    }
    return results_of(stack);
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception&) {
    Py_RETURN_NOTIMPLEMENTED;
  }
}

void deallocate(PyObject* self) {
  auto* direct = reinterpret_cast<DirectCall*>(self);
  std::destroy_at(&direct->parameters);
  std::destroy_at(&direct->op);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject* direct_call_type() {
  static PyTypeObject type = [] {
    PyTypeObject created{};
    created.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
    created.tp_name = "fuseopt.DirectCall";
    created.tp_basicsize = sizeof(DirectCall);
    created.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    created.tp_vectorcall_offset = offsetof(DirectCall, call);
    created.tp_call = PyVectorcall_Call;
    created.tp_dealloc = deallocate;
    return created;
  }();
  return &type;
}

// Throws where a schema has a type that `push` does not know.
std::vector<Parameter> parameters_of(const c10::FunctionSchema& schema) {
  std::vector<Parameter> parameters;
  for (const c10::Argument& argument : schema.arguments()) {
    // The real type: a dtype's plain type is that of a number.
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
        default: TORCH_CHECK(false, "direct_call: no arguments of type ", type->str(), ", as ", argument.name());
      }
    }();
    const bool is_written_to = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    TORCH_CHECK(!is_written_to || (known == Type::kTensor && !optional), "direct_call: only tensors are written to");
    parameters.push_back({known, optional != nullptr, is_written_to, argument.default_value()});
  }
  for (const c10::Argument& result : schema.returns()) {
    TORCH_CHECK(result.type()->kind() == c10::TypeKind::TensorType, "direct_call: no results but tensors");
  }
  return parameters;
}

PyObject* direct_call(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *name = nullptr, *overload = nullptr, *device = nullptr;
  if (!PyArg_ParseTuple(arguments, "sss", &name, &overload, &device)) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  auto parameters = parameters_of(op.schema());
  const c10::DeviceType device_type = c10::Device(device).type();
  auto* direct = reinterpret_cast<DirectCall*>(direct_call_type()->tp_alloc(direct_call_type(), 0));
  if (direct == nullptr) return nullptr;
  direct->call = call;
  direct->device = device_type;
  new (&direct->op) c10::OperatorHandle(std::move(op));
  new (&direct->parameters) std::vector<Parameter>(std::move(parameters));
  return reinterpret_cast<PyObject*>(direct);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"direct_call", direct_call, METH_VARARGS,
                          "direct_call(name, overload, device): the raw op as a callable for tensors of that device"},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseopt_python", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fuseopt_python() {
  if (PyType_Ready(direct_call_type()) < 0) return nullptr;
  return PyModule_Create(&module);
}
