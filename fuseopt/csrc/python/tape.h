// `record(function)`: runs a function of static tensors, and returns a `Tape` of the operations that it called. The tape
// runs them again without Python.
//
// Recorded are the calls that enter PyTorch's dispatcher from outside an operation. A tensor that no recorded call
// returned is a constant: the tape holds it, and a replay reads and writes it in place. Views of constants are constants
// too, so a replay does not make them again. All other results are new in each replay.
//
// Numbers that Python computes, and memory that is filled without the dispatcher, are not seen. The tapes of two runs
// differ then, which `difference` finds.
#pragma once

#include "python/own_ops.h"

#include <cstring>
#include <unordered_map>
#include <utility>

namespace {

constexpr int kNoRegister = -1;

// A constant, the tensor in a register, or a list some of whose elements are in registers.
struct TapeArgument {
  IValue constant;
  int from = kNoRegister;
  bool is_last_use = false;
  std::vector<std::pair<size_t, int>> elements;  // index in the list, register
};

struct TapeCall {
  c10::OperatorHandle op;
  std::vector<TapeArgument> arguments;
  std::vector<std::vector<int>> results;  // for each result the registers of its tensors; kNoRegister: not kept
};

struct TapeData {
  std::vector<TapeCall> calls;
  std::vector<at::Tensor> written;  // the constants that a replay writes
  int registers = 0;
  std::string refused;  // why a replay would not do what the function does; empty if it does
};

bool is_same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.unsafeGetTensorImpl() == b.unsafeGetTensorImpl()) return true;
  if (a.unsafeGetTensorImpl()->is_wrapped_number() && b.unsafeGetTensorImpl()->is_wrapped_number()) {
    // A number that Python passed where an operation takes a tensor.
    return a.dtype() == b.dtype() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  }
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage()) && a.dtype() == b.dtype() &&
         a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool is_same(const IValue& a, const IValue& b) {
  if (a.isTensor() && b.isTensor()) return is_same_tensor(a.toTensor(), b.toTensor());
  if (a.isString() && b.isString()) return a.toStringRef() == b.toStringRef();
  if (a.isList() && b.isList()) {
    const auto first = a.toListRef(), second = b.toListRef();
    return std::equal(first.begin(), first.end(), second.begin(), second.end(), is_same);
  }
  if (a.isDouble() && b.isDouble()) {
    const double first = a.toDouble(), second = b.toDouble();
    return std::memcmp(&first, &second, sizeof(double)) == 0;  // NaN is the same as NaN
  }
  return a.is(b);
}

bool is_same_argument(const TapeArgument& a, const TapeArgument& b) {
  return a.from == b.from && a.elements == b.elements && (a.from != kNoRegister || is_same(a.constant, b.constant));
}

bool is_same_call(const TapeCall& a, const TapeCall& b) {
  return a.op == b.op && a.results == b.results &&
         std::equal(a.arguments.begin(), a.arguments.end(), b.arguments.begin(), b.arguments.end(), is_same_argument);
}

// Calls `visit(tensor, index)` for a value's tensors: itself, or the elements of a list.
template <typename Visit>
void for_each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor(), size_t{0});
  } else if (value.isList()) {
    const auto items = value.toListRef();
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].isTensor() && items[i].toTensor().defined()) visit(items[i].toTensor(), i);
    }
  }
}

// A list of the same elements. An operation of the stable ABI takes the tensors out of the list that it is given.
c10::List<IValue> copied(const IValue& list) { return list.toList().copy(); }

// What a thread records: its callbacks are called by the dispatcher around each call.
class Recorder {
 public:
  explicit Recorder(TapeData& tape) : tape_(tape) {
    current_ = this;
    auto callback = at::RecordFunctionCallback(&Recorder::start, &Recorder::end);
    callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
    handle_ = at::addThreadLocalCallback(callback);
  }
  ~Recorder() {
    at::removeCallback(handle_);
    current_ = nullptr;
  }
  Recorder(const Recorder&) = delete;

  static bool is_active() { return current_ != nullptr; }

  void finish() {
    std::vector<bool> is_used(static_cast<size_t>(tape_.registers));
    for (auto call = tape_.calls.rbegin(); call != tape_.calls.rend(); ++call) {
      for (auto& registers : call->results) {
        for (int& index : registers) {
          if (index != kNoRegister && !is_used[index]) index = kNoRegister;
        }
      }
      for (auto argument = call->arguments.rbegin(); argument != call->arguments.rend(); ++argument) {
        if (argument->from != kNoRegister) {
          argument->is_last_use = !is_used[argument->from];
          is_used[argument->from] = true;
        }
        for (const auto& [element, index] : argument->elements) is_used[index] = true;
      }
    }
  }

 private:
  struct Entered : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (current_ == nullptr || !name.has_value()) return nullptr;
    if (current_->depth_++ == 0) current_->begin_call(*name, function.inputs());
    return std::make_unique<Entered>();
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* entered) {
    if (current_ == nullptr || entered == nullptr) return;
    if (--current_->depth_ == 0) current_->end_call(function.outputs());
  }

  void begin_call(const c10::OperatorName& name, c10::ArrayRef<const IValue> inputs) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    // What torch.tensor and others hand to it is memory that they have filled themselves.
    if (name.name == "aten::lift_fresh") tape_.refused = "it makes a tensor of what is no tensor";
    inputs_.clear();
    for (const IValue& input : inputs) inputs_.push_back(input.isList() ? IValue(copied(input)) : input);
    std::vector<TapeArgument> arguments;
    for (const IValue& input : inputs_) {
      TapeArgument argument{input};
      for_each_tensor(input, [&](const at::Tensor& tensor, size_t i) {
        const int found = register_of(tensor);
        if (found == kNoRegister) return;
        if (input.isTensor()) argument.from = found;
        else argument.elements.emplace_back(i, found);
      });
      if (argument.from != kNoRegister) argument.constant = IValue();
      if (!argument.elements.empty()) {
        c10::List<IValue> constants = copied(input);
        for (const auto& [element, index] : argument.elements) constants.set(element, at::Tensor());
        argument.constant = std::move(constants);
      }
      arguments.push_back(std::move(argument));
    }
    tape_.calls.push_back({std::move(op), std::move(arguments), {}});
  }

  void end_call(const std::vector<IValue>& outputs) {
    TapeCall& call = tape_.calls.back();
    const bool writes = note_written(call);
    if (!writes && is_view_of_constants(call, outputs)) {
      for (const IValue& output : outputs) kept_.push_back(output);
      tape_.calls.pop_back();
      return;
    }
    for (const IValue& output : outputs) {
      if (!output.isTensor() && !output.isList()) {
        tape_.refused = std::string(call.op.schema().name()) + " reads a value on the host";
      }
      std::vector<int> registers;
      for_each_tensor(output, [&](const at::Tensor& tensor, size_t) {
        registers.push_back(is_input(tensor) ? kNoRegister : new_register(tensor));
      });
      call.results.push_back(std::move(registers));
      kept_.push_back(output);
    }
  }

  bool note_written(const TapeCall& call) {
    bool writes = false;
    const auto& parameters = call.op.schema().arguments();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].alias_info() == nullptr || !parameters[i].alias_info()->isWrite()) continue;
      writes = true;
      for_each_tensor(inputs_[i], [&](const at::Tensor& tensor, size_t) {
        const bool is_noted = std::any_of(tape_.written.begin(), tape_.written.end(), [&](const at::Tensor& other) {
          return other.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
        });
        if (!is_noted && register_of(tensor) == kNoRegister) tape_.written.push_back(tensor);
      });
    }
    return writes;
  }

  // Whether nothing has to be replayed: no argument is in a register, and all results are in the memory of arguments.
  bool is_view_of_constants(const TapeCall& call, const std::vector<IValue>& outputs) const {
    for (const TapeArgument& argument : call.arguments) {
      if (argument.from != kNoRegister || !argument.elements.empty()) return false;
    }
    bool is_view = true;
    size_t tensors = 0;
    for (const IValue& output : outputs) {
      for_each_tensor(output, [&](const at::Tensor& tensor, size_t) {
        ++tensors;
        is_view = is_view && any_input([&](const at::Tensor& input) { return is_alias(input, tensor); });
      });
    }
    return is_view && tensors > 0;
  }

  static bool is_alias(const at::Tensor& a, const at::Tensor& b) {
    return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
  }

  template <typename Condition>
  bool any_input(Condition condition) const {
    bool found = false;
    for (const IValue& input : inputs_) {
      for_each_tensor(input, [&](const at::Tensor& tensor, size_t) { found = found || condition(tensor); });
    }
    return found;
  }

  bool is_input(const at::Tensor& tensor) const {
    return any_input([&](const at::Tensor& input) { return is_same_tensor(input, tensor); });
  }

  int new_register(const at::Tensor& tensor) {
    const int index = tape_.registers++;
    registers_[tensor.unsafeGetTensorImpl()] = index;
    if (tensor.has_storage()) {
      const void* storage = tensor.storage().unsafeGetStorageImpl();
      const bool is_of_constant = any_input([&](const at::Tensor& input) { return is_alias(input, tensor); });
      if (!is_of_constant || in_storage_.count(storage) != 0) in_storage_[storage].emplace_back(tensor, index);
    }
    return index;
  }

  // Python's factories may hand out another tensor on the memory of an operation's result.
  int register_of(const at::Tensor& tensor) {
    const auto found = registers_.find(tensor.unsafeGetTensorImpl());
    if (found != registers_.end()) return found->second;
    if (!tensor.has_storage()) return kNoRegister;
    const auto others = in_storage_.find(tensor.storage().unsafeGetStorageImpl());
    if (others == in_storage_.end()) return kNoRegister;
    for (const auto& [other, index] : others->second) {
      if (is_same_tensor(other, tensor)) return index;
    }
    tape_.refused = "it makes a view of a result without an operation";
    return kNoRegister;
  }

  static thread_local Recorder* current_;
  TapeData& tape_;
  at::CallbackHandle handle_;
  int depth_ = 0;
  std::unordered_map<const c10::TensorImpl*, int> registers_;
  std::unordered_map<const void*, std::vector<std::pair<at::Tensor, int>>> in_storage_;  // of results: their registers
  std::vector<IValue> inputs_;  // of the call that runs
  std::vector<IValue> kept_;    // all results, so that no address is used twice
};

thread_local Recorder* Recorder::current_ = nullptr;

void replay_calls(const TapeData& tape) {
  at::AutoDispatchBelowADInplaceOrView nothing_for_autograd;
  std::vector<at::Tensor> registers(static_cast<size_t>(tape.registers));
  Stack<> own;
  torch::jit::Stack& stack = *own;
  for (const TapeCall& call : tape.calls) {
    stack.clear();
    for (const TapeArgument& argument : call.arguments) {
      if (argument.from != kNoRegister) {
        at::Tensor& tensor = registers[argument.from];
        stack.emplace_back(argument.is_last_use ? std::move(tensor) : tensor);
      } else if (argument.constant.isList()) {
        c10::List<IValue> list = copied(argument.constant);
        for (const auto& [element, index] : argument.elements) list.set(element, registers[index]);
        stack.emplace_back(std::move(list));
      } else {
        stack.push_back(argument.constant);
      }
    }
    call.op.callBoxed(stack);
    for (size_t i = 0; i < call.results.size(); ++i) {
      const std::vector<int>& kept = call.results[i];
      for_each_tensor(stack[i], [&](const at::Tensor& tensor, size_t place) {
        if (place < kept.size() && kept[place] != kNoRegister) registers[kept[place]] = tensor;
      });
    }
  }
  for (const at::Tensor& tensor : tape.written) count_version_up(tensor);
}

struct Tape {
  PyObject_HEAD
  TapeData data;
};

PyObject* replay(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const TapeData& tape = reinterpret_cast<Tape*>(self)->data;
  WithoutGil released;
  replay_calls(tape);
  END_HANDLE_TH_ERRORS
  Py_RETURN_NONE;
}

PyObject* difference(PyObject* self, PyObject* other) {
  if (Py_TYPE(other) != Py_TYPE(self)) {
    PyErr_SetString(PyExc_TypeError, "difference takes another Tape");
    return nullptr;
  }
  const auto &a = reinterpret_cast<Tape*>(self)->data.calls, &b = reinterpret_cast<Tape*>(other)->data.calls;
  const auto [first, second] = std::mismatch(a.begin(), a.end(), b.begin(), b.end(), is_same_call);
  if (first == a.end() && second == b.end()) return PyUnicode_FromString("");
  return PyUnicode_FromString((first != a.end() ? first : second)->op.schema().name().c_str());
}

PyObject* refused(PyObject* self, void*) {
  return PyUnicode_FromString(reinterpret_cast<Tape*>(self)->data.refused.c_str());
}

Py_ssize_t count_calls(PyObject* self) { return static_cast<Py_ssize_t>(reinterpret_cast<Tape*>(self)->data.calls.size()); }

void deallocate_tape(PyObject* self) {
  std::destroy_at(&reinterpret_cast<Tape*>(self)->data);
  Py_TYPE(self)->tp_free(self);
}

PyMethodDef tape_methods[] = {
    {"replay", replay, METH_NOARGS, "replay(): the recorded operations"},
    {"difference", difference, METH_O,
     "difference(other): the first operation in which the tapes differ; empty if they do the same on the same tensors"},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef tape_attributes[] = {
    {"refused", refused, nullptr, "why a replay would not do what the function does; empty if it does", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject* tape_type() {
  static PySequenceMethods sequence{};
  static PyTypeObject type = [] {
    sequence.sq_length = count_calls;
    PyTypeObject created{};
    created.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
    created.tp_name = "fuseopt_python.Tape";
    created.tp_basicsize = sizeof(Tape);
    created.tp_flags = Py_TPFLAGS_DEFAULT;
    created.tp_as_sequence = &sequence;
    created.tp_dealloc = deallocate_tape;
    created.tp_methods = tape_methods;
    created.tp_getset = tape_attributes;
    return created;
  }();
  return &type;
}

// `record(function)`: its tape, after one run. An error of the function is raised.
PyObject* record(PyObject*, PyObject* function) {
  HANDLE_TH_ERRORS
  THPObjectPtr self(tape_type()->tp_alloc(tape_type(), 0));
  if (!self) return nullptr;
  TapeData& tape = *new (&reinterpret_cast<Tape*>(self.get())->data) TapeData();
  if (Recorder::is_active()) {
    PyErr_SetString(PyExc_RuntimeError, "record: this thread is recording already");
    return nullptr;
  }
  Recorder recorder(tape);
  const THPObjectPtr result(PyObject_CallNoArgs(function));
  if (!result) return nullptr;
  recorder.finish();
  return self.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
